#include "core/thread_pool.h"

#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "core/error.h"
#include "core/relax.h"

namespace dyno {
namespace {

// About 50 microseconds: longer than the gap between two ops of a token, shorter than a scheduler slice.
constexpr int kSpins = 2000;

}  // namespace

struct ThreadPool::State {
  std::mutex mutex;
  std::condition_variable wake;
  // One job at a time. `epoch` counts jobs; a worker takes part when its index is below `width` of that epoch.
  std::atomic<uint64_t> epoch{0};
  std::atomic<int> pending{0};
  std::atomic<int> sleepers{0};
  const std::function<void(int, int)>* job = nullptr;
  int width = 0;
  bool stop = false;
  std::exception_ptr failure;
  std::vector<std::thread> threads;

  void record_failure() {
    const std::lock_guard lock(mutex);
    if (!failure) failure = std::current_exception();
  }

  void work(int index, uint64_t seen) {
    while (true) {
      for (int i = 0; i < kSpins && epoch.load(std::memory_order_acquire) == seen; ++i) relax();
      if (epoch.load(std::memory_order_acquire) == seen) {
        std::unique_lock lock(mutex);
        sleepers.fetch_add(1);
        wake.wait(lock, [&] { return epoch.load(std::memory_order_acquire) != seen; });
        sleepers.fetch_sub(1);
      }
      // Every worker acknowledges every epoch, so the next job cannot start while one still reads this one's fields.
      seen = epoch.load(std::memory_order_acquire);
      if (stop) return;
      if (index < width) {
        try {
          (*job)(index, width);
        } catch (...) {
          record_failure();
        }
      }
      pending.fetch_sub(1, std::memory_order_release);
    }
  }

  void publish() {
    {
      // Under the lock, so that a worker between its check and its wait cannot miss the change.
      const std::lock_guard lock(mutex);
      epoch.fetch_add(1, std::memory_order_release);
    }
    if (sleepers.load() > 0) wake.notify_all();
  }
};

ThreadPool::ThreadPool(int max_threads) : state_(std::make_unique<State>()), max_threads_(max_threads) {
  DYNO_CHECK(PlanError, max_threads >= 1, "[threads] ", max_threads, " threads; at least 1 is needed");
}

ThreadPool::~ThreadPool() {
  state_->stop = true;
  state_->publish();
  for (std::thread& thread : state_->threads) thread.join();
}

void ThreadPool::run(int n_threads, const std::function<void(int, int)>& fn) {
  DYNO_CHECK(PlanError, n_threads >= 1 && n_threads <= max_threads_, "[threads] ", n_threads,
             " threads asked of a pool of ", max_threads_);
  if (n_threads == 1) {
    fn(0, 1);
    return;
  }
  State& s = *state_;
  while (static_cast<int>(s.threads.size()) < n_threads - 1) {
    const int index = static_cast<int>(s.threads.size()) + 1;
    s.threads.emplace_back([&s, index, seen = s.epoch.load()] { s.work(index, seen); });
  }
  s.job = &fn;
  s.width = n_threads;
  s.failure = nullptr;
  s.pending.store(static_cast<int>(s.threads.size()), std::memory_order_relaxed);
  s.publish();
  try {
    fn(0, n_threads);
  } catch (...) {
    s.record_failure();
  }
  int spins = 0;
  while (s.pending.load(std::memory_order_acquire) != 0) {
    if (++spins < kSpins) {
      relax();
    } else {
      std::this_thread::yield();
    }
  }
  if (s.failure) std::rethrow_exception(s.failure);
}

}  // namespace dyno
