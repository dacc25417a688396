// A file mapped into memory, read-only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace dyno {

// Move-only owner of a private read-only mapping. A file that another process truncates while it is mapped raises
// SIGBUS on the next access to the lost pages; that is not caught here.
class FileMapping {
 public:
  // Throws GgufError when `path` cannot be opened, is no regular file or is empty.
  static FileMapping open(const std::string& path);
  // Bytes that the caller owns and keeps alive and unchanged; `name` stands for the path in messages.
  static FileMapping borrow(std::span<const std::byte> bytes, std::string name);

  FileMapping(FileMapping&& other) noexcept;
  FileMapping& operator=(FileMapping&& other) noexcept;
  FileMapping(const FileMapping&) = delete;
  FileMapping& operator=(const FileMapping&) = delete;
  ~FileMapping();

  const std::string& path() const { return path_; }
  std::span<const std::byte> bytes() const { return bytes_; }
  bool contains(std::span<const std::byte> range) const;

  // Advice on `range`, which must lie in this mapping. Drop gives the whole pages inside `range` back (they are read
  // again from the file when touched); will-need starts reading all pages that `range` touches. False when the
  // operating system refused; nothing else changes then.
  bool advise_drop(std::span<const std::byte> range) const;
  bool advise_willneed(std::span<const std::byte> range) const;

 private:
  FileMapping(std::string path, std::span<const std::byte> bytes, bool owned)
      : path_(std::move(path)), bytes_(bytes), owned_(owned) {}
  void unmap() noexcept;

  std::string path_;
  std::span<const std::byte> bytes_;
  bool owned_ = false;
};

}  // namespace dyno
