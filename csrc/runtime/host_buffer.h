// Host memory that starts as zeros. Pages become resident when first touched. Under AddressSanitizer it comes from the
// heap, whose blocks have red zones; anonymous mappings have none.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace dyno::runtime {

// Pages that a large buffer asks the system for.
enum class Pages : unsigned char { huge, small };

class HostBuffer {
 public:
  HostBuffer() = default;
  // Throws OutOfMemoryError with the size. Huge pages matter for weights that are streamed.
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

// Gives the memory of whole pages within a part of a buffer back to the system; they hold zeros afterwards. Nothing
// happens under AddressSanitizer.
void give_back_pages(std::span<std::byte> part);

// Later pages of a part of a buffer will be small ones; of whole pages within it.
void use_small_pages(std::span<std::byte> part);

// A place in a buffer. Several may share one, as values of the arena do that are never in use at the same time.
struct BufferPart {
  size_t offset = 0;
  size_t bytes = 0;
  friend bool operator==(const BufferPart&, const BufferPart&) = default;
};

// A buffer by its parts. Under AddressSanitizer every part is a heap block of its own, so that an access past its end
// is an error even where another part follows.
class PartedBuffer {
 public:
  PartedBuffer() = default;
  // Parts without bytes have no address. Throws OutOfMemoryError.
  PartedBuffer(size_t bytes, std::vector<BufferPart> parts, const char* purpose, Pages pages = Pages::huge);

  std::byte* at(size_t part) const { return addresses_[part]; }
  // All of it as one piece; nothing under AddressSanitizer.
  std::span<std::byte> block() const;
  size_t bytes() const { return bytes_; }
  const std::vector<BufferPart>& parts() const { return parts_; }
  // Whether a buffer of these parts would be the same.
  bool holds(size_t bytes, std::span<const BufferPart> parts) const;

 private:
  size_t bytes_ = 0;
  std::vector<BufferPart> parts_;
  std::vector<HostBuffer> blocks_;  // one, or under AddressSanitizer one for each part
  std::vector<std::byte*> addresses_;
};

// `count` equal parts, one behind the other. Under AddressSanitizer the bytes between them are red zones.
class StripedBuffer {
 public:
  StripedBuffer() = default;
  // Throws OutOfMemoryError. `bytes` is a multiple of 64.
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
