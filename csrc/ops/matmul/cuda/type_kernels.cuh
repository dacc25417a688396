// The kernels of one weight type as a table.
#pragma once

#include "ops/matmul/cuda/convert.cuh"
#include "ops/matmul/cuda/exact.cuh"
#include "ops/matmul/cuda/stream.cuh"
#include "ops/matmul/cuda/unpack.cuh"

namespace dyno::ops::cuda {

// Compiled in separate units: gemm_instances.cu.in.
template <DType kType>
void gemm_mma(const Problem& p, int tokens, int warps, CUstream_st* stream);
template <DType kType>
void gemm_wgmma(const Problem& p, int tokens, int warps, CUstream_st* stream);

template <DType kType>
void gemm_split(const Problem& p, int tokens, int parts, CUstream_st* stream);

template <DType kType>
constexpr TypeKernels make_type_kernels() {
  if constexpr (has_gpu_layout(kType)) {
    return {.stream = stream<kType>,
            .gemm_mma = gemm_mma<kType>,
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
