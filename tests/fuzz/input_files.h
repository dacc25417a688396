// The files of one input: the only file of a model, or its shards, and the folder that they are written to.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

namespace dyno::fuzz {

using Bytes = std::vector<uint8_t>;

constexpr size_t kMaxShards = 3;

// In an input: one byte for the number of files less one, the size of each (32 bits), the files. The last file has all
// that is left; what the sizes ask for beyond the input's end is missing from the files. At least one, perhaps empty.
std::vector<Bytes> parse_files(std::span<const uint8_t> bytes);
void put_files(Bytes& out, const std::vector<Bytes>& files);

// In memory, if the system has a place for that; gone at the end.
class Folder {
 public:
  Folder();
  ~Folder();
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  // The path to open: the first shard, or the only file.
  std::string write(const std::vector<Bytes>& files) const;

 private:
  std::filesystem::path path_;
};

}  // namespace dyno::fuzz
