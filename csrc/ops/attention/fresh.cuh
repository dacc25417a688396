// Rows of this batch that the reading attention kernel itself normalises, rotates and stores (family rope_attention).
// Blocks do not wait for each other: each computes the rows that it needs, and exactly one block writes each row to the
// cache.
#pragma once

#include "device/arithmetic.cuh"
#include "device/rope.cuh"
#include "device/store.cuh"
#include "ops/attention/tile.cuh"

namespace dyno::ops {

struct FreshRows {
  const float* k;
  const float* v;
  int64_t k_stride, v_stride;  // between tokens
  const float* q_norm;         // weights; null: all ones
  const float* k_norm;
  bool norms_q, norms_k, norms_v;  // norms_v: without weights
  float eps;
  const float* inv_freq;
  float mscale;
  int n_rot;
  bool neox;
  uint8_t* k_cache;
  uint8_t* v_cache;
  const float* q_rotary;  // only if latent: the rotary part of the first head's query
  int64_t q_rotary_stride;
  int q_rotary_head;  // between heads
};

FreshRows make_fresh_rows(const RopeAttentionArgs& args, const RopeAttentionDesc& desc);

// The rows of new tokens among the keys of a block.
struct FreshKeys {
  int first = 0;  // index of the first token within the run
  int count = 0;
  __device__ FreshKeys(const CudaTile& tile, const KeyRange& range)
      : first(max(range.begin - tile.run.position, 0)), count(max(range.end - tile.run.position - first, 0)) {}
};

// Number of the run's tokens up to the last one of the tile.
__device__ __forceinline__ int tile_tokens(const CudaAttention& t, const CudaTile& tile) {
  return (tile.row_end - 1) / t.group + 1;
}
// Whether this tile writes a token's row to the cache, because it has the token's first head.
__device__ __forceinline__ bool stores(const CudaAttention& t, const CudaTile& tile, int token) {
  return token * t.group >= tile.row_begin && token * t.group < tile.row_end;
}
__device__ __forceinline__ int64_t fresh_cell(const CudaAttention& t, const CudaTile& tile, int token) {
  return tile.run.slot * t.args.slot_positions + tile.run.position + token;
}

// Cosines and sines, [token of the run][pair]. They do not depend on earlier launches.
__device__ __forceinline__ void fill_angles(const FreshRows& f, int position, int tokens, float2* table) {
  const int pairs = f.n_rot / 2;
  for (int i = static_cast<int>(threadIdx.x); i < tokens * pairs; i += static_cast<int>(blockDim.x)) {
    table[i] = device::cos_sin(position + i / pairs, f.inv_freq[i % pairs], f.mscale);
  }
}

// Rotates n_rot floats at `row` in shared memory with one warp.
__device__ __forceinline__ void rotate_row(const FreshRows& f, float* row, const float2* angles, int lane) {
  const int pairs = f.n_rot / 2;
  for (int pair = lane; pair < pairs; pair += 32) {
    float* first = row + (f.neox ? pair : 2 * pair);
    float* second = f.neox ? first + pairs : first + 1;
    const float2 c = angles[pair];
    const float a = *first, b = *second;
    *first = a * c.x - b * c.y;
    *second = a * c.y + b * c.x;
  }
}

// The factor of the RMS norm for a warp's floats.
template <int kPer>
__device__ __forceinline__ float norm_scale(const float (&x)[kPer], int width, float eps, int lane) {
  float squares = 0;
#pragma unroll
  for (int j = 0; j < kPer; ++j) {
    if (lane + 32 * j < width) squares += x[j] * x[j];
  }
  return device::inverse_root(device::quotient(device::warp_sum(squares), static_cast<float>(width)) + eps);
}

}  // namespace dyno::ops
