#include "gguf/gguf_file.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <optional>
#include <utility>

#include "core/error.h"
#include "gguf/parse.h"
#include "gguf/split_name.h"
#include "gguf/text.h"

namespace dyno {
namespace {

// Checks a shard's keys about the split against its file name. `name` is empty for a file that is not named like a
// shard.
void check_shard(const Metadata& metadata, const std::string& path, const std::optional<SplitName>& name) {
  const auto count = metadata.find_u32("split.count");
  const auto number = metadata.find_u32("split.no");
  const uint32_t expected_count = name ? name->count : 1;
  const uint32_t expected_number = name ? name->number - 1 : 0;
  if (!count && !number && expected_count == 1) return;
  const std::string says = name ? str_cat("the file name says shard ", name->number, " of ", name->count)
                                : std::string("the file name is not that of a shard");
  const auto offset = [&](std::string_view key) { return metadata.find(key)->offset; };
  DYNO_CHECK(GgufError, count, "[gguf] ", path, ": ", says, ", but the key 'split.count' is missing");
  DYNO_CHECK(GgufError, number, "[gguf] ", path, ": the key 'split.no' is missing beside 'split.count'");
  DYNO_CHECK(GgufError, *count == expected_count, "[gguf] ", path, ": key 'split.count' at byte ",
             offset("split.count"), " is ", *count, ", but ", says,
             "; shards must keep their names PREFIX-00001-of-0000N.gguf");
  DYNO_CHECK(GgufError, *number == expected_number, "[gguf] ", path, ": key 'split.no' at byte ", offset("split.no"),
             " is ", *number, " (counted from 0), but ", says);
}

void check_tensor_total(const Metadata& metadata, const std::string& path, size_t total) {
  const auto expected = metadata.find_u64("split.tensors.count");
  DYNO_CHECK(GgufError, !expected || *expected == total, "[gguf] ", path, ": key 'split.tensors.count' at byte ",
             metadata.find("split.tensors.count")->offset, " is ", *expected, ", but all shards together have ", total,
             " tensors");
}

// A vocabulary of a quarter of a million tokens takes 20 MiB. A sparse file may claim any size at no cost to its
// writer.
constexpr uint64_t kMaxHeaderBytes = uint64_t{1} << 30;

// Parses a copy of the header (`header`) if the file is mapped, so that the checked bytes are the used bytes even if
// the file changes.
ParsedFile parse_mapping(const FileMapping& mapping, uint32_t file, std::unique_ptr<std::byte[]>& header) {
  const std::span<const std::byte> bytes = mapping.bytes();
  const std::span<const std::byte> beginning = bytes.first(std::min<uint64_t>(bytes.size(), kMaxHeaderBytes));
  ParsedFile parsed = parse_file(beginning, mapping.path(), file, bytes);
  if (!mapping.mapped()) return parsed;
  const uint64_t size = parsed.header_bytes;
  header.reset(new (std::nothrow) std::byte[size]);
  DYNO_CHECK(OutOfMemoryError, header != nullptr, "[gguf] cannot allocate ", size, " bytes for the header of ",
             mapping.path());
  std::memcpy(header.get(), mapping.bytes().data(), size);
  mapping.advise_drop(mapping.bytes().first(size));
  return parse_file({header.get(), size}, mapping.path(), file, mapping.bytes());
}

}  // namespace

GgufFile GgufFile::open(const std::string& path, Reading reading) {
  std::optional<SplitName> name = parse_split_name(path);
  if (name) {
    DYNO_CHECK(GgufError, name->number >= 1 && name->number <= name->count, "[gguf] ", path,
               ": the file name says shard ", name->number, " of ", name->count, "; expected 1 to ", name->count);
  }
  const uint32_t count = name ? name->count : 1;
  GgufFile file;
  std::vector<Metadata> shard_metadata;
  for (uint32_t number = 1; number <= count; ++number) {
    if (name) name->number = number;
    FileMapping mapping = FileMapping::open(name ? name->path(number) : path, reading);
    ParsedFile parsed;
    try {
      parsed = parse_mapping(mapping, number - 1, file.headers_.emplace_back());
      check_shard(parsed.metadata, mapping.path(), name);
    } catch (const Error&) {
      mapping.check_unchanged();  // otherwise the message would blame a file that is being written
      throw;
    }
    shard_metadata.push_back(parsed.metadata);
    file.append(std::move(mapping), std::move(parsed));
  }
  file.check_unchanged();
  for (size_t i = 0; i < shard_metadata.size(); ++i) {
    check_tensor_total(shard_metadata[i], file.mappings_[i].path(), file.tensors_.size());
  }
  return file;
}

GgufFile GgufFile::from_memory(std::span<const std::byte> bytes, std::string name) {
  GgufFile file;
  FileMapping mapping = FileMapping::borrow(bytes, std::move(name));
  ParsedFile parsed = parse_file(mapping.bytes(), mapping.path(), 0);
  check_shard(parsed.metadata, mapping.path(), std::nullopt);
  check_tensor_total(parsed.metadata, mapping.path(), parsed.tensors.size());
  file.append(std::move(mapping), std::move(parsed));
  return file;
}

void GgufFile::append(FileMapping mapping, ParsedFile parsed) {
  if (mappings_.empty()) {
    version_ = parsed.version;
    alignment_ = parsed.alignment;
    metadata_ = std::move(parsed.metadata);
    tensors_.reserve(parsed.tensors.size());
  }
  for (const TensorInfo& tensor : parsed.tensors) {
    const auto [it, inserted] = by_name_.emplace(tensor.name, tensors_.size());
    DYNO_CHECK(GgufError, inserted, "[gguf] ", mapping.path(), ": tensor ", in_quotes(tensor.name), " at byte ",
               tensor.offset, " is also in ", mappings_[tensors_[it->second].file].path());
    tensors_.push_back(tensor);
  }
  mappings_.push_back(std::move(mapping));
}

std::vector<std::string> GgufFile::paths() const {
  std::vector<std::string> out;
  for (const FileMapping& mapping : mappings_) out.push_back(mapping.path());
  return out;
}

uint64_t GgufFile::file_bytes() const {
  uint64_t total = 0;
  for (const FileMapping& mapping : mappings_) total += mapping.bytes().size();
  return total;
}

const TensorInfo* GgufFile::find_tensor(std::string_view name) const {
  const auto it = by_name_.find(name);
  return it == by_name_.end() ? nullptr : &tensors_[it->second];
}

const TensorInfo& GgufFile::tensor(std::string_view name) const {
  const TensorInfo* tensor = find_tensor(name);
  DYNO_CHECK(ModelError, tensor != nullptr, "[gguf] ", path(), ": no tensor ", in_quotes(name));
  return *tensor;
}

void GgufFile::check_unchanged() const {
  for (const FileMapping& mapping : mappings_) mapping.check_unchanged();
}

const FileMapping& GgufFile::mapping_of(std::span<const std::byte> range) const {
  for (const FileMapping& mapping : mappings_) {
    if (mapping.contains(range)) return mapping;
  }
  throw Error(str_cat("[gguf] ", path(), ": advice on ", range.size(), " bytes that are not part of the file"));
}

bool GgufFile::advise_drop(std::span<const std::byte> range) const { return mapping_of(range).advise_drop(range); }

bool GgufFile::advise_willneed(std::span<const std::byte> range) const {
  return mapping_of(range).advise_willneed(range);
}

}  // namespace dyno
