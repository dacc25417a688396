// Converts f32 rows to the cache type and stores each row at the position that the runs give. columns: a thread
// converts single values; for q8_0 a warp converts a block of 32. chunks: a thread converts eight values.
#include <cuda_runtime.h>

#include "core/cuda/launch.h"
#include "core/error.h"
#include "device/dependent.cuh"
#include "device/store.cuh"
#include "ops/kv_store/kernels_cuda.h"
#include "ops/runs.cuh"

namespace dyno::ops {
namespace {

using device::Scalar;

template <Scalar kType>
__global__ void __launch_bounds__(256) store_rows(KvStoreArgs args, int width) {
  device::let_next_start();
  device::wait_for_previous();
  const int64_t token = blockIdx.x;
  const int64_t i = int64_t{blockIdx.y} * blockDim.x + threadIdx.x;
  const int64_t cell = cell_of_warp(args.runs, args.n_runs, args.slot_positions, static_cast<int>(token),
                                    static_cast<int>(threadIdx.x % 32));
  if (cell < 0 || i >= width) return;  // exits as whole warps for q8_0, because its width is a multiple of 32
  const float v = args.x[token * args.x_stride + i];
  uint8_t* row = reinterpret_cast<uint8_t*>(args.cache) + cell * args.row_bytes + args.byte_offset;
  device::store_scalar(kType, v, row, i, threadIdx.x % 32);
}

template <Scalar kType>
__global__ void __launch_bounds__(256) store_chunks(KvStoreArgs args, int width) {
  device::let_next_start();
  device::wait_for_previous();
  const int64_t token = blockIdx.x;
  const int at = 8 * static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x);
  float4 v[2] = {};
  if (at < width) {
    const auto* x = reinterpret_cast<const float4*>(args.x + token * args.x_stride + at);
    v[0] = x[0], v[1] = x[1];
  }
  const int64_t cell = cell_of_warp(args.runs, args.n_runs, args.slot_positions, static_cast<int>(token),
                                    static_cast<int>(threadIdx.x % 32));
  if (cell < 0 || at >= width) return;
  uint8_t* row = reinterpret_cast<uint8_t*>(args.cache) + cell * args.row_bytes + args.byte_offset;
  if constexpr (kType == Scalar::f32) {
    *reinterpret_cast<float4*>(row + at * 4) = v[0];
    *reinterpret_cast<float4*>(row + at * 4 + 16) = v[1];
  } else {
    __align__(16) uint8_t chunk[16];
    const float values[8] = {v[0].x, v[0].y, v[0].z, v[0].w, v[1].x, v[1].y, v[1].z, v[1].w};
#pragma unroll
    for (int i = 0; i < 8; ++i) device::store_scalar(kType, values[i], chunk, i, 0);
    *reinterpret_cast<uint4*>(row + at * 2) = *reinterpret_cast<const uint4*>(chunk);
  }
}

// Whether rows of the cache and of x allow 16-byte accesses.
bool is_aligned(const KvStoreArgs& args) {
  const auto bits = reinterpret_cast<uintptr_t>(args.x) | reinterpret_cast<uintptr_t>(args.cache) |
                    static_cast<uintptr_t>(args.x_stride * 4 | args.row_bytes | args.byte_offset);
  return bits % 16 == 0;
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

auto chunk_kernel_of(DType type) {
  switch (type) {
    case DType::f32:
      return store_chunks<Scalar::f32>;
    case DType::f16:
      return store_chunks<Scalar::f16>;
    case DType::bf16:
      return store_chunks<Scalar::bf16>;
    default:
      throw UnsupportedError(str_cat("[kv_store] chunks write no cache of type ", dtype_name(type)));
  }
}

}  // namespace

void kv_store_chunks_cuda(const KvStoreArgs& args, const KvStoreDesc& desc, int threads, CudaStream& stream) {
  // If chunks are not aligned, columns write the same bits.
  if (!is_aligned(args)) return kv_store_rows_cuda(args, desc, threads, stream);
  const auto columns = static_cast<unsigned>((desc.width / 8 + threads - 1) / threads);
  const dim3 grid(static_cast<unsigned>(desc.m), columns);
  launch_dependent("kv_store", chunk_kernel_of(desc.type), grid, static_cast<unsigned>(threads), 0, stream.handle, args,
                   static_cast<int>(desc.width));
}

void kv_store_rows_cuda(const KvStoreArgs& args, const KvStoreDesc& desc, int threads, CudaStream& stream) {
  const auto columns = static_cast<unsigned>((desc.width + threads - 1) / threads);
  const dim3 grid(static_cast<unsigned>(desc.m), columns);
  launch_dependent("kv_store", kernel_of(desc.type), grid, static_cast<unsigned>(threads), 0, stream.handle, args,
                   static_cast<int>(desc.width));
}

}  // namespace dyno::ops
