// A cursor over untrusted bytes: every read is checked against the end of the file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "core/error.h"
#include "gguf/metadata.h"

namespace dyno {

// The end of a message about bytes that are missing at the end of a file.
inline constexpr std::string_view kIncomplete = "; the file may be incomplete: download or copy it again";

class ByteReader {
 public:
  // `file_bytes`: size of the file that starts with these bytes, or consists of them.
  ByteReader(std::span<const std::byte> bytes, const std::string& path, uint64_t file_bytes)
      : bytes_(bytes), path_(path), file_bytes_(file_bytes) {}

  uint64_t position() const { return position_; }
  uint64_t remaining() const { return bytes_.size() - position_; }
  const std::byte* here() const { return bytes_.data() + position_; }
  // remaining(), as text for a message.
  std::string left() const {
    if (bytes_.size() == file_bytes_) return str_cat(remaining(), " bytes");
    return str_cat(remaining(), " bytes of the ", bytes_.size(), " that a header may have");
  }

  // The end of a message about missing bytes, unless a header exceeds its limit.
  std::string_view advice() const { return bytes_.size() == file_bytes_ ? kIncomplete : ""; }

  // Throws GgufError "[gguf] PATH: WHAT… (at byte OFFSET)".
  template <typename... Args>
  [[noreturn]] void fail(uint64_t offset, const Args&... what) const {
    throw GgufError(str_cat("[gguf] ", path_, ": ", what..., " (at byte ", offset, " of ", file_bytes_, ")"));
  }

  // Consumes `n` bytes of `field` and returns their start.
  template <typename Field>
  const std::byte* take(uint64_t n, const Field& field) {
    if (n > remaining()) fail(position_, field, " needs ", n, " bytes, but only ", left(), " are left", advice());
    const std::byte* start = here();
    position_ += n;
    return start;
  }

  template <typename T, typename Field>
  T read(const Field& field) {
    return load_unaligned<T>(take(sizeof(T), field));
  }

  // A 64-bit length followed by that many bytes.
  template <typename Field>
  std::string_view read_string(const Field& field) {
    const uint64_t start = position_;
    const auto length = read<uint64_t>(field);
    if (length > remaining()) {
      fail(start, field, " has length ", length, ", but only ", left(), " are left", advice());
    }
    return {reinterpret_cast<const char*>(take(length, field)), length};
  }

 private:
  std::span<const std::byte> bytes_;
  const std::string& path_;
  uint64_t file_bytes_ = 0;
  uint64_t position_ = 0;
};

}  // namespace dyno
