// Helpers that divide a CPU launch among the threads of its context. None allocates. Work units are independent, so
// results do not depend on the thread.
//
// A worker fetches each line of memory that a launch describes itself with from the caller's core, and a launch of a
// small model takes microseconds. So the functions that threads get hold their values, and no reference to another such
// function on the caller's stack.
#pragma once

#include <algorithm>
#include <atomic>

#include "ops/cpu_context.h"

namespace dyno::ops {

// The scratch memory of each thread of a launch.
struct ThreadScratch {
  explicit ThreadScratch(const CpuContext& context) : first(context.scratch), per_thread(context.scratch_per_thread) {}
  std::byte* of(int thread) const { return first + static_cast<size_t>(thread) * per_thread; }

  std::byte* first;
  size_t per_thread;
};

// Memory that one thread writes and others read is at least this far from other memory: processors fetch cache lines
// of 64 bytes in pairs.
inline constexpr size_t kWrittenApart = 128;

template <typename Body>
void run_threads(CpuContext& context, int threads, const Body& body) {
  if (threads <= 1 || context.pool == nullptr) {
    body(0, 1);
    return;
  }
  context.pool->run(threads, body);
}

// Calls body(begin, end, scratch) for contiguous parts of [0, items). Uses only as many threads as get at least
// `grain_elements` each, because waking a thread for less does not pay.
template <typename Body>
void parallel_ranges(CpuContext& context, int64_t items, int64_t elements_per_item, int64_t grain_elements,
                     const Body& body) {
  if (items <= 0) return;
  const int64_t wanted = items * elements_per_item / std::max<int64_t>(1, grain_elements);
  const int64_t limit = std::min<int64_t>(context.threads, items);
  const int threads = static_cast<int>(std::clamp<int64_t>(wanted, 1, limit));
  run_threads(context, threads, [items, body, scratch = ThreadScratch(context)](int thread, int count) {
    const int64_t begin = items * thread / count, end = items * (thread + 1) / count;
    if (begin < end) body(begin, end, scratch.of(thread));
  });
}

// Calls body(item, scratch) for every item of [0, items), assigned one by one, for items of unequal cost. Order them
// with the most expensive first. `elements` is the work of all items together, in the unit of `grain_elements`.
template <typename Body>
void parallel_items(CpuContext& context, int64_t items, int64_t elements, int64_t grain_elements, const Body& body) {
  struct alignas(kWrittenApart) Next {
    std::atomic<int64_t> item{0};
  } next;
  const int64_t limit = std::max<int64_t>(1, std::min<int64_t>(context.threads, items));
  const auto threads = static_cast<int>(std::clamp<int64_t>(elements / grain_elements, 1, limit));
  run_threads(context, threads, [items, body, &next, scratch = ThreadScratch(context)](int thread, int) {
    for (int64_t item; (item = next.item.fetch_add(1, std::memory_order_relaxed)) < items;) {
      body(item, scratch.of(thread));
    }
  });
}

inline constexpr int kStretches = 64;  // maximum per launch; additional threads share stretches

// Calls body(item, scratch) for every item of [0, items), for items that are adjacent in memory and cost the same. Each
// thread starts with its own contiguous stretch, so that it reads one stream, which its core's prefetchers follow. A
// thread that has finished takes items of other stretches, so a thread that lost its core delays one item only.
template <typename Body>
void parallel_stretches(CpuContext& context, int64_t items, const Body& body) {
  if (items <= 0) return;
  const auto threads = static_cast<int>(std::clamp<int64_t>(items, 1, context.threads));
  const int count = std::min(threads, kStretches);
  struct alignas(kWrittenApart) Stretch {
    std::atomic<int64_t> next;
    int64_t end;
  };
  Stretch stretches[kStretches];
  for (int i = 0; i < count; ++i) {
    stretches[i].next.store(items * i / count, std::memory_order_relaxed);
    stretches[i].end = items * (i + 1) / count;
  }
  run_threads(context, threads, [&stretches, count, body, scratch = ThreadScratch(context)](int thread, int) {
    for (int i = 0; i < count; ++i) {
      Stretch& stretch = stretches[(thread + i) % count];
      // Tests before it takes: most threads find that nothing is left in other stretches, and only writes take a line
      // away from its thread.
      while (stretch.next.load(std::memory_order_relaxed) < stretch.end) {
        const int64_t item = stretch.next.fetch_add(1, std::memory_order_relaxed);
        if (item >= stretch.end) break;
        // The next stretch is known by the time that the last item is done.
        if (item == stretch.end - 1) __builtin_prefetch(&stretches[(thread + i + 1) % count]);
        body(item, scratch.of(thread));
      }
    }
  });
}

}  // namespace dyno::ops
