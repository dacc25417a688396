// A fork-join pool: run(n, fn) calls fn(part, n) for the parts 0 to n - 1 and returns when all are done. Each part has
// a thread of its own as long as the machine gives it one; the caller does the parts of threads that have not begun.
// Workers spin briefly between jobs (ops follow each other within microseconds), then sleep; while stay_awake() holds,
// they spin as long as another device's turn takes.
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

  // Runs fn(part, n_threads) for every part on at most n_threads threads (1 <= n_threads <= max_threads). Parts must
  // not wait for each other: one thread may do several in turn. An exception thrown by any of them is rethrown here
  // after all have finished. Throws PlanError if the system gives no more threads. Not reentrant.
  void run(int n_threads, const std::function<void(int, int)>& fn);

  // Whether jobs follow each other with gaps of up to a millisecond, as they do within a token that another device
  // computes part of. Waking 15 threads costs as much as an op of such a token.
  void stay_awake(bool on);

 private:
  struct State;
  std::unique_ptr<State> state_;
  int max_threads_;
};

}  // namespace dyno
