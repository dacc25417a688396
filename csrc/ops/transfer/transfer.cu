// Host to device, device to host or within a device: unified addresses tell the driver which.
#include <cuda_runtime.h>

#include "core/cuda/check.h"
#include "ops/transfer/transfer.h"

namespace dyno::ops {

// No kernel: what stands before it on the stream is over when it begins, and what stands behind it waits for it. From
// or to host memory it is asynchronous only where that is page-locked.
void transfer_cuda(const TransferArgs& args, const TransferDesc& desc, CudaStream& stream) {
  DYNO_CUDA_CHECK(cudaMemcpyAsync(args.y, args.x, static_cast<size_t>(desc.bytes()), cudaMemcpyDefault, stream.handle));
}

}  // namespace dyno::ops
