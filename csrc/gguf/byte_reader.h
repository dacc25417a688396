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

class ByteReader {
 public:
  ByteReader(std::span<const std::byte> bytes, const std::string& path) : bytes_(bytes), path_(path) {}

  uint64_t position() const { return position_; }
  uint64_t remaining() const { return bytes_.size() - position_; }
  const std::byte* here() const { return bytes_.data() + position_; }

  // Throws GgufError "[gguf] PATH: WHAT… (at byte OFFSET)".
  template <typename... Args>
  [[noreturn]] void fail(uint64_t offset, const Args&... what) const {
    throw GgufError(str_cat("[gguf] ", path_, ": ", what..., " (at byte ", offset, " of ", bytes_.size(), ")"));
  }

  // Moves over `n` bytes of `field` and returns the first of them.
  template <typename Field>
  const std::byte* take(uint64_t n, const Field& field) {
    if (n > remaining()) fail(position_, field, " needs ", n, " bytes, but only ", remaining(), " are left");
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
      fail(start, field, " has length ", length, ", but only ", remaining(), " bytes are left");
    }
    return {reinterpret_cast<const char*>(take(length, field)), length};
  }

 private:
  std::span<const std::byte> bytes_;
  const std::string& path_;
  uint64_t position_ = 0;
};

}  // namespace dyno
