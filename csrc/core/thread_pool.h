// A fork-join pool: run(n, fn) calls fn(part, n) for the parts 0 to n - 1 and returns when all are done. Each part has
// a thread of its own as long as the machine gives it one; the caller does the parts of threads that have not begun.
// Workers spin briefly between jobs (ops follow each other within microseconds), then sleep; while stay_awake() holds,
// they spin as long as another device's turn takes. Threads run on any core, unless spread() holds each on a NUMA node.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/numa_memory.h"
#include "core/numa_topology.h"

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

  // From the next run() on, of `threads` threads, each of them stays on the cores of its node (node_of_thread()), and
  // this_thread_node() tells which. Without nodes, as at first, the system puts threads where it likes. set_nodes()
  // tries each node with the calling thread, for spread_problem().
  void set_nodes(std::vector<NumaNode> nodes);
  void spread(int threads);
  const std::vector<NumaNode>& nodes() const { return nodes_; }
  // Holds the calling thread, which does the first part of each job, on the first node as long as the answer lives;
  // nothing without nodes.
  std::unique_ptr<ThreadOnCpus> hold_caller();
  // Why the system did not let a thread stay on its node; empty if it did.
  std::string spread_problem() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
  int max_threads_;
  std::vector<NumaNode> nodes_;
};

}  // namespace dyno
