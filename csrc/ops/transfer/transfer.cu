// Host to device, device to host or within a device: with unified addressing, the driver infers the direction.
#include <cuda_runtime.h>

#include "core/cuda/check.h"
#include "ops/transfer/transfer.h"

namespace dyno::ops {

// Not a kernel: all earlier work on the stream has completed when it starts, and later work waits for it. Copies from
// or to host memory are asynchronous only if that memory is page-locked.
void transfer_cuda(const TransferArgs& args, const TransferDesc& desc, CudaStream& stream) {
  DYNO_CUDA_CHECK(cudaMemcpyAsync(args.y, args.x, static_cast<size_t>(desc.bytes()), cudaMemcpyDefault, stream.handle));
}

}  // namespace dyno::ops
