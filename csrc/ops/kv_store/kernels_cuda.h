// CUDA kernels of kv_store.
#pragma once

#include "ops/args.h"
#include "ops/cuda_stream.h"
#include "ops/op.h"

namespace dyno::ops {

void kv_store_rows_cuda(const KvStoreArgs& args, const KvStoreDesc& desc, int threads, CudaStream& stream);
void kv_store_chunks_cuda(const KvStoreArgs& args, const KvStoreDesc& desc, int threads, CudaStream& stream);

}  // namespace dyno::ops
