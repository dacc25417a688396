// The memory of a GPU's KV cache: allocated whole, or addresses of which parts get memory when they are written.
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
  // Of the current device, `ordinal`. `by_need`: addresses alone, for take(). Throws OutOfMemoryError, or DeviceError
  // where the driver cannot reserve addresses.
  CacheMemory(int ordinal, size_t bytes, bool by_need);
  ~CacheMemory();
  CacheMemory(CacheMemory&& other) noexcept;
  CacheMemory& operator=(CacheMemory&& other) noexcept;

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  bool by_need() const { return !mapped_.empty(); }
  // Whether pieces wait for settle() or a later take().
  bool unsettled() const { return !leaves_.empty() || !leaving_.empty(); }
  // Bytes of the device that it takes now.
  size_t taken() const;

  // Memory for bytes [begin, end), zeros where there was none; work on `stream` from now on may use it. Throws
  // OutOfMemoryError; then a part of the range may have memory.
  void take(size_t begin, size_t end, cudaStream_t stream);
  // The device gets back the pieces that lie within [begin, end). Nothing may be under way that uses them.
  void give_back(size_t begin, size_t end);
  // The same, when the work is over that is on the stream of the next take(): in a later take(), which need not wait
  // for the device then. Until then the pieces stay, and they count in taken().
  void give_back_later(size_t begin, size_t end);
  // All pieces that are to leave do so now. Nothing may be under way that uses them.
  void settle();
  // All zeros, on `stream`. By need: without any memory.
  void clear(cudaStream_t stream);

 private:
  // Pieces that leave when an event is over, unless somebody takes them again.
  struct Leaving {
    int64_t turn = 0;
    Event over;
    std::vector<size_t> pieces;
  };

  void map(size_t piece);
  // Lets the pieces go whose work is over, and waits for it but for the last turn's; `all`: also for that.
  void let_go(bool all);
  void let_go(const Leaving& leaving) noexcept;
  void unmap(size_t piece) noexcept;
  size_t pieces_of(size_t bytes) const { return (bytes + piece_bytes_ - 1) / piece_bytes_; }

  DeviceBuffer whole_;
  std::byte* data_ = nullptr;
  size_t size_ = 0;
  int ordinal_ = 0;
  size_t piece_bytes_ = 0;
  std::vector<bool> mapped_;  // by piece; empty where the cache is allocated whole
  // By piece: in which turn it leaves; 0: it stays. A turn begins with the first piece that leaves after a take().
  std::vector<int64_t> turns_;
  std::vector<size_t> leaves_;    // in the turn that no event ends yet
  std::vector<Leaving> leaving_;  // in order
  int64_t turn_ = 0;
};

}  // namespace dyno::runtime
