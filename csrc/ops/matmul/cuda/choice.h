// The common CUDA host code of the four families of matrix products: which kernels exist for a desc, the default, the
// scratch and the launch. Needs no CUDA toolkit, except for run().
//
// Variants, by the same names in every family (parameters in this order):
//   exact                    plain weights, float32 throughout
//   tf32_pairs(parts)        plain float32 weights on tensor cores, unless numerics are exact; `parts` blocks share k;
//                            from compute capability 9.0 on
// path matvec:
//   stream(warps, stripes)   weights stream past up to 8 rows of x
//   ring(share, blocks)      one row of x a matrix, quantised weights; from compute capability 9.0 on
// path mmq:
//   mma(tokens, warps), wgmma(tokens, warps)   tensor cores; wgmma needs a Hopper chip and code for 90a
//   wgmma_split(tokens, parts)  the same needs; dense products of few tokens, `parts` blocks of a cluster share k
//   wgmma_ring(tokens, rows, parts, blocks)  the same needs; quantised weights through a ring in shared memory, `rows`
//                               of w a block, `parts` share k, `blocks` find room on a multiprocessor
//   wgmma_codes(tokens, rows, parts, blocks)  the same for q4_k, q5_k and q6_k: operands are codes times small scales
//   wgmma_wide(tokens, group)   the same needs; dense products, tiles of 256 or 128 tokens by 128 rows a block, `group`
//                               tiles of tokens with all rows before the next
// path dequantize:
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
  mma,
  wgmma,
  wgmma_split,
  wgmma_ring,
  wgmma_codes,
  wgmma_wide,
  cublas,
  half_mma,
  half_staged,
  float32
};
ProductPath path_of(Kernel kernel);
// The two that take a ring in shared memory, gemm_ring.h.
constexpr bool is_gemm_ring(Kernel kernel) { return kernel == Kernel::wgmma_ring || kernel == Kernel::wgmma_codes; }

struct Choice {
  Kernel kernel = Kernel::exact;
  int tokens = 0;
  int warps = 0;
  int stripes = 1;
  int rows = 0;
  int group = 0;  // wgmma_wide
  int share = 1, blocks = 1;
  int parts = 1;  // wgmma_split, wgmma_ring, wgmma_codes, tf32_pairs
};
// A Config as a Choice and back. All four families give the variants the same names.
bool is_cuda(std::span<const VariantInfo> variants, const Config& config);
Choice choice_of(std::span<const VariantInfo> variants, const Config& config);
Config config_of(std::span<const VariantInfo> variants, const Choice& choice);

// The parts of a desc that matter to the choice.
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
  int64_t x_rows = 1;            // rows of x, over all of the batch
  bool norm = false;             // of the rows, inside of the product
  bool exact = false;            // numerics
  int64_t x_tiles = 0;           // x comes as HalfTiles of that height
  int64_t y_tiles = 0;           // y leaves as such
  std::optional<DType> other{};  // of further matrices of the same launch
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
  if constexpr (requires { d.x_tiles; }) s.x_tiles = d.x_tiles;
  if constexpr (requires { d.y_tiles; }) s.y_tiles = d.y_tiles;
  return s;
}

Support supports_choice(const Shape& shape, const Choice& choice, const DeviceInfo& device);
Choice default_choice(const Shape& shape, const DeviceInfo& device);
// The most warps for each of `blocks` of stream that still get two tiles of k each and, with the registers they take,
// all run at once. None: the blocks come in several rounds.
std::optional<int> stream_warps(int64_t blocks, int64_t k_tiles, const DeviceInfo& device);
// The ring, where the launch reads so much that it is faster: `tasks` stripes of `segments` rows of chunks (ring.h).
std::optional<Choice> default_ring(const Shape& shape, int64_t tasks, int64_t segments, const DeviceInfo& device);
// Whether stream multiplies with weights of both types in one launch: csrc/ops/matmul/CMakeLists.txt lists the pairs.
bool stream_takes_both(DType type, DType other);
inline void set_norm(Problem& p, const NormInside& norm) {
  p.normed = true;
  p.norm = norm.weight;
  p.norm_eps = norm.eps;
}
// Whether a launch with experts lets the next one start only once all launches before it are over.
constexpr bool lets_next_start_late(const Choice& choice) {
  return choice.kernel == Kernel::stream || choice.kernel == Kernel::ring;
}
// Bytes of CudaStream::workspace.
size_t choice_scratch_bytes(const Shape& shape, const Choice& choice);
// Enqueues `problem` on stream; `other`: the second type of its parts, or its own.
void run_stream(Problem problem, DType other, const Choice& choice, CudaStream& stream);
// Enqueues the launches of `problem`, whose x is float32. Throws DeviceError when the workspace is too small.
void run(const Choice& choice, const Shape& shape, Problem problem, CudaStream& stream);

}  // namespace dyno::ops::cuda
