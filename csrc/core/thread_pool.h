// A fork-join pool: run(n, fn) calls fn(thread_index, n) on n threads, the caller being thread 0, and returns when all
// are done. Workers spin briefly between jobs (ops follow each other within microseconds), then sleep.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace dyno {

class ThreadPool {
 public:
  // `max_threads` counts the calling thread. Threads start lazily, at the first run() that needs them.
  explicit ThreadPool(int max_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int max_threads() const { return max_threads_; }

  // Runs fn(thread_index, n_threads) on n_threads threads (1 <= n_threads <= max_threads). An exception thrown by any
  // of them is rethrown here after all have finished. Not reentrant.
  void run(int n_threads, const std::function<void(int, int)>& fn);

 private:
  struct State;
  std::unique_ptr<State> state_;
  int max_threads_;
};

}  // namespace dyno
