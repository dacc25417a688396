// Weights of mla_expand as rows of halves.
#include <cuda_runtime.h>

#include "core/cuda/check.h"
#include "core/error.h"
#include "device/convert.cuh"
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
  const auto run = [&](auto kernel) {
    kernel<<<grid, 256, 0, stream.handle>>>(bytes, stride_bytes, n, k, static_cast<int64_t>(row_bytes(type, k)), out,
                                            padded);
  };
  switch (type) {
    case DType::f32:
      run(halve_floats<device::Scalar::f32>);
      break;
    case DType::f16:
      run(halve_floats<device::Scalar::f16>);
      break;
    case DType::bf16:
      run(halve_floats<device::Scalar::bf16>);
      break;
    default:
      throw UnsupportedError(str_cat("[mla_expand] plain weights of type ", dtype_name(type)));
  }
  DYNO_LAUNCH_CHECK("mla_expand");
}

}  // namespace dyno::ops
