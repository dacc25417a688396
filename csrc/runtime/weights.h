// Weights in the form that the plan asks for: pages of the file, or owned copies that were repacked or converted. Under
// AddressSanitizer all are copies, because file pages have no red zones.
#pragma once

#include <map>
#include <vector>

#include "core/thread_pool.h"
#include "gguf/gguf_file.h"
#include "plan/plan.h"
#include "runtime/host_buffer.h"
#include "runtime/numa_weights.h"
#include "runtime/page_lock.h"

namespace dyno::runtime {

// Writes a weight, transformed and in `layout` (plain or x16), to `out`.
void fill_weight(const GgufFile& file, const model::Weight& weight, ops::Layout layout, std::byte* out,
                 ThreadPool& pool, int threads);

class Weights {
 public:
  // Loads the plan's weights on the CPU and on virtual devices. Repacks on `threads` threads; file pages are dropped as
  // soon as their copy exists. `dealt`: number of threads that divide a product with few tokens.
  Weights(const GgufFile& file, const model::ModelDesc& model, const plan::Plan& plan, ThreadPool& pool, int threads,
          int dealt);

  const std::byte* data(model::WeightId id) const { return data_[static_cast<size_t>(id)]; }
  // Copies a matrix of `bytes` bytes of one weight to a place in an owned weight of the same layout, on every NUMA node
  // that has a copy.
  void copy_matrix(model::WeightId weight, int64_t matrix, model::WeightId own, int64_t place, size_t bytes);
  // The reason that these weights are not page-locked; empty if they are, or do not need it.
  const std::string& lock_problem() const { return lock_.problem(); }
  // As in NumaWeights.
  const std::string& numa_problem() const { return numa_.problem(); }
  const NumaCopies* copies() const { return numa_.copies(); }
  // Bytes of resident pages by node number, for these weights and for each further copy. Throws Error if the system
  // does not report them.
  std::vector<std::map<int, size_t>> bytes_by_node() const;
  const float* floats(model::WeightId id) const {
    return id == model::kNone ? nullptr : reinterpret_cast<const float*>(data(id));
  }

 private:
  NumaWeights numa_;
  PartedBuffer owned_, streamed_;
  PageLock lock_;  // for weights that a GPU copies
  std::vector<const std::byte*> data_;
};

}  // namespace dyno::runtime
