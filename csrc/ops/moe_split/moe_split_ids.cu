// The division of the chosen experts between two devices, one thread per id.
#include <cuda_runtime.h>

#include "core/cuda/launch.h"
#include "device/dependent.cuh"
#include "ops/moe_split/moe_split.h"

namespace dyno::ops {
namespace {

__global__ void __launch_bounds__(256) moe_split_ids(MoeSplitArgs args, int64_t count) {
  device::let_next_start();
  device::wait_for_previous();
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const int32_t id = args.ids[i], place = args.places[id];
  args.here[i] = place >= 0 ? place : -1;
  args.there[i] = place >= 0 ? -1 : id;
  if (args.counts != nullptr) atomicAdd(args.counts + id, 1);
}

}  // namespace

void moe_split_ids_cuda(const MoeSplitArgs& args, const MoeSplitDesc& desc, int threads, CudaStream& stream) {
  const int64_t count = desc.m * desc.used;
  const dim3 grid(static_cast<unsigned>((count + threads - 1) / threads));
  launch_dependent("moe_split", moe_split_ids, grid, static_cast<unsigned>(threads), 0, stream.handle, args, count);
}

}  // namespace dyno::ops
