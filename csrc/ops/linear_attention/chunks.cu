// Linear attention of 32 tokens at a time as matrix products in float32; chunked.cpp has the formulas and their source.
// A block has 32 columns of a head's state in registers, and processes a run's chunks in order.
#include "core/cuda/launch.h"
#include "device/dependent.cuh"
#include "ops/linear_attention/state_tile.cuh"

namespace dyno::ops {
namespace {

using linear::kColumns;
using linear::kThreads;

constexpr int kTokens = 32;
constexpr int kLeast = 8;                 // a shorter run, or end of a run, is processed token by token
constexpr int kRowsLd = 2 * kTokens + 4;  // floats between columns of the transposed rows, with fewer bank conflicts
constexpr int kLd = kColumns + 4;

template <int kDk>
constexpr int kFloats = kDk * (kRowsLd + kLd) + 5 * kTokens * kLd + 3 * kTokens;

__device__ __forceinline__ void fma_tile(float (&sum)[4][4], const float4& a, const float4& b) {
  const float x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) sum[i][j] += x[i] * y[j];
  }
}

// The rows of a chunk during their transfer to shared memory. A warp loads eight rows of k or of q, four lanes per row.
template <int kDk>
struct Rows {
  static constexpr int kParts = kDk / 16;
  float4 part[kParts];

  __device__ static int row() { return static_cast<int>(threadIdx.x) / 32 * 8 + static_cast<int>(threadIdx.x) % 8; }
  __device__ static int at(int i) { return 16 * i + static_cast<int>(threadIdx.x) % 32 / 8 * 4; }

  // Rows beyond the `count` tokens are 0.
  __device__ void load(const linear::Head& head, int64_t first, int count) {
    const int token = row() % kTokens;
    const bool query = row() >= kTokens;
    const float* from = token < count ? (query ? head.q(first + token) : head.k(first + token)) : nullptr;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      part[i] = from == nullptr ? make_float4(0, 0, 0, 0) : linear::load_four(from, at(i), head.dk);
    }
  }

  // Stores to rows[kDk, kRowsLd]: token t of k in column t, of q in column 32 + t.
  __device__ void store(const linear::Head& head, int count, float* rows) const {
    float squares = 0;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      squares += part[i].x * part[i].x + part[i].y * part[i].y + part[i].z * part[i].z + part[i].w * part[i].w;
    }
    squares += __shfl_xor_sync(device::kFullMask, squares, 8);
    squares += __shfl_xor_sync(device::kFullMask, squares, 16);
    float scale = 0;  // for rows beyond the tokens: with eps = 0 their scale would not be finite
    if (row() % kTokens < count) scale = row() >= kTokens ? head.query_scale(squares) : head.key_scale(squares);
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      float* to = rows + at(i) * kRowsLd + row();
      to[0] = part[i].x * scale;
      to[kRowsLd] = part[i].y * scale;
      to[2 * kRowsLd] = part[i].z * scale;
      to[3 * kRowsLd] = part[i].w * scale;
    }
  }
};

// The gates of a chunk, one token per lane. Their inputs are loaded while the previous chunk is computed.
struct Gates {
  float log_decay, factor;

  __device__ void load(const linear::Head& head, int64_t first, int count) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    log_decay = lane < count ? head.args.decay[head.head] * head.step(first + lane) : 0.0f;
    factor = lane < count ? head.factor(first + lane) : 0.0f;
  }

  // Stores the sums of log_decay up to each token, and their rounding errors.
  __device__ void store(float* sums, float* rests, float* factors) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    float sum = log_decay, rest = 0;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const float before = __shfl_up_sync(device::kFullMask, sum, offset);
      const float rest_before = __shfl_up_sync(device::kFullMask, rest, offset);
      if (lane < offset) continue;
      const float both = sum + before, grown = both - sum;
      rest += rest_before + ((sum - (both - grown)) + (before - grown));
      sum = both;
    }
    sums[lane] = sum;
    rests[lane] = rest;
    factors[lane] = factor;
  }
};

template <int kDk>
__global__ void __launch_bounds__(kThreads) chunks_kernel(LinearAttentionArgs args, LinearAttentionDesc desc) {
  extern __shared__ float4 shared[];
  float* rows = reinterpret_cast<float*>(shared);  // [kDk, kRowsLd]: k and q of the chunk, transposed
  float* state = rows + kDk * kRowsLd;             // [kDk, kLd]: before the chunk
  float* among_keys = state + kDk * kLd;           // [kTokens, kLd]: column s, row t > s of the system for u
  float* among = among_keys + kTokens * kLd;       // [kTokens, kLd]: query t with key s <= t
  float* u = among + kTokens * kLd;                // [kTokens, kLd]
  float* decayed = u + kTokens * kLd;              // [kTokens, kLd]: u with the decays up to the end of the chunk
  float* outs = decayed + kTokens * kLd;           // [kTokens, kLd]: the output of the state before the chunk
  float* sums = outs + kTokens * kLd;              // [kTokens]: of the logarithms of the decays
  float* rests = sums + kTokens;                   // [kTokens]: the rounding errors of the sums
  float* factors = rests + kTokens;                // [kTokens]
  device::let_next_start();
  device::wait_for_previous();
  const SequenceRun run = args.runs[blockIdx.z];
  if (run.n_tokens == 0) return;
  const linear::Head head(args, desc, static_cast<int>(blockIdx.y), static_cast<int>(blockIdx.x) * kColumns);
  linear::StateTile<kDk> tile;
  tile.load(head, run);
  const int chunked = run.n_tokens - (run.n_tokens % kTokens < kLeast ? run.n_tokens % kTokens : 0);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (chunked > 0) {
#pragma unroll
    for (int i = 0; i < tile.kRows; ++i) {
      *reinterpret_cast<float4*>(state + (tile.row() + i) * kLd + tile.column()) = tile.s[i];
    }
  }
  // [k; q] times [state, k]: half of the warps compute the columns of the state, the other half the keys.
  const bool keys = warp % 2 == 1;
  const int m = warp / 2 * 16 + lane / 8 * 4, n = lane % 8 * 4;
  const int t0 = m % kTokens;
  const bool query = m >= kTokens;
  Rows<kDk> next;
  Gates gates;
  if (chunked > 0) {
    next.load(head, run.first_token, min(kTokens, chunked));
    gates.load(head, run.first_token, min(kTokens, chunked));
  }
  for (int done = 0; done < chunked; done += kTokens) {
    const int count = min(kTokens, chunked - done);
    const int64_t first = int64_t{run.first_token} + done;
    next.store(head, count, rows);
    if (warp == 0) gates.store(sums, rests, factors);
    __syncthreads();  // rows, sums and factors are written, and so is the state

    // Sums of a few hundred hide decays of a few tokens that matter, so rounding errors are added.
    const auto between = [&](int t, int s) { return expf((sums[t] - sums[s]) + (rests[t] - rests[s])); };

    float4 values[4];
    if (!keys && !query) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        values[i] = t0 + i < count ? linear::load_four(head.v(first + t0 + i), head.first_column + n, head.dv)
                                   : make_float4(0, 0, 0, 0);
      }
    }
    float product[4][4] = {};
    {
      const float *a = rows + m, *b = (keys ? rows : state) + n;
      const int ldb = keys ? kRowsLd : kLd;
#pragma unroll 8
      for (int k = 0; k < kDk; ++k) {
        fma_tile(product, *reinterpret_cast<const float4*>(a + k * kRowsLd),
                 *reinterpret_cast<const float4*>(b + k * ldb));
      }
    }
    if (!keys) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int t = t0 + i;
        const float decay = expf(sums[t] + rests[t]);
        float4 value = query ? make_float4(0, 0, 0, 0) : values[i];
        const float by = query ? decay : head.delta ? -decay : 0.0f;
        value.x += by * product[i][0], value.y += by * product[i][1];
        value.z += by * product[i][2], value.w += by * product[i][3];
        if (!query) {
          const float factor = factors[t];
          value = make_float4(factor * value.x, factor * value.y, factor * value.z, factor * value.w);
        }
        *reinterpret_cast<float4*>((query ? outs : u) + t * kLd + n) = value;
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int t = t0 + i;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int s = n + j;
          const bool seen = query ? s <= t : s < t;
          product[i][j] *= seen ? (query ? 1.0f : factors[t]) * between(t, s) : 0.0f;
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (query) {
          *reinterpret_cast<float4*>(among + (t0 + i) * kLd + n) =
              make_float4(product[i][0], product[i][1], product[i][2], product[i][3]);
        } else {
          *reinterpret_cast<float4*>(among_keys + (n + i) * kLd + t0) =
              make_float4(product[0][i], product[1][i], product[2][i], product[3][i]);
        }
      }
    }
    if (done + kTokens < chunked) {
      const int more = min(kTokens, chunked - done - kTokens);
      next.load(head, first + kTokens, more);
      if (warp == 0) gates.load(head, first + kTokens, more);
    }
    __syncthreads();  // u, outs and the products among tokens are written; the state has been read

    // Subtracts the contributions of earlier rows from row t of u: one lane per token, four columns per warp.
    {
      float4 value = *reinterpret_cast<const float4*>(u + lane * kLd + 4 * warp);
      if (head.delta) {
#pragma unroll 8
        for (int s = 0; s < kTokens - 1; ++s) {
          const float by = -among_keys[s * kLd + lane];
          value.x += by * __shfl_sync(device::kFullMask, value.x, s);
          value.y += by * __shfl_sync(device::kFullMask, value.y, s);
          value.z += by * __shfl_sync(device::kFullMask, value.z, s);
          value.w += by * __shfl_sync(device::kFullMask, value.w, s);
        }
        *reinterpret_cast<float4*>(u + lane * kLd + 4 * warp) = value;
      }
      const float by = between(kTokens - 1, lane);
      *reinterpret_cast<float4*>(decayed + lane * kLd + 4 * warp) =
          make_float4(by * value.x, by * value.y, by * value.z, by * value.w);
    }
    __syncthreads();  // u and decayed are written

    const int t = threadIdx.x / 8, column = tile.column();
    float4 out = *reinterpret_cast<const float4*>(outs + t * kLd + column);
    for (int s = 0; s <= warp * 4 + 3; s += 4) {
      const float4 by = *reinterpret_cast<const float4*>(among + t * kLd + s);
      linear::add_scaled(out, by.x, *reinterpret_cast<const float4*>(u + s * kLd + column));
      linear::add_scaled(out, by.y, *reinterpret_cast<const float4*>(u + (s + 1) * kLd + column));
      linear::add_scaled(out, by.z, *reinterpret_cast<const float4*>(u + (s + 2) * kLd + column));
      linear::add_scaled(out, by.w, *reinterpret_cast<const float4*>(u + (s + 3) * kLd + column));
    }
    if (t < count) {
      const int at = head.first_column + column;
      if (!head.delta) {
        linear::add_scaled(out, args.skip[head.head], linear::load_four(head.v(first + t), at, head.dv));
      }
      linear::store_four(head.out(first + t), at, head.dv, out);
    }
    const float decay = expf(sums[kTokens - 1] + rests[kTokens - 1]);
#pragma unroll
    for (int i = 0; i < tile.kRows; ++i) {
      tile.s[i] = make_float4(decay * tile.s[i].x, decay * tile.s[i].y, decay * tile.s[i].z, decay * tile.s[i].w);
    }
#pragma unroll
    for (int s = 0; s < kTokens; s += 4) {
      float4 given[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) given[j] = *reinterpret_cast<const float4*>(decayed + (s + j) * kLd + column);
#pragma unroll
      for (int i = 0; i < tile.kRows; ++i) {
        const float4 key = *reinterpret_cast<const float4*>(rows + (tile.row() + i) * kRowsLd + s);
        linear::add_scaled(tile.s[i], key.x, given[0]);
        linear::add_scaled(tile.s[i], key.y, given[1]);
        linear::add_scaled(tile.s[i], key.z, given[2]);
        linear::add_scaled(tile.s[i], key.w, given[3]);
      }
    }
#pragma unroll
    for (int i = 0; i < tile.kRows; ++i) {
      *reinterpret_cast<float4*>(state + (tile.row() + i) * kLd + column) = tile.s[i];
    }
    __syncthreads();  // rows, sums and decayed have been read
  }
  linear::tokens(head, int64_t{run.first_token} + chunked, run.n_tokens - chunked, tile, rows);
  tile.store(head, run);
}

template <int kDk>
void launch_chunks(const LinearAttentionArgs& args, const LinearAttentionDesc& desc, CudaStream& stream) {
  static_assert(linear::kTokenFloats<kDk> <= kFloats<kDk>);
  constexpr int kBytes = kFloats<kDk> * static_cast<int>(sizeof(float));
  static_assert(kBytes <= linear_chunk_shared_bytes(kDk));
  const dim3 grid(static_cast<unsigned>((desc.dv + kColumns - 1) / kColumns), static_cast<unsigned>(desc.v_heads),
                  static_cast<unsigned>(args.n_runs));
  DYNO_CUDA_CHECK(cudaFuncSetAttribute(chunks_kernel<kDk>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  launch_dependent("linear_attention", chunks_kernel<kDk>, grid, kThreads, kBytes, stream.handle, args, desc);
}

}  // namespace

void linear_attention_chunks(const LinearAttentionArgs& args, const LinearAttentionDesc& desc, CudaStream& stream) {
  if (args.n_runs == 0) return;
  if (desc.dk <= 64) return launch_chunks<64>(args, desc, stream);
  if (desc.dk <= 128) return launch_chunks<128>(args, desc, stream);
  launch_chunks<256>(args, desc, stream);
}

}  // namespace dyno::ops
