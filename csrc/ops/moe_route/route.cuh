// Routing of one token by a warp: lane l has experts l, l + 32, … in registers. The order of the steps is documented at
// MoeRouteDesc (ops/op.h); ties go to the lower id.
#pragma once

#include "device/arithmetic.cuh"
#include "device/reduce.cuh"
#include "ops/args.h"
#include "ops/op.h"

namespace dyno::ops::route {

// A sum of selected probabilities below the smallest normal f16 is replaced by that number.
inline constexpr float kSmallestSum = 6.103515625e-5f;
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

// Unsigned numbers with the order of the floats; 0 is below all of them.
__device__ __forceinline__ unsigned ordered(float x) {
  const unsigned bits = __float_as_uint(x + 0.0f);  // both zeros are equal
  return bits ^ ((bits >> 31) != 0 ? 0xffffffffu : 0x80000000u);
}

__device__ __forceinline__ float from_ordered(unsigned key) {
  return __uint_as_float(key ^ ((key >> 31) != 0 ? 0x80000000u : 0xffffffffu));
}

// Sorts each lane's keys, best first, together with their `ids`. Ties keep their order, the lower id first.
template <int kPerLane>
__device__ __forceinline__ void sort_lane(unsigned (&keys)[kPerLane], int (&ids)[kPerLane]) {
#pragma unroll
  for (int round = 0; round < kPerLane; ++round) {
#pragma unroll
    for (int i = round % 2; i + 1 < kPerLane; i += 2) {
      const bool swap = keys[i] < keys[i + 1];
      const unsigned key = keys[i];
      const int id = ids[i];
      keys[i] = swap ? keys[i + 1] : key, keys[i + 1] = swap ? key : keys[i + 1];
      ids[i] = swap ? ids[i + 1] : id, ids[i + 1] = swap ? id : ids[i + 1];
    }
  }
}

// Moves the best of all lanes' sorted keys to `chosen`. Ties go to the lower id.
template <int kPerLane>
__device__ __forceinline__ void take_best(unsigned (&keys)[kPerLane], int (&ids)[kPerLane], int* chosen) {
  const unsigned top = device::warp_max_unsigned(keys[0]);
  bool mine = keys[0] == top;
  const unsigned lanes = __ballot_sync(device::kFullMask, mine);
  if ((lanes & (lanes - 1)) != 0) {
    mine = device::warp_min_unsigned(mine ? ids[0] : 0xffffffffu) == static_cast<unsigned>(ids[0]);
  }
  if (!mine) return;
  *chosen = ids[0];
#pragma unroll
  for (int i = 0; i + 1 < kPerLane; ++i) keys[i] = keys[i + 1], ids[i] = ids[i + 1];
  keys[kPerLane - 1] = 0;
}

// The same for any number of keys per lane, because sorting 32 keys costs more than it saves.
template <int kPerLane>
__device__ __forceinline__ void choose(unsigned (&keys)[kPerLane], int used, int lane, int* chosen) {
  if constexpr (kPerLane <= 8) {
    int ids[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) ids[i] = lane + 32 * i;
    sort_lane(keys, ids);
    for (int slot = 0; slot < used; ++slot) take_best(keys, ids, chosen + slot);
  } else {
    for (int slot = 0; slot < used; ++slot) {
      unsigned best = keys[0], id = lane;
#pragma unroll
      for (int i = 1; i < kPerLane; ++i) {
        if (keys[i] > best) best = keys[i], id = lane + 32 * i;
      }
      const unsigned top = device::warp_max_unsigned(best);
      id = device::warp_min_unsigned(best == top ? id : 0xffffffffu);
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        if (id == static_cast<unsigned>(lane + 32 * i)) keys[i] = 0;
      }
      if (lane == 0) chosen[slot] = static_cast<int>(id);
    }
  }
}

// Masks all experts except in the groups with the largest sums of their two best scores. `sums` is shared memory of the
// warp, one float per group.
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

// Floats of shared memory that route_token() needs for a warp.
__host__ __device__ inline int64_t shared_floats(const MoeRouteDesc& desc) {
  return desc.groups + desc.experts + desc.used;
}

// Whether route_softmax() can replace route_token(): a router without groups, biases and pinned experts.
inline bool takes_softmax(const MoeRouteDesc& desc, const MoeRouteArgs& args) {
  return args.pinned == nullptr && args.selection_bias == nullptr && desc.groups == 1 && desc.used <= 32 &&
         desc.experts <= 256 && desc.gating != Gating::sigmoid;
}

// The same for a softmax over all experts or over the chosen ones, with lane s for slot s and without shared memory.
// The softmax over the chosen ones equals the normalised softmax over all: kSmallestSum is never reached, because the
// best of 256 has at least 1/256.
template <int kPerLane>
__device__ __forceinline__ void route_softmax(const MoeRouteArgs& args, const MoeRouteDesc& desc, int64_t token,
                                              const float (&logit)[kPerLane]) {
  const int lane = threadIdx.x % 32, used = static_cast<int>(desc.used);
  unsigned keys[kPerLane];
  int ids[kPerLane];
  bool bad = false;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    ids[i] = lane + 32 * i;
    keys[i] = ids[i] < static_cast<int>(desc.experts) ? ordered(finite_score(logit[i])) : 0;
    bad = bad || isnan(logit[i]);
  }
  sort_lane(keys, ids);
  unsigned first = 0, mine = 0;  // the best key, and the key of this lane's slot
  int id = 0;
  for (int slot = 0; slot < used; ++slot) {
    const unsigned top = device::warp_max_unsigned(keys[0]);
    bool has = keys[0] == top;
    unsigned lanes = __ballot_sync(device::kFullMask, has);
    if ((lanes & (lanes - 1)) != 0) {
      // All lanes participate: ids differ, so only the lane of the best one has the smallest.
      has = device::warp_min_unsigned(has ? ids[0] : 0xffffffffu) == static_cast<unsigned>(ids[0]);
      lanes = __ballot_sync(device::kFullMask, has);
    }
    const int chosen = __shfl_sync(device::kFullMask, ids[0], __ffs(lanes) - 1);
    if (slot == 0) first = top;
    if (lane == slot) mine = top, id = chosen;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const bool last = i + 1 == kPerLane;
      keys[i] = has ? (last ? 0 : keys[last ? i : i + 1]) : keys[i];
      ids[i] = has && !last ? ids[last ? i : i + 1] : ids[i];
    }
  }
  const float best = from_ordered(first);
  float weight = lane < used ? expf(from_ordered(mine) - best) : 0.0f, total = weight;
  if (desc.gating == Gating::softmax && !desc.normalize) {
    total = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (lane + 32 * i < static_cast<int>(desc.experts)) total += expf(logit[i] - best);
    }
  }
  total = device::warp_sum(total);
  weight *= device::quotient(args.scale, total);
  if (__any_sync(device::kFullMask, bad)) weight = nan("");  // the error stays visible
  if (lane < used) {
    if (args.expert_scale != nullptr) weight *= args.expert_scale[id];
    args.ids[token * used + lane] = id;
    args.weights[token * used + lane] = weight;
  }
}

// `logit[i]` belongs to expert lane + 32·i; never() if there is no such expert.
template <int kPerLane>
__device__ __forceinline__ void route_token(const MoeRouteArgs& args, const MoeRouteDesc& desc, int64_t token,
                                            const float (&logit)[kPerLane], float* shared) {
  const int lane = threadIdx.x % 32;
  const int experts = static_cast<int>(desc.experts), used = static_cast<int>(desc.used);
  int32_t* ids = args.ids + token * used;
  float* weights = args.weights + token * used;
  float* sums = shared;
  float* source = sums + desc.groups;  // the source of the weights, by expert
  int* chosen = reinterpret_cast<int*>(source + desc.experts);

  float probability[kPerLane];
  float best = never();
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) best = fmaxf(best, logit[i]);
  if (desc.gating == Gating::softmax) {
    best = device::warp_max(best);
    float total = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      probability[i] = lane + 32 * i < experts ? expf(logit[i] - best) : 0.0f;
      total += probability[i];
    }
    total = device::warp_sum(total);
    const float inverse = device::quotient(1.0f, total);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) probability[i] *= inverse;
  } else {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      probability[i] = desc.gating == Gating::sigmoid ? device::quotient(1.0f, 1.0f + expf(-logit[i])) : logit[i];
    }
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    if (lane + 32 * i < experts) source[lane + 32 * i] = probability[i];
  }

  if (args.pinned != nullptr) {
    for (int slot = lane; slot < used; slot += 32) chosen[slot] = args.pinned[token * used + slot];
  } else {
    // Softmax and sigmoid round distinct logits to equal probabilities: without a bias or groups, the logits are
    // compared.
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
    unsigned keys[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) keys[i] = lane + 32 * i < experts ? ordered(score[i]) : 0;
    choose(keys, used, lane, chosen);
  }
  __syncwarp();  // chosen and source are written, for the lanes below
  float top = never(), total = 0;
  for (int slot = lane; slot < used; slot += 32) top = fmaxf(top, source[chosen[slot]]);
  if (desc.gating == Gating::softmax_selected) top = device::warp_max(top);
  const auto weight_of = [&](int slot) {
    const float value = source[chosen[slot]];
    return desc.gating == Gating::softmax_selected ? expf(value - top) : value;
  };
  for (int slot = lane; slot < used; slot += 32) total += weight_of(slot);
  total = device::warp_sum(total);
  float factor = args.scale;
  if (desc.gating == Gating::softmax_selected) {
    factor = device::quotient(factor, total);  // the weights add up to one, so no further normalisation is needed
  } else if (desc.normalize) {
    factor = device::quotient(factor, fmaxf(total, kSmallestSum));
  }
  for (int slot = lane; slot < used; slot += 32) {
    ids[slot] = chosen[slot];
    weights[slot] = weight_of(slot) * factor;
    if (args.expert_scale != nullptr) weights[slot] *= args.expert_scale[chosen[slot]];
  }
}

}  // namespace dyno::ops::route
