// The places of the CPU's weights on NUMA nodes: policies for their pages before they are written, and their copies.
#pragma once

#include <map>
#include <span>
#include <string>
#include <vector>

#include "core/numa_copies.h"
#include "core/thread_pool.h"
#include "plan/plan.h"
#include "runtime/host_buffer.h"

namespace dyno::runtime {

// Adds the bytes of a buffer's resident pages to those of their nodes. Throws Error where the system does not tell.
void add_by_node(const PartedBuffer& buffer, std::map<int, size_t>& bytes);

class NumaWeights {
 public:
  // By the nodes of the pool, where the plan places anything. `threads`: among which matrices are divided.
  NumaWeights(const model::ModelDesc& model, const plan::Plan& plan, ThreadPool& pool, int threads);

  // Throws OutOfMemoryError if each node is to have a copy of so many bytes and one is too small for that.
  void check_nodes(size_t bytes) const;
  // Of a buffer whose parts are the weights, before anything is written to it.
  void place(const PartedBuffer& buffer);
  // Afterwards, for the mode mirror: its copies on the further nodes. Throws OutOfMemoryError.
  void mirror(const PartedBuffer& buffer, const char* purpose);

  // Null where each weight is there once.
  const NumaCopies* copies() const { return copies_.empty() ? nullptr : &copies_; }
  // By node behind the first.
  const std::vector<std::vector<PartedBuffer>>& further() const { return further_; }
  // Why pages are not where they should be; empty where they are.
  const std::string& problem() const { return problem_; }

 private:
  bool on() const { return plan_.numa_nodes() > 1 && pool_.nodes().size() > 1; }
  void prefer(std::span<std::byte> memory, size_t node);
  void note(const std::string& refusal);

  const model::ModelDesc& model_;
  const plan::Plan& plan_;
  ThreadPool& pool_;
  int threads_;
  std::vector<int> numbers_;  // of the nodes
  std::vector<std::vector<PartedBuffer>> further_;
  NumaCopies copies_;
  std::string problem_;
};

}  // namespace dyno::runtime
