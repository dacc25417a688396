// CUDA kernels of mla_expand.
#pragma once

#include "ops/args.h"
#include "ops/cuda_stream.h"
#include "ops/op.h"

namespace dyno::ops {

// The weights as halves: k_b [heads, lora, padded nope], then v_b [heads, dv, padded lora]. Rows are padded so that
// they start at 16-byte addresses; the pads are zeros.
constexpr int64_t expand_padded(int64_t width) { return (width + 7) / 8 * 8; }
constexpr int64_t expand_key_halves(const MlaExpandDesc& d) { return d.heads * d.lora * expand_padded(d.nope); }
constexpr int64_t expand_value_halves(const MlaExpandDesc& d) { return d.heads * d.dv * expand_padded(d.lora); }

// `matrices` of [n, k] in `layout` to rows of halves, `padded` apart.
void expand_weights_cuda(DType type, Layout layout, const void* w, int64_t stride_bytes, int64_t matrices, int64_t n,
                         int64_t k, uint16_t* out, int64_t padded, CudaStream& stream);
// The products, `rows` (64 or 128) latents a block, with the halves of expand_weights_cuda.
void expand_products_cuda(const MlaExpandArgs& args, const MlaExpandDesc& desc, const uint16_t* k_b,
                          const uint16_t* v_b, int rows, CudaStream& stream);

}  // namespace dyno::ops
