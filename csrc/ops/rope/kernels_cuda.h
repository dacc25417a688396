// CUDA kernels of rope.
#pragma once

#include "ops/args.h"
#include "ops/cuda_stream.h"
#include "ops/op.h"

namespace dyno::ops {

void rope_pairs_cuda(const RopeArgs& args, const RopeDesc& desc, int threads, CudaStream& stream);
void rope_tokens_cuda(const RopeArgs& args, const RopeDesc& desc, int threads, CudaStream& stream);

}  // namespace dyno::ops
