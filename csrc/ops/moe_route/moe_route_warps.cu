// Routing: one warp a token; lane l holds experts l, l + 32, … in registers. The order of the steps is the one at
// MoeRouteDesc (ops/op.h), ties go to the lower id.
#include <cuda_runtime.h>

#include "core/cuda/launch.h"
#include "device/dependent.cuh"
#include "device/reduce.cuh"
#include "ops/moe_route/kernels_cuda.h"

namespace dyno::ops {
namespace {

// A sum of selected probabilities below the smallest normal f16 counts as that.
constexpr float kSmallestSum = 6.103515625e-5f;
__device__ __forceinline__ float never() { return __int_as_float(0xff800000); }
__device__ __forceinline__ float finite_score(float x) { return x > -3.0e38f ? x : -3.0e38f; }

struct Best {
  float score;
  int id;
};
__device__ __forceinline__ bool better(float a, int a_id, float b, int b_id) {
  return a > b || (a == b && a_id < b_id);
}

__device__ __forceinline__ Best warp_best(Best best) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const float score = __shfl_xor_sync(device::kFullMask, best.score, offset);
    const int id = __shfl_xor_sync(device::kFullMask, best.id, offset);
    if (better(score, id, best.score, best.id)) best = {score, id};
  }
  return best;
}

template <int kPerLane>
__device__ __forceinline__ Best best_of(const float (&scores)[kPerLane], int lane) {
  Best best{never(), INT_MAX};
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    if (better(scores[i], lane + 32 * i, best.score, best.id)) best = {scores[i], lane + 32 * i};
  }
  return warp_best(best);
}

// Leaves only the experts of the groups whose two best scores have the largest sum. `sums` is shared memory of the
// warp, one float a group.
template <int kPerLane>
__device__ __forceinline__ void mask_groups(float (&scores)[kPerLane], float* sums, const MoeRouteDesc& desc,
                                            int lane) {
  const int groups = static_cast<int>(desc.groups), size = static_cast<int>(desc.experts / desc.groups);
  for (int g = 0; g < groups; ++g) {
    Best first{never(), INT_MAX};
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int id = lane + 32 * i;
      if (id / size == g && better(scores[i], id, first.score, first.id)) first = {scores[i], id};
    }
    first = warp_best(first);
    float second = never();
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int id = lane + 32 * i;
      if (id / size == g && id != first.id) second = fmaxf(second, scores[i]);
    }
    second = device::warp_max(second);
    if (lane == 0) sums[g] = finite_score(size > 1 ? first.score + second : first.score);
  }
  __syncwarp();  // all sums are written
  for (int kept = 0; kept < desc.groups_used; ++kept) {
    Best best{never(), INT_MAX};
    for (int g = lane; g < groups; g += 32) {
      if (better(sums[g], g, best.score, best.id)) best = {sums[g], g};
    }
    best = warp_best(best);
    __syncwarp();  // all sums are read
    if (lane == 0) sums[best.id] = never();
    __syncwarp();  // the group is marked before the next search
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int id = lane + 32 * i;
    if (id < desc.experts && sums[id / size] != never()) scores[i] = never();
  }
}

template <int kPerLane>
__global__ void __launch_bounds__(128) moe_route_warps(MoeRouteArgs args, MoeRouteDesc desc) {
  device::let_next_start();
  device::wait_for_previous();
  extern __shared__ float shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t token = int64_t{blockIdx.x} * (blockDim.x / 32) + warp;
  if (token >= desc.m) return;
  const int experts = static_cast<int>(desc.experts), used = static_cast<int>(desc.used);
  const float* logits = args.logits + token * experts;
  int32_t* ids = args.ids + token * used;
  float* weights = args.weights + token * used;
  float* sums = shared + warp * (desc.groups + desc.experts);
  float* source = sums + desc.groups;  // what the weights are read from, by expert

  float logit[kPerLane], probability[kPerLane];
  float best = never();
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int id = lane + 32 * i;
    logit[i] = id < experts ? logits[id] : never();
    best = fmaxf(best, logit[i]);
  }
  if (desc.gating == Gating::softmax) {
    best = device::warp_max(best);
    float total = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      probability[i] = lane + 32 * i < experts ? expf(logit[i] - best) : 0.0f;
      total += probability[i];
    }
    total = device::warp_sum(total);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) probability[i] /= total;
  } else {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      probability[i] = desc.gating == Gating::sigmoid ? 1.0f / (1.0f + expf(-logit[i])) : logit[i];
    }
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    if (lane + 32 * i < experts) source[lane + 32 * i] = probability[i];
  }

  if (args.pinned != nullptr) {
    for (int slot = lane; slot < used; slot += 32) ids[slot] = args.pinned[token * used + slot];
  } else {
    // A softmax or sigmoid rounds distinct logits to equal probabilities: without a bias or groups the logits decide.
    const bool by_logit =
        desc.gating == Gating::softmax_selected || (args.selection_bias == nullptr && desc.groups == 1);
    float score[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int id = lane + 32 * i;
      const float bias = args.selection_bias != nullptr && id < experts ? args.selection_bias[id] : 0.0f;
      score[i] = id < experts ? finite_score((by_logit ? logit[i] : probability[i]) + bias) : never();
    }
    if (desc.groups_used < desc.groups) mask_groups(score, sums, desc, lane);
    for (int slot = 0; slot < used; ++slot) {
      const Best chosen = best_of(score, lane);
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        if (chosen.id == lane + 32 * i) score[i] = never();
      }
      if (lane == 0) ids[slot] = chosen.id;
    }
  }
  __syncwarp();  // ids and source are written; the lanes below read them
  float top = never(), total = 0;
  for (int slot = lane; slot < used; slot += 32) top = fmaxf(top, source[ids[slot]]);
  if (desc.gating == Gating::softmax_selected) top = device::warp_max(top);
  for (int slot = lane; slot < used; slot += 32) {
    const float value = source[ids[slot]];
    const float weight = desc.gating == Gating::softmax_selected ? expf(value - top) : value;
    weights[slot] = weight;
    total += weight;
  }
  total = device::warp_sum(total);
  float factor = args.scale;
  if (desc.gating == Gating::softmax_selected) {
    factor /= total;  // they add up to one, so there is nothing left to normalise
  } else if (desc.normalize) {
    factor /= total > kSmallestSum ? total : kSmallestSum;
  }
  for (int slot = lane; slot < used; slot += 32) weights[slot] *= factor;
}

auto kernel_for(int64_t experts) {
  if (experts <= 64) return moe_route_warps<2>;
  if (experts <= 128) return moe_route_warps<4>;
  if (experts <= 256) return moe_route_warps<8>;
  return moe_route_warps<32>;
}

}  // namespace

void moe_route_warps_cuda(const MoeRouteArgs& args, const MoeRouteDesc& desc, int warps, CudaStream& stream) {
  const auto blocks = static_cast<unsigned>((desc.m + warps - 1) / warps);
  const size_t shared = static_cast<size_t>(warps * (desc.groups + desc.experts)) * sizeof(float);
  launch_dependent("moe_route", kernel_for(desc.experts), blocks, static_cast<unsigned>(warps * 32), shared,
                   stream.handle, args, desc);
}

}  // namespace dyno::ops
