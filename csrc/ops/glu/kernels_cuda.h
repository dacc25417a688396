// CUDA kernels of glu.
#pragma once

#include "ops/args.h"
#include "ops/cuda_stream.h"
#include "ops/op.h"

namespace dyno::ops {

void glu_columns_cuda(const GluArgs& args, const GluDesc& desc, int threads, CudaStream& stream);

}  // namespace dyno::ops
