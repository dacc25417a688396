// A GGUF model file, or all shards of a split one, mapped and checked. It is the result of the gguf stage.
//
//   GgufFile file = GgufFile::open("model-00001-of-00003.gguf");
//   uint32_t layers = file.metadata().get_u32("llama.block_count");
//   const TensorInfo& embedding = file.tensor("token_embd.weight");
//
// Versions 2 and 3, little-endian. Opening copies only the header into memory, so checked metadata and names cannot
// change. Tensors are pages of the file, which change with the file: check_unchanged() detects this.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "gguf/mapping.h"
#include "gguf/metadata.h"
#include "gguf/tensor_info.h"

namespace dyno {

struct ParsedFile;

class GgufFile {
 public:
  // `path` may be any shard of a split file; all shards are opened. Throws GgufError with field, value and byte offset
  // if the header violates the format or does not match the file.
  static GgufFile open(const std::string& path, Reading reading = Reading::map);
  // One complete file in memory, 8-byte aligned, which the caller keeps alive.
  static GgufFile from_memory(std::span<const std::byte> bytes, std::string name);

  GgufFile(GgufFile&&) noexcept = default;
  GgufFile& operator=(GgufFile&&) noexcept = default;

  uint32_t version() const { return version_; }
  uint64_t alignment() const { return alignment_; }
  const std::string& path() const { return mappings_.front().path(); }  // of the first shard
  std::vector<std::string> paths() const;
  uint64_t file_bytes() const;  // of all shards

  const Metadata& metadata() const { return metadata_; }  // of the first shard, which has the model's keys

  const std::vector<TensorInfo>& tensors() const { return tensors_; }  // shard by shard, in file order
  const TensorInfo* find_tensor(std::string_view name) const;
  const TensorInfo& tensor(std::string_view name) const;  // throws ModelError if there is none

  // Throws GgufError if a mapped file has changed since it was opened, or could not be read.
  void check_unchanged() const;

  // Advice to the operating system about a part of the tensor data, which must be in one shard (else Error). Drop, for
  // use after repacking: the whole pages inside `range` are freed and read again from the file if touched.
  bool advise_drop(std::span<const std::byte> range) const;
  bool advise_willneed(std::span<const std::byte> range) const;

  // The complete header as text: files, metadata, types, tensors.
  std::string describe() const;

 private:
  GgufFile() = default;
  void append(FileMapping mapping, ParsedFile parsed);
  const FileMapping& mapping_of(std::span<const std::byte> range) const;

  uint32_t version_ = 0;
  uint64_t alignment_ = 0;
  std::vector<FileMapping> mappings_;
  std::vector<std::unique_ptr<std::byte[]>> headers_;  // copies, for mapped shards
  Metadata metadata_;
  std::vector<TensorInfo> tensors_;
  std::unordered_map<std::string_view, size_t> by_name_;
};

}  // namespace dyno
