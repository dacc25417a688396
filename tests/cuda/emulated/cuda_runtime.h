// CUDA's words for a kernel that runs on the CPU, so that a test without a GPU can look at its answers. The threads of
// a block are fibers of one thread, which run until a barrier or a shuffle. Only its arithmetic and its order are those
// of a GPU: nothing here finds a missing barrier, or tells anything about time.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ thread_local
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __grid_constant__

using std::max;
using std::min;

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned of_x = 1, unsigned of_y = 1, unsigned of_z = 1) : x(of_x), y(of_y), z(of_z) {}
};

struct alignas(16) float4 {
  float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
struct alignas(8) float2 {
  float x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
struct alignas(8) uint2 {
  unsigned x, y;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

namespace emulated {

constexpr unsigned kWarp = 32;
constexpr unsigned kMaxThreads = 1024;
constexpr size_t kStackBytes = size_t{1} << 17;

// A copy into shared memory that arrives when its thread waits for it.
struct Copy {
  uint8_t* to;
  const uint8_t* from;  // null: zeros
  size_t bytes;
};

// A fiber runs the kernel of one block after the other. It enters its stack by a context once. Later switches are
// jumps, which leave out the system calls that a context takes for the mask of signals.
struct Fiber {
  jmp_buf at;
  std::unique_ptr<char[]> stack;
  dim3 index;
  bool started = false, ended = false;
  unsigned shared = 0;                    // values that it has shared with its warp
  std::vector<std::vector<Copy>> copies;  // groups that it has not awaited, and at the end the open one
};

inline std::vector<Fiber> fibers;
inline size_t current = 0;
inline jmp_buf scheduler;
inline std::function<void()> kernel;
inline dim3 block, threads, grid;
inline uint8_t* shared_memory = nullptr;  // what a kernel that takes addresses there calls `shared`
inline bool backwards = false;            // the last thread runs first
inline bool moved = false;                // whether any fiber got on since the scheduler last looked
inline const char* fault = nullptr;       // the first thing that a kernel must not do
// Global memory that kernels copy to shared memory; empty: any.
inline std::vector<std::pair<const uint8_t*, const uint8_t*>> readable;

inline void yield() {
  if (_setjmp(fibers[current].at) == 0) _longjmp(scheduler, 1);
}

class Barrier {
 public:
  void wait(unsigned count) {
    moved = true;
    const unsigned generation = generation_;
    if (++arrived_ == count) {
      arrived_ = 0;
      ++generation_;
    }
    while (generation == generation_) yield();
    moved = true;
  }

 private:
  unsigned arrived_ = 0, generation_ = 0;
};

inline Barrier whole;
inline std::vector<Barrier> named;  // barriers of some warps, by number
inline std::vector<Barrier> warps;
inline std::vector<uint64_t> lanes;  // the bits of two values for each thread: a lane may be one ahead of others

inline void enter() {
  while (true) {
    kernel();
    fibers[current].ended = true;
    moved = true;
    yield();
  }
}

// Runs the current fiber until it yields.
inline void resume() {
  if (_setjmp(scheduler) != 0) return;
  Fiber& fiber = fibers[current];
  if (fiber.started) _longjmp(fiber.at, 1);
  fiber.started = true;
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = fiber.stack.get();
  context.uc_stack.ss_size = kStackBytes;
  context.uc_link = nullptr;
  makecontext(&context, enter, 0);
  setcontext(&context);
}

// Runs one block. Throws std::runtime_error if its threads wait for each other for ever.
inline void run_block(unsigned count, std::function<void()> body) {
  kernel = std::move(body);
  threads = dim3(count);
  whole = {};
  named.assign(16, {});
  warps.assign((count + kWarp - 1) / kWarp, {});
  lanes.assign(2 * size_t{count}, 0);
  if (fibers.size() < count) fibers.resize(count);
  for (unsigned i = 0; i < count; ++i) {
    Fiber& fiber = fibers[i];
    if (fiber.stack == nullptr) fiber.stack = std::make_unique_for_overwrite<char[]>(kStackBytes);
    fiber.ended = false;
    fiber.index = dim3(i, 0, 0);
    fiber.shared = 0;
    fiber.copies.assign(1, {});
  }
  // A warp runs as far as it can before the next one does: to a barrier of the block, over its own shuffles.
  const unsigned per_block = static_cast<unsigned>(warps.size());
  for (bool left = true, any = true; left;) {
    if (!any) {
      fibers.clear();  // they stand in the middle of the kernel
      throw std::runtime_error("the threads of a block wait for each other for ever");
    }
    left = any = false;
    for (unsigned turn = 0; turn < per_block; ++turn) {
      const unsigned first = (backwards ? per_block - 1 - turn : turn) * kWarp, size = std::min(kWarp, count - first);
      do {
        moved = false;
        for (unsigned lane = 0; lane < size; ++lane) {
          current = first + (backwards ? size - 1 - lane : lane);
          if (fibers[current].ended) continue;
          left = true;
          resume();
        }
        any = any || moved;
      } while (moved);
    }
  }
  for (unsigned i = 0; i < count; ++i) {
    for (const auto& group : fibers[i].copies) {
      if (!group.empty()) fault = "copies are in flight when a block ends";
    }
  }
}

// The bits of the values of the caller's warp, in the order of its lanes, of which all have to take part. They stand
// until a lane shares twice again, and that waits for the others.
template <typename T>
const uint64_t* share(T value) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  Fiber& fiber = fibers[current];
  const unsigned thread = fiber.index.x, first = thread / kWarp * kWarp;
  uint64_t* const half = &lanes[fiber.shared++ % 2 * size_t{threads.x}];
  std::memcpy(half + thread, &value, sizeof(T));
  warps[thread / kWarp].wait(std::min(kWarp, threads.x - first));
  return half + first;
}

// The value of lane `from` of the caller's warp.
template <typename T>
T exchange(T value, unsigned from) {
  T found;
  std::memcpy(&found, share(value) + from, sizeof(T));
  return found;
}

inline unsigned lane() { return fibers[current].index.x % kWarp; }

inline void sync_warp() {
  const unsigned first = fibers[current].index.x / kWarp * kWarp;
  warps[first / kWarp].wait(std::min(kWarp, threads.x - first));
}

}  // namespace emulated

#define threadIdx (emulated::fibers[emulated::current].index)
#define blockIdx (emulated::block)
#define blockDim (emulated::threads)
#define gridDim (emulated::grid)

inline void __syncthreads() { emulated::whole.wait(emulated::threads.x); }
inline void __syncwarp() { emulated::sync_warp(); }
template <typename T>
T __shfl_xor_sync(unsigned, T value, int bits) {
  return emulated::exchange(value, emulated::lane() ^ static_cast<unsigned>(bits));
}
template <typename T>
T __shfl_sync(unsigned, T value, int from) {
  return emulated::exchange(value, static_cast<unsigned>(from));
}
template <typename T>
T __shfl_up_sync(unsigned, T value, int delta) {
  const unsigned lane = emulated::lane(), by = static_cast<unsigned>(delta);
  return emulated::exchange(value, lane >= by ? lane - by : lane);
}
// The threads of a block are fibers of one thread.
inline int atomicAdd(int* at, int value) {
  const int before = *at;
  *at += value;
  return before;
}
inline int atomicMin(int* at, int value) { return std::exchange(*at, min(*at, value)); }
inline int atomicMax(int* at, int value) { return std::exchange(*at, max(*at, value)); }
inline void __threadfence() {}
template <typename T>
T __ldcg(const T* at) {
  return *at;
}
inline unsigned __ballot_sync(unsigned, bool value) {
  const uint64_t* const values = emulated::share<uint64_t>(value);
  unsigned found = 0;
  for (unsigned lane = 0; lane < emulated::kWarp; ++lane) found |= static_cast<unsigned>(values[lane]) << lane;
  return found;
}
inline bool __all_sync(unsigned mask, bool value) { return __ballot_sync(mask, value) == ~0u; }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __clz(int bits) { return bits == 0 ? 32 : __builtin_clz(static_cast<unsigned>(bits)); }
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  const uint64_t* const values = emulated::share<uint64_t>(value);
  return static_cast<unsigned>(*std::max_element(values, values + emulated::kWarp));
}
// Byte i of the answer is the one of {low, high} that nibble i of `which` counts.
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned which) {
  const uint64_t both = uint64_t{high} << 32 | low;
  unsigned out = 0;
  for (int i = 0; i < 4; ++i) out |= static_cast<unsigned>(both >> (which >> (4 * i) & 7) * 8 & 0xff) << (8 * i);
  return out;
}
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline unsigned __float_as_uint(float value) { return __builtin_bit_cast(unsigned, value); }
inline int __double2int_rn(double x) { return static_cast<int>(std::rint(x)); }
inline int __float2int_rn(float x) { return static_cast<int>(std::rint(x)); }
inline float __int_as_float(int value) { return __builtin_bit_cast(float, value); }
inline float __uint_as_float(unsigned value) { return __builtin_bit_cast(float, value); }

constexpr int cudaFuncAttributeMaxDynamicSharedMemorySize = 0;
template <typename Kernel>
int cudaFuncSetAttribute(Kernel, int, int) {
  return 0;
}
