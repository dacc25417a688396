// CUDA kernels of embed.
#pragma once

#include "ops/args.h"
#include "ops/cuda_stream.h"
#include "ops/op.h"

namespace dyno::ops {

void embed_columns_cuda(const EmbedArgs& args, const EmbedDesc& desc, int threads, CudaStream& stream);

}  // namespace dyno::ops
