// Family linear_attention: attention with a fixed-size matrix per head as its memory, instead of a cache.
#pragma once

#include "ops/args.h"
#include "ops/cpu_context.h"
#include "ops/cuda_stream.h"
#include "ops/op.h"

namespace dyno::ops {

// A state S [dk, dv] per value head, zero before position 0. With s = softplus(step + step_bias), each token computes
//   S = exp(decay * s) * S + k (outer) u,   out = S^T q [+ skip * v]
//   rule delta      u = sigmoid(beta) * (v - S^T k), S decayed: the gated delta rule (arXiv:2412.06464), with q and k
//                   divided by sqrt(sum of squares + eps) first, and q by sqrt(dk)
//   rule additive   u = s * v: the state space of Mamba-2 (arXiv:2405.21060)
// With `channel_decay`, each of the dk rows of S has a separate step (arXiv:2510.26692). Value head j uses key head j
// mod k_heads, or j / (v_heads / k_heads) with `grouped`.
struct LinearAttentionDesc {
  int64_t m = 1, k_heads = 1, v_heads = 1, dk = 0, dv = 0;
  LinearRule rule = LinearRule::delta;
  bool grouped = false;
  bool channel_decay = false;
  friend bool operator==(const LinearAttentionDesc&, const LinearAttentionDesc&) = default;
  int64_t state_elements() const { return v_heads * dk * dv; }  // per sequence
  int64_t steps() const { return channel_decay ? v_heads * dk : v_heads; }
};

// Maximum head size, which limits scratch and the registers of a GPU block.
inline constexpr int64_t kMaxLinearHead = 512;

std::span<const VariantInfo> linear_attention_variants();
std::string op_key(const LinearAttentionDesc& desc);
std::vector<Config> candidates(const LinearAttentionDesc& desc, const DeviceInfo& device, CandidateSet set);
Config default_config(const LinearAttentionDesc& desc, const DeviceInfo& device);
Support supports(const LinearAttentionDesc& desc, const Config& config, const DeviceInfo& device);
Cost cost(const LinearAttentionDesc& desc);
size_t scratch_bytes(const LinearAttentionDesc& desc, const Config& config);
void launch(const Config& config, const LinearAttentionDesc& desc, const LinearAttentionArgs& args,
            CpuContext& context);
void launch(const Config& config, const LinearAttentionDesc& desc, const LinearAttentionArgs& args, CudaStream& stream);

// tokens.cu
void linear_attention_tokens(const LinearAttentionArgs& args, const LinearAttentionDesc& desc, CudaStream& stream);
// chunks.cu
void linear_attention_chunks(const LinearAttentionArgs& args, const LinearAttentionDesc& desc, CudaStream& stream);
inline constexpr int64_t kMaxChunkHead = 256;  // dk
// Shared memory of a block: k, q and the state of a chunk, and five matrices of 32 tokens.
constexpr int64_t linear_chunk_shared_bytes(int64_t dk) {
  const int64_t rows = dk <= 64 ? 64 : dk <= 128 ? 128 : kMaxChunkHead;
  return 4 * (rows * (68 + 36) + 5 * 32 * 36 + 96);
}

}  // namespace dyno::ops
