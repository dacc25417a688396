// Rows of the table by token id, one element per thread, dequantised as the file format defines.
#include <cuda_runtime.h>

#include "core/cuda/launch.h"
#include "core/error.h"
#include "device/dependent.cuh"
#include "ops/embed/kernels_cuda.h"
#include "ops/matmul/gpu_pack.h"

namespace dyno::ops {
namespace {

template <DType kType>
__global__ void __launch_bounds__(256) embed_columns(EmbedArgs args, int64_t n) {
  device::let_next_start();
  device::wait_for_previous();
  using Block = typename FileBlock<kType>::Type;
  constexpr int kElements = kFileBlock<kType>;
  const int64_t token = blockIdx.x, i = int64_t{blockIdx.y} * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const auto* row = static_cast<const Block*>(args.table) + args.ids[token] * (n / kElements);
  args.out[token * n + i] = value_of<kType>(row[i / kElements], static_cast<int>(i % kElements)) * args.scale;
}

auto kernel_of(DType type) {
  switch (type) {
#define DYNO_CASE(name) \
  case DType::name:     \
    return embed_columns<DType::name>;
#define DYNO_BUILT_FLOAT(name) DYNO_CASE(name)
#define DYNO_BUILT_QUANT(name) DYNO_CASE(name)
#define DYNO_BUILT_GPU(name) DYNO_CASE(name)
#include "ops/built_types.inc"
#undef DYNO_CASE
    default:
      throw UnsupportedError(str_cat("[embed] no CUDA kernel for a table of type ", dtype_name(type)));
  }
}

}  // namespace

void embed_columns_cuda(const EmbedArgs& args, const EmbedDesc& desc, int threads, CudaStream& stream) {
  const dim3 grid(static_cast<unsigned>(desc.m), static_cast<unsigned>((desc.n + threads - 1) / threads));
  launch_dependent("embed", kernel_of(desc.type), grid, static_cast<unsigned>(threads), 0, stream.handle, args, desc.n);
}

}  // namespace dyno::ops
