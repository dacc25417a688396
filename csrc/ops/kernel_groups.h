// From an op to its groups of GPU kernels (kernel_groups.def). Which groups this build has: ops/instances.h.
#pragma once

#include <algorithm>
#include <string_view>
#include <type_traits>

#include "ops/attention/kernels_cuda.h"
#include "ops/instances.h"
#include "ops/op.h"

namespace dyno::ops {

struct MoeSplitDesc;
struct LinearAttentionDesc;
struct ShortConvDesc;
struct IndexSelectDesc;

// `size`: flash_head() or direct_head() of the heads.
constexpr KernelGroup heads_of(int size) {
  return size == 64    ? KernelGroup::heads_64
         : size == 128 ? KernelGroup::heads_128
         : size == 192 ? KernelGroup::heads_192
         : size == 256 ? KernelGroup::heads_256
                       : KernelGroup::heads_512;
}
constexpr bool heads_built(int size) { return group_built(heads_of(size)); }

// Variant `rows` reads heads of every size. Its kernels for wide values are in groups.
inline constexpr int64_t kRowsNarrow = 256;
constexpr uint32_t rows_groups(const AttentionDesc& d) {
  if (d.selected > 0) return group_bit(KernelGroup::latent);
  if (d.dv <= kRowsNarrow) return 0;
  return group_bit(d.v_in_k ? KernelGroup::latent : KernelGroup::heads_512);
}

// For all numbers of tokens and all types of caches.
constexpr uint32_t attention_groups(const AttentionDesc& d) {
  if (d.exact || d.selected > 0) return rows_groups(d);
  const uint32_t latent = d.v_in_k ? group_bit(KernelGroup::latent) : 0;
  const int64_t widest = std::max(d.dk, d.dv);
  if (widest > kFlashWideHead) return latent | rows_groups(d);
  return latent | group_bit(heads_of(flash_head(d.dk, d.dv))) | group_bit(heads_of(direct_head(widest)));
}

// The groups of one variant of attention or rope_attention.
constexpr uint32_t attention_groups(const AttentionDesc& d, std::string_view variant) {
  if (variant.starts_with("latent")) return group_bit(KernelGroup::latent);
  if (variant.starts_with("flash")) return group_bit(heads_of(flash_head(d.dk, d.dv)));
  if (variant == "rows") return rows_groups(d);
  if (variant == "adaptive" || variant == "stored") return attention_groups(d);
  return group_bit(heads_of(direct_head(std::max(d.dk, d.dv))));  // direct, token, token_cluster
}

// The groups that an op needs on a GPU.
template <typename Desc>
uint32_t groups_of(const Desc& desc) {
  const auto is_one_of = []<typename... Some>(std::type_identity<Some>...) {
    return (std::is_same_v<Desc, Some> || ...);
  };
  if constexpr (std::is_same_v<Desc, AttentionDesc>) {
    return attention_groups(desc);
  } else if constexpr (std::is_same_v<Desc, RopeAttentionDesc>) {
    return attention_groups(desc.attention());
  } else if constexpr (is_one_of(std::type_identity<MlaExpandDesc>{}, std::type_identity<IndexSelectDesc>{})) {
    return group_bit(KernelGroup::latent);
  } else if constexpr (std::is_same_v<Desc, LinearAttentionDesc>) {
    return group_bit(KernelGroup::linear_attention);
  } else if constexpr (std::is_same_v<Desc, ShortConvDesc>) {
    return group_bit(KernelGroup::short_conv);
  } else if constexpr (is_one_of(std::type_identity<MatmulIdDesc>{}, std::type_identity<MoeUpGateDesc>{},
                                 std::type_identity<MoeRouteDesc>{}, std::type_identity<MoeSumDesc>{},
                                 std::type_identity<MoeDownSumDesc>{}, std::type_identity<NormRouteDesc>{},
                                 std::type_identity<MoeSplitDesc>{})) {
    return group_bit(KernelGroup::experts);
  } else {
    return 0;
  }
}

// The groups of one variant.
template <typename Desc>
uint32_t groups_of(const Desc& desc, std::string_view variant) {
  if constexpr (std::is_same_v<Desc, AttentionDesc>) {
    return attention_groups(desc, variant);
  } else if constexpr (std::is_same_v<Desc, RopeAttentionDesc>) {
    return attention_groups(desc.attention(), variant);
  } else {
    return groups_of(desc);
  }
}

}  // namespace dyno::ops
