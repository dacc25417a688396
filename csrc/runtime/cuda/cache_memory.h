// The memory of a GPU's KV cache: either allocated completely, or reserved addresses to which memory is mapped on
// demand.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "runtime/cuda/handles.h"

namespace dyno::runtime {

class CacheMemory {
 public:
  CacheMemory() = default;
  // Creates the cache on the current device, `ordinal`. `by_need`: reserves only addresses, for take(). Throws
  // OutOfMemoryError, or DeviceError if the driver cannot reserve addresses.
  CacheMemory(int ordinal, size_t bytes, bool by_need);
  ~CacheMemory();
  CacheMemory(CacheMemory&& other) noexcept;
  CacheMemory& operator=(CacheMemory&& other) noexcept;

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  bool by_need() const { return !mapped_.empty(); }
  // Whether pieces wait for settle() or a later take() to be freed.
  bool unsettled() const { return !leaves_.empty() || !leaving_.empty(); }
  // Bytes of device memory in use now.
  size_t taken() const;

  // Maps memory for bytes [begin, end); new memory is zero. Later work on `stream` may use it. Throws OutOfMemoryError;
  // a part of the range may then have memory.
  void take(size_t begin, size_t end, cudaStream_t stream);
  // Frees the pieces within [begin, end). No running work may use them.
  void give_back(size_t begin, size_t end);
  // Frees the pieces within [begin, end) in a later take(), after the work that is on the stream at the next take().
  // That take() need not wait for the device. Until then the pieces stay mapped and count in taken().
  void give_back_later(size_t begin, size_t end);
  // Frees all pending pieces now. No running work may use them.
  void settle();
  // Sets everything to zero on `stream`. With `by_need`, frees all memory instead.
  void clear(cudaStream_t stream);

 private:
  // Pieces that are freed after an event, unless take() needs them again.
  struct Leaving {
    int64_t turn = 0;
    Event over;
    std::vector<size_t> pieces;
  };

  void map(size_t piece);
  // Frees pieces whose work is complete, and waits for the work of all turns except the last; `all`: of all turns.
  void let_go(bool all);
  void let_go(const Leaving& leaving) noexcept;
  void unmap(size_t piece) noexcept;
  size_t pieces_of(size_t bytes) const { return (bytes + piece_bytes_ - 1) / piece_bytes_; }

  DeviceBuffer whole_;
  std::byte* data_ = nullptr;
  size_t size_ = 0;
  int ordinal_ = 0;
  size_t piece_bytes_ = 0;
  std::vector<bool> mapped_;  // by piece; empty if the cache is allocated completely
  // By piece: the turn in which it is freed; 0: it is kept. A turn starts with the first pending piece after a take().
  std::vector<int64_t> turns_;
  std::vector<size_t> leaves_;    // pieces of the current turn, which has no event yet
  std::vector<Leaving> leaving_;  // in order
  int64_t turn_ = 0;
};

}  // namespace dyno::runtime
