// A token from each row of logits, by the rules of sample.cpp and in its order.
//
// All blocks look at the row once: the best of it and of every chunk, and sums over chunks where the whole row is drawn
// from. The block that is through last goes on alone: it finds the logit at which the filters cut and walks what is
// kept. A chunk whose best lies below what is asked for is not read, so the usual filters read a few dozen chunks.
// Every sum is made in one order, whatever the number of blocks.
#include <cuda_runtime.h>

#include <algorithm>

#include "core/cuda/launch.h"
#include "device/dependent.cuh"
#include "ops/sample/filters.cuh"
#include "ops/sample/kernels_cuda.h"
#include "ops/sample/row.cuh"

namespace dyno::ops {
namespace sampling {
namespace {

// Draws by walking ids in order. `sums` of the chunks are there, each to be scaled by scale(chunk); of(key, id, logit)
// is the weight of a logit, and 0 of one that is not kept.
template <typename Scale, typename Of>
__device__ __forceinline__ int32_t walk(const Row& row, const double* sums, float uniform, const Scale& scale,
                                        const Of& of) {
  Shared& shared = *row.shared;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto sum_of = [&](uint32_t chunk) { return __ldcg(sums + chunk) * scale(chunk); };
  // A piece of the row for each thread, then the chunk within the piece, then the id within the chunk. Where rounding
  // leaves the target unreached, the last one with any weight is taken.
  const uint32_t per_thread = (row.chunks + kThreads - 1) / kThreads;
  const uint32_t begin = min(threadIdx.x * per_thread, row.chunks), end = min(begin + per_thread, row.chunks);
  double own = 0;
  for (uint32_t chunk = begin; chunk < end; ++chunk) own += sum_of(chunk);
  const double in_warp = warp_prefix(own, lane);
  if (lane == 31) shared.warps[warp] = in_warp;
  if (threadIdx.x == 0) shared.first = kThreads, shared.last = 0;
  __syncthreads();  // sums of warps
  double before = 0, total = 0;
  for (int i = 0; i < kWarps; ++i) {
    if (i == warp) before = total;
    total += shared.warps[i];
  }
  const double target = static_cast<double>(uniform) * total;
  if (own > 0) {
    if (before + in_warp > target) atomicMin(&shared.first, static_cast<int>(threadIdx.x));
    atomicMax(&shared.last, static_cast<int>(threadIdx.x));
  }
  __syncthreads();  // first and last
  if (static_cast<int>(threadIdx.x) == (shared.first < kThreads ? shared.first : shared.last)) {
    double reached = before + (in_warp - own);
    for (uint32_t chunk = begin; chunk < end; ++chunk) {
      const double sum = sum_of(chunk);
      if (sum <= 0) continue;
      shared.chunk = chunk;
      shared.before = reached;
      reached += sum;
      if (reached > target) break;
    }
  }
  __syncthreads();  // the chunk
  if (warp != 0) return 0;
  const uint32_t first = row.first_of(shared.chunk, lane);
  const Four four = row.load(first);
  double weights[kPerLane];
  double sum = 0;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    weights[i] = of(key_of(four.x[i]), static_cast<int32_t>(first + i), four.x[i]);
    sum += weights[i];
  }
  const double reached = shared.before + warp_prefix(sum, lane);
  const unsigned some = __ballot_sync(device::kFullMask, sum > 0);
  const unsigned past = __ballot_sync(device::kFullMask, sum > 0 && reached > target);
  const int chosen = past != 0 ? __ffs(past) - 1 : 31 - __clz(some | 1u);
  int32_t id = -1;
  double at = reached - sum;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    if (weights[i] > 0 && (id < 0 || at <= target)) id = static_cast<int32_t>(first + i);
    at += weights[i];
  }
  return __shfl_sync(device::kFullMask, id, chosen);
}

struct Scratch {
  uint64_t* bests;   // of each block
  double* sums;      // of each chunk, relative to its best
  uint32_t* maxima;  // of each chunk, as keys
};

// By the block that is through last. In thread 0: the token.
__device__ int32_t finish_row(const Row& row, const SampleSettings& settings, const Scratch& scratch, uint64_t rank,
                              float uniform) {
  const auto best = static_cast<uint32_t>(rank >> 32);
  const float top = value_of(best);
  const double inverse = 1.0 / static_cast<double>(settings.temperature);
  for (uint32_t chunk = threadIdx.x; chunk < row.chunks && row.chunks <= kSharedMaxima; chunk += kThreads) {
    row.shared->maxima[chunk] = __ldcg(row.maxima + chunk);
  }
  __syncthreads();  // maxima
  const auto weight = [&](float logit) {
    const double distance = static_cast<double>(logit) - static_cast<double>(top);
    return distance == 0.0 ? 1.0 : exp(distance * inverse);
  };
  const bool by_count = settings.top_k > 0 && static_cast<uint32_t>(settings.top_k) < row.n;
  const bool by_mass = settings.top_p < 1.0f, by_ratio = settings.min_p > 0.0f;
  const auto chunk_scale = [&](uint32_t chunk, const auto& of) {
    const uint32_t key = row.best_of(chunk);
    return key > kMinusInfinity ? of(value_of(key)) : 0.0;
  };
  if (!by_count && !by_mass && !by_ratio) {
    return walk(
        row, scratch.sums, uniform, [&](uint32_t chunk) { return chunk_scale(chunk, weight); },
        [&](uint32_t key, int32_t, float logit) { return key > kMinusInfinity ? weight(logit) : 0.0; });
  }

  Cut cut = by_count ? top_k(row, settings.top_k, best) : Cut{};
  if (by_mass) {
    double total = 0;
    if (by_count) {
      total = row.total<double>(cut.key, [&](uint32_t key, int32_t id, float logit) {
        return cut.keeps(key, id) ? mass_of(logit, top) : 0.0;
      });
    } else {
      for (uint32_t chunk = threadIdx.x; chunk < row.chunks; chunk += kThreads) {
        total += __ldcg(scratch.sums + chunk) * chunk_scale(chunk, [&](float x) { return mass_of(x, top); });
      }
      total = block_total(total, *row.shared);
    }
    cut = top_p(row, cut, settings.top_p, best, total);
  }
  uint32_t least = cut.key > kMinusInfinity ? cut.key : kMinusInfinity + 1;
  const double ratio = by_ratio ? static_cast<double>(settings.min_p) : 0.0;
  if (by_ratio) {
    // Only which chunks are read: a little too low.
    const uint32_t bound =
        key_of(static_cast<float>(static_cast<double>(top) + log(ratio) - 1e-3) - 1e-3f * fabsf(top));
    least = bound > least ? bound : least;
  }
  const auto kept_weight = [&](uint32_t key, int32_t id, float logit) {
    if (key < least || !cut.keeps(key, id)) return 0.0;
    if (by_ratio && exp(static_cast<double>(logit) - static_cast<double>(top)) < ratio) return 0.0;
    return weight(logit);
  };
  row.for_each_chunk(
      least, [&](uint32_t chunk) { scratch.sums[chunk] = 0; },
      [&](uint32_t chunk) {
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
      });
  __syncthreads();  // sums, read by other threads of the block
  return walk(row, scratch.sums, uniform, [](uint32_t) { return 1.0; }, kept_weight);
}

// Grid: blocks of a row, rows.
__global__ void __launch_bounds__(kThreads)
    sample_blocks(SampleArgs args, const SampleSettings* in_memory, uint32_t n, SampleScratch layout,
                  std::byte* workspace, int32_t* counters) {
  device::let_next_start();
  device::wait_for_previous();
  __shared__ Shared shared;
  const SampleSettings settings = in_memory == nullptr ? settings_of(args) : *in_memory;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  std::byte* own = workspace + blockIdx.y * layout.bytes;
  const Scratch scratch{reinterpret_cast<uint64_t*>(own), reinterpret_cast<double*>(own + layout.sums_offset),
                        reinterpret_cast<uint32_t*>(own + layout.maxima_offset)};
  const float* logits = args.logits + blockIdx.y * int64_t{n};
  const Row row{.logits = logits,
                .n = n,
                .chunks = static_cast<uint32_t>(layout.chunks),
                .aligned = reinterpret_cast<uintptr_t>(logits) % sizeof(float4) == 0,
                .maxima = scratch.maxima,
                .shared = &shared};
  const bool draws = settings.temperature > 0.0f;
  const bool by_count = settings.top_k > 0 && static_cast<uint32_t>(settings.top_k) < n;
  // Sums over whole chunks: of weights where no filter stands before the draw, of probabilities where top-p is the
  // first.
  const bool masses = draws && !by_count && settings.top_p < 1.0f;
  const bool weights = draws && !by_count && !masses && !(settings.min_p > 0.0f);
  const double inverse = 1.0 / static_cast<double>(settings.temperature);

  uint64_t rank = 0;
  for (uint32_t chunk = blockIdx.x * kWarps + warp; chunk < row.chunks; chunk += gridDim.x * kWarps) {
    const uint32_t first = row.first_of(chunk, lane);
    const Four four = row.load(first);
    uint32_t key = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const uint32_t at = key_of(four.x[i]);
      // Past the end stand ids that are none: a row without a number gives its first.
      const uint64_t found = first + i < n ? rank_of(at, first + i) : 0;
      rank = found > rank ? found : rank;
      key = max(key, at);
    }
    if (!draws) continue;
    key = device::warp_max_unsigned(key);
    double sum = 0;
    if ((masses || weights) && key > kMinusInfinity && key < kInfinity) {
      const float top = value_of(key);
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        if (key_of(four.x[i]) <= kMinusInfinity) continue;
        const double distance = static_cast<double>(four.x[i]) - static_cast<double>(top);
        sum += masses ? mass_of(four.x[i], top) : distance == 0.0 ? 1.0 : exp(distance * inverse);
      }
      sum = warp_total(sum);
    }
    if (lane == 0) {
      scratch.maxima[chunk] = key;
      scratch.sums[chunk] = sum;
    }
  }
  rank = warp_best(rank);
  uint64_t* ranks = reinterpret_cast<uint64_t*>(shared.warps);
  if (lane == 0) ranks[warp] = rank;
  __threadfence();  // maxima and sums come before the count
  __syncthreads();  // ranks of warps, and all of the block's writes
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
  if (draws && best > kMinusInfinity && best < kInfinity) {
    token = finish_row(row, settings, scratch, rank, args.uniform[blockIdx.y]);
  }
  if (threadIdx.x == 0) {
    args.out[blockIdx.y] = token;
    counters[blockIdx.y] = 0;
  }
}

}  // namespace
}  // namespace sampling

void sample_blocks_cuda(const SampleArgs& args, const SampleSettings* settings, const SampleDesc& desc, int blocks,
                        CudaStream& stream) {
  const SampleScratch layout = sample_scratch(desc.n_vocab, blocks);
  const auto used =
      static_cast<unsigned>(std::min<int64_t>(blocks, (layout.chunks + sampling::kWarps - 1) / sampling::kWarps));
  launch_dependent("sample", sampling::sample_blocks, dim3(used, static_cast<unsigned>(desc.m)), sampling::kThreads, 0,
                   stream.handle, args, settings, static_cast<uint32_t>(desc.n_vocab), layout, stream.workspace,
                   stream.counters);
}

}  // namespace dyno::ops
