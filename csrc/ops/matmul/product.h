// Host code that the four families of matrix products share: the mapping from a Config to a method, its scratch, and
// the distribution of tasks to threads.
//
// A task is a group of weight tiles (in up_gate: the same number of gate and up tiles) times a block of tokens.
#pragma once

#include <algorithm>
#include <atomic>

#include "ops/cpu_context.h"
#include "ops/matmul/kernels.h"
#include "ops/matmul/layout.h"
#include "ops/op.h"
#include "ops/parallel.h"

namespace dyno::ops {

inline constexpr int64_t kMatvecTokens = 32;  // the most tokens of matvec; more use gemm
inline constexpr int kMaxGroupTiles = 16;     // weight tiles of a task, for both matrices of up_gate together

enum class Method : uint8_t {
  matvec,  // q8: unpacks in registers, stores nothing
  gemm,    // q8: unpacks to the cache, register tiles over many tokens
  dot,     // f32 activations
};

// Distribution of tasks to threads; the values of the parameter `split`.
enum class Split : int16_t {
  fixed_rows = 0,  // contiguous weight rows for each thread
  rows = 1,        // contiguous groups of weight rows per thread; a thread that has finished takes groups of slower
                   // threads
  blocks = 2,      // groups of weight rows by blocks of tokens, assigned one by one
};

struct Tiling {
  Method method = Method::gemm;
  int group = 1;        // tiles of one matrix in a task
  int nr = 1;           // gemm: weight tiles in a register tile
  int tokens = 1;       // tokens in a register tile
  int kc = 256;         // gemm
  int block = 8;        // tokens in a task
  int weight_rows = 4;  // dot
  int prefetch = 0;     // matvec, bytes
  int few = 0;          // by_expert: experts with at most this many tokens use matvec
  Split split = Split::rows;
};

struct Weights {
  DType type = DType::f32;
  Layout layout = Layout::plain;
  int64_t n = 0, k = 0;
  const NumaCopies* copies = nullptr;  // from the CpuContext

  int64_t tiles() const { return (n + kTileRows - 1) / kTileRows; }
  WeightTile tile(const void* base, int64_t index) const {
    const size_t row = row_bytes(type, k);
    const size_t bytes = layout == Layout::plain ? 16 * row : layout_bytes(type, layout, kTileRows, k);
    const std::byte* at = static_cast<const std::byte*>(base) + static_cast<size_t>(index) * bytes;
    return {copies == nullptr ? at : copies->here(at), static_cast<int64_t>(row),
            static_cast<int>(std::min(kTileRows, n - index * kTileRows))};
  }
};

// Reasons that products with this type, layout, activation and k are not supported, with the same wording for all
// families.
Support supports_weights(DType type, Layout layout, ActType act, int64_t k);
// Reasons that `tiling` does not match the desc's activation, its tokens or the device.
Support supports_tiling(const Tiling& tiling, DType type, ActType act, int64_t m, const DeviceInfo& device);

// Scratch of a task, within a thread's part of the context's scratch.
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

// Calls body(task, scratch) for all tasks. The result of a task does not depend on its thread.
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

// Cost of a MoE product with `matrices` weight matrices per expert: every expert that m * used rows can reach is read
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
// Only for a build that tests the check of answers. Configurations in faults.def, identified by a unique prefetch or
// block, compute results that are wrong by a factor. Every other group of rows has the opposite error, because a common
// factor of all rows may have no effect, or even a positive one.
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

// `rows`: rows of a register tile; with `pairs`, of both matrices together.
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

// The number of tokens up to which matvec is the default for q8 activations. matvec passes over a tile once for every
// few tokens and unpacks it in each pass; gemm unpacks once, stores, and loads again. So the number depends on the
// tokens of a pass, and on the cost of unpacking.
int64_t default_matvec_tokens(DType type, Layout layout, CpuIsa isa);

// Returns `wanted` if `accepts` allows it; else the first allowed instance in `all` (a variants.def) of the same
// variant, or of any variant. So a default is always a candidate. `accepts` rejects anything that is not an instance.
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
