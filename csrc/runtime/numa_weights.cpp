#include "runtime/numa_weights.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "core/numa_memory.h"
#include "core/sanitizers.h"

namespace dyno::runtime {
namespace {

// Size of the pieces that threads copy.
constexpr size_t kPiece = size_t{1} << 20;

void copy_with(ThreadPool& pool, int threads, std::span<const std::byte> from, std::byte* to) {
  const size_t pieces = (from.size() + kPiece - 1) / kPiece;
  if (pieces == 0) return;
  pool.run(static_cast<int>(std::min<size_t>(static_cast<size_t>(threads), pieces)), [&](int part, int parts) {
    const size_t share = static_cast<size_t>(parts), at = static_cast<size_t>(part);
    const size_t begin = pieces * at / share * kPiece;
    const size_t end = std::min(from.size(), pieces * (at + 1) / share * kPiece);
    std::memcpy(to + begin, from.data() + begin, end - begin);
  });
}

// The memory of a buffer: one span, or its parts under AddressSanitizer.
std::vector<std::span<std::byte>> pieces_of(const PartedBuffer& buffer) {
  if (!kAddressSanitizer) return {buffer.block()};
  std::vector<std::span<std::byte>> pieces;
  for (size_t i = 0; i < buffer.parts().size(); ++i) pieces.emplace_back(buffer.at(i), buffer.parts()[i].bytes);
  return pieces;
}

}  // namespace

void add_by_node(const PartedBuffer& buffer, std::map<int, size_t>& bytes) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  for (const std::span<std::byte> piece : pieces_of(buffer)) {
    for (const int node : nodes_of_pages(piece)) {
      if (node >= 0) bytes[node] += page;
    }
  }
}

NumaWeights::NumaWeights(const model::ModelDesc& model, const plan::Plan& plan, ThreadPool& pool, int threads)
    : model_(model), plan_(plan), pool_(pool), threads_(threads) {
  for (const NumaNode& node : pool.nodes()) numbers_.push_back(node.number);
}

void NumaWeights::note(const std::string& refusal) {
  if (refusal.empty() || !problem_.empty()) return;
  problem_ = str_cat("[numa] the system refuses to place pages on nodes (", refusal,
                     "): it chooses the nodes of the weights, which is slower. In a container, the permission may be "
                     "missing (CAP_SYS_NICE, or a seccomp profile that allows mbind)");
}

void NumaWeights::prefer(std::span<std::byte> memory, size_t node) {
  note(place_pages(memory, PagePolicy::prefer, {&numbers_[node], 1}));
}

void NumaWeights::check_nodes(size_t bytes) const {
  if (!on() || plan_.load.numa != plan::NumaMode::mirror) return;
  for (const NumaNode& node : pool_.nodes()) {
    DYNO_CHECK(OutOfMemoryError, node.memory_bytes == 0 || bytes <= static_cast<size_t>(node.memory_bytes),
               "[numa] numa=mirror puts a copy of the weights, ", bytes >> 20, " MiB, on each node, but node ",
               node.number, " has ", node.memory_bytes >> 20, " MiB; use numa=interleave, which keeps one copy");
  }
}

void NumaWeights::place(const PartedBuffer& buffer) {
  // Heap blocks of the sanitizer do not have separate pages.
  if (!on() || kAddressSanitizer) return;
  if (plan_.load.numa == plan::NumaMode::mirror) {
    prefer(buffer.block(), 0);
    return;
  }
  note(place_pages(buffer.block(), PagePolicy::interleave, numbers_));
  if (plan_.load.numa != plan::NumaMode::pin) return;
  // A launch assigns each thread a range of rows to start with. Matrices of experts are interleaved, because the
  // routing determines which of them a thread starts with.
  for (size_t i = 0; i < buffer.parts().size(); ++i) {
    const size_t bytes = buffer.parts()[i].bytes;
    if (bytes == 0 || model_.weights[i].batch > 1) continue;
    const auto cut = [&](int thread) { return bytes * static_cast<size_t>(thread) / static_cast<size_t>(threads_); };
    for (int first = 0, end = 0; first < threads_; first = end) {
      const size_t node = node_of_thread(pool_.nodes(), first, threads_);
      while (end < threads_ && node_of_thread(pool_.nodes(), end, threads_) == node) ++end;
      prefer({buffer.at(i) + cut(first), cut(end) - cut(first)}, node);
    }
  }
}

void NumaWeights::mirror(const PartedBuffer& buffer, const char* purpose) {
  if (!on() || plan_.load.numa != plan::NumaMode::mirror) return;
  const std::vector<std::span<std::byte>> first = pieces_of(buffer);
  std::vector<std::vector<const std::byte*>> copies(first.size());
  further_.resize(numbers_.size() - 1);
  for (size_t node = 1; node < numbers_.size(); ++node) {
    const PartedBuffer& further = further_[node - 1].emplace_back(buffer.bytes(), buffer.parts(), purpose);
    const std::vector<std::span<std::byte>> pieces = pieces_of(further);
    if (!kAddressSanitizer) prefer(further.block(), node);
    for (size_t i = 0; i < pieces.size(); ++i) {
      copy_with(pool_, threads_, first[i], pieces[i].data());
      copies[i].push_back(pieces[i].data());
    }
  }
  for (size_t i = 0; i < first.size(); ++i) copies_.add(first[i], std::move(copies[i]));
}

}  // namespace dyno::runtime
