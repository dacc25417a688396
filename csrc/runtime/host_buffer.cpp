#include "runtime/host_buffer.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <new>
#include <utility>

#include "core/checked.h"
#include "core/error.h"
#include "core/sanitizers.h"

#if __has_include(<sanitizer/asan_interface.h>)
#include <sanitizer/asan_interface.h>  // its macros do nothing without the sanitizer
#else
#define ASAN_POISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#endif

namespace dyno::runtime {
namespace {

constexpr std::align_val_t kAlignment{64};
constexpr size_t kRedZone = kAddressSanitizer ? 64 : 0;

}  // namespace

HostBuffer::HostBuffer(size_t bytes, const char* purpose, Pages pages) : size_(bytes) {
  if (bytes == 0) return;
  if constexpr (kAddressSanitizer) {
    data_ = static_cast<std::byte*>(::operator new[](bytes, kAlignment, std::nothrow));
    DYNO_CHECK(OutOfMemoryError, data_ != nullptr, "[memory] cannot allocate ", bytes, " bytes for ", purpose,
               "; use a smaller ctx or ubatch");
    std::memset(data_, 0, bytes);
    return;
  }
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  DYNO_CHECK(OutOfMemoryError, memory != MAP_FAILED, "[memory] cannot allocate ", bytes, " bytes for ", purpose, ": ",
             std::strerror(errno));
  data_ = static_cast<std::byte*>(memory);
  // A small buffer would waste most of its huge page.
  constexpr size_t kHugePage = size_t{2} << 20;
  if (pages == Pages::small) {
    madvise(data_, size_, MADV_NOHUGEPAGE);
  } else if (bytes >= 8 * kHugePage) {
    madvise(data_, size_, MADV_HUGEPAGE);
  }
}

HostBuffer::~HostBuffer() {
  if (data_ == nullptr) return;
  if constexpr (kAddressSanitizer) {
    ::operator delete[](data_, kAlignment);
  } else {
    munmap(data_, size_);
  }
}

HostBuffer::HostBuffer(HostBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

HostBuffer& HostBuffer::operator=(HostBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

namespace {

void advise_whole_pages(std::span<std::byte> part, int advice) {
  if constexpr (kAddressSanitizer) return;
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto at = reinterpret_cast<uintptr_t>(part.data());
  const uintptr_t begin = (at + page - 1) / page * page, end = (at + part.size()) / page * page;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, advice);
}

}  // namespace

void give_back_pages(std::span<std::byte> part) { advise_whole_pages(part, MADV_DONTNEED); }

void use_small_pages(std::span<std::byte> part) { advise_whole_pages(part, MADV_NOHUGEPAGE); }

PartedBuffer::PartedBuffer(size_t bytes, std::vector<BufferPart> parts, const char* purpose, Pages pages)
    : bytes_(bytes), parts_(std::move(parts)) {
  if (!kAddressSanitizer) blocks_.emplace_back(bytes, purpose, pages);
  for (const BufferPart& part : parts_) {
    if (kAddressSanitizer) blocks_.emplace_back(part.bytes, purpose, pages);
    std::byte* const base = blocks_.back().data();
    addresses_.push_back(part.bytes == 0 ? nullptr : kAddressSanitizer ? base : base + part.offset);
  }
}

std::span<std::byte> PartedBuffer::block() const {
  if (kAddressSanitizer || blocks_.empty()) return {};
  return {blocks_.front().data(), blocks_.front().size()};
}

bool PartedBuffer::holds(size_t bytes, std::span<const BufferPart> parts) const {
  return bytes == bytes_ && std::equal(parts.begin(), parts.end(), parts_.begin(), parts_.end());
}

StripedBuffer::StripedBuffer(size_t bytes, size_t count, const char* purpose)
    : bytes_(bytes),
      count_(count),
      stride_(checked_add(bytes, bytes > 0 ? kRedZone : 0, purpose)),
      memory_(checked_mul(stride_, count, purpose), purpose) {
  if (kRedZone == 0 || bytes == 0) return;
  for (size_t i = 0; i < count; ++i) ASAN_POISON_MEMORY_REGION(memory_.data() + i * stride_ + bytes, kRedZone);
}

}  // namespace dyno::runtime
