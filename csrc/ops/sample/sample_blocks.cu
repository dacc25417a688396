// Samples a token from each row of logits, with the rules and the order of sample.cpp.
//
// All blocks read the row once and compute its best logit, the maximum of every chunk, and sums over chunks if tokens
// are sampled from the whole row. The last block to finish continues alone: it finds the logit at which the filters
// cut, and walks the kept tokens. Chunks whose maximum is below the searched logit are not read, so top-k reads a few
// dozen chunks once (few.cuh). Top-p alone may keep most of the row. For it, all blocks sort their chunks and compute
// prefix sums from the best on, so that the last block reads each chunk once per tested logit. The order of every sum
// is independent of the number of blocks.
#include <cuda_runtime.h>

#include <algorithm>

#include "core/cuda/launch.h"
#include "device/dependent.cuh"
#include "ops/sample/few.cuh"
#include "ops/sample/filters.cuh"
#include "ops/sample/kernels_cuda.h"
#include "ops/sample/row.cuh"
#include "ops/sample/sorted.cuh"
#include "ops/sample/walk.cuh"

namespace dyno::ops {
namespace sampling {
namespace {

struct Scratch {
  uint64_t* bests;   // per block
  double* sums;      // per chunk, relative to its best for sums over whole chunks
  uint32_t* maxima;  // per chunk, as keys
  Sorted sorted;
};

// Called by the last block. Returns the token in thread 0.
__device__ int32_t finish_row(const Row& row, const SampleSettings& settings, const Scratch& scratch, Few& few,
                              uint64_t rank, float uniform) {
  const auto best = static_cast<uint32_t>(rank >> 32);
  const float top = value_of(best);
  const double inverse = 1.0 / static_cast<double>(settings.temperature);
  for (uint32_t chunk = threadIdx.x; chunk < row.chunks && row.chunks <= kSharedMaxima; chunk += kThreads) {
    row.shared->maxima[chunk] = __ldcg(row.maxima + chunk);
  }
  __syncthreads();  // maxima are written
  const auto weight = [&](float logit) {
    const double distance = static_cast<double>(logit) - static_cast<double>(top);
    return distance == 0.0 ? 1.0 : exp(distance * inverse);
  };
  const bool by_count = settings.top_k > 0 && static_cast<uint32_t>(settings.top_k) < row.n;
  const bool by_mass = settings.top_p < 1.0f, by_ratio = settings.min_p > 0.0f;
  const auto drawn_at = [&](double total) { return static_cast<double>(uniform) * total; };
  const auto chunk_scale = [&](uint32_t chunk, const auto& of) {
    const uint32_t key = row.best_of(chunk);
    return key > kMinusInfinity ? of(value_of(key)) : 0.0;
  };
  if (!by_count && !by_mass && !by_ratio) {
    return walk(
        row, [&](uint32_t chunk) { return __ldcg(scratch.sums + chunk) * chunk_scale(chunk, weight); }, drawn_at,
        [&](uint32_t key, int32_t, float logit) { return key > kMinusInfinity ? weight(logit) : 0.0; });
  }

  if (by_count && settings.top_k <= kFewKept) {
    const int count = sort_few(row, few, settings.top_k, best);
    if (count <= kFewCandidates) return threadIdx.x < 32 ? draw_few(few, count, settings, uniform, weight) : 0;
  }
  const double ratio = by_ratio ? static_cast<double>(settings.min_p) : 0.0;
  const bool sorted = by_mass && !by_count;
  Cut cut{};
  if (by_count) cut = top_k(row, settings.top_k, best);
  if (sorted) {
    cut = top_p_sorted(row, scratch.sorted, settings.top_p, ratio, best, scratch.sums, weight);
  } else if (by_mass) {
    const double total = row.total<double>(
        cut.key, [&](uint32_t key, int32_t id, float logit) { return cut.keeps(key, id) ? mass_of(logit, top) : 0.0; });
    cut = top_p(row, cut, settings.top_p, best, total);
  }
  uint32_t least = cut.key > kMinusInfinity ? cut.key : kMinusInfinity + 1;
  if (by_ratio) {
    // Only determines which chunks are read, so it is slightly too low.
    const uint32_t bound =
        key_of(static_cast<float>(static_cast<double>(top) + log(ratio) - 1e-3) - 1e-3f * fabsf(top));
    least = bound > least ? bound : least;
  }
  const auto kept_weight = [&](uint32_t key, int32_t id, float logit) {
    if (key < least || !cut.keeps(key, id)) return 0.0;
    if (by_ratio && exp(static_cast<double>(logit) - static_cast<double>(top)) < ratio) return 0.0;
    return weight(logit);
  };
  const auto add_up = [&](uint32_t chunk) {
    const int lane = threadIdx.x % 32;
    const uint32_t first = row.first_of(chunk, lane);
    const Four four = row.load(first);
    double sum = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      sum += kept_weight(key_of(four.x[i]), static_cast<int32_t>(first + i), four.x[i]);
    }
    sum = warp_total(sum);
    if (lane == 0) scratch.sums[chunk] = sum;
  };
  if (!sorted) {
    row.for_each_chunk(least, [&](uint32_t chunk) { scratch.sums[chunk] = 0; }, add_up);
  } else if (cut.id != kAllIds) {
    __syncthreads();  // the sums of all chunks are written, one of which is corrected below
    if (threadIdx.x < 32) add_up(static_cast<uint32_t>(cut.id) / static_cast<uint32_t>(kSampleChunk));
  }
  __syncthreads();  // sums that other threads of the block read
  return walk(row, [&](uint32_t chunk) { return __ldcg(scratch.sums + chunk); }, drawn_at, kept_weight);
}

// Grid: blocks per row, rows.
__global__ void __launch_bounds__(kThreads, 2)  // the default's number of blocks assumes two on a multiprocessor
    sample_blocks(SampleArgs args, uint32_t n, SampleScratch layout, std::byte* workspace, int32_t* counters) {
  device::let_next_start();
  device::wait_for_previous();
  __shared__ Shared shared;
  __shared__ Few few;
  const SampleSettings settings = settings_of(args, blockIdx.y);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  std::byte* own = workspace + blockIdx.y * layout.bytes;
  const Scratch scratch{
      reinterpret_cast<uint64_t*>(own),
      reinterpret_cast<double*>(own + layout.sums_offset),
      reinterpret_cast<uint32_t*>(own + layout.maxima_offset),
      {reinterpret_cast<uint32_t*>(own + layout.keys_offset), reinterpret_cast<double*>(own + layout.masses_offset),
       reinterpret_cast<double*>(own + layout.weights_offset)}};
  const float* logits = args.logits + blockIdx.y * int64_t{n};
  const Row row{.logits = logits,
                .n = n,
                .chunks = static_cast<uint32_t>(layout.chunks),
                .aligned = reinterpret_cast<uintptr_t>(logits) % sizeof(float4) == 0,
                .maxima = scratch.maxima,
                .shared = &shared};
  const bool draws = settings.temperature > 0.0f;
  const bool by_count = settings.top_k > 0 && static_cast<uint32_t>(settings.top_k) < n;
  const bool sorts = sorts_row(settings, n);
  // Sums over whole chunks, if no filter is applied before sampling.
  const bool weights = draws && !by_count && !sorts && !(settings.min_p > 0.0f);
  const double inverse = 1.0 / static_cast<double>(settings.temperature);

  uint64_t rank = 0;
  bool undefined = false;  // a logit of the row is NaN
  const uint32_t warps = gridDim.x * kWarps, own_chunk = blockIdx.x * kWarps + warp;
  Four ahead = row.load(row.first_of(own_chunk, lane));
  for (uint32_t chunk = own_chunk; chunk < row.chunks; chunk += warps) {
    const uint32_t first = row.first_of(chunk, lane);
    const Four four = ahead;
    ahead = row.load(row.first_of(chunk + warps, lane));  // past the row, nothing is read
    uint32_t key = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const uint32_t at = key_of(four.x[i]);
      // Past the end, ids are invalid; a row without numbers gives its first id.
      const uint64_t found = first + i < n ? rank_of(at, first + i) : 0;
      rank = found > rank ? found : rank;
      undefined |= at == 0 && first + i < n;
      key = max(key, at);
    }
    if (!draws) continue;
    key = device::warp_max_unsigned(key);
    double sum = 0;
    const bool finite = key > kMinusInfinity && key < kInfinity;
    if (sorts && finite) {
      uint32_t keys[kPerLane];
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) keys[i] = key_of(four.x[i]);
      sort_chunk(scratch.sorted, chunk, keys, key, inverse);
    }
    if (weights && finite) {
      const float top = value_of(key);
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        if (key_of(four.x[i]) <= kMinusInfinity) continue;
        const double distance = static_cast<double>(four.x[i]) - static_cast<double>(top);
        sum += distance == 0.0 ? 1.0 : exp(distance * inverse);
      }
      sum = warp_total(sum);
    }
    if (lane == 0) {
      scratch.maxima[chunk] = key;
      scratch.sums[chunk] = sum;
    }
  }
  // Above every rank, so that it wins the same reduction over the row.
  if (args.finite_only && undefined) rank = ~uint64_t{0};
  rank = warp_best(rank);
  uint64_t* ranks = reinterpret_cast<uint64_t*>(shared.warps);
  if (lane == 0) ranks[warp] = rank;
  __threadfence();  // maxima and sums are visible before the count
  __syncthreads();  // ranks of warps, and all writes of the block
  if (warp == 0) {
    rank = warp_best(lane < kWarps ? ranks[lane] : 0);
    if (lane == 0) {
      scratch.bests[blockIdx.x] = rank;
      __threadfence();
      shared.ends = atomicAdd(counters + blockIdx.y, 1) == static_cast<int32_t>(gridDim.x) - 1;
    }
  }
  __syncthreads();  // whether this block ends the row
  if (!shared.ends) return;
  __threadfence();
  rank = 0;
  for (uint32_t block = lane; block < gridDim.x; block += 32) {
    const uint64_t found = __ldcg(reinterpret_cast<const unsigned long long*>(scratch.bests) + block);
    rank = found > rank ? found : rank;
  }
  rank = warp_best(rank);
  const auto best = static_cast<uint32_t>(rank >> 32);
  int32_t token = static_cast<int32_t>(~static_cast<uint32_t>(rank));
  if (best <= kMinusInfinity || best >= kInfinity) {
    if (args.finite_only) token = -1;
  } else if (draws) {
    token = finish_row(row, settings, scratch, few, rank, args.uniform[blockIdx.y]);
  }
  if (threadIdx.x == 0) {
    args.out[blockIdx.y] = token;
    counters[blockIdx.y] = 0;
  }
}

}  // namespace
}  // namespace sampling

void sample_blocks_cuda(const SampleArgs& args, const SampleDesc& desc, int blocks, bool sorts, CudaStream& stream) {
  const SampleScratch layout = sample_scratch(desc.n_vocab, blocks, sorts);
  const auto used =
      static_cast<unsigned>(std::min<int64_t>(blocks, (layout.chunks + sampling::kWarps - 1) / sampling::kWarps));
  launch_dependent("sample", sampling::sample_blocks, dim3(used, static_cast<unsigned>(desc.m)), sampling::kThreads, 0,
                   stream.handle, args, static_cast<uint32_t>(desc.n_vocab), layout, stream.workspace, stream.counters);
}

}  // namespace dyno::ops
