// Matrix product with f32 activations: dot products along k with 16 partial sums each, for a register tile of weight
// rows by tokens. F32, F16 and BF16 weights are read in place; quantised weights are first converted to floats, 16 rows
// at a time. The order of each sum is the same for every tile, so results do not depend on the configuration.
#include "ops/matmul/kernels.h"
#include "ops/matmul/unpack.h"

namespace DYNO_KERNEL_NAMESPACE {
namespace {

struct F32 {
  static constexpr int bytes = 4;
  static F load(const uint8_t* p) { return f_load(reinterpret_cast<const float*>(p)); }
};
struct F16 {
  static constexpr int bytes = 2;
  static F load(const uint8_t* p) { return f_from_f16(p); }
};
struct Bf16 {
  static constexpr int bytes = 2;
  static F load(const uint8_t* p) { return f_from_bf16(p); }
};

// The last k % 16 values, followed by zeros.
template <typename Weight>
inline F load_tail(const uint8_t* p, int n) {
  alignas(64) uint8_t buffer[16 * 4] = {};
  std::memcpy(buffer, p, static_cast<size_t>(n) * Weight::bytes);
  return Weight::load(buffer);
}

template <typename Weight, int kRows, int kMr>
void register_tile(const uint8_t* w, int64_t row_bytes, const std::byte* const* rows, int64_t k, float* c,
                   int64_t ldc) {
  const uint8_t* x[kMr];
  for (int t = 0; t < kMr; ++t) x[t] = reinterpret_cast<const uint8_t*>(rows[t]);
  F total[kRows][kMr];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int t = 0; t < kMr; ++t) total[r][t] = f_zero();
  }
  int64_t i = 0;
  for (; i + 16 <= k; i += 16) {
    F v[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) v[r] = Weight::load(w + r * row_bytes + i * Weight::bytes);
    if constexpr (kMr <= 2) {
      // With few tokens, memory is the bottleneck: prefetches the same position of the next rows.
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) __builtin_prefetch(w + (kRows + r) * row_bytes + i * Weight::bytes);
    }
#pragma GCC unroll 8
    for (int t = 0; t < kMr; ++t) {
      const F a = F32::load(x[t] + i * 4);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) total[r][t] = f_fma(v[r], a, total[r][t]);
    }
  }
  if (i < k) {
    const int n = static_cast<int>(k - i);
    F v[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) v[r] = load_tail<Weight>(w + r * row_bytes + i * Weight::bytes, n);
#pragma GCC unroll 8
    for (int t = 0; t < kMr; ++t) {
      const F a = load_tail<F32>(x[t] + i * 4, n);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) total[r][t] = f_fma(v[r], a, total[r][t]);
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < kMr; ++t) {
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) c[t * ldc + r] = f_sum(total[r][t]);
  }
}

using RegisterTile = void (*)(const uint8_t*, int64_t, const std::byte* const*, int64_t, float*, int64_t);

// Twice the accumulators of the integer kernels, because there are no integer accumulators.
template <typename Weight, int kRows, int kMr>
RegisterTile pick_tokens(int mr) {
  if (mr == kMr) return register_tile<Weight, kRows, kMr>;
  if constexpr (kRows * (kMr + 1) <= 2 * kMaxAccumulators && kMr < 8) {
    return pick_tokens<Weight, kRows, kMr + 1>(mr);
  } else {
    return nullptr;
  }
}

template <typename Weight>
void dot_rows(const ProductJob& job, const uint8_t* w, int64_t row_bytes, int n_rows, float* c) {
  for (int r = 0; r < n_rows;) {
    const int left_rows = n_rows - r;
    const int height = left_rows >= 4 && job.weight_rows >= 4 ? 4 : left_rows >= 2 && job.weight_rows >= 2 ? 2 : 1;
    for (int t = 0; t < job.m;) {
      const int left = job.m - t;
      const int tiles_left = (left + job.tokens - 1) / job.tokens;
      const int mr = (left + tiles_left - 1) / tiles_left;
      const RegisterTile tile = height == 4   ? pick_tokens<Weight, 4, 1>(mr)
                                : height == 2 ? pick_tokens<Weight, 2, 1>(mr)
                                              : pick_tokens<Weight, 1, 1>(mr);
      tile(w + r * row_bytes, row_bytes, job.rows + t, job.k, c + t * job.ldc + r, job.ldc);
      t += mr;
    }
    r += height;
  }
}

}  // namespace

void dot_f32(const ProductJob& job) {
  for (int i = 0; i < job.n_tiles; ++i) {
    const WeightTile& tile = job.tiles[i];
    float* c = job.c + 16 * i;
    const uint8_t* w = reinterpret_cast<const uint8_t*>(tile.base);
    switch (job.type) {
      case DType::f32:
        dot_rows<F32>(job, w, tile.row_bytes, tile.rows, c);
        break;
      case DType::f16:
        dot_rows<F16>(job, w, tile.row_bytes, tile.rows, c);
        break;
      case DType::bf16:
        dot_rows<Bf16>(job, w, tile.row_bytes, tile.rows, c);
        break;
      default: {
        float* const buffer = reinterpret_cast<float*>(job.scratch);
        tile_to_f32(job.type, job.layout, tile, job.k, buffer, job.k);
        dot_rows<F32>(job, reinterpret_cast<const uint8_t*>(buffer), job.k * 4, tile.rows, c);
      }
    }
  }
}

}  // namespace DYNO_KERNEL_NAMESPACE
