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

// First id of the engine's internal types, which files must not use.
inline constexpr uint32_t kFirstInternalType = 500;

struct ParsedFile {
  uint32_t version = 0;
  uint64_t alignment = 0;
  uint64_t header_bytes = 0;  // up to the end of the last tensor's entry
  uint64_t data_offset = 0;   // start of the tensor data
  Metadata metadata;
  std::vector<TensorInfo> tensors;  // file order
};

// `bytes` is the whole file and must outlive the result, `path` is its name in messages, and `file` is its index among
// the shards. If `bytes` is only the beginning of the file, or a copy of its header, tensors point into `data`, the
// whole file. Time and memory are linear in the size of the header, whatever its counts claim. Throws GgufError, with
// field, value and byte offset, unless all of these conditions hold:
//   - magic number and version 2 or 3, little-endian; counts, lengths and arrays end within the file;
//   - keys and tensor names are UTF-8 of 1 to 65535 bytes without NUL, each once; bools are 0 or 1; arrays nest at most
//     16 deep; general.alignment is a uint32 power of two, at least 8;
//   - tensors have 1 to 4 dimensions, each at least 1, a known type, rows of whole blocks, fewer than 2^63 elements and
//     2^64 bytes; their data is aligned, within the file and does not overlap.
ParsedFile parse_file(std::span<const std::byte> bytes, const std::string& path, uint32_t file,
                      std::span<const std::byte> data);
inline ParsedFile parse_file(std::span<const std::byte> bytes, const std::string& path, uint32_t file) {
  return parse_file(bytes, path, file, bytes);
}

}  // namespace dyno
