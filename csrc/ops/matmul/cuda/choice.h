// CUDA host code that the four families of matrix products share: the kernels for a desc, the default, the scratch and
// the launch. Needs no CUDA toolkit, except for run().
//
// Variants, with the same names in every family (parameters in this order):
//   exact                    plain weights, float32 throughout
//   tf32_pairs(parts)        plain float32 weights on tensor cores, not with numerics=exact; `parts` blocks share
//                            k; compute capability 9.0 or later
// Path matvec:
//   stream(warps, stripes)   streams weights for up to 8 rows of x
//   ring(share, blocks)      one row of x per matrix, quantised weights; compute capability 9.0 or later
//   walk(warps, blocks)      gated products of experts with rows in bytes (byte_rows.h), quantised weights
// Path mmq:
//   mma(tokens, warps), wgmma(tokens, warps)   tensor cores; wgmma needs a Hopper chip and code for 90a
//   wgmma_split(tokens, parts)  needs as wgmma; dense products of few tokens, `parts` blocks of a cluster share k
//   wgmma_ring(tokens, rows, parts, blocks)  needs as wgmma; quantised weights through a ring in shared memory;
//                               `rows` of w per block, `parts` blocks share k, `blocks` fit on a multiprocessor
//   wgmma_codes(tokens, rows, parts, blocks)  the same for q4_k, q5_k and q6_k: operands are codes times small
//                               scales; 64 rows for single products of q4_k
//   wgmma_wide(tokens, group)   needs as wgmma; dense products, tiles of 256 tokens by 128 rows per block;
//                               `group` tiles of tokens are multiplied by all rows before the next group
//   wgmma_wide_split(parts)     the same with 256 tokens, single products; `parts` clusters share the k of a tile
//   wgmma_sorted             needs as wgmma; experts with many rows, sorted by expert, in the loop of wgmma_wide
// Path dequantize:
//   cublas                   dense products only
//   half_mma(tokens, warps)  compute type f16
//   half_staged(rows)        experts, compute types f16 and bf16; Hopper with code for 90a
//   float32                  compute type f32
#pragma once

#include <optional>

#include "ops/args.h"
#include "ops/cuda_stream.h"
#include "ops/matmul/cuda/problem.h"
#include "ops/op.h"

namespace dyno::ops::cuda {

enum class Kernel : uint8_t {
  exact,
  tf32_pairs,
  stream,
  ring,
  walk,
  mma,
  wgmma,
  wgmma_split,
  wgmma_ring,
  wgmma_codes,
  wgmma_wide,
  wgmma_wide_split,
  wgmma_sorted,
  cublas,
  half_mma,
  half_staged,
  float32
};
ProductPath path_of(Kernel kernel);
// The two kernels with a ring in shared memory, gemm_ring.h.
constexpr bool is_gemm_ring(Kernel kernel) { return kernel == Kernel::wgmma_ring || kernel == Kernel::wgmma_codes; }
// The two with the tiles of wide.h.
constexpr bool has_wide_tiles(Kernel kernel) {
  return kernel == Kernel::wgmma_wide || kernel == Kernel::wgmma_wide_split;
}

struct Choice {
  Kernel kernel = Kernel::exact;
  int tokens = 0;
  int warps = 0;
  int stripes = 1;
  int rows = 0;
  int group = 0;  // wgmma_wide
  int share = 1, blocks = 1;
  int parts = 1;  // wgmma_split, wgmma_ring, wgmma_codes, wgmma_wide_split, tf32_pairs
};
// Conversion between a Config and a Choice. All four families use the same names for variants.
bool is_cuda(std::span<const VariantInfo> variants, const Config& config);
Choice choice_of(std::span<const VariantInfo> variants, const Config& config);
Config config_of(std::span<const VariantInfo> variants, const Choice& choice);

// The parts of a desc that affect the choice.
struct Shape {
  DType type = DType::f32;
  Layout layout = Layout::plain;
  ActType act = ActType::f32;
  ProductPath path = ProductPath::any;
  ComputeType compute = ComputeType::f16;
  int64_t rows = 1;  // of y: m, or m·used
  int64_t n = 0, k = 0;
  int64_t matrices = 1;  // batch, or experts
  bool experts = false;
  bool gated = false;
  int64_t x_rows = 1;            // rows of x over the whole batch
  bool norm = false;             // the product normalises the rows
  bool exact = false;            // numerics=exact
  int64_t x_tiles = 0;           // x is HalfTiles of this height
  int64_t y_tiles = 0;           // y is HalfTiles of this height
  bool bytes = false;            // x is also there as byte rows
  std::optional<DType> other{};  // type of further matrices in the same launch
  bool after_batch = false;      // see Neighbours
};

template <typename Desc>
Shape shape_of(const Desc& d) {
  Shape s{.type = d.type, .layout = d.layout, .rows = d.m, .n = d.n, .k = d.k, .x_rows = d.m};
  if constexpr (requires { d.act; }) s.act = d.act;
  if constexpr (requires { d.path; }) s.path = d.path, s.compute = d.compute;
  if constexpr (requires { d.experts; }) {
    s.experts = true, s.rows = d.m * d.used, s.matrices = d.experts;
  }
  if constexpr (requires { d.x_per_slot; }) s.x_rows = d.x_per_slot ? s.rows : d.m;
  if constexpr (requires { d.batch; }) s.matrices = d.batch, s.x_rows = d.m * d.batch;
  s.gated = requires { d.activation; };
  if constexpr (requires { d.norm; }) s.norm = d.norm;
  if constexpr (requires { d.exact; }) s.exact = d.exact;
  if constexpr (requires { d.bytes; }) s.bytes = d.bytes;
  if constexpr (requires { d.x_tiles; }) s.x_tiles = d.x_tiles;
  if constexpr (requires { d.y_tiles; }) s.y_tiles = d.y_tiles;
  return s;
}

// Up to this number of rows, a product that normalises them runs a ring or stream, and above it any kernel of path mmq.
inline constexpr int64_t kRingTokens = 64;

Support supports_choice(const Shape& shape, const Choice& choice, const DeviceInfo& device);
Choice default_choice(const Shape& shape, const DeviceInfo& device);
// The maximum of warps per block for which `blocks` blocks of stream still have two tiles of k per warp and all fit on
// the chip at once. Empty if the blocks need several rounds.
std::optional<int> stream_warps(int64_t blocks, int64_t k_tiles, const DeviceInfo& device);
// The ring, if the launch reads enough for it to be faster: `tasks` stripes of `segments` rows of chunks (ring.h).
std::optional<Choice> default_ring(const Shape& shape, int64_t tasks, int64_t segments, const DeviceInfo& device);
// The walk for this shape, which must support it.
Choice walk_choice(const Shape& shape);
// Whether stream supports weights of both types in one launch: csrc/ops/matmul/CMakeLists.txt lists the pairs.
bool stream_takes_both(DType type, DType other);
inline void set_norm(Problem& p, const NormInside& norm) {
  p.normed = true;
  p.norm = norm.weight;
  p.norm_eps = norm.eps;
}
// Whether a launch with experts lets the next one start only after all previous launches have completed.
constexpr bool lets_next_start_late(const Choice& choice) {
  return choice.kernel == Kernel::stream || choice.kernel == Kernel::ring || choice.kernel == Kernel::walk;
}
// Bytes of CudaStream::workspace.
size_t choice_scratch_bytes(const Shape& shape, const Choice& choice);
// Enqueues `problem` on stream; `other`: the second type of its parts, or its own type.
void run_stream(Problem problem, DType other, const Choice& choice, CudaStream& stream);
// Enqueues the launches of `problem`, whose x is float32. Throws DeviceError if the workspace is too small.
void run(const Choice& choice, const Shape& shape, Problem problem, CudaStream& stream);

}  // namespace dyno::ops::cuda
