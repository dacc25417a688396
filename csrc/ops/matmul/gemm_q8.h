// Matrix product of quantised weights by quantised activations. For kc columns at a time, up to four tiles of 16 weight
// rows are unpacked to scratch that stays in the first-level cache. A register tile of nr * 16 rows by mr tokens then
// covers all token rows. All types share this code; only unpacking differs. Instantiated by gemm_q8.cpp and
// gemm_q8_coded.cpp.
#pragma once

#include "ops/matmul/activation_rows.h"
#include "ops/matmul/kernels.h"
#include "ops/matmul/unpack.h"

namespace DYNO_KERNEL_NAMESPACE {
namespace {

constexpr int kMaxChunk = 1024;

// The properties of a type that the register kernel needs.
template <int kGroup, bool kHasMin, int kWidenSteps>
struct Class {
  static constexpr int group = kGroup;
  static constexpr bool has_min = kHasMin;
  static constexpr int widen = kWidenSteps;
};

// Unpacked tiles of one chunk; tile i is at offset i * stride.
struct Panel {
  const uint8_t* q;  // [k / 4][16][4]
  int64_t q_stride;
  const float* s;  // [groups][16]
  const float* b;
  int64_t scale_stride;
};

// For every group of the chunk, one int32 (-offset * sum of the group, the accumulator's start value) or one float (-d
// * sum, the factor of the minima).
template <typename Type>
inline void prepare_sums(const ActRow& row, int n_blocks, int offset, int32_t* start) {
  constexpr int kGroups = 32 / Type::group;
  int i = 0;  // index of the group
#if defined(__AVX2__)
  for (; i + 8 <= n_blocks * kGroups; i += 8) {
    __m256i sum;
    if constexpr (Type::group == 32) {
      const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row.sum + 4 * i));
      sum = _mm256_madd_epi16(halves, _mm256_set1_epi16(static_cast<int16_t>(Type::has_min ? 1 : -offset)));
    } else {
      sum = _mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row.sum + 2 * i)));
      if constexpr (!Type::has_min) sum = _mm256_mullo_epi32(sum, _mm256_set1_epi32(-offset));
    }
    if constexpr (Type::has_min) {
      __m256 d;
      if constexpr (Type::group == 32) {
        d = _mm256_loadu_ps(reinterpret_cast<const float*>(row.d + 4 * i));
      } else {
        const __m128 four = _mm_loadu_ps(reinterpret_cast<const float*>(row.d + 2 * i));
        d = _mm256_set_m128(_mm_unpackhi_ps(four, four), _mm_unpacklo_ps(four, four));
      }
      const __m256 product = _mm256_mul_ps(d, _mm256_cvtepi32_ps(sum));
      sum = _mm256_castps_si256(_mm256_xor_ps(product, _mm256_set1_ps(-0.0f)));
    }
    _mm256_store_si256(reinterpret_cast<__m256i*>(start + i), sum);
  }
#endif
  for (; i < n_blocks * kGroups; ++i) {
    const int sum = kGroups == 1 ? row.sum16(2 * i) + row.sum16(2 * i + 1) : row.sum16(i);
    if constexpr (Type::has_min) {
      const float x = -(row.scale(i / kGroups) * static_cast<float>(sum));
      std::memcpy(start + i, &x, 4);
    } else {
      start[i] = -offset * sum;
    }
  }
}

inline float as_float(int32_t x) {
  float f;
  std::memcpy(&f, &x, 4);
  return f;
}

// The weights that are unpacked next, one range of `bytes` per tile. The register tiles of a chunk prefetch them a few
// lines at a time; while weights are unpacked there is too little work to hide the latency of memory.
struct Ahead {
  const uint8_t* at[4];
  int bytes = 0;
  int line = 0;       // the next one, in bytes
  int per_block = 0;  // bytes of each range per block of 32
};

// Into the second-level cache: the first one holds the panel and has few fill buffers.
template <int kNr>
inline void prefetch_block(Ahead& ahead) {
  const int wanted = ahead.line + ahead.per_block, end = wanted < ahead.bytes ? wanted : ahead.bytes;
  for (; ahead.line < end; ahead.line += 64) {
    for (int r = 0; r < kNr; ++r) __builtin_prefetch(ahead.at[r] + ahead.line, 0, 2);
  }
}

template <typename Type, int kNr, int kMr>
void register_tile(const Panel& panel, int n_blocks, int offset, const std::byte* const* rows, int64_t k, int64_t k0,
                   bool first, Ahead& ahead, float* c, int64_t ldc) {
  constexpr int kSteps = Type::group / 4;
  constexpr int kGroups = 32 / Type::group;  // in a block of 32
  alignas(64) int32_t start[kMr][kMaxChunk / 16];
  const uint8_t* a[kMr];
  const uint8_t* d[kMr];
  for (int t = 0; t < kMr; ++t) {
    const ActRow row(rows[t], k, k0);
    prepare_sums<Type>(row, n_blocks, offset, start[t]);
    a[t] = row.q;
    d[t] = row.d;
  }
  F total[kNr][kMr];
  for (int r = 0; r < kNr; ++r) {
    for (int t = 0; t < kMr; ++t) total[r][t] = first ? f_zero() : f_load(c + t * ldc + 16 * r);
  }
  const uint8_t* q = panel.q;
  const float* s = panel.s;
  const float* b = panel.b;
  for (int block = 0; block < n_blocks; ++block) {
    prefetch_block<kNr>(ahead);
#pragma GCC unroll 2
    for (int g = 0; g < kGroups; ++g) {
      Dot<Type::widen, kSteps> dot[kNr][kMr];
#pragma GCC unroll 12
      for (int t = 0; t < kMr; ++t) {
#pragma GCC unroll 4
        for (int r = 0; r < kNr; ++r) {
          if constexpr (Type::has_min) {
            dot[r][t].zero();
          } else {
            dot[r][t].init(start[t][block * kGroups + g]);
          }
        }
      }
      const auto step = [&]<int kStep>() {
        const int64_t at = 16 * g + 4 * kStep;
        if constexpr (kNr == 1) {
          const Weight4<Type::widen> w(b_load(q + at * 16));
#pragma GCC unroll 12
          for (int t = 0; t < kMr; ++t) dot[0][t].template step<kStep>(w, act_broadcast(a[t] + block * 32 + at));
        } else if constexpr (kNr == 2) {
          const Weight4<Type::widen> w0(b_load(q + at * 16)), w1(b_load(q + panel.q_stride + at * 16));
#pragma GCC unroll 12
          for (int t = 0; t < kMr; ++t) {
            const Activation4 x = act_broadcast(a[t] + block * 32 + at);
            dot[0][t].template step<kStep>(w0, x);
            dot[1][t].template step<kStep>(w1, x);
          }
        } else {
          static_assert(kNr == 4);
          const uint8_t* p = q + at * 16;
          const Weight4<Type::widen> w0(b_load(p)), w1(b_load(p + panel.q_stride));
          const Weight4<Type::widen> w2(b_load(p + 2 * panel.q_stride)), w3(b_load(p + 3 * panel.q_stride));
#pragma GCC unroll 12
          for (int t = 0; t < kMr; ++t) {
            const Activation4 x = act_broadcast(a[t] + block * 32 + at);
            dot[0][t].template step<kStep>(w0, x);
            dot[1][t].template step<kStep>(w1, x);
            dot[2][t].template step<kStep>(w2, x);
            dot[3][t].template step<kStep>(w3, x);
          }
        }
      };
      step.template operator()<0>();
      step.template operator()<1>();
      step.template operator()<2>();
      step.template operator()<3>();
      if constexpr (kSteps == 8) {
        step.template operator()<4>();
        step.template operator()<5>();
        step.template operator()<6>();
        step.template operator()<7>();
      }
#pragma GCC unroll 4
      for (int r = 0; r < kNr; ++r) {
        const F scale = f_load(s + r * panel.scale_stride);
#pragma GCC unroll 12
        for (int t = 0; t < kMr; ++t) {
          float x;
          std::memcpy(&x, d[t] + 4 * block, 4);
          total[r][t] = f_fma(f_mul(f_from_i(dot[r][t].sum()), scale), f_set1(x), total[r][t]);
        }
        if constexpr (Type::has_min) {
          const F min = f_load(b + r * panel.scale_stride);
#pragma GCC unroll 12
          for (int t = 0; t < kMr; ++t) {
            total[r][t] = f_fma(min, f_set1(as_float(start[t][block * kGroups + g])), total[r][t]);
          }
        }
      }
      s += 16;
      b += 16;
    }
    q += 512;
  }
  for (int r = 0; r < kNr; ++r) {
    for (int t = 0; t < kMr; ++t) f_store(c + t * ldc + 16 * r, total[r][t]);
  }
}

using RegisterTile = void (*)(const Panel&, int, int, const std::byte* const*, int64_t, int64_t, bool, Ahead&, float*,
                              int64_t);

template <typename Type, int kNr, int kMr>
RegisterTile pick_tokens(int mr) {
  if (mr == kMr) return register_tile<Type, kNr, kMr>;
  if constexpr (kNr * (kMr + 1) <= kMaxAccumulators) {
    return pick_tokens<Type, kNr, kMr + 1>(mr);
  } else {
    return nullptr;
  }
}

template <typename Type>
RegisterTile pick_tile(int nr, int mr) {
  if (nr == 1) return pick_tokens<Type, 1, 1>(mr);
  if (nr == 2) return pick_tokens<Type, 2, 1>(mr);
  if (nr == 4) return pick_tokens<Type, 4, 1>(mr);
  return nullptr;
}

template <typename Source>
void unpack_chunk(Source& source, int64_t k0, int columns, uint8_t* q, float* s, float* b) {
  constexpr WeightFormat f = Source::format;
  constexpr int kGroups = 32 / f.group;
  for (int at = 0; at < columns; at += f.block) {
    source.seek((k0 + at) / f.block);
    for (int sub = 0; sub < f.block / 32; ++sub) {
      B w[8];
      source.load(sub, w);
      for (int j = 0; j < 8; ++j) b_store(q + 64 * j, w[j]);
      q += 512;
      F scale[2], min[2];
      source.scales(sub, scale, min);
      for (int g = 0; g < kGroups; ++g) {
        f_store(s, scale[g]);
        s += 16;
        if constexpr (f.has_min) {
          f_store(b, min[g]);
          b += 16;
        }
      }
    }
  }
}

// The chunk after columns [k0, k0 + kc) of tiles [first, first + nr): the next columns, or the first columns of the
// next tiles of the job or, after them, of the next task.
template <typename Source>
Ahead chunk_ahead(const ProductJob& job, int first, int nr, int64_t k0, int register_tiles) {
  Ahead ahead;
  if constexpr (requires { Source::bytes; }) {
    const int64_t from = k0 + job.kc < job.k ? k0 + job.kc : 0;
    int tile = from > 0 ? first : first + nr;
    int64_t distance = from / Source::format.block * Source::bytes;
    if (tile == job.n_tiles) {
      if (job.next_bytes == 0) return ahead;
      tile = 0;
      distance = job.next_bytes;
    }
    const int64_t columns = job.k - from < job.kc ? job.k - from : job.kc;
    for (int r = 0; r < nr; ++r) {
      const int at = tile + r < job.n_tiles ? tile + r : job.n_tiles - 1;
      ahead.at[r] = reinterpret_cast<const uint8_t*>(job.tiles[at].base) + distance;
    }
    ahead.bytes = static_cast<int>(columns / Source::format.block * Source::bytes);
    const int blocks = register_tiles * (job.kc / 32);
    ahead.per_block = (ahead.bytes / 64 + blocks) / blocks * 64;
  }
  return ahead;
}

// Computes tiles [first, first + nr) for all tokens.
template <typename Source>
void gemm_tiles(const ProductJob& job, int first, int nr) {
  const WeightTile* const tiles = job.tiles + first;
  float* const c = job.c + 16 * first;
  constexpr WeightFormat f = Source::format;
  using Type = Class<f.group, f.has_min, Source::tile.widen>;
  const int groups = job.kc / f.group;
  const int64_t q_stride = static_cast<int64_t>(job.kc) * 16;
  uint8_t* const q = reinterpret_cast<uint8_t*>(job.scratch);
  float* const s = reinterpret_cast<float*>(q + nr * q_stride);
  const int64_t scale_stride = 16 * groups;
  float* const b = s + nr * scale_stride;

  for (int64_t k0 = 0; k0 < job.k; k0 += job.kc) {
    const int columns = static_cast<int>(job.k - k0 < job.kc ? job.k - k0 : job.kc);
    int offset = 0;
    for (int r = 0; r < nr; ++r) {
      Source source({reinterpret_cast<const uint8_t*>(tiles[r].base), tiles[r].row_bytes, tiles[r].rows}, job.type);
      offset = source.offset();
      unpack_chunk(source, k0, columns, q + r * q_stride, s + r * scale_stride, b + r * scale_stride);
    }
    const Panel panel = {q, q_stride, s, b, scale_stride};
    Ahead ahead = chunk_ahead<Source>(job, first, nr, k0, (job.m + job.tokens - 1) / job.tokens);
    // Register tiles of nearly equal height: 7 tokens with tiles of at most 6 are 4 + 3, not 6 + 1.
    int left = job.m;
    for (int t = 0; t < job.m;) {
      const int tiles_left = (left + job.tokens - 1) / job.tokens;
      const int mr = (left + tiles_left - 1) / tiles_left;
      pick_tile<Type>(nr, mr)(panel, columns / 32, offset, job.rows + t, job.k, k0, k0 == 0, ahead, c + t * job.ldc,
                              job.ldc);
      t += mr;
      left -= mr;
    }
  }
}

template <typename Source>
void gemm_typed(const ProductJob& job) {
  for (int i = 0; i < job.n_tiles;) {
    const int left = job.n_tiles - i < job.nr ? job.n_tiles - i : job.nr;
    const int nr = left >= 4 ? 4 : left >= 2 ? 2 : 1;
    gemm_tiles<Source>(job, i, nr);
    i += nr;
  }
}

}  // namespace
}  // namespace DYNO_KERNEL_NAMESPACE
