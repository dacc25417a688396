// Turns of the CPU within a token whose GPU parts are graphs. Kernels move rows through page-locked memory that both
// sides can access, and a counter in that memory signals their arrival. So neither side waits through the driver, and
// the GPU's next part can be started before the CPU's turn ends.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <span>
#include <vector>

#include "runtime/cuda/handles.h"

namespace dyno::runtime {

// A copy between device and host: exactly one of the two addresses is on the host.
struct Crossing {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  size_t bytes = 0;
};

// The copies of one kernel launch. The driver copies values above kMostBytes.
struct Crossings {
  static constexpr int kMost = 8;
  static constexpr size_t kMostBytes = size_t{64} << 10;
  Crossing rows[kMost];
  int32_t count = 0;
};

// Implemented in turns.cu. Counts are in device memory. The GPU writes the number of turns that it gave to `seen`; the
// host writes the number of finished turns to `ready`.
void send_rows(const Crossings& rows, uint32_t* count, uint32_t* seen, CUstream_st* stream);
void receive_rows(const Crossings& rows, uint32_t* count, const uint32_t* ready, CUstream_st* stream);

// The counters of one GPU and its CPU. The CPU's turns are numbered in the order in which the GPU reaches them on its
// stream, so nothing is reset between tokens, and started work never waits forever: finish_turns().
class Turns {
 public:
  // Also loads the kernels, which cannot be loaded during a capture or while one of them waits.
  void prepare(cudaStream_t stream);

  // For a stream that is being captured. The first receive of a GPU part waits for the CPU (`wait`). The last send
  // gives the CPU its turn (`give`) after all previous work on the stream.
  void send(std::span<const Crossing> rows, bool give, cudaStream_t stream) const;
  void receive(std::span<const Crossing> rows, bool wait, cudaStream_t stream) const;

  // Records the start of a part that gives the CPU a turn; `waits`: the part itself waits for the CPU. `ahead`: the
  // CPU's previous turn is not over, so await() ignores this part until finish_turns().
  void started(bool waits, bool ahead);
  bool ahead() const { return ahead_ > 0; }
  // Marks all turns that started parts wait for as finished.
  void finish_turns();
  // Returns when the CPU has the turn of the last part that was not started ahead. Throws an error of the stream.
  void await(cudaStream_t stream) const;

 private:
  PinnedBuffer words_;   // seen, ready: one cache line each
  DeviceBuffer counts_;  // of turns given, and of turns waited for
  uint32_t given_ = 0, ahead_ = 0, waited_ = 0;
};

}  // namespace dyno::runtime
