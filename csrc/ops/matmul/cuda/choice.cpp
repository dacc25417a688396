// The choice of a kernel for a shape: the shapes that each kernel supports, and the defaults. They share a file,
// because a default is used only if the support rule next to it allows it, and a new kernel changes both. Kernels of
// few tokens have a file of their own, choice_stream.cpp.
#include "ops/matmul/cuda/choice.h"

#include <algorithm>
#include <optional>

#include "core/error.h"
#include "ops/matmul/cuda/blas.h"
#include "ops/matmul/cuda/choice_forms.h"
#include "ops/matmul/cuda/choice_stream.h"
#include "ops/matmul/cuda/dequantize.h"
#include "ops/matmul/cuda/gemm_ring.h"
#include "ops/matmul/cuda/ring.h"
#include "ops/matmul/cuda/sorted.h"
#include "ops/matmul/cuda/stripes.h"
#include "ops/matmul/cuda/tf32_pairs.h"
#include "ops/matmul/cuda/wide.h"
#include "ops/matmul/gpu_layout.h"

namespace dyno::ops::cuda {

namespace {

// Number of blocks for a tile size; with experts, for the rows that even routing gives to each expert.
int64_t blocks_of(const Shape& s, int tokens, int warps) {
  const int64_t rows_of_w = warps * (s.gated ? 16 : 32);
  const int64_t groups = s.experts ? std::min(s.matrices, s.rows) : s.matrices;
  const int64_t rows = s.experts ? (s.rows + groups - 1) / groups : s.rows;
  return groups * ((rows + tokens - 1) / tokens) * ((s.n + rows_of_w - 1) / rows_of_w);
}

// Whether tf32_pairs supports a product with plain weights, and the reason if it does not.
Support supports_pairs(const Shape& s, const DeviceInfo& device) {
  if (s.type != DType::f32 || s.layout != Layout::plain) {
    return Support::no(str_cat("tf32_pairs reads float32 weights of layout plain, not ", dtype_name(s.type), " of ",
                               layout_name(s.layout)));
  }
  if (s.exact) return Support::no("numerics are exact: only the variant exact sums in float32 throughout");
  if (s.experts || s.gated || s.norm || s.matrices > 1) {
    return Support::no("tf32_pairs multiplies with one matrix, without a norm");
  }
  if (s.k % 32 != 0) return Support::no(str_cat("k=", s.k, " is not a multiple of 32"));
  if (!has_bulk_copy(device)) {
    return Support::no(str_cat("tf32_pairs needs compute capability 9.0 and code for it; the device has ",
                               device.compute_capability / 10, ".", device.compute_capability % 10,
                               ", the code is for ", kCompiledArchitectures));
  }
  return Support::yes();
}

constexpr int64_t kSplitMaxRows = 512;

Support supports_split(const Shape& s, const Choice& choice) {
  if (s.experts) return Support::no("wgmma_split multiplies dense matrices; experts have wgmma");
  if (s.rows > kSplitMaxRows) {
    return Support::no(str_cat(s.rows, " rows: wgmma_split takes at most ", kSplitMaxRows));
  }
  const int64_t tiles = (s.k + kGpuTile - 1) / kGpuTile;
  if (tiles < choice.parts) {
    return Support::no(str_cat("k=", s.k, " has ", tiles, " tiles of ", kGpuTile, ", fewer than parts=", choice.parts));
  }
  return Support::yes();
}

constexpr int64_t kGemmRingMaxRows = 256;

constexpr int64_t kMostOfCluster = 16;  // blocks

// Whether a product supports rows in HalfTiles, and the reason if it does not.
Support supports_tiles(const Shape& s, const Choice& choice) {
  if (choice.kernel != Kernel::wgmma_codes) return Support::no("only wgmma_codes reads and writes f16 tiles");
  if (s.x_tiles > 0 && s.y_tiles > 0) return Support::no("a kernel reads or writes f16 tiles, not both");
  if (s.experts || s.matrices > 1) return Support::no("f16 tiles need a product with one matrix");
  if (s.x_tiles > 0 && s.norm) return Support::no("norm=1: rows in f16 tiles are already normalised");
  if (!has_half_tiles(s.type, choice.rows)) {
    return Support::no(
        str_cat("f16 tiles are for q4_k and up to 256 rows of w, not ", dtype_name(s.type), " and ", choice.rows));
  }
  if (const int64_t height = std::max(s.x_tiles, s.y_tiles); height != choice.tokens) {
    return Support::no(str_cat("tiles have ", height, " rows, tokens=", choice.tokens));
  }
  if (s.y_tiles > 0 && s.n % HalfTiles::kBlock != 0) {
    return Support::no(str_cat("n=", s.n, " is not a multiple of ", HalfTiles::kBlock, ", the blocks of tiles"));
  }
  const GemmRingShape shape = ring_shape_of(s, choice);
  if (s.y_tiles > 0 && choice.tokens % choice.parts != 0) {
    return Support::no(str_cat("blocks that write f16 tiles have equal shares, but parts=", choice.parts,
                               " does not divide tokens=", choice.tokens));
  }
  if (shape.joint() * choice.parts > kMostOfCluster) {
    return Support::no(str_cat(shape.joint(), " blocks for 256 columns times parts=", choice.parts, " are more than ",
                               kMostOfCluster, ", a cluster"));
  }
  return Support::yes();
}

Support supports_gemm_ring(const Shape& s, const Choice& choice, const DeviceInfo& device) {
  if (s.experts) return Support::no("the ring multiplies dense matrices; experts have wgmma");
  if (!has_block_codes(s.type)) {
    return Support::no(str_cat("the ring reads quantised weights, not ", dtype_name(s.type)));
  }
  if (s.other && *s.other != s.type) {
    return Support::no(
        str_cat("the ring reads weights of one type, not of ", dtype_name(s.type), " and ", dtype_name(*s.other)));
  }
  if (choice.kernel == Kernel::wgmma_codes && !has_code_tiles(s.type)) {
    return Support::no(str_cat("wgmma_codes reads q4_k, q5_k and q6_k, not ", dtype_name(s.type)));
  }
  if (choice.rows == 64 && !has_small_blocks(s.type)) {
    return Support::no(str_cat("blocks of 64 rows of w are for q4_k, not ", dtype_name(s.type)));
  }
  if (choice.rows == 64 && (s.gated || s.other)) return Support::no("blocks of 64 rows of w are for a single product");
  if (s.rows > kGemmRingMaxRows) {
    return Support::no(str_cat(s.rows, " rows: the ring takes at most ", kGemmRingMaxRows));
  }
  if (const int64_t chunks = gemm_ring_chunks(s.type, s.k); chunks < choice.parts) {
    return Support::no(str_cat("k=", s.k, " has ", chunks, " chunks of ", gemm_ring_tiles(s.type) * kGpuTile,
                               ", fewer than parts=", choice.parts));
  }
  if (has_tiles(s)) {
    if (const Support support = supports_tiles(s, choice); !support) return support;
  }
  const GemmRingShape shape = ring_shape_of(s, choice);
  if (!shape.fits() || shape.bytes > shared_of(device)) {
    return Support::no(str_cat("two stages of ", shape.stage_bytes, " bytes do not fit into shared memory ",
                               choice.blocks, " times; a block has ", shared_of(device)));
  }
  return Support::yes();
}

constexpr std::pair<std::string_view, Kernel> kNames[] = {{"exact", Kernel::exact},
                                                          {"tf32_pairs", Kernel::tf32_pairs},
                                                          {"stream", Kernel::stream},
                                                          {"ring", Kernel::ring},
                                                          {"walk", Kernel::walk},
                                                          {"mma", Kernel::mma},
                                                          {"wgmma", Kernel::wgmma},
                                                          {"wgmma_split", Kernel::wgmma_split},
                                                          {"wgmma_ring", Kernel::wgmma_ring},
                                                          {"wgmma_codes", Kernel::wgmma_codes},
                                                          {"wgmma_wide", Kernel::wgmma_wide},
                                                          {"wgmma_wide_split", Kernel::wgmma_wide_split},
                                                          {"wgmma_sorted", Kernel::wgmma_sorted},
                                                          {"cublas", Kernel::cublas},
                                                          {"half_mma", Kernel::half_mma},
                                                          {"half_staged", Kernel::half_staged},
                                                          {"float32", Kernel::float32}};

// Parameters of these variants, with their names in variants.def.
constexpr std::pair<std::string_view, int Choice::*> kParams[] = {
    {"tokens", &Choice::tokens},    {"warps", &Choice::warps}, {"stripes", &Choice::stripes},
    {"rows", &Choice::rows},        {"share", &Choice::share}, {"blocks", &Choice::blocks},
    {"group_size", &Choice::group}, {"parts", &Choice::parts}};

// Calls visit(index in Config::params, member of Choice) for each parameter of the variant.
template <typename Visit>
void for_each_param(const VariantInfo& variant, const Visit& visit) {
  for (size_t p = 0; p < kMaxParams && !variant.param_names[p].empty(); ++p) {
    const std::string_view name = variant.param_names[p];
    const auto* known = std::find_if(std::begin(kParams), std::end(kParams), [&](auto& n) { return n.first == name; });
    DYNO_CHECK(Error, known != std::end(kParams), "[matmul] variant ", variant.name, " has the parameter ", name,
               ", which Choice does not have");
    visit(p, known->second);
  }
}

}  // namespace

ProductPath path_of(Kernel kernel) {
  switch (kernel) {
    case Kernel::exact:
    case Kernel::tf32_pairs:
      return ProductPath::any;
    case Kernel::stream:
    case Kernel::ring:
    case Kernel::walk:
      return ProductPath::matvec;
    case Kernel::mma:
    case Kernel::wgmma:
    case Kernel::wgmma_split:
    case Kernel::wgmma_ring:
    case Kernel::wgmma_codes:
    case Kernel::wgmma_wide:
    case Kernel::wgmma_wide_split:
    case Kernel::wgmma_sorted:
      return ProductPath::mmq;
    default:
      return ProductPath::dequantize;
  }
}

bool is_cuda(std::span<const VariantInfo> variants, const Config& config) {
  return variants[config.variant].device == DeviceKind::cuda;
}

Choice choice_of(std::span<const VariantInfo> variants, const Config& config) {
  const std::string_view name = variants[config.variant].name;
  const auto* known = std::find_if(std::begin(kNames), std::end(kNames), [&](auto& n) { return n.first == name; });
  DYNO_CHECK(Error, known != std::end(kNames), "[matmul] variant ", name, " is not a CUDA kernel");
  Choice choice{known->second};
  if (choice.kernel == Kernel::half_staged) choice.tokens = kStagedTokens;
  for_each_param(variants[config.variant], [&](size_t p, int Choice::*member) { choice.*member = config.params[p]; });
  return choice;
}

Config config_of(std::span<const VariantInfo> variants, const Choice& choice) {
  const auto* name =
      std::find_if(std::begin(kNames), std::end(kNames), [&](const auto& n) { return n.second == choice.kernel; });
  for (size_t i = 0; i < variants.size(); ++i) {
    if (variants[i].device != DeviceKind::cuda || variants[i].name != name->first) continue;
    Config config{.variant = static_cast<uint8_t>(i)};
    for_each_param(variants[i],
                   [&](size_t p, int Choice::*member) { config.params[p] = static_cast<int16_t>(choice.*member); });
    return config;
  }
  throw Error(str_cat("[matmul] no variant ", name->first));
}

Support supports_choice(const Shape& s, const Choice& choice, const DeviceInfo& device) {
  if (s.act != ActType::f32) return Support::no("CUDA kernels take f32 activations, not q8");
  if (has_tiles(s) && !is_gemm_ring(choice.kernel)) return supports_tiles(s, choice);
  const ProductPath path = path_of(choice.kernel);
  const bool norms = path == ProductPath::matvec || (path == ProductPath::mmq && !s.experts);
  if (s.norm && !norms) {
    return Support::no(s.experts ? "only stream and ring normalise the rows of products of experts"
                                 : "only the kernels of the paths matvec and mmq normalise the rows of a product");
  }
  if (choice.kernel == Kernel::tf32_pairs) return supports_pairs(s, device);
  if (choice.kernel == Kernel::exact) {
    if (s.layout != Layout::plain) return Support::no(str_cat("exact reads layout plain, not ", layout_name(s.layout)));
    return Support::yes();
  }
  if (s.layout != Layout::gpu) {
    return Support::no(
        str_cat("all CUDA variants but exact and tf32_pairs read layout gpu, not ", layout_name(s.layout)));
  }
  if (s.k % 32 != 0) return Support::no(str_cat("k=", s.k, " is not a multiple of 32"));
  // A product that normalises its rows is on path matvec for any number of tokens. The ring is on both paths.
  const bool both = path == ProductPath::mmq && (s.norm || (is_gemm_ring(choice.kernel) && s.rows > 1));
  if (s.path != ProductPath::any && s.path != path && !(s.path == ProductPath::matvec && both)) {
    return Support::no(str_cat("the session's settings send ", s.rows, " rows to path ", product_path_name(s.path),
                               ", but the variant is of path ", product_path_name(path)));
  }
  const bool hopper = choice.kernel == Kernel::wgmma || choice.kernel == Kernel::wgmma_split ||
                      is_gemm_ring(choice.kernel) || has_wide_tiles(choice.kernel) ||
                      choice.kernel == Kernel::wgmma_sorted;
  if ((hopper || choice.kernel == Kernel::half_staged) && !has_wgmma(device)) {
    return Support::no(str_cat("the variant needs compute capability 9.0 and code for 90a; the device has ",
                               device.compute_capability / 10, ".", device.compute_capability % 10,
                               ", the code is for ", kCompiledArchitectures));
  }
  if (choice.kernel == Kernel::ring) return supports_ring(s, choice, device);
  if (choice.kernel == Kernel::walk) return supports_walk(s, choice);
  if (choice.kernel == Kernel::stream) {
    const int64_t needed = least_shared(s, choice.warps, choice.stripes);
    if (needed > shared_of(device)) {
      return Support::no(str_cat("warps=", choice.warps, " need ", needed, " bytes of shared memory; a block has ",
                                 shared_of(device)));
    }
    if (choice.stripes == kTrio) {
      if (!has_block_codes(s.type)) {
        return Support::no(str_cat("stripes=3 reads quantised weights, not ", dtype_name(s.type)));
      }
      if (s.experts || s.gated || s.other || s.rows > 1) {
        return Support::no(str_cat("stripes=3 multiplies one row by single matrices, not ", s.rows,
                                   s.experts ? " by experts"
                                   : s.gated ? " by a gated pair"
                                             : ""));
      }
    }
    // The grid has one block row per row. Above 64 tokens, stream is offered only if the path asks for it, so that it
    // is not timed.
    if (s.experts && s.rows > 65535) return Support::no(str_cat(s.rows, " rows: stream takes at most 65535"));
    if (!s.experts && s.path == ProductPath::any && s.rows > 64) {
      return Support::no(str_cat("m=", s.rows, ": above 64 tokens, stream runs only if matvec_max_tokens is as large"));
    }
  }
  if (path == ProductPath::mmq && kForceBlas && !s.experts) {
    return Support::no("this build multiplies dense matrices with cuBLAS: GGML_CUDA_FORCE_CUBLAS");
  }
  if (s.other && choice.kernel == Kernel::wgmma_split) return Support::no("wgmma_split multiplies by one matrix");
  if (s.other && *s.other != s.type && path == ProductPath::mmq) {
    return Support::no(str_cat("tensor cores read weights of one type in a launch, not of ", dtype_name(s.type),
                               " and ", dtype_name(*s.other)));
  }
  if (choice.kernel == Kernel::wgmma_split) return supports_split(s, choice);
  if (is_gemm_ring(choice.kernel)) return supports_gemm_ring(s, choice, device);
  if (has_wide_tiles(choice.kernel) && s.experts) {
    return Support::no("wide tiles multiply dense matrices; experts have wgmma");
  }
  if (choice.kernel == Kernel::wgmma_sorted) {
    if (!s.experts) return Support::no("wgmma_sorted multiplies experts; dense products have wgmma_wide");
    if (s.matrices > kSortedExperts) {
      return Support::no(str_cat("experts=", s.matrices, ": wgmma_sorted takes at most ", kSortedExperts));
    }
    if (s.k <= kGpuTile) return Support::no(str_cat("k=", s.k, ": wgmma_sorted needs more than ", kGpuTile));
  }
  if (choice.kernel == Kernel::wgmma_wide_split) {
    if (s.gated) return Support::no("wgmma_wide_split multiplies single products; gated pairs have wgmma_wide");
    if (s.k < kGpuTile * choice.parts) {
      return Support::no(str_cat("k=", s.k, " is less than a tile of ", kGpuTile, " for each of parts=", choice.parts));
    }
  }
  if (path != ProductPath::dequantize) return Support::yes();
  if (!kDequantizeBuilt) return Support::no("this build has no path dequantize: GGML_CUDA_FORCE_MMQ");
  if (choice.kernel == Kernel::cublas) {
    if (s.experts) return Support::no("cuBLAS needs group sizes on the host, but experts have theirs on the device");
    return Support::yes();
  }
  if (kForceBlas && !s.experts) {
    return Support::no("this build multiplies dense matrices with cuBLAS: GGML_CUDA_FORCE_CUBLAS");
  }
  if (choice.kernel == Kernel::half_staged && !s.experts) {
    return Support::no("half_staged multiplies experts; dense products have cublas");
  }
  if (choice.kernel == Kernel::half_staged && s.compute == ComputeType::bf16) return Support::yes();
  // Without Hopper's tiles, no other kernel multiplies experts in bfloat16.
  if (choice.kernel == Kernel::float32 && s.compute == ComputeType::bf16 && s.experts && !has_wgmma(device)) {
    return Support::yes();
  }
  const ComputeType wanted = choice.kernel == Kernel::float32 ? ComputeType::f32 : ComputeType::f16;
  if (s.compute != wanted) {
    return Support::no(str_cat("the variant computes in ", compute_type_name(wanted), ", but compute_type is ",
                               compute_type_name(s.compute)));
  }
  return Support::yes();
}

namespace {

// Wide tiles, if they give work to at least `tenths` tenths of the multiprocessors. Several clusters share k only if
// all of them run at once. Measured on an H200 (h200_wide_split.json).
std::optional<Choice> default_wide(const Shape& s, int64_t tenths, const DeviceInfo& device) {
  const int64_t rows = s.x_rows / s.matrices;
  if (!has_wgmma(device) || s.experts || rows <= kWideTokens / 2) return std::nullopt;
  const auto padded = [&](int64_t tokens) { return (rows + tokens - 1) / tokens * tokens; };
  const int64_t k_tiles = (s.k + kGpuTile - 1) / kGpuTile, places = std::max(device.sm_count / 2, 1);
  const int64_t tiles = wide_tiles(s);
  // Tiles of 64 tokens are slower, but fewer of their rows may not exist.
  if (tiles > places && padded(64) * 4 < padded(kWideTokens) * 3) return std::nullopt;
  std::optional<Choice> best;
  int64_t least = 0;
  for (const auto& [parts, exchange] : {std::pair(1, 0), std::pair(2, 10), std::pair(4, 14)}) {  // in tiles of k
    Choice choice{.kernel = Kernel::wgmma_wide, .tokens = kWideTokens, .group = kWideGroup};
    if (parts > 1) choice = {.kernel = Kernel::wgmma_wide_split, .parts = parts};
    const int64_t rounds = (tiles * parts + places - 1) / places;
    const bool busy = tiles * parts * 10 >= places * tenths;
    if (!busy || (parts > 1 && rounds > 1) || !supports_choice(s, choice, device)) continue;
    const int64_t steps = rounds * ((k_tiles + parts - 1) / parts + exchange);
    if (!best || steps < least) best = choice, least = steps;
  }
  return best;
}

// Tiles of few tokens are too few to fill the chip, so blocks of a cluster share k. Measured on an H200
// (h200_split_k.json): on average within 5 % of the best tile and number of blocks.
std::optional<Choice> default_split(const Shape& s, const DeviceInfo& device) {
  constexpr int64_t kMaxRows = 512, kFewRows = 128;
  constexpr int64_t kLeastTiles = 4;  // of k, per block
  constexpr int kMaxParts = 16, kPartsOfManyRows = 4;
  if (!has_wgmma(device) || s.experts || s.other || s.rows > kMaxRows) return std::nullopt;
  int tokens = 16;
  while (tokens < 64 && tokens < s.rows) tokens *= 2;
  const double blocks_each = tokens == 16 ? 5 : tokens == 32 ? 3.6 : 2.7;  // per multiprocessor
  const double room = blocks_each * std::max(device.sm_count, 1);
  const int64_t blocks = blocks_of(s, tokens, 4), tiles = (s.k + kGpuTile - 1) / kGpuTile;
  int parts = 1;
  while (parts < kMaxParts && static_cast<double>(blocks * parts * 2) <= room && tiles >= parts * 2 * kLeastTiles) {
    parts *= 2;
  }
  if (parts < (s.rows > kFewRows ? kPartsOfManyRows : 2)) return std::nullopt;
  return Choice{.kernel = Kernel::wgmma_split, .tokens = tokens, .parts = parts};
}

// Measured on an H200 (h200_filled_chip.json). With fewer blocks than places, some multiprocessors take two blocks and
// others none, and the slowest decides. So most products get as many blocks as the chip takes at once. More blocks
// would need a second round. A cluster stays in one group of multiprocessors, so up to a tenth of the places is left;
// how many depends on the chip.
void fill_chip(Choice& choice, const Shape& s, int64_t chunks, const DeviceInfo& device) {
  constexpr int64_t kLongPart = 8;  // chunks
  const bool is_long = chunks > kLongPart * choice.parts;
  const auto longest = [&](int parts) { return (chunks + parts - 1) / parts; };
  const auto blocks_of = [&](int rows) { return s.matrices * ((s.n + rows - 1) / rows); };
  // The fewest parts as short as the shortest that fit, if a multiprocessor takes `each` blocks of `rows`.
  const auto parts_of = [&](int rows, int each, int64_t most) {
    const int64_t fitting = int64_t{std::max(device.sm_count, 1)} * each * 9 / 10 / blocks_of(rows);
    auto parts = static_cast<int>(std::min({fitting, chunks, most}));
    while (parts > 1 && longest(parts - 1) == longest(parts)) --parts;
    return parts;
  };
  if (choice.tokens < 64 || !is_long) {
    constexpr int kRows = 64;
    const int blocks = choice.tokens == 64 ? 2 : 4;
    const int each = choice.tokens == 16 ? 5 : blocks;  // registers and shared memory are left for one more
    const int parts = parts_of(kRows, each, choice.tokens == 64 ? 4 : 8);
    if (parts >= 2 && blocks_of(kRows) * parts * 10 >= int64_t{device.sm_count} * each * 7) {
      choice.rows = kRows, choice.parts = parts, choice.blocks = blocks;
      return;
    }
  }
  if (is_long) choice.parts = std::max(choice.parts, parts_of(choice.rows, choice.blocks, 8));
}

// Measured on an H100 (h100_wgmma_codes.json): within 4 % of the best configuration for 16, 32 and 64 tokens. Two
// blocks share a multiprocessor. More than three blocks for two multiprocessors gain less than their exchange costs.
std::optional<Choice> default_gemm_codes(const Shape& s, const DeviceInfo& device) {
  constexpr int64_t kMaxRows = 64, kHeadRounds = 3;
  if ((s.rows > kMaxRows && !has_tiles(s)) || s.experts) return std::nullopt;
  Choice choice{.kernel = Kernel::wgmma_codes, .tokens = s.rows <= 16 ? 16 : s.rows <= 32 ? 32 : 64, .blocks = 2};
  if (has_tiles(s)) choice.tokens = static_cast<int>(std::max(s.x_tiles, s.y_tiles));
  if (s.type == DType::q6_k && s.n >= kHeadRounds * 128 * choice.blocks * std::max(device.sm_count, 1) && !s.gated) {
    choice.rows = 128;  // the head: enough blocks without a share of k
    return supports_choice(s, choice, device) ? std::optional(choice) : std::nullopt;
  }
  if (s.type != DType::q4_k) return std::nullopt;
  choice.rows = choice.tokens == 16 ? 256 : 128;  // one block of 256 rows by 64 tokens fills a multiprocessor
  const int64_t rows_of_w = s.gated ? choice.rows / 2 : choice.rows, chunks = gemm_ring_chunks(s.type, s.k);
  const int64_t blocks = s.matrices * ((s.n + rows_of_w - 1) / rows_of_w);
  const int64_t room = std::max(device.sm_count, 1) * (choice.tokens == 16 ? 7 : 6) / 4;
  const int most = s.y_tiles > 0 ? choice.rows / 64 : 8;  // to_tiles adds further blocks to a cluster
  while (choice.parts < most && choice.parts * 2 <= chunks && blocks * choice.parts * 2 <= room) choice.parts *= 2;
  if (!s.gated && !s.other && s.y_tiles == 0) fill_chip(choice, s, chunks, device);  // to_tiles: equal shares only
  if (!supports_choice(s, choice, device)) return std::nullopt;
  return choice;
}

// Measured on an H200 (h200_wgmma_ring.json): on average within 4 % of the best configuration. Launches of half the
// chip overlap in pairs: the weights of the second are loaded while the first multiplies.
std::optional<Choice> default_gemm_ring(const Shape& s, const DeviceInfo& device) {
  constexpr int64_t kLongPart = 16;  // chunks
  if (s.rows > kGemmRingMaxRows || s.experts) return std::nullopt;
  if (const auto codes = default_gemm_codes(s, device)) return codes;
  const int64_t sms = std::max(device.sm_count, 1);
  Choice choice{.kernel = Kernel::wgmma_ring, .tokens = s.rows <= 16 ? 16 : 32, .rows = 128, .blocks = 1};
  const auto blocks = [&] {
    const int64_t rows_of_w = s.gated ? choice.rows / 2 : choice.rows;
    return s.matrices * ((s.rows + choice.tokens - 1) / choice.tokens) * ((s.n + rows_of_w - 1) / rows_of_w);
  };
  // Two tiles of 32 tokens are faster than one of 64, if both fit at once.
  if (s.rows > 64 || (s.rows > 32 && blocks() * 2 > sms)) choice.tokens = 64;
  if (choice.tokens == 64) {
    if (blocks() > sms) choice.rows = 256;
    if (blocks() > sms) return std::nullopt;  // its blocks do not share a multiprocessor
  }
  // Clusters of more than two blocks leave some multiprocessors empty (see fill_chip). Up to 16 tokens, blocks share
  // multiprocessors.
  const int64_t few = sms * 3 / 4;
  const auto room = [&](int parts) {
    return s.rows <= 16 ? sms * 4 / 3 : s.rows <= 32 ? few : parts > 2 ? sms * 9 / 10 : sms;
  };
  const int64_t chunks = gemm_ring_chunks(s.type, s.k);
  const int most = s.rows <= 16 ? 8 : 4;
  while (choice.parts < most && choice.parts * 2 <= chunks && blocks() * choice.parts * 2 <= room(choice.parts * 2)) {
    choice.parts *= 2;
  }
  if (s.rows <= 32 && chunks > kLongPart * choice.parts && blocks() * choice.parts * 2 <= sms) {
    choice.parts *= 2, choice.blocks = 2;
  } else if (blocks() * choice.parts > (s.rows <= 16 ? few : sms)) {
    choice.blocks = 2;
  }
  if (!supports_choice(s, choice, device)) return std::nullopt;
  return choice;
}

// Rows for each expert from which on sorted rows are faster. Measured on an H200 (h200_sorted_experts.json; gated pairs
// of mxfp4: h200_few_rows.json). Most types take longer to unpack than those with one scale per block, and wide tiles
// unpack them for more rows at a time.
int64_t least_sorted(const Shape& s) {
  if (s.type == DType::mxfp4 && s.gated) return 72;
  const bool quick = !has_block_codes(s.type) || gpu_format(s.type).scale == GpuScale::d;
  return quick ? 128 : 64;
}

// Sorted rows take memory for each slot of a token. Larger u-batches of the largest models keep the kernel without it.
constexpr int64_t kMostSortedBytes = int64_t{1} << 30;

Choice default_mmq(const Shape& s, const DeviceInfo& device) {
  constexpr int64_t kMostBusy = 6, kHalfBusy = 4;  // tenths of the chip
  const std::optional<Choice> ring = default_gemm_ring(s, device);
  if (ring && ring->rows < 256) return *ring;
  if (const auto wide = default_wide(s, kMostBusy, device)) {
    constexpr int64_t kLongK = 3072;  // for the exchange of sums
    if (!ring || wide->parts == 1 || s.k >= kLongK) return *wide;
  }
  if (ring) return *ring;
  if (const auto wide = default_wide(s, kHalfBusy, device)) return *wide;
  if (const auto split = default_split(s, device)) return *split;
  const bool wgmma = has_wgmma(device);
  const Kernel kernel = wgmma ? Kernel::wgmma : Kernel::mma;
  if (s.experts) {
    // Rows of x that share weights, if routing were even. Tiles are chosen for this number, because a half-empty tile
    // still costs a full multiplication.
    const int64_t shared = (s.rows + s.matrices - 1) / s.matrices;
    if (shared >= least_sorted(s) && sorted_rows(s).bytes() <= kMostSortedBytes &&
        supports_choice(s, {Kernel::wgmma_sorted}, device)) {
      return {Kernel::wgmma_sorted};
    }
    if (shared >= 96) return {kernel, 64, 8};
    if (shared >= 24) return wgmma ? Choice{kernel, 64, 8} : Choice{kernel, 32, 4};
    return {kernel, shared >= 12 ? 32 : 16, 4};
  }
  // The largest tile that still gives a block to nearly every multiprocessor.
  const int64_t wanted = std::max(device.sm_count, 1) * 9 / 10;
  for (const Choice& choice :
       {Choice{kernel, 128, 8}, Choice{kernel, 128, 4}, Choice{kernel, 64, 4}, Choice{kernel, 32, 4}}) {
    if (!wgmma && (choice.tokens == 128 || choice.warps == 8)) continue;
    if (choice.tokens / 2 < s.rows && blocks_of(s, choice.tokens, choice.warps) >= wanted) return choice;
  }
  return {kernel, s.rows > 16 ? 32 : 16, 4};
}

Choice default_dequantize(const Shape& s, const DeviceInfo& device) {
  if (!s.experts) return {Kernel::cublas};
  if (has_wgmma(device) && s.compute != ComputeType::f32) {
    return {.kernel = Kernel::half_staged, .tokens = kStagedTokens, .rows = 256};
  }
  if (s.compute != ComputeType::f16) return {Kernel::float32};
  return {Kernel::half_mma, 64, 8};
}

// Tensor cores from this number of rows on; with fewer rows, one block per row of w is as fast.
Choice default_plain(const Shape& s, const DeviceInfo& device) {
  constexpr int64_t kFewRows = 8;
  constexpr int kMaxParts = 8, kBlocksEach = 4;  // per multiprocessor
  constexpr int kPairsStep = 32;                 // of k
  if (s.rows < kFewRows || !supports_pairs(s, device)) return {Kernel::exact};
  const int64_t rows = tf32_pairs_rows(s.n), columns = tf32_pairs_columns(s.n);
  const int64_t blocks = (s.rows + rows - 1) / rows * ((s.n + columns - 1) / columns);
  Choice choice{.kernel = Kernel::tf32_pairs};
  while (choice.parts < kMaxParts && blocks * choice.parts * 2 <= kBlocksEach * std::max(device.sm_count, 1) &&
         choice.parts * 2 <= s.k / kPairsStep) {
    choice.parts *= 2;
  }
  // The largest cluster for few rows, whose blocks have half as many.
  constexpr int64_t kMaxFewRows = 1024;
  const int64_t few = (s.rows + rows / 2 - 1) / (rows / 2) * ((s.n + columns - 1) / columns);
  const bool fits = few * 2 * kMaxParts <= kBlocksEach * std::max(device.sm_count, 1);
  if (s.rows <= kMaxFewRows && fits && s.k >= 4 * kMaxParts * kPairsStep) choice.parts = 2 * kMaxParts;
  return choice;
}

// Whether tensor cores are faster than `stream`, which multiplies several rows for longer than memory delivers the
// weights. With few weights they are not. Measured on an H200 (h200_batched_list.json, h200_few_sequences.json).
bool multiplies_long(const Shape& s) {
  constexpr int64_t kFewRows = 4, kMostRows = 16, kMiB = int64_t{1} << 20;
  if (s.experts || s.rows == 1) return false;
  // Every block of stream normalises all rows.
  if (s.norm && s.rows > kFewRows) return true;
  if (s.rows > kMostRows) return false;
  const int64_t stripes = (s.n + kGpuRows - 1) / kGpuRows * s.matrices * (s.gated ? 2 : 1);
  int64_t least = s.rows > 2 ? 16 : 28;
  if (s.gated && s.rows <= kFewRows) {
    least = 10;
  } else if (s.norm && s.rows == kFewRows) {
    least = 8;
  }
  return stripes * gpu_stripe_bytes(s.type, s.k) >= least * kMiB;
}

}  // namespace

Choice default_choice(const Shape& s, const DeviceInfo& device) {
  // A type without the layout: supports() says so of any kernel.
  if (s.layout != Layout::gpu || !has_gpu_layout(s.type)) return default_plain(s, device);
  if (has_tiles(s)) {
    if (const auto codes = default_gemm_codes(s, device)) return *codes;
  }
  ProductPath path = s.path;
  if (path == ProductPath::any) {
    const bool few = s.norm || (s.experts ? s.rows <= s.matrices : s.rows <= 16);
    path = few ? ProductPath::matvec : kForceBlas && !s.experts ? ProductPath::dequantize : ProductPath::mmq;
  }
  if (path == ProductPath::matvec) {
    if (s.norm && s.rows > kRingTokens && !s.experts) return default_mmq(s, device);
    if (multiplies_long(s)) {
      if (const auto ring = default_gemm_ring(s, device)) return *ring;
    }
    return default_stream(s, device);
  }
  return path == ProductPath::mmq ? default_mmq(s, device) : default_dequantize(s, device);
}

bool stream_takes_both(DType type, DType other) {
  if (type == other) return true;
#define DYNO_MIXED(a, b) \
  if (type == DType::a && other == DType::b) return true;
#include "ops/matmul/cuda/mixed_types.def"
#undef DYNO_MIXED
  return false;
}

}  // namespace dyno::ops::cuda
