// CUDA kernels of sample.
#pragma once

#include "ops/args.h"
#include "ops/cuda_stream.h"
#include "ops/op.h"
#include "ops/sample/settings.h"

namespace dyno::ops {

// Maximum rows of one launch: each has a counter of the stream.
inline constexpr int64_t kCudaMaxRows = 65535;
static_assert(kCudaMaxRows < kStreamCounters);

// Logits that a warp reads at once. The order of sums over them depends on nothing else, so any number of blocks
// samples the same token.
inline constexpr int64_t kSampleChunk = 128;

// The results that the blocks of one row write for the last block: the best of each block; the sum and the maximum of
// each chunk; and if top-p reads the whole row, the sorted chunk with two prefix sums from its best on.
struct SampleScratch {
  int64_t chunks = 0, sums_offset = 0, maxima_offset = 0, keys_offset = 0, masses_offset = 0, weights_offset = 0,
          bytes = 0;
};
// `sorts`: also for rows with sorts_row().
constexpr SampleScratch sample_scratch(int64_t n_vocab, int blocks, bool sorts) {
  SampleScratch s;
  s.chunks = (n_vocab + kSampleChunk - 1) / kSampleChunk;
  s.sums_offset = blocks * static_cast<int64_t>(sizeof(uint64_t));
  s.maxima_offset = s.sums_offset + s.chunks * static_cast<int64_t>(sizeof(double));
  s.keys_offset = (s.maxima_offset + s.chunks * static_cast<int64_t>(sizeof(uint32_t)) + 15) / 16 * 16;
  s.masses_offset = s.keys_offset + s.chunks * kSampleChunk * static_cast<int64_t>(sizeof(uint32_t));
  s.weights_offset = s.masses_offset + s.chunks * kSampleChunk * static_cast<int64_t>(sizeof(double));
  s.bytes = sorts ? s.weights_offset + s.chunks * kSampleChunk * static_cast<int64_t>(sizeof(double)) : s.keys_offset;
  return s;
}
inline size_t sample_blocks_scratch(const SampleDesc& desc, int blocks, bool sorts) {
  return static_cast<size_t>(desc.m * sample_scratch(desc.n_vocab, blocks, sorts).bytes);
}

void sample_blocks_cuda(const SampleArgs& args, const SampleDesc& desc, int blocks, bool sorts, CudaStream& stream);

}  // namespace dyno::ops
