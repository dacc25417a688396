// Sessions used by several threads, for ThreadSanitizer (DYNO_SANITIZE=thread): each thread with a session of its own,
// then all with one session and a lock, as the Python module has it. Everything computes what it computes alone.
// Usage: session_threads MODEL [ROUNDS]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"
#include "runtime/session.h"

namespace {

using dyno::runtime::Session;

constexpr int kThreads = 4;
constexpr int kTokens = 12;

std::unique_ptr<Session> open(const std::string& path, int64_t sequences) {
  dyno::runtime::SessionSettings settings;
  settings.ubatch = 8;
  settings.threads = settings.threads_batch = 3;
  settings.cuda_graphs = false;
  return std::make_unique<Session>(
      std::make_shared<const dyno::GgufFile>(dyno::GgufFile::open(path)), dyno::plan::LoadOptions{},
      dyno::plan::ContextOptions{.ctx = 64, .kv_type_k = {}, .kv_type_v = {}, .sequences = sequences}, settings,
      dyno::detect_cpu(), std::vector<dyno::profile::KernelEntry>{});
}

// A prompt and single tokens after it, in `slot`; the logits of the last. `locked` guards every call.
std::vector<float> generate(Session& session, int32_t slot, int seed, std::mutex& locked) {
  std::vector<float> logits(static_cast<size_t>(session.model().n_vocab));
  std::vector<int32_t> tokens(kTokens);
  for (int i = 0; i < kTokens; ++i) {
    tokens[static_cast<size_t>(i)] = static_cast<int32_t>((seed * 31 + i * 7) % session.model().n_vocab);
  }
  const auto feed = [&](size_t first, size_t count) {
    const std::lock_guard lock(locked);
    session.decode(
        {.sequences = {{.slot = slot, .tokens = std::span(tokens).subspan(first, count)}}, .logits = logits.data()});
  };
  {
    const std::lock_guard lock(locked);
    session.reset(slot);
  }
  feed(0, kTokens / 2);
  for (size_t i = kTokens / 2; i < kTokens; ++i) feed(i, 1);
  return logits;
}

template <typename Body>
void in_threads(const Body& body) {
  std::vector<std::thread> threads;
  std::vector<std::exception_ptr> failures(kThreads);
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      try {
        body(i);
      } catch (...) {
        failures[static_cast<size_t>(i)] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
}

void check(bool same, const char* how, int thread) {
  if (!same) throw dyno::Error(dyno::str_cat("thread ", thread, " with ", how, " got other logits than alone"));
}

void run(const std::string& path, int rounds) {
  std::vector<std::vector<float>> alone(kThreads);
  for (int i = 0; i < kThreads; ++i) {
    std::mutex own;
    alone[static_cast<size_t>(i)] = generate(*open(path, 1), 0, i, own);
  }
  for (int round = 0; round < rounds; ++round) {
    in_threads([&](int i) {
      std::mutex own;
      check(generate(*open(path, 1), 0, i, own) == alone[static_cast<size_t>(i)], "a session of its own", i);
    });
    std::mutex shared;
    const std::unique_ptr<Session> session = open(path, kThreads);
    in_threads([&](int i) {
      check(generate(*session, i, i, shared) == alone[static_cast<size_t>(i)], "a shared session", i);
    });
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s MODEL [ROUNDS]\n", argv[0]);
    return 2;
  }
  const int rounds = argc > 2 ? std::max(1, std::atoi(argv[2])) : 3;
  try {
    run(argv[1], rounds);
  } catch (const dyno::Error& error) {
    std::fprintf(stderr, "%s: %s\n", argv[1], error.what());
    return 1;
  }
  std::printf("%s: %d rounds of %d threads\n", argv[1], rounds, kThreads);
  return 0;
}
