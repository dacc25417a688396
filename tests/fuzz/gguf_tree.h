// A GGUF file as a mutator sees it: entries that can be changed, dropped or taken from another file, and written again
// so that lengths, offsets and padding fit. Mutations of bytes alone nearly always end in the reader.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "input_files.h"

namespace dyno::fuzz {

using Random = std::mt19937_64;

inline size_t below(Random& random, size_t n) { return n == 0 ? 0 : random() % n; }

struct MetaEntry {
  std::string key;
  uint32_t type = 0;
  Bytes value;  // as in the file
};

struct TensorEntry {
  std::string name;
  std::vector<uint64_t> dims;
  uint32_t type = 0;
  Bytes data;
};

struct GgufTree {
  uint32_t version = 3;
  std::vector<MetaEntry> metadata;
  std::vector<TensorEntry> tensors;
};

// Nothing when the bytes are no well-formed file.
std::optional<GgufTree> parse_tree(std::span<const uint8_t> bytes);
Bytes write_tree(const GgufTree& tree);

// One change; `other` is a file that entries may come from.
void mutate_tree(GgufTree& tree, const GgufTree& other, Random& random);

// An input of the session target: settings, then the shards of one model, or its only file.
struct SessionInput {
  static constexpr size_t kSettings = 64;
  std::array<uint8_t, kSettings> settings{};
  std::vector<Bytes> files;
};

SessionInput parse_input(std::span<const uint8_t> bytes);
Bytes write_input(const SessionInput& input);

// One change of the settings, of the structure of a file or of its bytes.
void mutate_input(SessionInput& input, const SessionInput& other, Random& random);

}  // namespace dyno::fuzz
