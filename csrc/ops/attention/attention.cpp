#include "ops/attention/attention.h"

#include <optional>

#include "core/error.h"
#include "ops/attention/adaptive.h"
#include "ops/attention/cpu_launch.h"
#include "ops/attention/decode_cut.h"
#include "ops/attention/kernels.h"
#include "ops/attention/kernels_cuda.h"
#include "ops/attention/shapes.h"
#include "ops/compiled_chips.h"
#include "ops/contract.h"
#include "ops/half_tiles.h"
#include "ops/registry.h"
#include "ops/runs.h"

namespace dyno::ops {

#define DYNO_FAMILY attention
#define DYNO_FAMILY_DESC AttentionDesc
#define DYNO_FAMILY_VARIANTS "ops/attention/variants.def"
#include "ops/family_table.inc"

namespace {

// Maximum tokens of the decode variant; with more, it reads the cache too often.
constexpr int64_t kDecodeMaxTokens = 64;
// Minimum tokens for f32 caches on tensor cores; with fewer, most rows of their tiles would be empty.
constexpr int64_t kPairsLeastTokens = 16;

// Maximum tokens for `direct` over wide heads of two types if the chip has wgmma; with more, wgmma reads the cache less
// often.
constexpr int64_t kDirectEightsTokens = 16;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

bool is_cache_type(DType type) { return is_float(type) || type == DType::q8_0; }

Config blocked_config(int64_t q_tile, int64_t k_block) {
  return blocked_params{.q_tile = static_cast<int16_t>(q_tile), .k_block = static_cast<int16_t>(k_block)};
}

}  // namespace

bool flash_in_bf16(const AttentionDesc& desc) {
#ifdef DYNO_CUDA_FORCE_BF16
  return desc.k_type != DType::f16 || (!desc.v_in_k && desc.v_type != DType::f16);
#else
  return desc.k_type == DType::bf16;
#endif
}

namespace {

Support flash_pairs_supports(const AttentionDesc& desc, const Config& config, const DeviceInfo& device) {
  if (desc.exact) return Support::no("exact=1: flash attention over f16 pairs multiplies with 22 bits only");
  const DType v_type = desc.v_in_k ? desc.k_type : desc.v_type;
  if (desc.k_type != DType::f32 || v_type != DType::f32) {
    return Support::no(str_cat("k_type=", dtype_name(desc.k_type), " with v_type=", dtype_name(v_type),
                               ": flash attention over f16 pairs reads f32 keys and values"));
  }
  const int head = flash_head(desc.dk, desc.dv);
  if (head > kFlashPairsMaxHead) {
    return Support::no(str_cat("heads of dk=", desc.dk, " dv=", desc.dv, " are wider than the ", kFlashPairsMaxHead,
                               " and ", flash_value_head(kFlashPairsMaxHead), " of flash attention over f16 pairs"));
  }
  if (config.variant == k_flash_wgmma_pairs) {
    if (!desc.paired) return Support::no("paired=0: flash_wgmma_pairs reads keys and values that are f16 pairs");
    if (const Support chip = supports_wgmma(device); !chip) return chip;
    if (const Support fits = fits_shared(kFlashWgmmaShared, device); !fits) return fits;
    return prompt_splits(desc, kFlashWgmmaPairsRows, flash_wgmma_pairs_params::of(config).splits);
  }
  const auto pairs = flash_pairs_params::of(config);
  const Support fits = fits_shared(flash_pairs_shared_bytes(head, pairs.rows) + 1024, device);  // plus static memory
  if (!fits) return fits;
  return prompt_splits(desc, pairs.rows, pairs.splits);
}

// Types of keys and values that one f16 or bf16 product reads.
bool narrow_types(DType k, DType v) {
  const auto halves = [](DType type) { return type == DType::f16 || type == DType::q8_0; };
  return (halves(k) && halves(v)) || (k == DType::bf16 && v == DType::bf16);
}

// Requirements of the tensor core variants, in addition to the common ones.
Support flash_supports(const AttentionDesc& desc, const Config& config, const DeviceInfo& device) {
  if (desc.exact) return Support::no("exact=1: flash attention multiplies with 11 or 8 bits only");
  const DType v_type = desc.v_in_k ? desc.k_type : desc.v_type;
  if (!narrow_types(desc.k_type, v_type)) {
    return Support::no(str_cat("k_type=", dtype_name(desc.k_type), " with v_type=", dtype_name(v_type),
                               ": flash attention reads f16 or q8_0 keys and values, or bf16 for both"));
  }
  if (flash_in_bf16(desc) && device.compute_capability < 80) {
    return Support::no(str_cat("compute capability ", device.compute_capability,
                               " has no bfloat16 matrix instructions; they come with 80"));
  }
  const int64_t widest = config.variant == k_flash_wgmma ? kFlashWideHead : kFlashMaxHead;
  if (std::max(desc.dk, desc.dv) > widest) {
    return Support::no(
        str_cat("heads of dk=", desc.dk, " dv=", desc.dv, " are wider than the ", widest, " of flash attention"));
  }
  const int head = flash_head(desc.dk, desc.dv);
  if (config.variant == k_flash_wgmma) {
    if (const Support chip = supports_wgmma(device); !chip) return chip;
    if (const Support fits = fits_shared(kFlashWgmmaShared, device); !fits) return fits;
    const auto wgmma = flash_wgmma_params::of(config);
    if (wgmma.rows == 128 && head > kFlashMaxHead) {
      return Support::no(str_cat("rows=128 do not fit into registers with heads of ", head));
    }
    return prompt_splits(desc, wgmma.rows, wgmma.splits);
  }
  const int rows = flash_params::of(config).rows;
  if (rows == 128 && head > 128) {
    return Support::no(str_cat("rows=128 do not fit into registers with heads of ", head));
  }
  const size_t shared = flash_shared_bytes(head, rows);
  if (shared > static_cast<size_t>(device.shared_per_block_bytes)) {
    return Support::no(
        str_cat(shared, " bytes of shared memory are more than the device's ", device.shared_per_block_bytes));
  }
  return Support::yes();
}

Support direct_supports(const AttentionDesc& desc, const Config& config, const DeviceInfo& device) {
  if (desc.exact) return Support::no("exact=1: direct attention multiplies with 11 or 8 bits only");
  const DType v_type = desc.v_in_k ? desc.k_type : desc.v_type;
  if (!narrow_types(desc.k_type, v_type)) {
    return Support::no(str_cat("k_type=", dtype_name(desc.k_type), " with v_type=", dtype_name(v_type),
                               ": direct attention reads f16 or q8_0 keys and values, or bf16 for both"));
  }
  if (desc.k_type == DType::bf16 && device.compute_capability < 80) {
    return Support::no(str_cat("compute capability ", device.compute_capability,
                               " has no bfloat16 matrix instructions; they come with 80"));
  }
  const int64_t widest = desc.k_type == v_type ? kDirectMaxHead : kDirectMaxMixedHead;
  if (desc.dk % 4 != 0 || desc.dv % 4 != 0 || std::max(desc.dk, desc.dv) > widest) {
    return Support::no(
        str_cat("heads of dk=", desc.dk, " dv=", desc.dv, ": direct attention takes multiples of 4 up to ", widest));
  }
  const int rows = direct_params::of(config).rows, head = direct_head(std::max(desc.dk, desc.dv));
  if (rows == 16 && desc.k_type != v_type) {
    return Support::no(str_cat("rows=16 are for keys and values of one type, not k_type=", dtype_name(desc.k_type),
                               " with v_type=", dtype_name(v_type)));
  }
  if (rows == 16 && head > 128) {
    return Support::no(str_cat("rows=16 do not fit into registers with heads of ", head));
  }
  const size_t shared = direct_shared_bytes(head, rows) + kDirectStaticBytes;
  if (shared > static_cast<size_t>(device.shared_per_block_bytes)) {
    return Support::no(
        str_cat(shared, " bytes of shared memory are more than the device's ", device.shared_per_block_bytes));
  }
  return Support::yes();
}

// Its kernels with a block of 8 rows support the most shapes.
Support adaptive_supports(const AttentionDesc& desc, const DeviceInfo& device) {
  if (!desc.v_in_k && desc.k_type != desc.v_type) {
    return Support::no(str_cat("k_type=", dtype_name(desc.k_type), " with v_type=", dtype_name(desc.v_type),
                               ": variant adaptive reads keys and values of one type"));
  }
  return direct_supports(desc, direct_params{.rows = 8, .splits = 1}, device);
}

// HalfTiles are written by the kernel for steps (steps.cuh).
Support tiles_supports(const AttentionDesc& desc, const Config& config) {
  const bool in_one_part = config.variant == k_adaptive ||
                           (config.variant == k_direct && direct_params::of(config).splits == 1) ||
                           config.variant == k_flash || config.variant == k_flash_wgmma;
  if (!in_one_part) return Support::no("attention writes f16 tiles only if the keys of a sequence are in one part");
  if (desc.out_tiles != 16 && desc.out_tiles != 32 && desc.out_tiles != 64) {
    return Support::no(str_cat("f16 tiles have 16, 32 or 64 rows, not ", desc.out_tiles));
  }
  const int64_t group = desc.heads / desc.kv_heads;
  if (!steps_shape(desc)) {
    return Support::no("attention writes f16 tiles only over f16 or bf16 caches, with heads of 64 or 128");
  }
  if (group * desc.dv % HalfTiles::kBlock != 0) {
    return Support::no(
        str_cat(group, " heads of ", desc.dv, " are not a multiple of ", HalfTiles::kBlock, ", the blocks of tiles"));
  }
  return Support::yes();
}

Support latent_supports(const AttentionDesc& desc, const DeviceInfo& device) {
  if (const Support shape = latent_shape(desc, device); !shape) return shape;
  return fits_shared(latent_shared_bytes(desc.k_type) + 8192, device);  // plus static shared memory
}

Support latent_cluster_supports(const AttentionDesc& desc, const DeviceInfo& device) {
  if (const Support shape = latent_shape(desc, device); !shape) return shape;
  if (const Support clusters = clusters_supported(device); !clusters) return clusters;
  return fits_shared(latent_cluster_shared_bytes(desc.k_type, false) + 1024, device);
}

}  // namespace

Support supports(const AttentionDesc& desc, const Config& config, const DeviceInfo& device) {
  const Support sizes = check_sizes(
      {{"m", desc.m}, {"heads", desc.heads}, {"kv_heads", desc.kv_heads}, {"dk", desc.dk}, {"dv", desc.dv}});
  if (!sizes) return sizes;
  if (desc.heads % desc.kv_heads != 0) {
    return Support::no(str_cat("heads=", desc.heads, " is not a multiple of kv_heads=", desc.kv_heads));
  }
  if (desc.v_in_k && desc.dv > desc.dk) {
    return Support::no(str_cat("dv=", desc.dv, " values do not lie within keys of dk=", desc.dk));
  }
  const auto row = [](std::string_view name, DType type, int64_t size) {
    if (!is_cache_type(type)) {
      return Support::no(
          str_cat(name, "=", dtype_name(type), " is not a KV cache type; expected f32, f16, bf16 or q8_0"));
    }
    const uint32_t block = dtype_info(type).block_elements;
    if (size % block == 0) return Support::yes();
    return Support::no(
        str_cat("a head has ", size, " elements, not a multiple of the ", block, " in a block of ", dtype_name(type)));
  };
  if (desc.paired && config.variant != k_flash_wgmma_pairs) {
    return Support::no("paired=1: only variant flash_wgmma_pairs reads keys and values that are f16 pairs");
  }
  if (desc.paired && (desc.v_in_k || ((desc.dk | desc.dv) % 8) != 0)) {
    return Support::no(str_cat("paired=1 needs values apart from keys, and multiples of 8; dk=", desc.dk,
                               " dv=", desc.dv, " v_in_k=", desc.v_in_k ? 1 : 0));
  }
  if (const Support keys = row("k_type", desc.k_type, desc.dk); !keys) return keys;
  if (!desc.v_in_k) {
    if (const Support values = row("v_type", desc.v_type, desc.dv); !values) return values;
  }
  if (device.kind == DeviceKind::cuda && std::max(desc.dk, desc.dv) > kCudaMaxHead) {
    return Support::no(str_cat("heads of dk=", desc.dk, " dv=", desc.dv, " are wider than the ", kCudaMaxHead,
                               " of the CUDA kernels"));
  }
  const Support checked = check_config(Family::attention, kVariants, kInstances, config, device);
  if (checked && config.variant == k_decode && desc.m > kDecodeMaxTokens) {
    return Support::no(str_cat("variant decode is for up to ", kDecodeMaxTokens, " tokens, not m=", desc.m));
  }
  if (checked && desc.selected == 0 && config.variant == k_gather) {
    return Support::no("selected=0: variant gather reads selected positions");
  }
  if (checked && desc.selected != 0) {
    if (config.variant != k_gather && config.variant != k_rows && config.variant != k_latent) {
      return Support::no(str_cat("selected=", desc.selected, ": variant ", kVariants[config.variant].name,
                                 " reads all positions; gather on the CPU, latent and rows on a GPU read selected "
                                 "ones"));
    }
    if (desc.selected < 0 || !desc.v_in_k || desc.kv_heads != 1 || desc.windowed) {
      return Support::no(str_cat("selected=", desc.selected, " with v_in_k=", desc.v_in_k, " kv_heads=", desc.kv_heads,
                                 " windowed=", desc.windowed, ": selected positions are latents without a window"));
    }
  }
  if (checked && device.kind == DeviceKind::cpu && desc.out_tiles != 0) {
    return Support::no(str_cat("out_tiles=", desc.out_tiles, ": only CUDA kernels write f16 tiles"));
  }
  if (!checked || device.kind == DeviceKind::cpu) return checked;
  const bool split_rows = config.variant == k_rows && rows_params::of(config).splits > 1;
  const bool splits = config.variant == k_adaptive || config.variant == k_direct || config.variant == k_latent ||
                      config.variant == k_latent_cluster || split_rows;
  // Tiles of selected positions have rows of one token each, so that one part of the keys is enough for a prompt.
  const bool prompt = desc.selected > 0 && config.variant == k_latent && latent_params::of(config).splits == 1;
  if (splits && !prompt && desc.m > kDecodeMaxTokens) {
    return Support::no(str_cat("splits of the keys are for up to ", kDecodeMaxTokens, " tokens, not m=", desc.m));
  }
  if (split_rows && AttentionTiles{kCudaRowTile, desc.heads / desc.kv_heads}.bound(desc.m, desc.m) * desc.kv_heads >
                        kStreamCounters) {
    return Support::no(
        str_cat("m=", desc.m, " tokens and heads=", desc.heads, " make more tiles than a launch can count"));
  }
  if (desc.out_tiles != 0) {
    if (const Support tiles = tiles_supports(desc, config); !tiles) return tiles;
  }
  if (config.variant == k_rows) return checked;
  if (config.variant == k_latent) return latent_supports(desc, device);
  if (config.variant == k_latent_cluster) return latent_cluster_supports(desc, device);
  if (config.variant == k_flash_pairs || config.variant == k_flash_wgmma_pairs) {
    return flash_pairs_supports(desc, config, device);
  }
  if (config.variant == k_adaptive) return adaptive_supports(desc, device);
  return config.variant == k_direct ? direct_supports(desc, config, device) : flash_supports(desc, config, device);
}

bool attention_in_pairs(const AttentionDesc& desc, const DeviceInfo& device) {
  if (device.kind != DeviceKind::cuda) return false;
  return desc.paired ? supports(desc, flash_wgmma_pairs_params{.splits = 1}, device).ok
                     : supports(desc, flash_pairs_params{.rows = 64, .splits = 1}, device).ok;
}

namespace {

// As many parts as give every multiprocessor one or two blocks.
int16_t cuda_splits(int64_t tiles, const DeviceInfo& device) {
  int16_t splits = 1;
  while (splits < 32 && tiles * splits < device.sm_count) splits = static_cast<int16_t>(splits * 2);
  return splits;
}

// For selected positions: as many parts as leave every multiprocessor one block.
Config selected_default(const AttentionDesc& desc, const DeviceInfo& device) {
  const auto blocks = [&](int64_t rows) { return desc.m * AttentionTiles{rows, desc.heads}.of_run(1); };
  std::optional<Config> best;
  for (const Config& config : kInstances) {
    if (config.variant != k_latent || !supports(desc, config, device)) continue;
    const int16_t splits = latent_params::of(config).splits;
    if (splits == 1 || blocks(kLatentRows) * splits <= device.sm_count) best = config;
  }
  if (best) return *best;
  const Config split = rows_params{.splits = cuda_splits(blocks(kCudaRowTile), device)};
  return supports(desc, split, device) ? split : rows_params{.splits = 1};
}

// For few tokens over a cache of two types: `direct` with as many parts as give each multiprocessor about four blocks,
// if each token is of another sequence. Measured with 1 to 64 sequences (benchmarks/results/h200_mixed_caches.json).
std::optional<Config> two_types_default(const AttentionDesc& desc, const DeviceInfo& device) {
  if (desc.v_in_k || desc.k_type == desc.v_type || desc.m > kDecodeMaxTokens || std::max(desc.dk, desc.dv) > 128) {
    return {};
  }
  const AttentionTiles tiles{8, std::max<int64_t>(1, desc.heads / std::max<int64_t>(1, desc.kv_heads))};
  const double wanted = 4.0 * static_cast<double>(device.sm_count);
  const auto whole = static_cast<double>(desc.m * tiles.of_run(1) * desc.kv_heads);
  std::optional<Config> best;
  double least = 0;
  for (const Config& config : kInstances) {
    if (config.variant != k_direct || direct_params::of(config).rows != 8 || !supports(desc, config, device)) continue;
    const double blocks = whole * direct_params::of(config).splits;
    const double distance = std::max(blocks / wanted, wanted / blocks);
    if (!best || distance < least) best = config, least = distance;
  }
  return best;
}

// For f16 pairs: as many parts of the keys as give every multiprocessor a block.
Config paired_default(const AttentionDesc& desc, const DeviceInfo& device) {
  const AttentionTiles tiles{kFlashWgmmaPairsRows, desc.heads / std::max<int64_t>(1, desc.kv_heads)};
  const int64_t blocks = tiles.bound(desc.m, 1) * desc.kv_heads;
  int16_t splits = 1;
  while (splits < 8 && blocks * splits * 2 <= device.sm_count) splits = static_cast<int16_t>(splits * 2);
  const Config parts = flash_wgmma_pairs_params{.splits = splits};
  return supports(desc, parts, device) ? parts : flash_wgmma_pairs_params{.splits = 1};
}

// The best variant that the device supports: tensor core variants first, then rows.
Config cuda_default(const AttentionDesc& desc, const DeviceInfo& device) {
  if (desc.paired) return paired_default(desc, device);
  if (const std::optional<Config> two_types = two_types_default(desc, device)) return *two_types;
  const int64_t group = std::max<int64_t>(1, desc.heads / std::max<int64_t>(1, desc.kv_heads));
  const auto blocks = [&](int64_t rows) { return AttentionTiles{rows, group}.bound(desc.m, 1) * desc.kv_heads; };
  if (blocks(64) < device.sm_count && supports(desc, adaptive_params{}, device)) return adaptive_params{};
  if (desc.m <= kDecodeMaxTokens && blocks(64) < device.sm_count) {
    std::optional<Config> best;
    // For wide heads of two types: as many parts as give every multiprocessor a block, or two if tiles of 64 rows could
    // not split the keys. With many tokens, or without room for parts, those tiles read the cache less often.
    const int64_t room = device.sm_count * (has_wgmma(device) ? 1 : 2);
    const bool few = desc.m <= kDirectEightsTokens || desc.m * group <= 8 || !has_wgmma(device);
    for (const Config& config : kInstances) {
      if (!few || config.variant != k_direct || !supports(desc, config, device)) continue;
      const auto direct = direct_params::of(config);
      if (direct.rows == 8 && (direct.splits == 1 || blocks(8) * direct.splits <= room)) best = config;
    }
    if (best && (direct_params::of(*best).splits > 1 || !has_wgmma(device))) return *best;
    best.reset();
    for (const Config& config : kInstances) {
      if (config.variant != k_latent_cluster || !supports(desc, config, device)) continue;
      const int64_t clusters = default_clusters(blocks(kLatentRows), desc.k_type, device);
      if (latent_cluster_params::of(config).clusters <= clusters) best = config;
    }
    if (best) return *best;
    for (const Config& config : kInstances) {
      if (config.variant != k_latent || !supports(desc, config, device)) continue;
      const int16_t splits = latent_params::of(config).splits;
      if (splits == 1 || blocks(kLatentRows) * splits <= device.sm_count) best = config;
    }
    if (best) return *best;
  }
  // Blocks of 128 rows if they fill nine tenths of the multiprocessors; otherwise of 64 rows, with the keys in parts.
  int16_t parts = 1;
  while (parts < 8 && blocks(64) * parts * 2 <= device.sm_count) parts = static_cast<int16_t>(parts * 2);
  const bool large = blocks(128) * 10 >= device.sm_count * 9 && std::max(desc.dk, desc.dv) <= kFlashMaxHead;
  const Config wgmma =
      large ? flash_wgmma_params{.rows = 128, .splits = 1} : flash_wgmma_params{.rows = 64, .splits = parts};
  if (supports(desc, wgmma, device)) return wgmma;
  if (desc.m >= kPairsLeastTokens) {
    int16_t pair_parts = 1;  // two blocks of 64 rows fit on a multiprocessor
    while (pair_parts < 8 && blocks(64) * pair_parts <= device.sm_count)
      pair_parts = static_cast<int16_t>(pair_parts * 2);
    for (const flash_pairs_params pairs :
         {flash_pairs_params{.rows = 128, .splits = 1}, flash_pairs_params{.rows = 64, .splits = pair_parts},
          flash_pairs_params{.rows = 64, .splits = 1}}) {
      if (pairs.rows == 128 && blocks(128) < 2 * device.sm_count) continue;
      if (supports(desc, pairs, device)) return pairs;
    }
  }
  for (const int16_t rows : {int16_t{128}, int16_t{64}}) {
    const Config whole = flash_params{.rows = rows};
    if ((rows == 64 || blocks(128) >= 2 * device.sm_count) && supports(desc, whole, device)) return whole;
  }
  const Config split = rows_params{.splits = cuda_splits(blocks(kCudaRowTile), device)};
  return supports(desc, split, device) ? split : rows_params{.splits = 1};
}

}  // namespace

Config default_config(const AttentionDesc& desc, const DeviceInfo& device) {
  if (device.kind == DeviceKind::cuda) {
    return desc.selected > 0 ? selected_default(desc, device) : cuda_default(desc, device);
  }
  const int64_t rows = desc.m * (desc.heads / std::max<int64_t>(1, desc.kv_heads));
  if (desc.selected > 0) {
    // As many heads at once as leave every core an item, because each item copies the rows again.
    for (const int64_t at_once : {128, 64, 16}) {
      if (desc.heads > at_once / 2 && desc.m * ceil_div(desc.heads, at_once) >= device.cores) {
        return gather_params{.rows = static_cast<int16_t>(at_once)};
      }
    }
    return gather_params{.rows = static_cast<int16_t>(desc.heads > 8 ? 16 : 8)};
  }
  const auto tiles = [&](int64_t tile_rows) { return desc.kv_heads * ceil_div(rows, tile_rows); };
  // With few rows, transposed scores waste lanes. And only the decode variant splits the keys, which helps if there are
  // fewer tiles than cores.
  if (rows <= kDecodeRows || (desc.m <= kDecodeMaxTokens && tiles(16) < device.cores)) {
    return decode_params{.splits = static_cast<int16_t>(decode_splits(desc, device.cores))};
  }
  // The largest tile that gives every core several tiles and uses at most half of its second-level cache. Each tile
  // reads and widens the keys again.
  constexpr std::array<std::pair<int64_t, int64_t>, 2> kLarge = {{{256, 128}, {128, 64}}};
  for (const auto& [q_tile, k_block] : kLarge) {
    const int64_t bytes = blocked_floats(q_tile, k_block, desc.dk, desc.dv) * static_cast<int64_t>(sizeof(float));
    if (tiles(q_tile) >= 4 * device.cores && 2 * bytes <= device.l2_bytes) return blocked_config(q_tile, k_block);
  }
  return blocked_config(tiles(64) < device.cores ? 16 : 64, 64);
}

Config launch_config(const AttentionDesc& desc, const LaunchShape& shape, const DeviceInfo& device) {
  const AdaptiveKernels kernels{.steps = steps_shape(desc),
                                .sixteens = supports(desc, direct_params{.rows = 16, .splits = 1}, device).ok,
                                .flash = supports(desc, flash_wgmma_params{.rows = 64, .splits = 1}, device).ok};
  const AdaptiveChoice best = best_kernel(kernels, shape, device);
  const auto rows = static_cast<int16_t>(best.rows), splits = static_cast<int16_t>(best.parts);
  if (best.kernel == AdaptiveKernel::flash) return flash_wgmma_params{.rows = rows, .splits = splits};
  return direct_params{.rows = rows, .splits = splits};  // with one part for steps
}

bool steps_in_one_part(const AttentionDesc& desc, const Config& config, int64_t depth, const DeviceInfo& device) {
  if (config.variant != k_adaptive || desc.windowed) return true;  // a window is short
  AttentionArgs args;
  args.n_runs = static_cast<int32_t>(desc.m);
  args.slot_positions = depth;
  const Config chosen = launch_config(desc, launch_shape(desc, args), device);
  return chosen.variant == k_direct && direct_params::of(chosen).splits == 1;
}

// Assumes a cache with only this batch, because a Desc does not have the depth.
Cost cost(const AttentionDesc& desc) {
  const double m = static_cast<double>(desc.m), heads = static_cast<double>(desc.heads);
  const double most = desc.selected > 0 ? static_cast<double>(desc.selected) : m;
  const double pairs = std::min(m * (m + 1) / 2, m * most) * heads;
  const double keys = m * static_cast<double>(desc.kv_heads) * static_cast<double>(row_bytes(desc.k_type, desc.dk));
  const double values =
      desc.v_in_k ? 0 : m * static_cast<double>(desc.kv_heads) * static_cast<double>(row_bytes(desc.v_type, desc.dv));
  const double width = static_cast<double>(desc.dk + desc.dv);
  return {keys + values + m * heads * width * 4, pairs * width * 2};
}

// Bytes of partial results of a prompt kernel that splits the keys.
static size_t prompt_partials_bytes(const AttentionDesc& desc, int64_t splits) {
  return splits == 1 ? 0 : static_cast<size_t>(desc.m * desc.heads * splits * (2 + desc.dv)) * sizeof(float);
}

size_t scratch_bytes(const AttentionDesc& desc, const Config& config) {
  if (config.variant == k_rows) return attention_partials_bytes(desc, kCudaRowTile, rows_params::of(config).splits);
  if (config.variant == k_flash) return 0;
  if (config.variant == k_flash_wgmma) return prompt_partials_bytes(desc, flash_wgmma_params::of(config).splits);
  if (config.variant == k_flash_pairs) return prompt_partials_bytes(desc, flash_pairs_params::of(config).splits);
  if (config.variant == k_flash_wgmma_pairs) {
    return prompt_partials_bytes(desc, flash_wgmma_pairs_params::of(config).splits);
  }
  if (config.variant == k_latent) {
    return attention_partials_bytes(desc, kLatentRows, latent_params::of(config).splits);
  }
  if (config.variant == k_latent_cluster) {
    return attention_partials_bytes(desc, kLatentRows, latent_cluster_params::of(config).clusters);
  }
  if (config.variant == k_adaptive) return adaptive_scratch_bytes(desc.dv);
  if (config.variant == k_direct) {
    const auto direct = direct_params::of(config);
    return attention_partials_bytes(desc, direct.rows, direct.splits);
  }
  const auto decode_floats = [&](int64_t splits) {
    const DecodeLayout layout(desc, splits);
    return layout.private_floats + layout.tiles_per_share * layout.tile_floats;
  };
  if (config.variant == k_decode) {
    return static_cast<size_t>(decode_floats(decode_params::of(config).splits)) * sizeof(float);
  }
  if (config.variant == k_gather) return gather_bytes(gather_params::of(config).rows, desc);
  const auto blocked = blocked_params::of(config);
  const int64_t floats = blocked_floats(blocked.q_tile, blocked.k_block, desc.dk, desc.dv);
  return static_cast<size_t>(std::max(floats, decode_floats(kFewRowsSplits))) * sizeof(float);
}

static void check_scalars(const AttentionDesc& desc, const AttentionArgs& args) {
  DYNO_CHECK(PlanError, !desc.windowed || args.window >= 1, "[attention] window is ", args.window,
             "; expected 1 or more");
  DYNO_CHECK(PlanError, !desc.softcap || args.softcap > 0, "[attention] softcap is ", args.softcap,
             "; expected a number above 0");
}

void launch(const Config& config, const AttentionDesc& desc, const AttentionArgs& args, CpuContext& context) {
  check_runs("attention", args.runs, args.n_runs, desc.m, args.slot_positions);
  check_scalars(desc, args);
  if (config.variant == k_decode) {
    launch_decode(decode_params::of(config).splits, desc, args, context);
  } else if (config.variant == k_gather) {
    launch_gather(gather_params::of(config).rows, desc, args, context);
  } else {
    const auto blocked = blocked_params::of(config);
    launch_blocked(blocked.q_tile, blocked.k_block, desc, args, context);
  }
}

#ifdef DYNO_HAVE_CUDA
static void launch_latent(const Config& config, const AttentionDesc& desc, const AttentionArgs& args,
                          CudaStream& stream) {
  if constexpr (!group_built(KernelGroup::latent)) {
    throw_left_out(KernelGroup::latent);
  } else if (config.variant == k_latent) {
    attention_latent_cuda(args, desc, latent_params::of(config).splits, stream);
  } else {
    attention_latent_cluster_cuda(args, desc, latent_cluster_params::of(config).clusters, stream);
  }
}

void launch(const Config& config, const AttentionDesc& desc, const AttentionArgs& args, CudaStream& stream) {
  check_scalars(desc, args);
  // An op key does not distinguish a prompt from a step with more sequences than `direct` supports. Tiles of a prompt
  // would have the rows of one token each.
  const bool prompts = config.variant == k_flash || config.variant == k_flash_wgmma;
  if (desc.out_tiles != 0) {
    const bool launched = attention_steps_cuda(args, desc, stream);
    DYNO_CHECK(PlanError, launched, "[attention] f16 tiles need one token of each sequence; these are ", desc.m,
               " tokens of ", args.n_runs, ", or rows of the cache are not aligned to 16 bytes");
    return;
  }
  if (prompts && attention_steps_cuda(args, desc, stream)) return;
  if (config.variant == k_adaptive) {
    launch(launch_config(desc, launch_shape(desc, args), *stream.device), desc, args, stream);
  } else if (config.variant == k_flash) {
    attention_flash_cuda(args, desc, flash_params::of(config).rows, stream);
  } else if (config.variant == k_flash_wgmma) {
    const auto wgmma = flash_wgmma_params::of(config);
    attention_flash_wgmma_cuda(args, desc, wgmma.rows, wgmma.splits, stream);
  } else if (config.variant == k_flash_pairs) {
    const auto pairs = flash_pairs_params::of(config);
    attention_flash_pairs_cuda(args, desc, pairs.rows, pairs.splits, stream);
  } else if (config.variant == k_flash_wgmma_pairs) {
    attention_flash_wgmma_pairs_cuda(args, desc, flash_wgmma_pairs_params::of(config).splits, stream);
  } else if (config.variant == k_direct) {
    const auto direct = direct_params::of(config);
    attention_direct_cuda(args, desc, direct.rows, direct.splits, stream);
  } else if (config.variant == k_latent || config.variant == k_latent_cluster) {
    launch_latent(config, desc, args, stream);
  } else {
    attention_rows_cuda(args, desc, rows_params::of(config).splits, stream);
  }
}
#endif

}  // namespace dyno::ops
