// The common host code of the four families of matrix products: how a Config becomes a way to compute a block of
// products, which scratch it needs, and how tasks are dealt out to threads.
//
// A task is a group of weight tiles (for up_gate: as many of the gate as of up) times a block of tokens.
#pragma once

#include <algorithm>
#include <atomic>

#include "ops/cpu_context.h"
#include "ops/matmul/kernels.h"
#include "ops/matmul/layout.h"
#include "ops/op.h"
#include "ops/parallel.h"

namespace dyno::ops {

inline constexpr int64_t kMatvecTokens = 8;  // more tokens than this are gemm's
inline constexpr int kMaxGroupTiles = 16;    // weight tiles of a task, both matrices of up_gate together

enum class Method : uint8_t {
  matvec,  // q8: unpack in registers, nothing stored
  gemm,    // q8: unpack into the cache, register tiles over many tokens
  dot,     // f32 activations
};

// How tasks are split over threads; the values of the parameter `split`.
enum class Split : int16_t {
  fixed_rows = 0,  // contiguous weight rows for each thread
  rows = 1,        // contiguous groups of weight rows for each thread, which then takes groups of slower threads
  blocks = 2,      // groups of weight rows by blocks of tokens, handed out one by one
};

struct Tiling {
  Method method = Method::gemm;
  int group = 1;        // tiles of one matrix in a task
  int nr = 1;           // gemm: tiles of a register tile
  int tokens = 1;       // of a register tile
  int kc = 256;         // gemm
  int block = 8;        // tokens of a task
  int weight_rows = 4;  // dot
  int prefetch = 0;     // matvec, bytes
  int few = 0;          // by_expert: experts with no more tokens than this go through matvec
  Split split = Split::rows;
};

struct Weights {
  DType type = DType::f32;
  Layout layout = Layout::plain;
  int64_t n = 0, k = 0;
  const NumaCopies* copies = nullptr;  // of CpuContext

  int64_t tiles() const { return (n + kTileRows - 1) / kTileRows; }
  WeightTile tile(const void* base, int64_t index) const {
    const size_t row = row_bytes(type, k);
    const size_t bytes = layout == Layout::plain ? 16 * row : layout_bytes(type, layout, kTileRows, k);
    const std::byte* at = static_cast<const std::byte*>(base) + static_cast<size_t>(index) * bytes;
    return {copies == nullptr ? at : copies->here(at), static_cast<int64_t>(row),
            static_cast<int>(std::min(kTileRows, n - index * kTileRows))};
  }
};

// Reasons why a product cannot be had with this type, layout, activation and k; one wording for all families.
Support supports_weights(DType type, Layout layout, ActType act, int64_t k);
// Reasons why `tiling` does not fit the desc's activation, its tokens or the device.
Support supports_tiling(const Tiling& tiling, DType type, ActType act, int64_t m, const DeviceInfo& device);

// Scratch of a task, carved from a thread's part of the context.
struct ProductScratch {
  const std::byte** rows;
  const float** residual;
  float** y;
  float* c;
  std::byte* kernel;

  ProductScratch(std::byte* base, const Tiling& tiling, int matrices);
};
size_t product_scratch_bytes(const Tiling& tiling, const Weights& weights, int matrices);

// c[t, 16 * i + r] for n_tiles tiles and m <= tiling.block tokens whose rows are in scratch.rows.
void compute_product(const Tiling& tiling, const Weights& weights, const WeightTile* tiles, int n_tiles, int m,
                     const ProductScratch& scratch, CpuIsa isa);

// body(task, scratch) for all tasks. Which thread runs a task never matters to its result.
template <typename Body>
void run_tasks(CpuContext& context, int64_t tasks, Split split, const Body& body) {
  if (split == Split::rows) {
    parallel_stretches(context, tasks, body);
    return;
  }
  if (split == Split::blocks) {
    parallel_items(context, tasks, tasks, 1, body);
    return;
  }
  parallel_ranges(context, tasks, 1, 1, [&](int64_t begin, int64_t end, std::byte* scratch) {
    for (int64_t task = begin; task < end; ++task) body(task, scratch);
  });
}

// Cost of a MoE product with `matrices` weight matrices an expert: every expert that m * used rows can reach is read
// once, at most all of them.
template <typename Desc>
Cost moe_cost(const Desc& desc, int matrices) {
  const double rows = static_cast<double>(desc.m * desc.used), n = static_cast<double>(desc.n);
  const double k = static_cast<double>(desc.k), reached = std::min(rows, static_cast<double>(desc.experts));
  const double expert = matrices * static_cast<double>(layout_bytes(desc.type, desc.layout, desc.n, desc.k));
  return {reached * expert + rows * k * (desc.act == ActType::q8 ? 1.25 : 4) + rows * n * 4,
          2 * matrices * rows * n * k};
}

#ifdef DYNO_TEST_FAULTS
// A build to test the check of answers with: configurations of faults.def, told by a prefetch that no other has or a
// block that no other has, are wrong by a factor. Every other group of rows is wrong the other way round, because a
// factor that all rows share can do no harm or even good.
inline float fault_factor(const Tiling& tiling, int64_t group) {
  int error = 0;
  if (tiling.method == Method::matvec && tiling.prefetch < 1024) error = tiling.prefetch;
  if (tiling.method == Method::gemm && tiling.block > 400) error = tiling.block - 400;
  return 1.0f + static_cast<float>(group % 2 == 0 ? error : -error) / 2000.0f;
}
#endif

// ---- choosing ----

// From the parameters of a variant, which have the same names in all families of products.
template <typename Matvec>
Tiling matvec_tiling(const Matvec& matvec, int matrices) {
  Tiling t;
  t.method = Method::matvec;
  t.group = std::max(1, matvec.rows / 16 / matrices);
  t.prefetch = matvec.prefetch;
  t.split = static_cast<Split>(matvec.split);
  t.block = kMatvecTokens;
  return t;
}

// `rows` are of a register tile, of both matrices together where `pairs`.
template <typename Gemm>
Tiling gemm_tiling(const Gemm& gemm, bool pairs) {
  Tiling t;
  t.method = Method::gemm;
  t.nr = gemm.rows / 16;
  t.group = pairs ? std::max(1, t.nr / 2) : t.nr;
  t.tokens = gemm.tokens;
  t.kc = gemm.kc;
  t.block = gemm.block;
  if constexpr (requires { gemm.split; }) t.split = static_cast<Split>(gemm.split);
  if constexpr (requires { gemm.few; }) t.few = gemm.few;
  return t;
}

template <typename Dot>
Tiling dot_tiling(const Dot& dot) {
  Tiling t;
  t.method = Method::dot;
  t.weight_rows = dot.rows;
  t.tokens = dot.tokens;
  t.split = static_cast<Split>(dot.split);
  t.block = 48;
  return t;
}

// `wanted` if `accepts` takes it, or else the first instance of `all` (a variants.def) of its variant, or of any: so a
// default is always a candidate. `accepts` refuses what is no instance.
template <typename Instances, typename Accepts>
Config nearest_instance(const Instances& all, const Config& wanted, const Accepts& accepts) {
  if (accepts(wanted)) return wanted;
  const Config* fallback = nullptr;
  for (const Config& config : all) {
    const bool alike = config.variant == wanted.variant;
    if ((fallback != nullptr && !alike) || !accepts(config)) continue;
    if (alike) return config;
    fallback = &config;
  }
  return fallback != nullptr ? *fallback : wanted;
}

}  // namespace dyno::ops
