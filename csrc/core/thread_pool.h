// A fork-join pool. run(n, fn) calls fn(part, n) for the parts 0 to n - 1 and returns when all are done. Normally each
// part has its own thread; the caller computes the parts of threads that have not started yet.
// Between jobs, workers spin briefly (ops follow each other within microseconds) and then sleep. While stay_awake() is
// on, they spin for as long as another device computes its part of a token. Workers without a part in a job sleep on.
// Threads may run on any core unless spread() binds each to a NUMA node.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/numa_memory.h"
#include "core/numa_topology.h"

namespace dyno {

class ThreadPool {
 public:
  // `max_threads` (1 to 65535) counts the calling thread. Threads start lazily, at the first run() that needs them.
  explicit ThreadPool(int max_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int max_threads() const { return max_threads_; }

  // Runs fn(part, n_threads) for every part on at most n_threads threads (1 <= n_threads <= max_threads). Parts must
  // not wait for each other, because one thread may run several in sequence. Rethrows an exception of any part after
  // all have finished. Throws PlanError if the system cannot start another thread. Not reentrant.
  template <typename Fn>
  void run(int n_threads, const Fn& fn) {
    run_parts(n_threads, [](const void* of, int part, int parts) { (*static_cast<const Fn*>(of))(part, parts); }, &fn);
  }

  // Set this if jobs follow each other with gaps of up to a millisecond, as in a token of which another device computes
  // a part. Waking 15 threads costs as much as an op of such a token.
  void stay_awake(bool on);

  // Binds each of `threads` threads to the cores of its node (node_of_thread()) from the next run() on;
  // this_thread_node() returns the node. Without nodes, which is the initial state, the system chooses the cores.
  // set_nodes() tests each node with the calling thread, for spread_problem().
  void set_nodes(std::vector<NumaNode> nodes);
  void spread(int threads);
  const std::vector<NumaNode>& nodes() const { return nodes_; }
  // Binds the calling thread, which computes the first part of each job, to the first node for the lifetime of the
  // result. Does nothing without nodes.
  std::unique_ptr<ThreadOnCpus> hold_caller();
  // The reason that the system refused to bind a thread to its node; empty if it did not refuse.
  std::string spread_problem() const;

 private:
  // Calls the function at the address for a part. Not std::function, whose object would be one more cache line that
  // each worker fetches from the caller's core.
  using Call = void (*)(const void*, int, int);
  void run_parts(int n_threads, Call call, const void* fn);

  struct State;
  std::unique_ptr<State> state_;
  int max_threads_;
  std::vector<NumaNode> nodes_;
};

}  // namespace dyno
