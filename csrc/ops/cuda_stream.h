// The context of a CUDA launch, in addition to its arguments: the counterpart of CpuContext. Launches neither allocate
// nor synchronise, so that they can be captured in a graph. Needs no CUDA toolkit, because selection is compiled
// everywhere.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/device_info.h"

struct CUstream_st;  // cudaStream_t is a pointer to it

namespace dyno::ops {

struct CudaStream {
  static constexpr DeviceKind kDevice = DeviceKind::cuda;
  CUstream_st* handle = nullptr;
  const DeviceInfo* device = nullptr;
  // Device memory for one launch at a time, 256-byte aligned, with at least scratch_bytes() of the planned ops.
  std::byte* workspace = nullptr;
  size_t workspace_bytes = 0;
  // kStreamCounters zeros in device memory. A launch that counts its blocks resets them to zero.
  int32_t* counters = nullptr;
  // cublasHandle_t of the device, see ops/matmul/cuda/blas.h; null in builds without path `dequantize`.
  void* blas = nullptr;
};

inline constexpr int64_t kStreamCounters = 1 << 16;

}  // namespace dyno::ops
