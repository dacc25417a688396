// Runs a plan's op list on the CPU for one u-batch at a time.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "core/thread_pool.h"
#include "ops/args.h"
#include "ops/cpu_context.h"
#include "plan/plan.h"
#include "plan/selection.h"
#include "runtime/host_buffer.h"
#include "runtime/weights.h"

namespace dyno::runtime {

// One u-batch: tokens of one or several sequences, and which rows' logits are wanted.
struct MicroBatch {
  std::span<const int32_t> tokens;
  std::span<const int32_t> positions;
  std::span<const ops::SequenceRun> runs;
  std::span<const int32_t> logit_rows;  // ascending
  float* logits = nullptr;              // [logit_rows, n_vocab]
  // Routing of mixtures of experts, [moe layer][token][slot] with `routing_stride` tokens a layer; null when not asked.
  const int32_t* pinned_routing = nullptr;
  int32_t* captured_routing = nullptr;
  int64_t routing_stride = 0;
  double* op_seconds = nullptr;  // [Plan::keys], added to; null when not asked
};

class CpuExecutor {
 public:
  CpuExecutor(const model::ModelDesc& model, const plan::Plan& plan, const Weights& weights, ThreadPool& pool);

  // Re-allocates what the plan's u-batch, cache or thread count needs. `clear_cache` forgets all positions.
  void prepare(const plan::Selection& selection, int max_threads, bool clear_cache);
  void run(const MicroBatch& batch, const plan::Selection& selection, int threads);

 private:
  struct Run;
  std::byte* at(const plan::Operand& operand, const Run& run) const;
  void select_rows(Run& run, std::span<const plan::ValueId> values);
  void launch(const plan::Node& node, Run& run);

  const model::ModelDesc& model_;
  const plan::Plan& plan_;
  const Weights& weights_;
  ThreadPool& pool_;
  HostBuffer arena_;
  HostBuffer cache_;
  HostBuffer scratch_;
  size_t scratch_per_thread_ = 0;
};

}  // namespace dyno::runtime
