// Converts the weights of mla_expand to f16 rows.
#include <cuda_runtime.h>

#include "core/cuda/check.h"
#include "core/error.h"
#include "device/convert.cuh"
#include "device/half_pairs.cuh"
#include "device/ptx.cuh"
#include "ops/matmul/cuda/problem.h"
#include "ops/matmul/gpu_layout.h"
#include "ops/mla_expand/kernels_cuda.h"

namespace dyno::ops {
namespace {

template <device::Scalar kType>
__global__ void __launch_bounds__(256) halve_floats(const uint8_t* w, int64_t stride_bytes, int64_t n, int64_t k,
                                                    int64_t row_bytes, uint16_t* out, int64_t padded) {
  const int64_t index = int64_t{blockIdx.x} * blockDim.x + threadIdx.x, row = index / padded, at = index % padded;
  if (row >= n) return;
  const uint8_t* from = w + blockIdx.y * stride_bytes + row * row_bytes;
  const float value = at < k ? device::load_scalar<kType>(from, at) : 0.0f;
  out[(blockIdx.y * n + row) * padded + at] = static_cast<uint16_t>(device::pack_half2(value, 0.0f));
}

// Eight numbers per thread; rows are padded to multiples of eight.
template <device::Scalar kType>
__global__ void __launch_bounds__(256) pair_floats(const uint8_t* w, int64_t stride_bytes, int n, int k,
                                                   int64_t row_bytes, uint16_t* halves, uint16_t* rests, int padded) {
  const int chunks = padded / 8, index = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const int row = index / chunks, at = index % chunks * 8;
  if (row >= n) return;
  const uint8_t* from = w + blockIdx.y * stride_bytes + row * row_bytes;
  float v[8];
  if (kType == device::Scalar::f32 && k % 8 == 0) {
    device::load_eight(v, reinterpret_cast<const float*>(from) + at, true);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = at + i < k ? device::load_scalar<kType>(from, at + i) : 0.0f;
  }
  uint4 high, rest;
  device::split_eight(v, device::kRestScale, high, rest);
  const int64_t to = (static_cast<int64_t>(blockIdx.y) * n + row) * padded + at;
  *reinterpret_cast<uint4*>(halves + to) = high;
  *reinterpret_cast<uint4*>(rests + to) = rest;
}

// Calls `run` with pair_floats or halve_floats for a float type in the file's layout.
template <typename Run>
void with_scalar(DType type, const Run& run) {
  switch (type) {
    case DType::f32:
      return run.template operator()<device::Scalar::f32>();
    case DType::f16:
      return run.template operator()<device::Scalar::f16>();
    case DType::bf16:
      return run.template operator()<device::Scalar::bf16>();
    default:
      throw UnsupportedError(str_cat("[mla_expand] plain weights of type ", dtype_name(type)));
  }
}

}  // namespace

void expand_weights_cuda(DType type, Layout layout, const void* w, int64_t stride_bytes, int64_t matrices, int64_t n,
                         int64_t k, uint16_t* out, int64_t padded, CudaStream& stream) {
  const auto* bytes = static_cast<const uint8_t*>(w);
  if (layout == Layout::gpu) {
    const cuda::UnpackJob job{.w = bytes,
                              .w_stride = stride_bytes,
                              .out = reinterpret_cast<uint8_t*>(out),
                              .rows = n,
                              .k = k,
                              .matrices = matrices};
    cuda::type_kernels(type).unpack(job, cuda::Unpacked::rows_f16, stream.handle);
    DYNO_LAUNCH_CHECK("mla_expand");
    return;
  }
  const dim3 grid(static_cast<unsigned>((n * padded + 255) / 256), static_cast<unsigned>(matrices));
  with_scalar(type, [&]<device::Scalar kType>() {
    halve_floats<kType><<<grid, 256, 0, stream.handle>>>(bytes, stride_bytes, n, k,
                                                         static_cast<int64_t>(row_bytes(type, k)), out, padded);
  });
  DYNO_LAUNCH_CHECK("mla_expand");
}

void expand_weight_pairs_cuda(DType type, Layout layout, const void* w, int64_t stride_bytes, int64_t matrices,
                              int64_t n, int64_t k, float* floats, uint16_t* halves, uint16_t* rests, int64_t padded,
                              CudaStream& stream) {
  const auto* bytes = static_cast<const uint8_t*>(w);
  if (layout == Layout::gpu) {
    const cuda::UnpackJob job{.w = bytes,
                              .w_stride = stride_bytes,
                              .out = reinterpret_cast<uint8_t*>(floats),
                              .rows = n,
                              .k = k,
                              .matrices = matrices};
    cuda::type_kernels(type).unpack(job, cuda::Unpacked::rows_f32, stream.handle);
    DYNO_LAUNCH_CHECK("mla_expand");
    bytes = reinterpret_cast<const uint8_t*>(floats);
    type = DType::f32;
    stride_bytes = n * k * static_cast<int64_t>(sizeof(float));
  }
  const dim3 grid(static_cast<unsigned>((n * padded / 8 + 255) / 256), static_cast<unsigned>(matrices));
  with_scalar(type, [&]<device::Scalar kType>() {
    pair_floats<kType><<<grid, 256, 0, stream.handle>>>(bytes, stride_bytes, static_cast<int>(n), static_cast<int>(k),
                                                        static_cast<int64_t>(row_bytes(type, k)), halves, rests,
                                                        static_cast<int>(padded));
  });
  DYNO_LAUNCH_CHECK("mla_expand");
}

}  // namespace dyno::ops
