// Turns of the CPU within a token whose GPU parts are graphs. Rows cross by kernels over page-locked memory that both
// can reach, and a count in that memory says when they are there. So neither side calls the driver to wait for the
// other, and the GPU's next part can be started before the CPU's turn is over.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <span>
#include <vector>

#include "runtime/cuda/handles.h"

namespace dyno::runtime {

// Bytes that cross: exactly one of the two addresses is of the host.
struct Crossing {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  size_t bytes = 0;
};

// Of one launch of a kernel; the driver moves more bytes than kMostBytes.
struct Crossings {
  static constexpr int kMost = 8;
  static constexpr size_t kMostBytes = size_t{64} << 10;
  Crossing rows[kMost];
  int32_t count = 0;
};

// turns.cu. Counts lie in the memory of the device; `seen` is where the host reads the count of turns that it got,
// `ready` where it writes that of those that are over.
void send_rows(const Crossings& rows, uint32_t* count, uint32_t* seen, CUstream_st* stream);
void receive_rows(const Crossings& rows, uint32_t* count, const uint32_t* ready, CUstream_st* stream);

// The counts of one GPU and the CPU beside it. The CPU's turns are numbered as the GPU comes to them on its stream, so
// nothing is reset between tokens, and what was started is never left waiting: finish_turns().
class Turns {
 public:
  // Also loads the kernels, which cannot be loaded during a capture, nor while one of them waits.
  void prepare(cudaStream_t stream);

  // On a stream that is being captured. The first rows that a part of the GPU receives wait for the CPU (`wait`); the
  // last that it sends give it the turn (`give`), when all before it on the stream is over.
  void send(std::span<const Crossing> rows, bool give, cudaStream_t stream) const;
  void receive(std::span<const Crossing> rows, bool wait, cudaStream_t stream) const;

  // A part was started that waits for the CPU or not, and gives it a turn. `ahead`: the CPU's turn before it is not
  // over, and is not waited for by await() before finish_turns().
  void started(bool waits, bool ahead);
  bool ahead() const { return ahead_ > 0; }
  // All turns that parts started so far wait for are over.
  void finish_turns();
  // Returns when the CPU has the turn of the last part that was not ahead. Throws an error of the stream.
  void await(cudaStream_t stream) const;

 private:
  PinnedBuffer words_;   // seen, ready: a cache line each
  DeviceBuffer counts_;  // of turns given, and of those waited for
  uint32_t given_ = 0, ahead_ = 0, waited_ = 0;
};

}  // namespace dyno::runtime
