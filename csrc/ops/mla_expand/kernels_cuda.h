// CUDA kernels of mla_expand.
#pragma once

#include "ops/mla_expand/mla_expand.h"

namespace dyno::ops {

// The weights as f16: k_b [heads, lora, padded nope], then v_b [heads, dv, padded lora]. Rows are padded with zeros, so
// that they start at 16-byte addresses.
constexpr int64_t expand_padded(int64_t width) { return (width + 7) / 8 * 8; }
constexpr int64_t expand_key_halves(const MlaExpandDesc& d) { return d.heads * d.lora * expand_padded(d.nope); }
constexpr int64_t expand_value_halves(const MlaExpandDesc& d) { return d.heads * d.dv * expand_padded(d.lora); }

// Converts `matrices` of [n, k] in `layout` to f16 rows at distances of `padded` values.
void expand_weights_cuda(DType type, Layout layout, const void* w, int64_t stride_bytes, int64_t matrices, int64_t n,
                         int64_t k, uint16_t* out, int64_t padded, CudaStream& stream);
// The same as f16 pairs (device/half_pairs.cuh): planes of high parts and of rests, with rows at distances of `pitch`.
struct PairedWeights {
  const uint16_t *halves = nullptr, *rests = nullptr;
  int64_t pitch = 0;
};
// Matrices in layout gpu are first unpacked to `floats` [matrices, n, k].
void expand_weight_pairs_cuda(DType type, Layout layout, const void* w, int64_t stride_bytes, int64_t matrices,
                              int64_t n, int64_t k, float* floats, uint16_t* halves, uint16_t* rests, int64_t padded,
                              CudaStream& stream);
// The products, `rows` (64 or 128) latents per block, with the weights of expand_weights_cuda().
void expand_products_cuda(const MlaExpandArgs& args, const MlaExpandDesc& desc, const uint16_t* k_b,
                          const uint16_t* v_b, int rows, CudaStream& stream);

// The products on Hopper (90a), 128 latents per block: with pairs for an f32 cache, otherwise with f16 and without
// rests.
void expand_wgmma_cuda(const MlaExpandArgs& args, const MlaExpandDesc& desc, const PairedWeights& k_b,
                       const PairedWeights& v_b, CudaStream& stream);
// Upper bound of the shared memory of any of its blocks.
inline constexpr size_t kExpandWgmmaShared = 198 << 10;

// The products with f16 pairs for an f32 cache: keys and values in f32.
void expand_pairs_cuda(const MlaExpandArgs& args, const MlaExpandDesc& desc, const PairedWeights& k_b,
                       const PairedWeights& v_b, int rows, CudaStream& stream);
// Stages of `rows` latents and 128 columns; two stages of 64 rows fit the 64 KiB of compute capability 7.5.
constexpr int expand_pairs_stages(int rows) { return rows == 64 ? 2 : 3; }
constexpr size_t expand_pairs_shared_bytes(int rows) {
  return static_cast<size_t>(expand_pairs_stages(rows)) * 128 * (static_cast<size_t>(rows) + 128);
}

}  // namespace dyno::ops
