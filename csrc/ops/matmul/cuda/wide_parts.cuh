// The end of a tile of gemm_wide.cuh whose k several clusters share. Warps with the same rows and tokens in these
// clusters exchange their sums through global memory. A tile's tokens are divided into shares, and each part of k owns
// some of them: a warp leaves its sums of the other shares, and finishes its own. No warp waits: the last one that
// arrives at a share finishes it. Sums are added in the order of the parts, so the bits do not depend on who comes
// last.
#pragma once

#include "device/reduce.cuh"
#include "ops/matmul/cuda/wide_epilogue.cuh"

namespace dyno::ops::cuda {

inline constexpr int kWideMostParts = kWideShares;

// Where the warps of a tile meet: see TiledRows::shared_tiles.
struct WideMeeting {
  int parts = 1;
  int32_t* arrivals = nullptr;  // [tile][warp of a cluster][share]
  float4* sums = nullptr;       // [tile][warp of a cluster][part][share][4 sums of each lane]
};

#ifdef DYNO_DEVICE_WGMMA

struct WideShare {
  static constexpr int kTokensEach = kWideTokens / kWideShares,
                       kQuads = kTokensEach / 8;  // quads: four sums of each lane
  const WideMeeting& at;
  int warp, part;  // warp: index among all warps of all tiles

  __device__ __forceinline__ int32_t* arrivals() const { return at.arrivals + warp * kWideShares; }
  __device__ __forceinline__ float4* sums_of(int of_part, int share) const {
    const int64_t index = (int64_t{warp} * at.parts + of_part) * kWideShares + share;
    return at.sums + index * kQuads * 32 + (threadIdx.x & 31);
  }
  __device__ __forceinline__ bool owns(int share) const { return share * at.parts / kWideShares == part; }

  // Leaves the sums of all shares in `shares`, and returns those at which all other warps had arrived before.
  __device__ __forceinline__ uint32_t leave(uint32_t shares, const float (&sums)[kWideTokens / 2]) const {
    if (shares == 0) return 0;
#pragma unroll
    for (int share = 0; share < kWideShares; ++share) {
      if ((shares >> share & 1) == 0) continue;
      float4* to = sums_of(part, share);
#pragma unroll
      for (int i = 0; i < kQuads; ++i) {
        const int first = 4 * (share * kQuads + i);
        __stcg(to + i * 32, make_float4(sums[first], sums[first + 1], sums[first + 2], sums[first + 3]));
      }
    }
    __syncwarp();
    __threadfence();  // the sums of all lanes are visible before the arrival
    const int lane = threadIdx.x & 31;
    const bool arrives = lane < kWideShares && (shares >> lane & 1) != 0;
    const int before = arrives ? atomicAdd(arrivals() + lane, 1) : -1;
    return __ballot_sync(device::kFullMask, before == at.parts - 1);
  }
  // The shares of `shares` at which all other warps have arrived.
  __device__ __forceinline__ uint32_t complete(uint32_t shares) const {
    const int lane = threadIdx.x & 31;
    const bool asks = lane < kWideShares && (shares >> lane & 1) != 0;
    const int seen = asks ? *reinterpret_cast<volatile int32_t*>(arrivals() + lane) : -1;
    return __ballot_sync(device::kFullMask, seen == at.parts - 1);
  }
  // Adds the sums of all kParts parts, in their order. All loads of a batch are issued before the first is used.
  template <int kParts>
  __device__ __forceinline__ void add_parts(int share, float (&sums)[kWideTokens / 2]) const {
    constexpr int kBatch = kParts == 2 ? kQuads : kQuads / 2;
#pragma unroll
    for (int first = 0; first < kQuads; first += kBatch) {
      float4 others[kBatch][kParts - 1];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
#pragma unroll
        for (int j = 0; j < kParts - 1; ++j) {
          others[i][j] = __ldcg(sums_of(j < part ? j : j + 1, share) + (first + i) * 32);
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        float* mine = sums + 4 * (share * kQuads + first + i);
        const float4 own = make_float4(mine[0], mine[1], mine[2], mine[3]);
        float4 total = part == 0 ? own : others[i][0];
#pragma unroll
        for (int j = 1; j < kParts; ++j) {
          float4 v = own;
          if (j < part) v = others[i][j == kParts - 1 ? j - 1 : j];
          if (j > part) v = others[i][j - 1];
          total.x += v.x, total.y += v.y, total.z += v.z, total.w += v.w;
        }
        mine[0] = total.x, mine[1] = total.y, mine[2] = total.z, mine[3] = total.w;
      }
    }
  }
};

__device__ __forceinline__ void wide_shared_epilogue(const Problem& p, const RowPart& rows, const WideTarget& to,
                                                     const WideMeeting& at, int warp, int part,
                                                     float (&sums)[kWideTokens / 2]) {
  const WideShare share{at, warp, part};
  uint32_t own = 0;
#pragma unroll
  for (int i = 0; i < kWideShares; ++i) own |= share.owns(i) ? 1u << i : 0;
  uint32_t finished = share.leave(((1u << kWideShares) - 1) & ~own, sums);
  // If the other warps have left their sums of an own share, its sums need not be written.
  const uint32_t ready = share.complete(own);
  finished |= ready | share.leave(own & ~ready, sums);
  if (finished == 0) return;
  __threadfence();  // the arrivals were seen before the sums are read
  const auto finish = [&]<int kShare>() {
    if ((finished >> kShare & 1) == 0) return;
    if (at.parts == 2) {
      share.template add_parts<2>(kShare, sums);
    } else {
      share.template add_parts<kWideMostParts>(kShare, sums);
    }
    wide_store<kShare * WideShare::kTokensEach, WideShare::kTokensEach>(p, rows, to.scales, to.y_at, to.tokens, to.row,
                                                                        sums);
  };
  for_each_step(finish);
}
static_assert(kWideShares == 4, "for_each_step() visits four shares");
#endif  // DYNO_DEVICE_WGMMA

}  // namespace dyno::ops::cuda
