#include "runtime/cuda/turns.h"

#include <atomic>
#include <cstring>

#include "core/cuda/check.h"
#include "core/error.h"
#include "core/relax.h"

namespace dyno::runtime {
namespace {

constexpr size_t kLine = 64;
// Spins between two checks of the stream: about a millisecond, so that a normal turn needs no check. A lost device
// never gives a turn.
constexpr int kSpins = 20'000;

uint32_t* word_of(const PinnedBuffer& words, size_t line) {
  return reinterpret_cast<uint32_t*>(words.data() + line * kLine);
}
uint32_t* count_of(const DeviceBuffer& counts, size_t index) {
  return reinterpret_cast<uint32_t*>(counts.data()) + index;
}

// Few bytes are copied in kernel launches, many by the driver.
template <typename Launch>
void in_launches(std::span<const Crossing> rows, Launch&& launch) {
  Crossings some;
  for (const Crossing& one : rows) {
    if (one.bytes > Crossings::kMostBytes) continue;
    if (some.count == Crossings::kMost) {
      launch(some, /*last=*/false);
      some.count = 0;
    }
    some.rows[some.count++] = one;
  }
  launch(some, /*last=*/true);
}

void by_driver(std::span<const Crossing> rows, cudaStream_t stream) {
  for (const Crossing& one : rows) {
    if (one.bytes <= Crossings::kMostBytes) continue;
    DYNO_CUDA_CHECK(cudaMemcpyAsync(one.to, one.from, one.bytes, cudaMemcpyDefault, stream));
  }
}

}  // namespace

void Turns::prepare(cudaStream_t stream) {
  if (words_.size() != 0) return;
  PinnedBuffer words(2 * kLine, "turns of the CPU");
  std::memset(words.data(), 0, words.size());
  DeviceBuffer counts(2 * sizeof(uint32_t), "turns of the CPU");
  DYNO_CUDA_CHECK(cudaMemsetAsync(counts.data(), 0, counts.size(), stream));
  send_rows({}, nullptr, nullptr, stream);
  receive_rows({}, nullptr, nullptr, stream);
  DYNO_CUDA_CHECK(cudaStreamSynchronize(stream));
  words_ = std::move(words);
  counts_ = std::move(counts);
}

void Turns::send(std::span<const Crossing> rows, bool give, cudaStream_t stream) const {
  by_driver(rows, stream);
  in_launches(rows, [&](const Crossings& some, bool last) {
    const bool gives = give && last;
    if (some.count > 0 || gives) send_rows(some, count_of(counts_, 0), gives ? word_of(words_, 0) : nullptr, stream);
  });
}

void Turns::receive(std::span<const Crossing> rows, bool wait, cudaStream_t stream) const {
  in_launches(rows, [&, waits = wait](const Crossings& some, bool) mutable {
    if (some.count > 0 || waits) receive_rows(some, count_of(counts_, 1), waits ? word_of(words_, 1) : nullptr, stream);
    waits = false;
  });
  by_driver(rows, stream);
}

void Turns::started(bool waits, bool ahead) {
  ++(ahead ? ahead_ : given_);
  if (waits) ++waited_;
  if (!ahead) finish_turns();
}

void Turns::finish_turns() {
  given_ += ahead_;
  ahead_ = 0;
  if (words_.size() != 0) std::atomic_ref<uint32_t>(*word_of(words_, 1)).store(waited_, std::memory_order_release);
}

void Turns::await(cudaStream_t stream) const {
  const std::atomic_ref<uint32_t> seen(*word_of(words_, 0));
  const auto here = [&] { return static_cast<int32_t>(seen.load(std::memory_order_acquire) - given_) >= 0; };
  while (true) {
    for (int i = 0; i < kSpins; ++i) {
      if (here()) return;
      relax();
    }
    const cudaError_t status = cudaStreamQuery(stream);
    if (status == cudaErrorNotReady) {
      (void)cudaGetLastError();  // cudaErrorNotReady is not an error, but the next launch would report it
      continue;
    }
    cuda_check(status, "cudaStreamQuery(stream)", __FILE__, __LINE__);
    DYNO_CHECK(Error, here(), "[executor] the GPU is idle and has not given the CPU turn ", given_);
  }
}

}  // namespace dyno::runtime
