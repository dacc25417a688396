// Helpers that divide a CPU launch among the threads of its context. Neither allocates, because the pool's
// std::function holds only a reference. Work units are independent, so results do not depend on the thread.
#pragma once

#include <algorithm>
#include <atomic>

#include "ops/cpu_context.h"

namespace dyno::ops {

inline std::byte* thread_scratch(const CpuContext& context, int thread) {
  return context.scratch + static_cast<size_t>(thread) * context.scratch_per_thread;
}

template <typename Body>
void run_threads(CpuContext& context, int threads, const Body& body) {
  if (threads <= 1 || context.pool == nullptr) {
    body(0, 1);
    return;
  }
  context.pool->run(threads, [&body](int thread, int count) { body(thread, count); });
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
  run_threads(context, threads, [&](int thread, int count) {
    const int64_t begin = items * thread / count, end = items * (thread + 1) / count;
    if (begin < end) body(begin, end, thread_scratch(context, thread));
  });
}

// Calls body(item, scratch) for every item of [0, items), assigned one by one, for items of unequal cost. Order them
// with the most expensive first. `elements` is the work of all items together, in the unit of `grain_elements`.
template <typename Body>
void parallel_items(CpuContext& context, int64_t items, int64_t elements, int64_t grain_elements, const Body& body) {
  std::atomic<int64_t> next{0};
  const int64_t limit = std::max<int64_t>(1, std::min<int64_t>(context.threads, items));
  const auto threads = static_cast<int>(std::clamp<int64_t>(elements / grain_elements, 1, limit));
  run_threads(context, threads, [&](int thread, int) {
    for (int64_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < items;) {
      body(item, thread_scratch(context, thread));
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
  struct alignas(64) Stretch {  // one cache line each, to avoid false sharing
    std::atomic<int64_t> next;
    int64_t end;
  };
  Stretch stretches[kStretches];
  for (int i = 0; i < count; ++i) {
    stretches[i].next.store(items * i / count, std::memory_order_relaxed);
    stretches[i].end = items * (i + 1) / count;
  }
  run_threads(context, threads, [&](int thread, int) {
    for (int i = 0; i < count; ++i) {
      Stretch& stretch = stretches[(thread + i) % count];
      for (int64_t item; (item = stretch.next.fetch_add(1, std::memory_order_relaxed)) < stretch.end;) {
        body(item, thread_scratch(context, thread));
      }
    }
  });
}

}  // namespace dyno::ops
