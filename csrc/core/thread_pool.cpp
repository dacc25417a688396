#include "core/thread_pool.h"

#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "core/allowed_cpus.h"
#include "core/error.h"
#include "core/numa_copies.h"
#include "core/relax.h"

namespace dyno {
namespace {

// About 50 microseconds: longer than the gap between two ops of a token, shorter than a scheduler slice.
constexpr int kSpins = 2000;
// A few milliseconds. A worker sleeps after that even if stay_awake() was never turned off.
constexpr int kAwakeSpins = 100'000;

}  // namespace

// A job has `width` parts. Part i is meant for thread i, but the first free thread claims it. So a worker that another
// process keeps from its core delays nobody, because the caller computes its part. Parts keep their numbers, so results
// do not depend on the thread.
struct ThreadPool::State {
  explicit State(int max_threads) : claims(static_cast<size_t>(max_threads)) {}

  std::mutex mutex;
  std::condition_variable wake;      // of workers
  std::condition_variable finished;  // of the caller
  std::atomic<uint64_t> epoch{0};    // counts jobs
  std::atomic<int> sleepers{0};
  std::atomic<bool> caller_sleeps{false};
  std::atomic<int> pending{0};  // parts of the job that are not done
  std::atomic<bool> stop{false};
  std::atomic<bool> awake{false};
  // 2e: the part is free in job e; 2e + 1: a thread has claimed it. A thread that holds a part of the current job may
  // read `job` and `width` and set `failure`, because the job cannot end before the part is done.
  std::vector<std::atomic<uint64_t>> claims;
  const std::function<void(int, int)>* job = nullptr;
  int width = 0;
  std::exception_ptr failure;
  // Valid under the same rule: the nodes of the threads. `spreads` counts the changes.
  const std::vector<NumaNode>* nodes = nullptr;
  int spread = 0;  // number of threads
  uint64_t spreads = 0;
  std::string spread_problem;  // guarded by the mutex
  std::vector<std::thread> threads;

  bool claim(int part, uint64_t number) {
    uint64_t free = 2 * number;
    return claims[static_cast<size_t>(part)].compare_exchange_strong(free, free + 1, std::memory_order_acq_rel);
  }

  void run_part(int part) {
    try {
      (*job)(part, width);
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (!failure) failure = std::current_exception();
    }
    if (pending.fetch_sub(1) == 1 && caller_sleeps.load()) {
      const std::lock_guard lock(mutex);
      finished.notify_one();
    }
  }

  // Binds the calling thread to its node. It must hold a part of the current job.
  void go_to_node(int index) {
    if (index >= spread) return;
    const size_t node = node_of_thread(*nodes, index, spread);
    set_this_thread_node(node);
    if (const std::string problem = pin_this_thread((*nodes)[node].cpus); !problem.empty()) {
      const std::lock_guard lock(mutex);
      spread_problem = problem;
    }
  }

  void work(int index, uint64_t seen) {
    uint64_t spreads_seen = 0;
    while (true) {
      for (int i = 0; epoch.load(std::memory_order_acquire) == seen; ++i) {
        if (i >= (awake.load(std::memory_order_relaxed) ? kAwakeSpins : kSpins)) break;
        relax();
      }
      if (epoch.load(std::memory_order_acquire) == seen) {
        std::unique_lock lock(mutex);
        sleepers.fetch_add(1);
        wake.wait(lock, [&] { return epoch.load(std::memory_order_acquire) != seen; });
        sleepers.fetch_sub(1);
      }
      seen = epoch.load(std::memory_order_acquire);
      if (stop.load()) return;
      if (!claim(index, seen)) continue;
      if (std::exchange(spreads_seen, spreads) != spreads) go_to_node(index);
      run_part(index);
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

  // Spins, then sleeps. A caller that yields its core to a busy process gets it back only a scheduler slice later,
  // after every op. A sleeping thread runs soon after it is woken.
  void wait() {
    for (int i = 0; i < kSpins; ++i) {
      if (pending.load(std::memory_order_acquire) == 0) return;
      relax();
    }
    std::unique_lock lock(mutex);
    caller_sleeps.store(true);
    finished.wait(lock, [&] { return pending.load() == 0; });
    caller_sleeps.store(false);
  }
};

ThreadPool::ThreadPool(int max_threads) : max_threads_(max_threads) {
  DYNO_CHECK(PlanError, max_threads >= 1, "[threads] a pool has ", max_threads, " threads; expected 1 or more");
  state_ = std::make_unique<State>(max_threads);
}

ThreadPool::~ThreadPool() {
  state_->stop.store(true);
  state_->publish();
  for (std::thread& thread : state_->threads) thread.join();
}

void ThreadPool::stay_awake(bool on) { state_->awake.store(on, std::memory_order_relaxed); }

void ThreadPool::set_nodes(std::vector<NumaNode> nodes) {
  nodes_ = std::move(nodes);
  state_->nodes = &nodes_;
  // Tests each node now, so that a refusal is reported when a model is opened, before the first job.
  for (const NumaNode& node : nodes_) {
    const ThreadOnCpus tried(node.cpus);
    const std::lock_guard lock(state_->mutex);
    if (!tried.problem().empty()) state_->spread_problem = tried.problem();
  }
}

void ThreadPool::spread(int threads) {
  if (nodes_.empty() || threads == state_->spread) return;
  state_->spread = threads;
  ++state_->spreads;
}

std::unique_ptr<ThreadOnCpus> ThreadPool::hold_caller() {
  if (nodes_.empty()) return nullptr;
  auto held = std::make_unique<ThreadOnCpus>(nodes_.front().cpus);
  if (!held->problem().empty()) {
    const std::lock_guard lock(state_->mutex);
    state_->spread_problem = held->problem();
  }
  return held;
}

std::string ThreadPool::spread_problem() const {
  const std::lock_guard lock(state_->mutex);
  return state_->spread_problem;
}

void ThreadPool::run(int n_threads, const std::function<void(int, int)>& fn) {
  DYNO_CHECK(PlanError, n_threads >= 1 && n_threads <= max_threads_, "[threads] ", n_threads,
             " threads do not fit a pool of ", max_threads_, "; expected 1 to ", max_threads_);
  if (n_threads == 1) {
    fn(0, 1);
    return;
  }
  State& s = *state_;
  while (static_cast<int>(s.threads.size()) < n_threads - 1) {
    const int index = static_cast<int>(s.threads.size()) + 1;
    try {
      s.threads.emplace_back([&s, index, seen = s.epoch.load()] { s.work(index, seen); });
    } catch (const std::system_error& error) {
      throw PlanError(str_cat("[threads] thread ", index + 1, " of ", n_threads, " cannot be started: ", error.what(),
                              "; use fewer threads or raise the limit (ulimit -u, pids.max)"));
    }
  }
  s.job = &fn;
  s.width = n_threads;
  s.failure = nullptr;
  s.pending.store(n_threads, std::memory_order_relaxed);
  const uint64_t number = s.epoch.load(std::memory_order_relaxed) + 1;
  for (int part = 1; part < n_threads; ++part) {
    s.claims[static_cast<size_t>(part)].store(2 * number, std::memory_order_release);
  }
  s.publish();
  s.run_part(0);
  // Starts at the last part: a worker that is only slightly late was probably woken first.
  for (int part = n_threads - 1; part > 0; --part) {
    if (s.claim(part, number)) s.run_part(part);
  }
  s.wait();
  if (s.failure) std::rethrow_exception(s.failure);
}

}  // namespace dyno
