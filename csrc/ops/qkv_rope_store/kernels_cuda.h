// CUDA kernels of qkv_rope_store.
#pragma once

#include "ops/args.h"
#include "ops/cuda_stream.h"
#include "ops/op.h"

namespace dyno::ops {

// Largest head or latent row that a warp's registers hold.
inline constexpr int64_t kCudaMaxHeadRow = 1024;

void qkv_heads_cuda(const QkvRopeStoreArgs& args, const QkvRopeStoreDesc& desc, int warps, CudaStream& stream);

}  // namespace dyno::ops
