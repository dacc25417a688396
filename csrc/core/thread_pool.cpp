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
// A few milliseconds. A worker sleeps after that even if stay_awake() was never turned off, or if other threads have
// jobs all the time.
constexpr int kAwakeSpins = 100'000;
// Memory that two threads write is at least this far apart: processors fetch cache lines of 64 bytes in pairs.
constexpr size_t kApart = 128;

// An announcement: the number of a job, and the number of its parts. Without parts, it tells workers to end.
constexpr int kWidthBits = 16;
constexpr int kMostThreads = (1 << kWidthBits) - 1;
constexpr uint64_t announcement(uint64_t number, int width) {
  return number << kWidthBits | static_cast<uint64_t>(width);
}
constexpr uint64_t number_of(uint64_t announced) { return announced >> kWidthBits; }
constexpr int width_of(uint64_t announced) { return static_cast<int>(announced & uint64_t{kMostThreads}); }
// Whether worker `index` must act: compute its part, or end.
constexpr bool concerns(uint64_t announced, int index) {
  return index < width_of(announced) || width_of(announced) == 0;
}

}  // namespace

// A job has `width` parts. Part i is meant for thread i, but the first free thread claims it. So a worker that another
// process keeps from its core delays nobody, because the caller computes its part. Parts keep their numbers, so results
// do not depend on the thread.
//
// An op of a small model takes a few microseconds, and a line between cores that share no cache takes a quarter of one.
// So a job moves a line three times between the caller and a worker: that of Job, that of the worker's slot to claim
// the part, and the slot back to the caller when the part is done. Neither line holds anything else that changes.
struct ThreadPool::State {
  explicit State(int max_threads) : slots(static_cast<size_t>(max_threads)), asleep(static_cast<size_t>(max_threads)) {}

  // Written by the caller. `announced` is written last, and only after all parts of the job before it are done. So a
  // thread that holds a part of the current job may read the rest: the job cannot end before the part is done.
  struct alignas(kApart) Job {
    std::atomic<uint64_t> announced{0};
    Call call = nullptr;
    const void* fn = nullptr;
    // The nodes of the threads. `spreads` counts the changes.
    const std::vector<NumaNode>* nodes = nullptr;
    uint64_t spreads = 0;
    int spread = 0;  // number of threads
  };

  // The part of one worker. state: 2e if the part of job e is claimed, 2e + 1 if it is done; a smaller number is that
  // of an earlier job, and means that the part is free. It only grows, so nothing has to reset it between jobs.
  struct alignas(kApart) Slot {
    std::atomic<uint64_t> state{0};
  };

  Job job;
  std::vector<Slot> slots;  // the first one is unused: the caller computes part 0

  // Changes only if a thread goes to sleep or wakes up, so that each core keeps a copy of the lines.
  alignas(kApart) std::atomic<int> sleepers{0};  // workers
  std::atomic<int> awaited{0};                   // the part for which the caller sleeps, else 0
  std::atomic<bool> awake{false};
  std::vector<std::atomic<bool>> asleep;  // by worker

  alignas(kApart) std::mutex mutex;
  std::condition_variable wake;      // of workers
  std::condition_variable finished;  // of the caller
  std::exception_ptr failure;        // guarded by the mutex during a job
  std::string spread_problem;        // guarded by the mutex
  std::vector<std::thread> threads;

  // Workers that are late may still hold the number of a job that has ended. All its parts are done then, so that they
  // find no free one. Tests before it writes, because a write would take the line away from a worker that computes.
  bool claim(int part, uint64_t number) {
    std::atomic<uint64_t>& state = slots[static_cast<size_t>(part)].state;
    uint64_t before = state.load(std::memory_order_relaxed);
    return before < 2 * number && state.compare_exchange_strong(before, 2 * number, std::memory_order_acq_rel);
  }

  bool is_done(int part, uint64_t number) const {
    return slots[static_cast<size_t>(part)].state.load() == 2 * number + 1;
  }

  void run_part(int part, int width) {
    try {
      job.call(job.fn, part, width);
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (!failure) failure = std::current_exception();
    }
  }

  void set_done(int part, uint64_t number) { slots[static_cast<size_t>(part)].state.store(2 * number + 1); }

  // Binds the calling thread to its node. It must hold a part of the current job.
  void go_to_node(int index) {
    if (index >= job.spread) return;
    const size_t node = node_of_thread(*job.nodes, index, job.spread);
    set_this_thread_node(node);
    if (const std::string problem = pin_this_thread((*job.nodes)[node].cpus); !problem.empty()) {
      const std::lock_guard lock(mutex);
      spread_problem = problem;
    }
  }

  // Returns the first announcement after `seen` that concerns worker `index`.
  uint64_t next_job(int index, uint64_t seen) {
    for (int quiet = 0, spins = 0; spins < kAwakeSpins; ++quiet, ++spins) {
      const uint64_t announced = job.announced.load(std::memory_order_acquire);
      if (announced != seen) {
        if (concerns(announced, index)) return announced;
        seen = announced;
        quiet = 0;
      }
      if (quiet >= kSpins && !awake.load(std::memory_order_relaxed)) break;
      relax();
    }
    return sleep(index, seen);
  }

  // No wake-up is lost: the worker sets its flags before it tests the announcement, and the caller announces before it
  // tests the flags. All four are sequentially consistent, so at least one of the two sees the write of the other. If
  // it is the caller, it takes the mutex, hence notifies when the worker waits or has already seen the announcement.
  uint64_t sleep(int index, uint64_t seen) {
    std::atomic<bool>& sleeps = asleep[static_cast<size_t>(index)];
    uint64_t announced = seen;
    std::unique_lock lock(mutex);
    sleeps.store(true);
    sleepers.fetch_add(1);
    wake.wait(lock, [&] {
      announced = job.announced.load();
      return announced != seen && concerns(announced, index);
    });
    sleepers.fetch_sub(1);
    sleeps.store(false);
    return announced;
  }

  void announce(uint64_t number, int width) {
    const uint64_t announced = announcement(number, width);
    job.announced.store(announced);
    if (sleepers.load() == 0) return;
    bool needed = false;
    for (size_t i = 1; i < asleep.size() && !needed; ++i) {
      needed = concerns(announced, static_cast<int>(i)) && asleep[i].load();
    }
    if (!needed) return;
    { const std::lock_guard lock(mutex); }  // see sleep()
    wake.notify_all();
  }

  void work(int index, uint64_t seen) {
    uint64_t spreads_seen = 0;
    while (true) {
      seen = next_job(index, seen);
      const int width = width_of(seen);
      if (width == 0) return;
      const uint64_t number = number_of(seen);
      if (!claim(index, number)) continue;
      if (std::exchange(spreads_seen, job.spreads) != job.spreads) go_to_node(index);
      run_part(index, width);
      set_done(index, number);
      // As in sleep(): the part is done before this test, and the caller tests the part after it set `awaited`.
      if (awaited.load() == index) {
        const std::lock_guard lock(mutex);
        finished.notify_one();
      }
    }
  }

  // Spins, then sleeps. A caller that yields its core to a busy process gets it back only a scheduler slice later,
  // after every op. A sleeping thread runs soon after it is woken.
  void wait_for(int width, uint64_t number) {
    int spins = 0;
    for (int part = 1; part < width; ++part) {
      for (; !is_done(part, number) && spins < kSpins; ++spins) relax();
      if (is_done(part, number)) continue;
      std::unique_lock lock(mutex);
      awaited.store(part);
      finished.wait(lock, [&] { return is_done(part, number); });
      awaited.store(0);
    }
  }
};

ThreadPool::ThreadPool(int max_threads) : max_threads_(max_threads) {
  DYNO_CHECK(PlanError, max_threads >= 1 && max_threads <= kMostThreads, "[threads] a pool has ", max_threads,
             " threads; expected 1 to ", kMostThreads);
  state_ = std::make_unique<State>(max_threads);
}

ThreadPool::~ThreadPool() {
  state_->announce(number_of(state_->job.announced.load()) + 1, 0);
  for (std::thread& thread : state_->threads) thread.join();
}

void ThreadPool::stay_awake(bool on) {
  std::atomic<bool>& awake = state_->awake;
  if (awake.load(std::memory_order_relaxed) != on) awake.store(on, std::memory_order_relaxed);
}

void ThreadPool::set_nodes(std::vector<NumaNode> nodes) {
  nodes_ = std::move(nodes);
  state_->job.nodes = &nodes_;
  // Tests each node now, so that a refusal is reported when a model is opened, before the first job.
  for (const NumaNode& node : nodes_) {
    const ThreadOnCpus tried(node.cpus);
    const std::lock_guard lock(state_->mutex);
    if (!tried.problem().empty()) state_->spread_problem = tried.problem();
  }
}

void ThreadPool::spread(int threads) {
  if (nodes_.empty() || threads == state_->job.spread) return;
  state_->job.spread = threads;
  ++state_->job.spreads;
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

void ThreadPool::run_parts(int n_threads, Call call, const void* fn) {
  DYNO_CHECK(PlanError, n_threads >= 1 && n_threads <= max_threads_, "[threads] ", n_threads,
             " threads do not fit a pool of ", max_threads_, "; expected 1 to ", max_threads_);
  if (n_threads == 1) {
    call(fn, 0, 1);
    return;
  }
  State& s = *state_;
  while (static_cast<int>(s.threads.size()) < n_threads - 1) {
    const int index = static_cast<int>(s.threads.size()) + 1;
    try {
      s.threads.emplace_back([&s, index, seen = s.job.announced.load()] { s.work(index, seen); });
    } catch (const std::system_error& error) {
      throw PlanError(str_cat("[threads] thread ", index + 1, " of ", n_threads, " cannot be started: ", error.what(),
                              "; use fewer threads or raise the limit (ulimit -u, pids.max)"));
    }
  }
  const uint64_t number = number_of(s.job.announced.load(std::memory_order_relaxed)) + 1;
  s.job.call = call;
  s.job.fn = fn;
  s.announce(number, n_threads);
  s.run_part(0, n_threads);
  // Starts at the last part: a worker that is only slightly late was probably woken first.
  for (int part = n_threads - 1; part > 0; --part) {
    if (!s.claim(part, number)) continue;
    s.run_part(part, n_threads);
    s.set_done(part, number);
  }
  s.wait_for(n_threads, number);
  if (s.failure) std::rethrow_exception(std::exchange(s.failure, nullptr));
}

}  // namespace dyno
