// Names of split files: PREFIX-00001-of-00003.gguf, numbered from 1.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace dyno {

struct SplitName {
  std::string prefix;  // with the folder
  uint32_t number = 0;
  uint32_t count = 0;

  std::string path(uint32_t shard_number) const;
};

// Nothing if `path` does not end like the name of a shard.
std::optional<SplitName> parse_split_name(const std::string& path);

}  // namespace dyno
