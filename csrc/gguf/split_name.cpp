#include "gguf/split_name.h"

#include <cctype>
#include <cstdio>
#include <string_view>

namespace dyno {
namespace {

// The five digits at the start of `text`.
std::optional<uint32_t> five_digits(std::string_view text) {
  uint32_t value = 0;
  for (const char c : text.substr(0, 5)) {
    if (std::isdigit(static_cast<unsigned char>(c)) == 0) return std::nullopt;
    value = value * 10 + static_cast<uint32_t>(c - '0');
  }
  return value;
}

}  // namespace

std::string SplitName::path(uint32_t shard_number) const {
  char suffix[40];
  std::snprintf(suffix, sizeof(suffix), "-%05u-of-%05u.gguf", shard_number, count);
  return prefix + suffix;
}

std::optional<SplitName> parse_split_name(const std::string& path) {
  constexpr std::string_view kPattern = "-NNNNN-of-NNNNN.gguf";
  if (path.size() < kPattern.size()) return std::nullopt;
  const std::string_view tail = std::string_view(path).substr(path.size() - kPattern.size());
  const auto number = five_digits(tail.substr(1));
  const auto count = five_digits(tail.substr(10));
  if (tail[0] != '-' || tail.substr(6, 4) != "-of-" || tail.substr(15) != ".gguf" || !number || !count) {
    return std::nullopt;
  }
  return SplitName{path.substr(0, path.size() - kPattern.size()), *number, *count};
}

}  // namespace dyno
