// The properties of ThreadPool; prints nothing and returns 0 if all hold. Jobs whose parts wait for each other give up
// after a minute, which fails the test. An argument multiplies the number of jobs, to search for races.
#include "core/thread_pool.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"
#include "core/relax.h"

namespace {

using Clock = std::chrono::steady_clock;
using dyno::ThreadPool;

// Waits until `holds()`, for a minute at most, and returns whether it did.
template <typename Condition>
bool comes(const Condition& holds) {
  const auto until = Clock::now() + std::chrono::minutes(1);
  while (!holds()) {
    if (Clock::now() > until) return false;
    std::this_thread::yield();
  }
  return true;
}

// Durations around those at which a worker goes to sleep, and at which the caller does.
void pass_time(int step) {
  if (step % 5 == 0) return;
  if (step % 31 == 0) {
    std::this_thread::sleep_for(std::chrono::microseconds(300));
    return;
  }
  const auto until = Clock::now() + std::chrono::microseconds(step % 97);
  while (Clock::now() < until) dyno::relax();
}

// Each part once, in jobs of changing widths. The counts are no atomics: a job must have ended before the next begins,
// and the caller sees all that its parts have written.
bool each_part_once(int threads, int jobs) {
  ThreadPool pool(threads);
  std::vector<int> done(static_cast<size_t>(threads)), expected(done.size());
  uint32_t random = 1;
  for (int job = 0; job < jobs; ++job) {
    random = random * 1664525 + 1013904223;
    const int width = 1 + static_cast<int>((random >> 16) % static_cast<uint32_t>(threads));
    if (job % 1000 == 0) pool.stay_awake(job % 2000 == 0);
    if (job % 100 == 0) pass_time(job / 100);
    std::atomic<int> wrong{0};
    pool.run(width, [&](int part, int parts) {
      if (parts != width || part < 0 || part >= width) {
        ++wrong;
      } else {
        ++done[static_cast<size_t>(part)];
      }
    });
    for (int part = 0; part < width; ++part) ++expected[static_cast<size_t>(part)];
    if (wrong != 0 || done != expected) {
      std::printf("%d threads: job %d of width %d did not compute each part once\n", threads, job, width);
      return false;
    }
  }
  return true;
}

// Also if the worker has just decided to sleep. Part 0 ends only after the last worker has begun, and the caller cannot
// compute a part meanwhile.
bool workers_wake_up(int threads, int jobs) {
  ThreadPool pool(threads);
  for (int job = 0; job < jobs; ++job) {
    pass_time(job);
    std::atomic<int> began{1};
    bool all = true;
    const int width = 2 + job % (threads - 1);
    pool.run(width, [&](int part, int) {
      if (part > 0) {
        ++began;
      } else {
        all = comes([&] { return began == width; });
      }
    });
    if (!all) {
      std::printf("%d threads: in job %d a worker slept on\n", threads, job);
      return false;
    }
  }
  return true;
}

// The caller, which has computed its part, leaves those alone that workers compute, sleeps, and is woken after them.
bool caller_wakes_up(int threads, int jobs) {
  ThreadPool pool(threads);
  for (int job = 0; job < jobs; ++job) {
    std::atomic<int> began{0}, ended{0};
    bool all = true;
    pool.run(threads, [&](int part, int) {
      ++began;
      if (part > 0) {
        pass_time(job);
      } else {
        all = comes([&] { return began == threads; });
      }
      ++ended;
    });
    if (!all || began != threads || ended != threads) {
      std::printf("%d threads: job %d returned after %d beginnings and %d ends\n", threads, job, began.load(),
                  ended.load());
      return false;
    }
  }
  return true;
}

// The caller does not wait for a worker that is late. The parts are so short that sooner or later one is.
bool caller_computes_late_parts(int threads) {
  ThreadPool pool(threads);
  const auto caller = std::this_thread::get_id();
  bool helped = false;
  const bool came = comes([&] {
    std::atomic<int> by_caller{0};
    pool.run(threads, [&](int, int) { by_caller += std::this_thread::get_id() == caller ? 1 : 0; });
    helped = by_caller > 1;
    return helped;
  });
  if (!came) std::printf("%d threads: the caller never computed the part of a worker\n", threads);
  return came;
}

// One of the exceptions arrives, after all parts have ended, and the next job is a normal one.
bool exceptions_arrive(int threads, int jobs) {
  ThreadPool pool(threads);
  for (int job = 0; job < jobs; ++job) {
    std::atomic<int> ended{0};
    std::string caught;
    const int thrower = job % (threads + 1);  // the last one: none
    const bool all = job % 7 == 0;
    try {
      pool.run(threads, [&](int part, int) {
        ++ended;
        if (all || part == thrower) throw std::runtime_error("part " + std::to_string(part));
      });
    } catch (const std::runtime_error& error) {
      caught = error.what();
    }
    const bool right = all ? caught.starts_with("part ")
                           : caught == (thrower < threads ? "part " + std::to_string(thrower) : std::string());
    if (!right || ended != threads) {
      std::printf("%d threads: job %d threw '%s' after %d parts\n", threads, job, caught.c_str(), ended.load());
      return false;
    }
  }
  return true;
}

// A pool ends whether its workers spin, sleep, have no part for long, or never began.
bool pools_end(int threads, int pools) {
  for (int i = 0; i < pools; ++i) {
    ThreadPool pool(threads);
    std::atomic<int> parts{0};
    if (i % 4 > 0) pool.run(threads, [&](int, int) { ++parts; });
    if (i % 4 > 1) pool.stay_awake(true);
    if (i % 4 > 2) pool.run(2, [&](int, int) { ++parts; });
    pass_time(i);
    const int expected = i % 4 == 0 ? 0 : i % 4 < 3 ? threads : threads + 2;
    if (parts != expected) {
      std::printf("pool %d of %d threads computed %d parts, not %d\n", i, threads, parts.load(), expected);
      return false;
    }
  }
  return true;
}

bool refuses_widths() {
  bool refused = true;
  const auto refuses = [&](const char* name, const std::function<void()>& act) {
    try {
      act();
    } catch (const dyno::PlanError&) {
      return;
    }
    std::printf("%s was accepted\n", name);
    refused = false;
  };
  ThreadPool pool(2);
  refuses("a job of 0 threads", [&] { pool.run(0, [](int, int) {}); });
  refuses("a job of 3 threads in a pool of 2", [&] { pool.run(3, [](int, int) {}); });
  refuses("a pool of 0 threads", [] { ThreadPool none(0); });
  refuses("a pool of 65536 threads", [] { ThreadPool many(65536); });
  return refused;
}

}  // namespace

int main(int argc, char** argv) {
  const int times = argc > 1 ? std::atoi(argv[1]) : 1;
  bool holds = refuses_widths();
  for (const int threads : {1, 2, 3, 8}) holds = each_part_once(threads, 3000 * times) && holds;
  for (const int threads : {2, 3, 8}) {
    holds = workers_wake_up(threads, 100 * times) && holds;
    holds = caller_wakes_up(threads, 100 * times) && holds;
    holds = caller_computes_late_parts(threads) && holds;
    holds = exceptions_arrive(threads, 200 * times) && holds;
    holds = pools_end(threads, 40 * times) && holds;
  }
  return holds ? 0 : 1;
}
