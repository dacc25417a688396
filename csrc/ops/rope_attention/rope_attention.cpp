#include "ops/rope_attention/rope_attention.h"

#include <algorithm>
#include <optional>

#include "core/error.h"
#include "ops/attention/adaptive.h"
#include "ops/attention/attention.h"
#include "ops/attention/kernels_cuda.h"
#include "ops/contract.h"
#include "ops/qkv_rope_store/qkv_rope_store.h"
#include "ops/registry.h"
#include "ops/runs.h"

namespace dyno::ops {

#define DYNO_FAMILY rope_attention
#define DYNO_FAMILY_DESC RopeAttentionDesc
#define DYNO_FAMILY_VARIANTS "ops/rope_attention/variants.def"
#include "ops/family_table.inc"

namespace {

bool is_token(const Config& config) { return config.variant == k_token || config.variant == k_token_cluster; }
int token_splits(const Config& config) {
  if (config.variant == k_token_cluster) return token_cluster_params::of(config).clusters * kClusterBlocks;
  return token_params::of(config).splits;
}

// Attention behind qkv_rope_store, whose support the caller has checked.
Config stored_attention(const Config& config) {
  const auto stored = stored_params::of(config);
  const bool flash = stored.rows == 64;
  const std::string_view name = flash ? "flash_wgmma" : "direct";
  const std::span<const VariantInfo> all = attention_variants();
  const auto it = std::find_if(all.begin(), all.end(), [&](const VariantInfo& v) { return v.name == name; });
  return {static_cast<uint8_t>(it - all.begin()), {stored.rows, stored.splits}};
}

// The configuration of attention for the second part; if there is none, one for the same shapes.
Config attention_config(const Config& config) {
  if (config.variant == k_stored) return stored_attention({config.variant, {stored_params::of(config).rows, 1}});
  const bool token = is_token(config);
  const std::string_view name = config.variant == k_apart ? "decode"
                                : token                   ? "direct"
                                                          : kVariants[config.variant].name;
  const std::span<const VariantInfo> all = attention_variants();
  const auto it = std::find_if(all.begin(), all.end(), [&](const VariantInfo& v) { return v.name == name; });
  Config out{static_cast<uint8_t>(it - all.begin()), config.params};
  if (token) out.params = {kTokenRows, 1};
  return out;
}

// Of qkv_rope_store before variant stored, in nanoseconds as AdaptiveChoice::time.
constexpr double kStoreTime = 3500;

Config store_config(const QkvRopeStoreDesc& desc) { return default_config(desc, DeviceInfo{}); }

size_t padded(size_t bytes) { return (bytes + 63) / 64 * 64; }

// The results of the first part for the second one on a CPU: rotated queries and positions of tokens.
struct Apart {
  size_t queries, positions;
  explicit Apart(const RopeAttentionDesc& d)
      : queries(padded(static_cast<size_t>(d.m * d.heads * d.dk) * sizeof(float))),
        positions(padded(static_cast<size_t>(d.m) * sizeof(int32_t))) {}
  size_t bytes() const { return queries + positions; }
};

Support latent_fused(const RopeAttentionDesc& desc, const DeviceInfo& device) {
  if (!desc.latent) return Support::no("latent=0: variant latent_cluster reads caches of latent attention");
  // Four dimensions are rotated together.
  if (desc.n_rot % 8 != 0 || desc.n_rot > kLatentMaxRotary) {
    return Support::no(str_cat("n_rot=", desc.n_rot, " is not a multiple of 8 up to ", kLatentMaxRotary));
  }
  const size_t shared = latent_cluster_shared_bytes(desc.k_type, true) + 1024;
  if (shared > static_cast<size_t>(device.shared_per_block_bytes)) {
    return Support::no(
        str_cat(shared, " bytes of shared memory are more than the device's ", device.shared_per_block_bytes));
  }
  return Support::yes();
}

Support one_type(const RopeAttentionDesc& desc) {
  if (desc.k_type == desc.v_type) return Support::yes();
  return Support::no(str_cat("k_type=", dtype_name(desc.k_type), " with v_type=", dtype_name(desc.v_type),
                             ": variants other than latent_cluster store keys and values of one type"));
}

Support direct_fused(const RopeAttentionDesc& desc, const Config& config, const DeviceInfo& device) {
  if (desc.latent) return Support::no("latent=1: direct attention rotates whole heads");
  if (const Support same = one_type(desc); !same) return same;
  if (desc.dk % 8 != 0 || desc.dv % 8 != 0) {
    return Support::no(
        str_cat("heads of dk=", desc.dk, " dv=", desc.dv, ": variant direct rotates and stores multiples of 8"));
  }
  if (std::max(desc.dk, desc.dv) > kDirectMaxFusedHead) {
    return Support::no(str_cat("heads of dk=", desc.dk, " dv=", desc.dv, " are wider than the ", kDirectMaxFusedHead,
                               " that variant direct rotates and stores"));
  }
  const int head = direct_head(std::max(desc.dk, desc.dv));
  const int rows = direct_params::of(config).rows;
  const size_t shared = direct_shared_bytes(head, rows) + direct_fresh_bytes(head, rows) + kDirectStaticBytes;
  if (shared > static_cast<size_t>(device.shared_per_block_bytes)) {
    return Support::no(
        str_cat(shared, " bytes of shared memory are more than the device's ", device.shared_per_block_bytes));
  }
  return Support::yes();
}

Support token_fused(const RopeAttentionDesc& desc, const Config& config, const DeviceInfo& device) {
  if (config.variant == k_token_cluster) {
    if (const Support clusters = clusters_supported(device); !clusters) return clusters;
  }
  if (desc.m != 1) return Support::no(str_cat("m=", desc.m, ": variant token computes one token"));
  if (desc.latent || desc.dk != desc.dv || (desc.dk != 64 && desc.dk != 128)) {
    return Support::no(str_cat("dk=", desc.dk, " dv=", desc.dv, " latent=", desc.latent,
                               ": variant token needs keys and values of 64 or 128 dims"));
  }
  if (const Support same = one_type(desc); !same) return same;
  if (desc.k_type == DType::q8_0) return Support::no("k_type=q8_0: variant token reads f16 or bf16");
  if (desc.heads > desc.kv_heads * kTokenRows) {
    return Support::no(str_cat("heads=", desc.heads, " with kv_heads=", desc.kv_heads,
                               ": variant token supports at most ", kTokenRows, " heads per KV head"));
  }
  if (desc.softcap) return Support::no("softcap=1: variant token has no soft cap");
  if (desc.n_rot % (desc.dk / 16) != 0) {  // a lane's dimensions are rotated with the dimensions of exactly one other
                                           // lane
    return Support::no(str_cat("n_rot=", desc.n_rot, " is not a multiple of ", desc.dk / 16));
  }
  return Support::yes();
}

}  // namespace

Support supports(const RopeAttentionDesc& desc, const Config& config, const DeviceInfo& device) {
  const QkvRopeStoreDesc store = desc.store();
  if (const Support first = supports(store, default_config(store, device), device); !first) return first;
  if (desc.latent && desc.dv > desc.dk - desc.n_rot) {
    return Support::no(str_cat("dv=", desc.dv, " values do not lie within the ", desc.dk - desc.n_rot,
                               " dimensions that are not rotated"));
  }
  const Support checked = check_config(Family::rope_attention, kVariants, kInstances, config, device);
  if (!checked) return checked;
  if (const Support second = supports(desc.attention(), attention_config(config), device); !second) return second;
  if (device.kind == DeviceKind::cpu) return checked;
  if (desc.m > kFusedAttentionTokens) {
    return Support::no(str_cat("m=", desc.m, " tokens are more than the ", kFusedAttentionTokens, " of a launch"));
  }
  if (is_token(config)) return token_fused(desc, config, device);
  if (config.variant == k_stored) {
    if (desc.latent) return Support::no("latent=1: variant stored stores whole keys and values");
    return one_type(desc);
  }
  if (config.variant == k_adaptive) return direct_fused(desc, direct_params{.rows = 8, .splits = 1}, device);
  return config.variant == k_direct ? direct_fused(desc, config, device) : latent_fused(desc, device);
}

Config launch_config(const RopeAttentionDesc& desc, const LaunchShape& shape, const DeviceInfo& device) {
  std::optional<Config> config;
  double least = 0;
  const auto consider = [&](const AdaptiveChoice& choice, const Config& other, double preferred = kPreferred) {
    if (!config || choice.time <= preferred * least) config = other, least = choice.time;
  };
  const auto count = [](int number) { return static_cast<int16_t>(number); };
  for (const int rows : {8, 16}) {
    if (rows != direct_rows(shape, rows)) continue;
    if (!supports(desc, direct_params{.rows = count(rows), .splits = 1}, device)) continue;
    const AdaptiveChoice choice = best_division(AdaptiveKernel::direct_fused, rows, kMostSplits, shape, device);
    consider(choice, direct_params{.rows = count(rows), .splits = count(choice.parts)});
  }
  if (supports(desc, token_params{.splits = 1}, device)) {
    const AdaptiveChoice choice = best_division(AdaptiveKernel::token, kTokenRows, kMostSplits, shape, device);
    consider(choice, token_params{.splits = count(choice.parts)});
  }
  for (const int rows : {8, 16, 64}) {
    const bool flash = rows == 64;
    if (!flash && rows != direct_rows(shape, rows)) continue;
    if (!supports(desc, stored_params{.rows = count(rows), .splits = 1}, device)) continue;
    const AdaptiveKernel kernel = flash ? AdaptiveKernel::flash : AdaptiveKernel::direct;
    AdaptiveChoice choice = best_division(kernel, rows, flash ? kFlashMostSplits : kMostSplits, shape, device);
    choice.time += kStoreTime;
    consider(choice, stored_params{.rows = count(rows), .splits = count(choice.parts)});
  }
  for (int clusters = 1; clusters <= kMostClusters; clusters *= 2) {
    // Clusters need several multiprocessors of one group at once, in addition to the previous and next launches.
    const int parts = clusters * kClusterBlocks;
    if (clusters > 1 && desc.kv_heads * parts > device.sm_count / 2) break;
    if (!supports(desc, token_cluster_params{.clusters = 1}, device)) break;
    consider(divided(AdaptiveKernel::token_cluster, kTokenRows, parts, shape, device),
             token_cluster_params{.clusters = count(clusters)}, 1);
  }
  return *config;
}

// adaptive if supported. For latents the default of attention alone, if that is a variant of this family; otherwise as
// many clusters as run at once. supports() then decides.
Config default_config(const RopeAttentionDesc& desc, const DeviceInfo& device) {
  if (device.kind != DeviceKind::cuda) return apart_params{.splits = 4};
  if (!desc.latent) return adaptive_params{};
  const Config alone = default_config(desc.attention(), device);
  const int64_t group = std::max<int64_t>(1, desc.heads / std::max<int64_t>(1, desc.kv_heads));
  const int64_t tiles = AttentionTiles{kLatentRows, group}.bound(desc.m, 1) * desc.kv_heads;
  Config best = latent_cluster_params{.clusters = 1};
  for (const Config& config : kInstances) {
    if (config.variant != k_latent_cluster) continue;
    if (attention_config(config) == alone) return config;
    if (latent_cluster_params::of(config).clusters <= default_clusters(tiles, desc.k_type, device)) best = config;
  }
  return best;
}

Cost cost(const RopeAttentionDesc& desc) {
  const Cost store = cost(desc.store()), attention = cost(desc.attention());
  // New rows and queries are not read back from memory.
  const double m = static_cast<double>(desc.m), heads = static_cast<double>(desc.heads);
  const double again = 2 * m * heads * static_cast<double>(desc.dk) * 4;
  return {std::max(attention.bytes, store.bytes + attention.bytes - again), store.flops + attention.flops};
}

size_t scratch_bytes(const RopeAttentionDesc& desc, const Config& config) {
  const size_t queries = padded(static_cast<size_t>(desc.m * desc.heads * desc.dk) * sizeof(float));
  if (config.variant == k_adaptive) return queries + adaptive_scratch_bytes(desc.dv);
  if (config.variant == k_stored) return queries + scratch_bytes(desc.attention(), stored_attention(config));
  if (is_token(config)) return attention_partials_bytes(desc.attention(), kTokenRows, token_splits(config));
  const size_t attention = scratch_bytes(desc.attention(), attention_config(config));
  if (config.variant != k_apart) return attention;
  const QkvRopeStoreDesc store = desc.store();
  return Apart(desc).bytes() + padded(std::max(attention, scratch_bytes(store, store_config(store))));
}

// Without positions and an output for queries.
static QkvRopeStoreArgs store_args_of(const RopeAttentionArgs& args, float* q, int64_t q_stride) {
  return {.q = q,
          .q_stride = q_stride,
          .k = args.k,
          .k_stride = args.k_stride,
          .v = args.v,
          .v_stride = args.v_stride,
          .q_norm = args.q_norm,
          .k_norm = args.k_norm,
          .eps = args.eps,
          .inv_freq = args.inv_freq,
          .mscale = args.mscale,
          .k_cache = args.k_cache,
          .v_cache = args.v_cache,
          .k_row_bytes = args.k_row_bytes,
          .v_row_bytes = args.v_row_bytes,
          .slot_positions = args.slot_positions,
          .runs = args.runs,
          .n_runs = args.n_runs};
}

void launch(const Config& config, const RopeAttentionDesc& desc, const RopeAttentionArgs& args, CpuContext& context) {
  check_runs("rope_attention", args.runs, args.n_runs, desc.m, args.slot_positions);
  const Apart apart(desc);
  // They are at the start of all threads' scratch; the rest of each share is enough for either part.
  auto* q = reinterpret_cast<float*>(context.scratch);
  auto* positions = reinterpret_cast<int32_t*>(context.scratch + apart.queries);
  std::fill_n(positions, desc.m, 0);
  for (int32_t r = 0; r < args.n_runs; ++r) {
    const SequenceRun& run = args.runs[r];
    for (int32_t i = 0; i < run.n_tokens; ++i) positions[run.first_token + i] = run.position + i;
  }
  const int64_t width = desc.heads * desc.dk;
  for (int64_t token = 0; token < desc.m; ++token) {
    std::copy_n(args.q + token * args.q_stride, width, q + token * width);
  }
  CpuContext rest = context;
  rest.scratch = context.scratch + apart.bytes();
  rest.scratch_per_thread = context.scratch_per_thread - apart.bytes();

  const QkvRopeStoreDesc store = desc.store();
  QkvRopeStoreArgs store_args = desc.latent
                                    ? store_args_of(args, const_cast<float*>(args.q_rotary), args.q_rotary_stride)
                                    : store_args_of(args, q, width);  // latent: read only
  store_args.q_out = q;
  store_args.q_out_stride = width;
  store_args.positions = positions;
  launch(store_config(store), store, store_args, rest);
  AttentionArgs attention = args.attention();
  attention.q = q;
  attention.q_stride = width;
  launch(attention_config(config), desc.attention(), attention, rest);
}

#ifdef DYNO_HAVE_CUDA
static void launch_stored(const Config& config, const RopeAttentionDesc& desc, const RopeAttentionArgs& args,
                          CudaStream& stream) {
  const int64_t width = desc.heads * desc.dk;
  const size_t queries = padded(static_cast<size_t>(desc.m * width) * sizeof(float));
  auto* q = reinterpret_cast<float*>(stream.workspace);
  QkvRopeStoreArgs store_args = store_args_of(args, const_cast<float*>(args.q), args.q_stride);  // read only
  store_args.q_out = q;
  store_args.q_out_stride = width;
  store_args.positions = args.positions;
  const QkvRopeStoreDesc store = desc.store();
  launch(default_config(store, *stream.device), store, store_args, stream);
  AttentionArgs attention = args.attention();
  attention.q = q;
  attention.q_stride = width;
  CudaStream rest = stream;
  rest.workspace += queries;
  rest.workspace_bytes -= queries;
  const auto stored = stored_params::of(config);
  if (stored.rows == 64) {
    attention_flash_wgmma_cuda(attention, desc.attention(), stored.rows, stored.splits, rest);
  } else {
    attention_direct_cuda(attention, desc.attention(), stored.rows, stored.splits, rest);
  }
}

void launch(const Config& config, const RopeAttentionDesc& desc, const RopeAttentionArgs& args, CudaStream& stream) {
  if (config.variant == k_stored) {
    launch_stored(config, desc, args, stream);
  } else if (config.variant == k_direct) {
    const auto direct = direct_params::of(config);
    rope_attention_direct_cuda(args, desc, direct.rows, direct.splits, stream);
  } else if (config.variant == k_adaptive) {
    const LaunchShape shape = launch_shape(desc.attention(), args.attention());
    launch(launch_config(desc, shape, *stream.device), desc, args, stream);
  } else if (is_token(config)) {
    rope_attention_token_cuda(args, desc, token_splits(config), config.variant == k_token_cluster, stream);
  } else if constexpr (!group_built(KernelGroup::latent)) {
    throw_left_out(KernelGroup::latent);
  } else {
    rope_attention_latent_cuda(args, desc, latent_cluster_params::of(config).clusters, stream);
  }
}
#endif

}  // namespace dyno::ops
