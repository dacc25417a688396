#include "core/cpu_distance.h"

#include <sched.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

#include "core/allowed_cpus.h"

namespace dyno {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kMostPairs = 16;
constexpr int kVisits = 3;   // of each pair, with the other pairs in between: an interruption meets only one
constexpr int kBatches = 3;  // in a visit; the fastest one of all visits counts, since interruptions only lengthen one
constexpr int kTrips = 64;   // round trips in a batch
constexpr int kSpins = 2048;
constexpr size_t kLine = 128;                      // bytes; neighbouring lines of 64 are fetched in pairs
constexpr std::chrono::milliseconds kPatience{5};  // of a thread that waits for the other one
constexpr std::chrono::milliseconds kWhole{60};    // all pairs
constexpr std::chrono::milliseconds kCaller{100};  // the caller, if the threads get no time at all

enum class Side { asks, answers };

// Both threads and the caller own it, so that a thread which gets no time can end later.
struct Shared {
  explicit Shared(std::vector<std::pair<int, int>> all) : pairs(std::move(all)), batches(pairs.size()) {}

  alignas(kLine) std::atomic<int> question{0};
  alignas(kLine) std::atomic<int> answer{0};
  alignas(kLine) std::atomic<bool> stop{false};
  Clock::time_point end;
  std::vector<std::pair<int, int>> pairs;
  std::vector<std::vector<double>> batches;  // ns of a round trip, by pair

  std::mutex mutex;
  std::condition_variable ended;
  int running = 2;
  std::string why;  // the first reason for which nothing is known
};

bool wait_for(Shared& s, const std::atomic<int>& line, int value) {
  const Clock::time_point end = std::min(s.end, Clock::now() + kPatience);
  for (;;) {
    for (int i = 0; i < kSpins; ++i) {
      if (line.load(std::memory_order_acquire) == value) return true;
    }
    if (s.stop.load(std::memory_order_relaxed) || Clock::now() > end) return false;
  }
}

// One batch; the number of its last trip is `last`.
bool exchange(Shared& s, Side side, int last) {
  for (int trip = last - kTrips + 1; trip <= last; ++trip) {
    if (side == Side::asks) s.question.store(trip, std::memory_order_release);
    if (!wait_for(s, side == Side::asks ? s.answer : s.question, trip)) return false;
    if (side == Side::answers) s.answer.store(trip, std::memory_order_release);
  }
  return true;
}

// A visit of a pair. Returns why it failed.
std::string visit(Shared& s, size_t pair, Side side, int& last) {
  const int cpu = side == Side::asks ? s.pairs[pair].first : s.pairs[pair].second;
  if (const std::string why = pin_this_thread(std::array{cpu}); !why.empty()) {
    return "the system does not let a thread run on cpu" + std::to_string(cpu) + " alone: " + why;
  }
  for (int batch = 0; batch <= kBatches; ++batch) {
    const Clock::time_point begin = Clock::now();
    if (!exchange(s, side, last += kTrips)) return "a thread on the CPUs of the pair got no time";
    const std::chrono::duration<double, std::nano> took = Clock::now() - begin;
    // The first batch only brings both threads together.
    if (side == Side::asks && batch > 0) s.batches[pair].push_back(took.count() / kTrips);
  }
  return sched_getcpu() == cpu ? "" : "cpu" + std::to_string(cpu) + " was taken away";
}

void take_part(const std::shared_ptr<Shared>& shared, Side side) {
  Shared& s = *shared;
  std::string why;
  int last = 0;
  for (int round = 0; round < kVisits && why.empty(); ++round) {
    for (size_t pair = 0; pair < s.pairs.size() && why.empty(); ++pair) why = visit(s, pair, side, last);
  }
  if (!why.empty()) s.stop.store(true, std::memory_order_relaxed);
  const std::scoped_lock lock(s.mutex);
  if (s.why.empty()) s.why = why;
  --s.running;
  s.ended.notify_one();
}

double middle(std::vector<double> values) {
  const auto at = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), at, values.end());
  return *at;
}

CpuDistances unknown(std::string why) {
  CpuDistances none;
  none.unknown = std::move(why);
  return none;
}

// Starts both threads. Returns why the system refused.
std::string start(const std::shared_ptr<Shared>& shared) {
  int started = 0;
  try {
    for (const Side side : {Side::asks, Side::answers}) {
      std::thread(take_part, shared, side).detach();
      ++started;
    }
    return "";
  } catch (const std::system_error& error) {
    shared->stop.store(true, std::memory_order_relaxed);
    return std::string("the system does not start a thread: ") + error.what();
  }
}

}  // namespace

std::vector<std::pair<int, int>> ring_of_pairs(const std::vector<int>& cpus, int most) {
  const size_t n = cpus.size();
  const size_t ring = n < 2 ? 0 : (n == 2 ? 1 : n);  // two CPUs are one pair
  const size_t count = std::min(ring, static_cast<size_t>(std::max(0, most)));
  std::vector<std::pair<int, int>> pairs;
  for (size_t i = 0; i < count; ++i) {
    const size_t at = i * ring / count;
    pairs.emplace_back(cpus[at], cpus[(at + 1) % n]);
  }
  return pairs;
}

CpuDistances measure_cpu_distances() {
  auto pairs = ring_of_pairs(allowed_cpus(), kMostPairs);
  if (pairs.empty()) return unknown("this process may use fewer than two CPUs");
  const auto shared = std::make_shared<Shared>(std::move(pairs));
  Shared& s = *shared;
  s.end = Clock::now() + kWhole;
  if (std::string why = start(shared); !why.empty()) return unknown(std::move(why));
  std::unique_lock lock(s.mutex);
  if (!s.ended.wait_for(lock, kCaller, [&] { return s.running == 0; })) {
    s.stop.store(true, std::memory_order_relaxed);
    return unknown("the threads got no time");
  }
  if (!s.why.empty()) return unknown(s.why);
  CpuDistances found;
  std::vector<double> all;
  for (size_t pair = 0; pair < s.pairs.size(); ++pair) {
    const double ns = *std::min_element(s.batches[pair].begin(), s.batches[pair].end());
    all.push_back(ns);
    if (ns > found.farthest_ns) {
      found.farthest_ns = ns;
      found.farthest = s.pairs[pair];
    }
  }
  found.median_ns = middle(all);
  found.pairs = static_cast<int>(all.size());
  return found;
}

}  // namespace dyno
