// Checks the header of one GGUF file and turns it into views of the mapped bytes. Tensor data is not touched.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "gguf/metadata.h"
#include "gguf/tensor_info.h"

namespace dyno {

struct ParsedFile {
  uint32_t version = 0;
  uint64_t alignment = 0;
  uint64_t data_offset = 0;  // start of the tensor data
  Metadata metadata;
  std::vector<TensorInfo> tensors;  // file order
};

// `bytes` is the whole file and outlives the result, `path` is its name in messages and `file` its index among shards.
// Throws GgufError, naming field, value and byte offset, for everything that the format does not allow: see
// docs/architecture.md. Time and memory are linear in the size of the header, whatever its counts claim.
ParsedFile parse_file(std::span<const std::byte> bytes, const std::string& path, uint32_t file);

}  // namespace dyno
