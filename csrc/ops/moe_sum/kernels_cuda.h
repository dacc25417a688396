// CUDA kernels of moe_sum.
#pragma once

#include "ops/args.h"
#include "ops/cuda_stream.h"
#include "ops/op.h"

namespace dyno::ops {

void moe_sum_columns_cuda(const MoeSumArgs& args, const MoeSumDesc& desc, int threads, CudaStream& stream);

}  // namespace dyno::ops
