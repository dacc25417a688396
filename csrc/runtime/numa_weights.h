// Placement of the CPU's weights on NUMA nodes: page policies before the weights are written, and copies afterwards.
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

// Adds the bytes of a buffer's resident pages to the bytes of their nodes. Throws Error if the system does not report
// them.
void add_by_node(const PartedBuffer& buffer, std::map<int, size_t>& bytes);

class NumaWeights {
 public:
  // Uses the nodes of the pool, if the plan places anything. `threads`: number of threads that divide a matrix.
  NumaWeights(const model::ModelDesc& model, const plan::Plan& plan, ThreadPool& pool, int threads);

  // Throws OutOfMemoryError if each node needs a copy of this many bytes and one node is too small.
  void check_nodes(size_t bytes) const;
  // Sets the page policies of a buffer whose parts are the weights. Must be called before anything is written to it.
  void place(const PartedBuffer& buffer);
  // Called after the weights are written, in mode mirror: copies the buffer to the other nodes. Throws
  // OutOfMemoryError.
  void mirror(const PartedBuffer& buffer, const char* purpose);

  // Null if there is one copy of each weight.
  const NumaCopies* copies() const { return copies_.empty() ? nullptr : &copies_; }
  // The copies, by node after the first one.
  const std::vector<std::vector<PartedBuffer>>& further() const { return further_; }
  // The reason that pages are not on their nodes; empty if they are.
  const std::string& problem() const { return problem_; }

 private:
  bool on() const { return plan_.numa_nodes() > 1 && pool_.nodes().size() > 1; }
  void prefer(std::span<std::byte> memory, size_t node);
  void note(const std::string& refusal);

  const model::ModelDesc& model_;
  const plan::Plan& plan_;
  ThreadPool& pool_;
  int threads_;
  std::vector<int> numbers_;  // the nodes' numbers in the system
  std::vector<std::vector<PartedBuffer>> further_;
  NumaCopies copies_;
  std::string problem_;
};

}  // namespace dyno::runtime
