// How parallel_stretches deals out items; prints nothing and returns 0 if all of it holds.
#include <chrono>
#include <cstdio>
#include <memory>
#include <thread>
#include <vector>

#include "ops/parallel.h"

namespace {

using dyno::ThreadPool;
using dyno::ops::CpuContext;
using dyno::ops::parallel_stretches;

CpuContext context_of(ThreadPool& pool, int threads) {
  CpuContext context;
  context.pool = &pool;
  context.threads = threads;
  return context;
}

// Each item once, for any number of threads: also more threads than items, and more than there are stretches.
bool each_item_once(int threads, int64_t items) {
  ThreadPool pool(threads);
  CpuContext context = context_of(pool, threads);
  const auto done = std::make_unique<std::atomic<int>[]>(static_cast<size_t>(items) + 1);
  parallel_stretches(context, items, [&](int64_t item, std::byte*) { ++done[static_cast<size_t>(item)]; });
  for (int64_t item = 0; item < items; ++item) {
    if (done[static_cast<size_t>(item)] != 1) {
      std::printf("%d threads, %lld items: item %lld was done %d times\n", threads, static_cast<long long>(items),
                  static_cast<long long>(item), done[static_cast<size_t>(item)].load());
      return false;
    }
  }
  return true;
}

// A thread leaves its own stretch only if all of that has been taken.
bool own_stretch_first(int threads, int64_t items) {
  ThreadPool pool(threads);
  CpuContext context = context_of(pool, threads);
  const std::vector<std::byte> marks(static_cast<size_t>(threads));  // the scratch of a thread tells which one it is
  context.scratch = const_cast<std::byte*>(marks.data());
  context.scratch_per_thread = 1;
  std::vector<std::atomic<int64_t>> taken(static_cast<size_t>(threads));
  const auto begin = [&](int64_t stretch) { return items * stretch / threads; };
  std::atomic<bool> left_early{false};
  parallel_stretches(context, items, [&](int64_t item, std::byte* scratch) {
    const int64_t own = scratch - context.scratch;
    int64_t stretch = 0;
    while (item >= begin(stretch + 1)) ++stretch;
    ++taken[static_cast<size_t>(stretch)];
    const int64_t size = begin(own + 1) - begin(own);
    // Other threads may not have counted the item yet that they have just taken.
    if (stretch != own && taken[static_cast<size_t>(own)] + threads < size) left_early = true;
    std::this_thread::yield();
  });
  if (left_early) std::printf("%d threads: one left its stretch too early\n", threads);
  return !left_early;
}

// A thread that stands still with one item holds up no other item.
bool others_help(int64_t held, int64_t items) {
  ThreadPool pool(2);
  CpuContext context = context_of(pool, 2);
  std::atomic<int64_t> done{0};
  bool helped = false;
  parallel_stretches(context, items, [&](int64_t item, std::byte*) {
    if (item == held) {
      const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(30);
      while (done < items - 1 && std::chrono::steady_clock::now() < until) std::this_thread::yield();
      helped = done == items - 1;
    } else {
      ++done;
    }
  });
  if (!helped) std::printf("while item %lld was held, not all others were done\n", static_cast<long long>(held));
  return helped;
}

}  // namespace

int main() {
  bool holds = true;
  for (const int threads : {1, 2, 3, 7, 64, 65, 100}) {
    for (const int64_t items : {0, 1, 2, 63, 64, 99, 1000}) holds = each_item_once(threads, items) && holds;
  }
  for (const int threads : {1, 2, 4}) holds = own_stretch_first(threads, 4000) && holds;
  for (const int64_t held : {0, 50, 99}) holds = others_help(held, 100) && holds;
  return holds ? 0 : 1;
}
