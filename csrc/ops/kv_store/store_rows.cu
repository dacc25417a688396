// Conversion of f32 rows to the cache type, each row into the cell that the runs name. A thread converts single values;
// for q8_0 a warp makes a block of 32.
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
  const int64_t cell = cell_of(args.runs, args.n_runs, args.slot_positions, static_cast<int>(token));
  if (cell < 0 || i >= width) return;  // whole warps for q8_0: its width is a multiple of 32
  const float v = args.x[token * args.x_stride + i];
  uint8_t* row = reinterpret_cast<uint8_t*>(args.cache) + cell * args.row_bytes + args.byte_offset;
  device::store_scalar(kType, v, row, i, threadIdx.x % 32);
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
