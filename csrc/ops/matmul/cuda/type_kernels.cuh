// The kernels of one weight type as a table.
#pragma once

#include "ops/instances.h"
#include "ops/matmul/cuda/convert.cuh"
#include "ops/matmul/cuda/exact.cuh"
#include "ops/matmul/cuda/stream.cuh"
#include "ops/matmul/cuda/unpack.cuh"

namespace dyno::ops::cuda {

// Compiled in separate units: gemm_instances.cu.in. A build for Hopper alone has few units of gemm_mma.
template <DType kType>
void gemm_mma(const Problem& p, int tokens, int warps, CUstream_st* stream);
template <DType kType>
void no_gemm_mma(const Problem& /*p*/, int tokens, int warps, CUstream_st* /*stream*/) {
  throw_left_out("mma", kType, {static_cast<int16_t>(tokens), static_cast<int16_t>(warps)});
}
template <DType kType>
constexpr auto gemm_mma_or_none() {
  if constexpr (variant_compiled("mma", type_bit(kType))) {
    return gemm_mma<kType>;
  } else {
    return no_gemm_mma<kType>;
  }
}
template <DType kType>
void gemm_wgmma(const Problem& p, int tokens, int warps, CUstream_st* stream);

template <DType kType>
void gemm_split(const Problem& p, int tokens, int parts, CUstream_st* stream);

template <DType kType>
constexpr TypeKernels make_type_kernels() {
  if constexpr (has_gpu_layout(kType)) {
    return {.stream = stream<kType>,
            .gemm_mma = gemm_mma_or_none<kType>(),
            .gemm_wgmma = gemm_wgmma<kType>,
            .gemm_split = gemm_split<kType>,
            .exact = exact<kType>,
            .repack = repack<kType>,
            .unpack = unpack<kType>};
  } else {
    TypeKernels kernels;
    kernels.exact = exact<kType>;
    return kernels;
  }
}

}  // namespace dyno::ops::cuda
