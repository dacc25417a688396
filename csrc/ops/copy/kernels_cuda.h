// CUDA kernels of copy.
#pragma once

#include "ops/args.h"
#include "ops/cuda_stream.h"
#include "ops/op.h"

namespace dyno::ops {

void copy_columns_cuda(const CopyArgs& args, const CopyDesc& desc, int threads, CudaStream& stream);

}  // namespace dyno::ops
