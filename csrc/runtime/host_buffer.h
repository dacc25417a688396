// Zero-initialised host memory. Pages become resident when first touched. Under AddressSanitizer it comes from the
// heap, because heap blocks have red zones and anonymous mappings do not.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace dyno::runtime {

// The page size that a large buffer requests.
enum class Pages : unsigned char { huge, small };

class HostBuffer {
 public:
  HostBuffer() = default;
  // Throws OutOfMemoryError with the size. Huge pages matter for weights that are read in sequence.
  explicit HostBuffer(size_t bytes, const char* purpose, Pages pages = Pages::huge);
  ~HostBuffer();
  HostBuffer(HostBuffer&& other) noexcept;
  HostBuffer& operator=(HostBuffer&& other) noexcept;
  HostBuffer(const HostBuffer&) = delete;
  HostBuffer& operator=(const HostBuffer&) = delete;

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

// Returns the whole pages within a part of a buffer to the system; they then read as zeros. Does nothing under
// AddressSanitizer.
void give_back_pages(std::span<std::byte> part);

// Requests small pages for the whole pages within a part of a buffer.
void use_small_pages(std::span<std::byte> part);

// A range in a buffer. Ranges may coincide, like values of the arena that are never in use at the same time.
struct BufferPart {
  size_t offset = 0;
  size_t bytes = 0;
  friend bool operator==(const BufferPart&, const BufferPart&) = default;
};

// A buffer that consists of parts. Under AddressSanitizer every part is a separate heap block, so that an access past
// its end is an error even if another part follows.
class PartedBuffer {
 public:
  PartedBuffer() = default;
  // A part without bytes has no address. Throws OutOfMemoryError.
  PartedBuffer(size_t bytes, std::vector<BufferPart> parts, const char* purpose, Pages pages = Pages::huge);

  std::byte* at(size_t part) const { return addresses_[part]; }
  // The whole buffer as one span; empty under AddressSanitizer.
  std::span<std::byte> block() const;
  size_t bytes() const { return bytes_; }
  const std::vector<BufferPart>& parts() const { return parts_; }
  // Whether a new buffer with these parts would be identical.
  bool holds(size_t bytes, std::span<const BufferPart> parts) const;

 private:
  size_t bytes_ = 0;
  std::vector<BufferPart> parts_;
  std::vector<HostBuffer> blocks_;  // one block, or under AddressSanitizer one for each part
  std::vector<std::byte*> addresses_;
};

// `count` equal parts in sequence. Under AddressSanitizer the gaps between them are red zones.
class StripedBuffer {
 public:
  StripedBuffer() = default;
  // Throws OutOfMemoryError. `bytes` must be a multiple of 64.
  StripedBuffer(size_t bytes, size_t count, const char* purpose);

  std::byte* data() const { return memory_.data(); }
  size_t stride() const { return stride_; }
  bool holds(size_t bytes, size_t count) const { return bytes == bytes_ && count == count_; }

 private:
  size_t bytes_ = 0;
  size_t count_ = 0;
  size_t stride_ = 0;
  HostBuffer memory_;
};

}  // namespace dyno::runtime
