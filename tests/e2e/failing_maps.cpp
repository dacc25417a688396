// Preloaded before a process: memory of the engine that the system does not give, and memory that the engine gives
// back. Its buffers are the mappings with MAP_NORESERVE.
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>

namespace {

constexpr int kMost = 4096;
constexpr uintptr_t kPage = 4096;
struct {
  uintptr_t begin, end;
} maps[kMost];
int count = 0;
unsigned long failing = 0;  // bit n: the n-th buffer from now on
int outside = 0;

}  // namespace

extern "C" {

void fail_maps(unsigned long which) { failing = which; }
// Parts given back that are not whole within one buffer.
int given_back_outside() { return outside; }

void* mmap(void* at, size_t bytes, int protection, int flags, int file, off_t offset) {
  const bool buffer = (flags & MAP_NORESERVE) != 0;
  const bool fails = buffer && (failing & 1) != 0;
  if (buffer) failing >>= 1;
  if (fails) {
    errno = ENOMEM;
    return MAP_FAILED;
  }
  void* made = reinterpret_cast<void*>(syscall(SYS_mmap, at, bytes, protection, flags, file, offset));
  if (buffer && made != MAP_FAILED && count < kMost) {
    const auto begin = reinterpret_cast<uintptr_t>(made);
    maps[count++] = {begin, (begin + bytes + kPage - 1) / kPage * kPage};
  }
  return made;
}

void* mmap64(void* at, size_t bytes, int protection, int flags, int file, off_t offset) {
  return mmap(at, bytes, protection, flags, file, offset);
}

int munmap(void* at, size_t bytes) {
  for (int i = 0; i < count; ++i) {
    if (maps[i].begin == reinterpret_cast<uintptr_t>(at)) maps[i] = maps[--count];
  }
  return static_cast<int>(syscall(SYS_munmap, at, bytes));
}

int madvise(void* at, size_t bytes, int advice) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(at), end = begin + bytes;
  bool within = advice != MADV_DONTNEED;
  for (int i = 0; i < count; ++i) within = within || (maps[i].begin <= begin && end <= maps[i].end);
  if (within) return static_cast<int>(syscall(SYS_madvise, at, bytes, advice));
  ++outside;
  return 0;
}

}  // extern "C"
