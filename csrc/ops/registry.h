// The op contract by family name, for bindings, plan, profiles and tests. A variant that is added to a family's
// variants.def appears everywhere without another edit.
#pragma once

#include <optional>
#include <utility>
#include <variant>

#include "ops/all_families.h"
#include "ops/neighbours.h"
#include "ops/op.h"

namespace dyno::ops {

namespace detail {
template <typename, typename... Descs>
using AnyOf = std::variant<Descs...>;
}  // namespace detail

// A desc of any family, in the order of Family.
using OpDesc = detail::AnyOf<void
#define DYNO_OP_FAMILY(name, Stem, ...) , Stem##Desc
#include "ops/families.def"
                             >;

Family family_of(const OpDesc& desc);
int64_t tokens_of(const OpDesc& desc);
OpDesc with_tokens(OpDesc desc, int64_t m);
// For a matrix product; other families have no path.
OpDesc with_path(OpDesc desc, ProductPath path, ComputeType compute);

// tile_height(): the height of f16 tiles (half_tiles.h) that the product's configuration reads if it gets tiles; 0: it
// cannot read tiles.
int64_t tile_height(const OpDesc& reader, const Config& config);
// Sets the height of the tiles in both descs. False if ops of these families cannot exchange tiles.
bool set_tiles(OpDesc& giver, OpDesc& reader, int64_t height);

// The key of an op in profiles: family, types and shapes, without the number of tokens. Example: "matmul q4_0 n=4096
// k=2048 layout=x16 act=q8"
std::string op_key(const OpDesc& desc);
// The desc of a key for a number of tokens. Throws ProfileError with the part that it cannot parse.
OpDesc parse_key(std::string_view key, int64_t tokens);
Family family_from_name(std::string_view name);  // throws ProfileError with the nearest name
OpDesc default_desc(Family family);              // a default-constructed desc

std::vector<Config> candidates(const OpDesc& desc, const DeviceInfo& device, CandidateSet set);
Config default_config(const OpDesc& desc, const DeviceInfo& device);
Config default_config(const OpDesc& desc, const DeviceInfo& device, const Neighbours& neighbours);
Support supports(const OpDesc& desc, const Config& config, const DeviceInfo& device);
// Whether this build has the groups of GPU kernels for any number of tokens. The reason names the missing groups, and
// the GGML_CUDA_PROFILE that left them out.
Support kernels_built(const OpDesc& desc, const DeviceInfo& device);
Cost cost(const OpDesc& desc);
// Scratch memory per thread of a CPU launch.
size_t scratch_bytes(const OpDesc& desc, const Config& config);

std::span<const VariantInfo> variants(Family family);

// {variant: …, param: value, …} and back. parse throws ProfileError with the nearest valid key or variant.
struct ConfigEntry {
  std::string key;
  std::string text;   // for the key "variant"
  int64_t value = 0;  // for all other keys
};
std::vector<ConfigEntry> config_entries(Family family, const Config& config);
Config config_from_entries(Family family, std::span<const ConfigEntry> entries);
std::string describe(Family family, const Config& config);

// Buckets of token counts in profiles: 1, 2-4, 5-8, 9-16, 17-32, … doubling.
inline constexpr int kBucketCount = 31;  // the last one ends at 2^31
int bucket_of(int64_t m);
std::pair<int64_t, int64_t> bucket_range(int bucket);  // inclusive
std::string bucket_name(int bucket);                   // "m1", "m2-4", "m5-8", …
// First and last bucket of "m1", "m5-8", a range of several such as "m1-8", or an open range "m513+". Nothing if the
// text is not such a range, or does not start and end at bucket boundaries.
std::optional<std::pair<int, int>> parse_tokens(std::string_view text);

}  // namespace dyno::ops
