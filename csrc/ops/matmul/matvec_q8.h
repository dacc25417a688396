// Quantised weights times few tokens: weights are unpacked in registers directly before the dot products and are not
// stored. Instantiated by matvec_q8_x16.cpp, matvec_q8_coded.cpp (layout x16 of coded types) and matvec_q8_plain.cpp.
#pragma once

#include "ops/matmul/activation_rows.h"
#include "ops/matmul/kernels.h"
#include "ops/matmul/unpack.h"

namespace DYNO_KERNEL_NAMESPACE {
namespace {

// Prefetch distance below which weights go to the first-level cache. It has few fill buffers, and a prefetch that waits
// for memory there blocks a later load. So weights further ahead go only to the second-level cache.
constexpr int kNearBytes = 2048;

inline void prefetch_lines(const uint8_t* p, int bytes, int ahead) {
  const int near = ahead < kNearBytes ? ahead : kNearBytes;
  for (int i = 0; i < bytes; i += 64) {
    __builtin_prefetch(p + i + ahead, 0, 2);
    __builtin_prefetch(p + i + near, 0, 3);
  }
}

template <typename Source, int kMr>
void matvec_tile(const ProductJob& job, const WeightTile& tile, const std::byte* const* rows, float* c) {
  constexpr WeightFormat f = Source::format;
  constexpr int kSteps = f.group / 4;
  constexpr int kGroups = 32 / f.group;
  constexpr int kWiden = Source::tile.widen;
  Source source({reinterpret_cast<const uint8_t*>(tile.base), tile.row_bytes, tile.rows}, job.type);
  const int offset = -source.offset();
  ActRow row[kMr];
  F total[kMr];
  for (int t = 0; t < kMr; ++t) {
    row[t] = ActRow(rows[t], job.k, 0);
    total[t] = f_zero();
  }
  const int64_t records = job.k / f.block;
  int64_t block = 0;  // block of 32
  for (int64_t record = 0; record < records; ++record) {
    source.seek(record);
    for (int sub = 0; sub < f.block / 32; ++sub, ++block) {
      if constexpr (requires { source.record(); }) {
        constexpr int kBytes = Source::bytes / (f.block / 32);
        prefetch_lines(source.record() + sub * kBytes, kBytes, job.prefetch);
      }
      B w[8];
      source.load(sub, w);
      F scale[2], min[2];
      source.scales(sub, scale, min);
#pragma GCC unroll 8
      for (int t = 0; t < kMr; ++t) {
        const uint8_t* a = row[t].q + 32 * block;
        const float d = row[t].scale(block);
#pragma GCC unroll 2
        for (int g = 0; g < kGroups; ++g) {
          const int sum =
              kGroups == 1 ? row[t].sum16(2 * block) + row[t].sum16(2 * block + 1) : row[t].sum16(2 * block + g);
          Dot<kWiden, kSteps> dot;
          if constexpr (f.has_min) {
            dot.zero();
          } else {
            dot.init(offset * sum);
          }
          const auto step = [&]<int kStep>() {
            const int at = 4 * g + kStep;
            dot.template step<kStep>(Weight4<kWiden>(w[at]), act_broadcast(a + 4 * at));
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
          total[t] = f_fma(f_mul(f_from_i(dot.sum()), scale[g]), f_set1(d), total[t]);
          if constexpr (f.has_min) total[t] = f_fma(min[g], f_set1(-d * static_cast<float>(sum)), total[t]);
        }
      }
    }
  }
  for (int t = 0; t < kMr; ++t) f_store(c + t * job.ldc, total[t]);
}

template <typename Source, int kMr>
int matvec_tokens(const ProductJob& job, const WeightTile& tile, const std::byte* const* rows, int left, float* c) {
  if constexpr (kMr > 1) {
    if (left < kMr) return matvec_tokens < Source, kMr == 8 ? 6 : kMr == 6 ? 4 : kMr - 1 > (job, tile, rows, left, c);
  }
  matvec_tile<Source, kMr>(job, tile, rows, c);
  return kMr;
}

template <typename Source>
void matvec_typed(const ProductJob& job) {
  for (int i = 0; i < job.n_tiles; ++i) {
    for (int t = 0; t < job.m;) {
      t += matvec_tokens<Source, kMaxMatvec>(job, job.tiles[i], job.rows + t, job.m - t, job.c + 16 * i + t * job.ldc);
    }
  }
}

}  // namespace
}  // namespace DYNO_KERNEL_NAMESPACE
