// Buckets of token counts: the meaning of a profile's "m1-8".
#include <bit>
#include <charconv>

#include "core/error.h"
#include "ops/registry.h"

namespace dyno::ops {

int bucket_of(int64_t m) {
  DYNO_CHECK(PlanError, m >= 1, "[tokens] ", m, " tokens; at least 1 is needed");
  if (m == 1) return 0;
  if (m <= 4) return 1;
  const int bucket = std::bit_width(static_cast<uint64_t>(m - 1)) - 1;
  return bucket < kBucketCount ? bucket : kBucketCount - 1;
}

std::pair<int64_t, int64_t> bucket_range(int bucket) {
  DYNO_CHECK(PlanError, bucket >= 0 && bucket < kBucketCount, "[tokens] bucket ", bucket, " is not in 0..",
             kBucketCount - 1);
  if (bucket == 0) return {1, 1};
  if (bucket == 1) return {2, 4};
  return {(int64_t{1} << bucket) + 1, int64_t{1} << (bucket + 1)};
}

std::string bucket_name(int bucket) {
  const auto [first, last] = bucket_range(bucket);
  return first == last ? str_cat("m", first) : str_cat("m", first, "-", last);
}

std::optional<std::pair<int, int>> parse_tokens(std::string_view text) {
  if (!text.starts_with('m')) return std::nullopt;
  text.remove_prefix(1);
  const auto number = [&text]() -> std::optional<int64_t> {
    int64_t value = 0;
    if (text.empty() || text.front() < '1' || text.front() > '9') return std::nullopt;
    const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc()) return std::nullopt;
    text.remove_prefix(static_cast<size_t>(stop - text.data()));
    return value;
  };
  const std::optional<int64_t> first = number();
  if (!first) return std::nullopt;
  const int first_bucket = bucket_of(*first);
  if (bucket_range(first_bucket).first != *first) return std::nullopt;
  if (text == "+") return std::pair(first_bucket, kBucketCount - 1);
  std::optional<int64_t> last = first;
  if (!text.empty()) {
    if (text.front() != '-') return std::nullopt;
    text.remove_prefix(1);
    last = number();
  }
  if (!last || !text.empty() || *last < *first) return std::nullopt;
  const int last_bucket = bucket_of(*last);
  if (bucket_range(last_bucket).second != *last) return std::nullopt;
  return std::pair(first_bucket, last_bucket);
}

}  // namespace dyno::ops
