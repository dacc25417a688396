// cuBLAS as a way to multiply unpacked weights: the handle, and the products of one part of path `dequantize`.
#pragma once

#include <cstddef>

#include "ops/cuda_stream.h"
#include "ops/matmul/cuda/problem.h"

namespace dyno::ops::cuda {

struct DequantizePlan;

// Device memory that cuBLAS works in; it allocates none itself then.
inline constexpr size_t kBlasWorkspace = size_t{32} << 20;

// CudaStream::blas of the current device; null in a build without this path. Throws DeviceError.
#ifdef DYNO_CUDA_FORCE_MMQ
inline void* make_blas() { return nullptr; }
inline void destroy_blas(void*) noexcept {}
#else
void* make_blas();
void destroy_blas(void* blas) noexcept;
#endif

// Products of `part` (unpacked rows of weights, x as the plan says) into the sums of the workspace, and from there,
// with scales, biases, activation or residual, into y.
void multiply_with_blas(const Problem& part, const DequantizePlan& plan, ComputeType compute, CudaStream& stream);

// y of `part` from sums [matrices, rows, n] of one product, or of a gated pair. `half_rows`: x has scales.
void finish_sums(const Problem& part, const float* sums, const float* sums_up, bool half_rows, CUstream_st* stream);

}  // namespace dyno::ops::cuda
