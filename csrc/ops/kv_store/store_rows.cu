// Conversion of f32 rows to the cache type, each row into the cell that the runs name. A thread converts single values;
// for q8_0 a warp makes a block of 32.
#include <cuda_runtime.h>

#include "core/cuda/launch.h"
#include "core/error.h"
#include "device/convert.cuh"
#include "device/dependent.cuh"
#include "device/reduce.cuh"
#include "ops/kv_store/kernels_cuda.h"
#include "ops/runs.cuh"

namespace dyno::ops {
namespace {

using device::Scalar;

// A block with a value that is not finite gets a NaN scale, so that the fault stays visible (as on the CPU).
__device__ __forceinline__ void store_q8_0(float v, uint8_t* block, int lane) {
  const float largest = device::warp_max(fabsf(v));
  const bool finite = __all_sync(device::kFullMask, isfinite(v));
  const float scale = finite ? largest / 127.0f : __int_as_float(0x7fffffff);
  const float inverse = finite && largest > 0.0f ? 127.0f / largest : 0.0f;
  reinterpret_cast<int8_t*>(block)[2 + lane] = finite ? static_cast<int8_t>(__float2int_rn(v * inverse)) : int8_t{0};
  if (lane == 0) *reinterpret_cast<__half*>(block) = __float2half_rn(scale);
}

template <Scalar kType>
__global__ void __launch_bounds__(256) store_rows(KvStoreArgs args, int width) {
  device::let_next_start();
  device::wait_for_previous();
  const int64_t token = blockIdx.x;
  const int64_t i = int64_t{blockIdx.y} * blockDim.x + threadIdx.x;
  const int64_t cell = cell_of(args.runs, args.n_runs, args.slot_positions, static_cast<int>(token));
  if (cell < 0 || i >= width) return;  // whole warps for q8_0: its width is a multiple of 32
  const float v = args.x[token * args.x_stride + i];
  uint8_t* row = reinterpret_cast<uint8_t*>(args.cache) + cell * args.row_bytes + args.byte_offset;
  if constexpr (kType == Scalar::f32) {
    reinterpret_cast<float*>(row)[i] = v;
  } else if constexpr (kType == Scalar::f16) {
    reinterpret_cast<__half*>(row)[i] = __float2half_rn(v);
  } else if constexpr (kType == Scalar::bf16) {
    reinterpret_cast<__nv_bfloat16*>(row)[i] = __float2bfloat16_rn(v);
  } else {
    store_q8_0(v, row + i / 32 * 34, threadIdx.x % 32);
  }
}

auto kernel_of(DType type) {
  switch (type) {
    case DType::f32:
      return store_rows<Scalar::f32>;
    case DType::f16:
      return store_rows<Scalar::f16>;
    case DType::bf16:
      return store_rows<Scalar::bf16>;
    case DType::q8_0:
      return store_rows<Scalar::q8_0>;
    default:
      throw UnsupportedError(str_cat("[kv_store] no cache of type ", dtype_name(type)));
  }
}

}  // namespace

void kv_store_rows_cuda(const KvStoreArgs& args, const KvStoreDesc& desc, int threads, CudaStream& stream) {
  const auto columns = static_cast<unsigned>((desc.width + threads - 1) / threads);
  const dim3 grid(static_cast<unsigned>(desc.m), columns);
  launch_dependent("kv_store", kernel_of(desc.type), grid, static_cast<unsigned>(threads), 0, stream.handle, args,
                   static_cast<int>(desc.width));
}

}  // namespace dyno::ops
