// CUDA kernels of norm.
#pragma once

#include "ops/args.h"
#include "ops/cuda_stream.h"
#include "ops/op.h"

namespace dyno::ops {

// `threads` per row: 32, or a multiple of it up to 1024.
void norm_rows_cuda(const NormArgs& args, const NormDesc& desc, int threads, CudaStream& stream);

}  // namespace dyno::ops
