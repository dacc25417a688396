// cuBLAS for products of unpacked weights: the handle, and the products of one part of path `dequantize`.
#pragma once

#include <cstddef>

#include "ops/cuda_stream.h"
#include "ops/matmul/cuda/problem.h"

namespace dyno::ops::cuda {

struct DequantizePlan;

// Device memory for cuBLAS, so that it does not allocate.
inline constexpr size_t kBlasWorkspace = size_t{32} << 20;

// CudaStream::blas of the current device; null in a build without this path. Throws DeviceError.
#ifdef DYNO_CUDA_FORCE_MMQ
inline void* make_blas() { return nullptr; }
inline void destroy_blas(void*) noexcept {}
#else
void* make_blas();
void destroy_blas(void* blas) noexcept;
#endif

// Multiplies the unpacked weight rows of `part` by x (in the form of `plan`) to sums in the workspace. Then computes y
// from the sums with scales, biases, activation or residual.
void multiply_with_blas(const Problem& part, const DequantizePlan& plan, ComputeType compute, CudaStream& stream);

// Computes y of `part` from sums [matrices, rows, n] of one product or a gated pair. `half_rows`: x has scales.
void finish_sums(const Problem& part, const float* sums, const float* sums_up, bool half_rows, CUstream_st* stream);

}  // namespace dyno::ops::cuda
