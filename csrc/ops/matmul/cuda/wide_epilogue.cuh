// The epilogue of gemm_wide.cuh.
#pragma once

#include "device/cluster.cuh"
#include "ops/matmul/cuda/row_part.cuh"
#include "ops/matmul/cuda/weight_tile.cuh"
#include "ops/matmul/cuda/wide.h"

namespace dyno::ops::cuda {

// Bytes for half of the sums of two warpgroups.
inline constexpr int kWideExchangeBytes = 2 * 128 * kWideTokens;

#ifdef DYNO_DEVICE_WGMMA

inline constexpr int kWideExchangeBarrier = 1;

// All activations as min(gate, limit) / (1 + 2^z)·(clamp(up) + shift) with z = gate·(linear + cubic·gate²), so that 64
// of them are short code. The errors of the fast power and division are far below the rounding of f16.
struct QuickActivation {
  static constexpr float kPower = -1.4426950408889634f;  // e^(-v) = 2^(kPower·v)
  float linear = kPower, cubic = 0.0f, limit = INFINITY, shift = 0.0f;

  __device__ __forceinline__ explicit QuickActivation(Activation activation) {
    if (activation == Activation::gelu_tanh) {
      linear = kPower * 2 * 0.7978845608028654f;  // (1 + tanh(v)) / 2 is 1 / (1 + e^(-2·v))
      cubic = linear * 0.044715f;
    } else if (activation == Activation::swiglu_oai) {
      linear = kPower * 1.702f, limit = 7.0f, shift = 1.0f;
    } else if (activation == Activation::relu) {
      linear = -1e30f;  // a sigmoid this steep is a step function
    }
  }
  __device__ __forceinline__ float operator()(float gate, float up) const {
    const float limited = fminf(gate, limit);
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(power) : "f"(limited * fmaf(cubic * limited, limited, linear)));
    return __fdividef(limited, 1.0f + power) * (fminf(fmaxf(up, -limit), limit) + shift);
  }
};

// Rows of this lane, g and g + 8 of the warp's stripe, and the values that are added to their sums.
struct WideRowsOf {
  bool valid[2];
  __device__ __forceinline__ WideRowsOf(int n, int row) : valid{row < n, row + 8 < n} {}
  __device__ __forceinline__ void bias(const float* from, int row, float (&out)[2]) const {
#pragma unroll
    for (int q = 0; q < 2; ++q) out[q] = from != nullptr && valid[q] ? from[row + 8 * q] : 0.0f;
  }
};

// Stores y of one product, for kCount tokens from token kFirst of the tile on; sums[4·nb + e + 2·q]: row g + 8·q, token
// 8·nb + 2·t + e.
template <int kFirst = 0, int kCount = kWideTokens>
__device__ __forceinline__ void wide_store(const Problem& p, const RowPart& part, const float* scales, int64_t y_at,
                                           int tokens, int row, const float (&sums)[kWideTokens / 2]) {
  constexpr int kBatch = 4;  // column groups whose residual is loaded at once, because loads cannot pass stores
  const WideRowsOf rows(part.n, row);
  float bias[2];
  rows.bias(part.bias, row, bias);
  const int t = threadIdx.x & 3;
  float* y = part.y + y_at + row + (kFirst + 2 * t) * part.y_stride;
  const float* residual = p.residual == nullptr ? nullptr : p.residual + y_at + row + (kFirst + 2 * t) * part.y_stride;
#pragma unroll
  for (int first = kFirst / 8; first < (kFirst + kCount) / 8; first += kBatch) {
    float add[kBatch][4] = {};
    if (residual != nullptr) {
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (8 * (first + b) + 2 * t + (i & 1) < tokens && rows.valid[i >> 1]) {
            add[b][i] = residual[(8 * b + (i & 1)) * part.y_stride + 8 * (i >> 1)];
          }
        }
      }
      residual += 8 * kBatch * part.y_stride;
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const float2 scale = __ldg(reinterpret_cast<const float2*>(scales + 8 * (first + b) + 2 * t));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float v = fmaf(sums[4 * (first + b) + i], (i & 1) == 0 ? scale.x : scale.y, bias[i >> 1]);
        if (8 * (first + b) + 2 * t + (i & 1) < tokens && rows.valid[i >> 1]) {
          y[(8 * b + (i & 1)) * part.y_stride + 8 * (i >> 1)] = fmaf(v, p.scale, add[b][i]);
        }
      }
    }
    y += 8 * kBatch * part.y_stride;
  }
}

// For a gated pair: sends the sums of the other half of the tokens, receives the other matrix's sums for its own half,
// and calls put(nb, v) for each eight own tokens, with v of rows and tokens as in wide_store() and the scales of
// load_scales(nb). kMine: index of the first own sum. Group 0 multiplied by the gate, group 1 by up.
template <int kTokens, int kMine, typename LoadScales, typename Put>
__device__ __forceinline__ void wide_activate(const Problem& p, int group, const LoadScales& load_scales,
                                              const float (&bias)[2], const float (&bias_up)[2],
                                              const float (&sums)[kTokens / 2], float4* exchange, const Put& put) {
  constexpr int kOther = kTokens / 4 - kMine, kQuads = kTokens / 16;
  const int thread = threadIdx.x & 127;
  float4* given = exchange + (group == 0 ? 0 : kQuads * 128) + thread;
  const float4* got = exchange + (group == 0 ? kQuads * 128 : 0) + thread;
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    given[i * 128] =
        make_float4(sums[kOther + 4 * i], sums[kOther + 4 * i + 1], sums[kOther + 4 * i + 2], sums[kOther + 4 * i + 3]);
  }
  const QuickActivation activate(p.activation);
  device::meet<256>(kWideExchangeBarrier);  // sums were exchanged
#pragma unroll
  for (int nb = 0; nb < kQuads; ++nb) {
    const float4 other = got[nb * 128];
    const float2 scale = load_scales(nb);
    const float others[4] = {other.x, other.y, other.z, other.w};
    float v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float of_token = (i & 1) == 0 ? scale.x : scale.y, mine = sums[kMine + 4 * nb + i];
      const float gate = fmaf(group == 0 ? mine : others[i], of_token, bias[i >> 1]);
      const float up = fmaf(group == 0 ? others[i] : mine, of_token, bias_up[i >> 1]);
      v[i] = activate(gate, up);
    }
    asm volatile(""
                 : "+f"(v[0]), "+f"(v[1]), "+f"(v[2]), "+f"(v[3]));  // computes them in parallel instead of one by
                                                                     // one in branches
    put(nb, v);
  }
  device::meet<256>(kWideExchangeBarrier);  // the exchanged sums are read
}

template <int kMine>
__device__ __forceinline__ void wide_store_gated(const Problem& p, const float* scales, int64_t y_at, int tokens,
                                                 int row, const float (&sums)[kWideTokens / 2], float4* exchange) {
  constexpr int kFirstToken = 2 * kMine;
  const int t = threadIdx.x & 3;
  const WideRowsOf rows(p.n, row);
  float bias[2], bias_up[2];
  rows.bias(p.bias, row, bias);
  rows.bias(p.bias_up, row, bias_up);
  float* y = p.y + y_at + row + (kFirstToken + 2 * t) * p.y_stride;
  const auto load = [&](int nb) {
    return __ldg(reinterpret_cast<const float2*>(scales + kFirstToken + 8 * nb + 2 * t));
  };
  wide_activate<kWideTokens, kMine>(p, kMine == 0 ? 0 : 1, load, bias, bias_up, sums, exchange,
                                    [&](int nb, const float(&v)[4]) {
#pragma unroll
                                      for (int i = 0; i < 4; ++i) {
                                        if (kFirstToken + 8 * nb + 2 * t + (i & 1) < tokens && rows.valid[i >> 1]) {
                                          y[(i & 1) * p.y_stride + 8 * (i >> 1)] = v[i];
                                        }
                                      }
                                      y += 8 * p.y_stride;
                                    });
}

// Where the sums of a warp belong in y: offset of the tile's first token, number of tokens, and this lane's first row.
struct WideTarget {
  const float* scales;
  int64_t y_at;
  int tokens, row;

  __device__ __forceinline__ WideTarget(const Problem& p, const RowPart& part, const TiledRows& format, int matrix,
                                        int first_token, int first_row)
      : scales(reinterpret_cast<const float*>(p.x + format.scales_at()) + matrix * format.token_tiles() * kWideTokens +
               first_token),
        y_at(matrix * p.y_batch_stride + first_token * part.y_stride),
        tokens(min(kWideTokens, p.rows - first_token)),
        row(first_row + (threadIdx.x >> 2 & 7)) {}
};

__device__ __forceinline__ void wide_epilogue(const Problem& p, const RowPart& part, const WideTarget& to, int group,
                                              const float (&sums)[kWideTokens / 2], float4* exchange) {
  if (!p.gated()) return wide_store(p, part, to.scales, to.y_at, to.tokens, to.row, sums);
  if (group == 0) return wide_store_gated<0>(p, to.scales, to.y_at, to.tokens, to.row, sums, exchange);
  wide_store_gated<kWideTokens / 4>(p, to.scales, to.y_at, to.tokens, to.row, sums, exchange);
}
#endif  // DYNO_DEVICE_WGMMA

}  // namespace dyno::ops::cuda
