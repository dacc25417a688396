// A file that is mapped or copied into memory, read-only in both cases.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace dyno {

// map: pages of the file, loaded when touched. copy: the whole file is read into process memory, so that later changes
// of the file have no effect.
enum class Reading : uint8_t { map, copy };

// Move-only owner of the bytes of one file. A mapping keeps the file open, so another file with the same name has no
// effect. If the file itself shrinks or is written to, check_unchanged() reports it, and missing pages read as zeros.
class FileMapping {
 public:
  // Throws GgufError if `path` cannot be opened, is not a regular file, is empty, or changes while it is read. Throws
  // OutOfMemoryError if a copy of it does not fit.
  static FileMapping open(const std::string& path, Reading reading = Reading::map);
  // Bytes that the caller owns and keeps alive and unchanged; messages have `name` instead of a path.
  static FileMapping borrow(std::span<const std::byte> bytes, std::string name);

  FileMapping(FileMapping&&) noexcept = default;
  FileMapping& operator=(FileMapping&&) noexcept = default;

  const std::string& path() const { return path_; }
  std::span<const std::byte> bytes() const { return bytes_; }
  bool contains(std::span<const std::byte> range) const;
  // Whether the bytes are pages of the file, which can change.
  bool mapped() const { return pages_ != nullptr; }

  // Throws GgufError if the file has changed since it was opened: another size, another modification time, or
  // unreadable pages. Needs at most two system calls, so it is cheap enough for every token.
  void check_unchanged() const;

  // Advice about `range`, which must be in this mapping. Drop frees the whole pages inside `range` (they are read again
  // from the file when touched). Will-need starts reading all pages that `range` touches. False, without any effect, if
  // the operating system refuses.
  bool advise_drop(std::span<const std::byte> range) const;
  bool advise_willneed(std::span<const std::byte> range) const;

 private:
  struct Pages;  // a mapping and its open file
  struct Copy {
    void operator()(std::byte* bytes) const;
  };
  struct Unmap {
    void operator()(Pages* pages) const;
  };

  FileMapping(std::string path, std::span<const std::byte> bytes) : path_(std::move(path)), bytes_(bytes) {}

  std::string path_;
  std::span<const std::byte> bytes_;
  std::unique_ptr<Pages, Unmap> pages_;
  std::unique_ptr<std::byte, Copy> copy_;
};

}  // namespace dyno
