#include "ops/attention/shapes.h"

#include "core/error.h"
#include "ops/attention/kernels_cuda.h"

namespace dyno::ops {

// Maximum tokens for which prompt kernels offer parts of the keys; with more, tiles alone fill any chip.
constexpr int64_t kPromptSplitTokens = 2048;

Support prompt_splits(const AttentionDesc& desc, int64_t rows, int splits) {
  if (splits == 1) return Support::yes();
  if (desc.m > kPromptSplitTokens) {
    return Support::no(str_cat("splits=", splits, " are for up to ", kPromptSplitTokens, " tokens, not m=", desc.m));
  }
  const AttentionTiles tiles{rows, desc.heads / desc.kv_heads};
  if (tiles.bound(desc.m, desc.m) * desc.kv_heads > kStreamCounters) {
    return Support::no(
        str_cat("m=", desc.m, " tokens and heads=", desc.heads, " make more tiles than a launch can count"));
  }
  return Support::yes();
}

Support latent_shape(const AttentionDesc& desc, const DeviceInfo& device) {
  if (desc.exact) return Support::no("exact=1: latent attention multiplies with 22, 11 or 8 bits only");
  if (!desc.v_in_k) return Support::no("v_in_k=0: latent attention reads values as part of the keys");
  if (desc.k_type == DType::q8_0) return Support::no("k_type=q8_0: latent attention reads f32, f16 or bf16");
  if (desc.k_type == DType::bf16 && device.compute_capability < 80) {
    return Support::no(str_cat("compute capability ", device.compute_capability,
                               " has no bfloat16 matrix instructions; they come with 80"));
  }
  if (desc.dk % 8 != 0 || desc.dv % 8 != 0 || desc.dk > kLatentMaxKey || desc.dv > kLatentMaxValue) {
    return Support::no(str_cat("heads of dk=", desc.dk, " dv=", desc.dv,
                               ": latent attention takes multiples of 8 up to ", kLatentMaxKey, " and ",
                               kLatentMaxValue));
  }
  return Support::yes();
}

}  // namespace dyno::ops
