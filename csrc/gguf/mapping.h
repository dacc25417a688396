// A file mapped into memory, or read into it: read-only either way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace dyno {

// map: pages of the file itself, loaded when they are touched. copy: all of it is read into memory of this process,
// so that nothing that happens to the file afterwards is seen.
enum class Reading : uint8_t { map, copy };

// Move-only owner of the bytes of one file. A mapping keeps the file open: another file of the same name changes
// nothing. If the file itself shrinks or is written to, check_unchanged() says so; pages that are gone read as zeros.
class FileMapping {
 public:
  // Throws GgufError when `path` cannot be opened, is no regular file, is empty, or changes while it is read;
  // OutOfMemoryError when a copy of it does not fit.
  static FileMapping open(const std::string& path, Reading reading = Reading::map);
  // Bytes that the caller owns and keeps alive and unchanged; `name` stands for the path in messages.
  static FileMapping borrow(std::span<const std::byte> bytes, std::string name);

  FileMapping(FileMapping&&) noexcept = default;
  FileMapping& operator=(FileMapping&&) noexcept = default;

  const std::string& path() const { return path_; }
  std::span<const std::byte> bytes() const { return bytes_; }
  bool contains(std::span<const std::byte> range) const;
  // Whether the bytes are the file's own pages, which can change.
  bool mapped() const { return pages_ != nullptr; }

  // Throws GgufError if the file is not what it was when it was opened: other size, other time of modification, or
  // pages that could not be read. Two system calls at most; cheap enough for every token.
  void check_unchanged() const;

  // Advice on `range`, which must lie in this mapping. Drop gives the whole pages inside `range` back (they are read
  // again from the file when touched); will-need starts reading all pages that `range` touches. False when the
  // operating system refused; nothing else changes then.
  bool advise_drop(std::span<const std::byte> range) const;
  bool advise_willneed(std::span<const std::byte> range) const;

 private:
  struct Pages;  // a mapping, and the open file that it belongs to
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
