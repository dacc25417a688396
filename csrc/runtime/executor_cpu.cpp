#include "runtime/executor_cpu.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>

#include "runtime/launch_node.h"

namespace dyno::runtime {

struct CpuExecutor::Env {
  const model::ModelDesc& model;
  const plan::Plan& plan;
  const plan::Selection& selection;
  const Weights& weights;
  ops::CpuContext context;
  LaunchBatch batch;
  int64_t tokens;
  std::byte* arena;
  std::byte* cache;
  float* logits;
  bool ids_settled = false;  // a matter of GPUs

  std::byte* at(const plan::Operand& operand) const {
    if (!operand) return nullptr;
    std::byte* base = operand.value == plan.logits ? reinterpret_cast<std::byte*>(logits)
                                                   : arena + plan.values[static_cast<size_t>(operand.value)].offset;
    return base + operand.offset_bytes;
  }
  const std::byte* weight(model::WeightId id) const { return weights.data(id); }
  const float* inverse_frequencies(int32_t table) const {
    return plan.rope_tables[static_cast<size_t>(table)].inv_freq.data();
  }
  void soft_cap(float* values, int64_t count, float cap) const {
    for (int64_t i = 0; i < count; ++i) values[i] = cap * std::tanh(values[i] / cap);
  }
  void copy_ids(const int32_t* from, int64_t count, int32_t* to) const { std::copy_n(from, count, to); }
  void sample(const ops::Config&, const ops::SampleDesc&, const float*) const {
    throw Error("[executor] on the CPU the session draws, not its plan");
  }
};

CpuExecutor::CpuExecutor(const model::ModelDesc& model, const plan::Plan& plan, const Weights& weights,
                         ThreadPool& pool)
    : model_(model), plan_(plan), weights_(weights), pool_(pool) {}

void CpuExecutor::prepare(const plan::Selection& selection, int max_threads, bool clear_cache) {
  if (arena_.size() != plan_.arena_bytes) arena_ = HostBuffer(plan_.arena_bytes, "the arena");
  if (clear_cache || cache_.size() != plan_.kv_bytes) cache_ = HostBuffer(plan_.kv_bytes, "the KV cache");
  scratch_per_thread_ = selection.scratch_per_thread(plan_.ubatch);
  const size_t scratch = scratch_per_thread_ * static_cast<size_t>(max_threads);
  if (scratch_.size() != scratch) scratch_ = HostBuffer(scratch, "kernel scratch");
}

// Moves the rows whose logits are wanted together; the others stop here.
void CpuExecutor::select_rows(Env& env, std::span<const int32_t> rows, std::span<const plan::ValueId> values) const {
  const auto wanted = static_cast<int64_t>(rows.size());
  if (wanted == env.tokens) return;
  for (const plan::ValueId id : values) {
    const plan::Value& value = plan_.values[static_cast<size_t>(id)];
    std::byte* base = arena_.data() + value.offset;
    for (int64_t row = 0; row < wanted; ++row) {
      const int32_t from = rows[static_cast<size_t>(row)];
      if (from != row) {
        std::memcpy(base + value.bytes_per_token * static_cast<size_t>(row),
                    base + value.bytes_per_token * static_cast<size_t>(from), value.bytes_per_token);
      }
    }
  }
  env.tokens = wanted;
}

void CpuExecutor::run(const MicroBatch& batch, const plan::Selection& selection, int threads) {
  Env env{.model = model_,
          .plan = plan_,
          .selection = selection,
          .weights = weights_,
          .context = {.pool = &pool_,
                      .threads = threads,
                      .isa = plan_.device.isa,
                      .scratch = scratch_.data(),
                      .scratch_per_thread = scratch_per_thread_},
          .batch = {.tokens = batch.tokens.data(),
                    .positions = batch.positions.data(),
                    .runs = batch.runs.data(),
                    .n_runs = static_cast<int32_t>(batch.runs.size()),
                    .host_runs = batch.runs,
                    .pinned_routing = batch.pinned_routing,
                    .captured_routing = batch.captured_routing,
                    .routing_stride = batch.routing_stride},
          .tokens = static_cast<int64_t>(batch.tokens.size()),
          .arena = arena_.data(),
          .cache = cache_.data(),
          .logits = batch.logits};
  const plan::NodeList& list = plan_.list_for(env.tokens);
  const NodeRange range = nodes_to_run(list, batch);
  for (int32_t i = 0; i < range.stop; ++i) {
    if (range.all_rows && i == list.head_node) select_rows(env, batch.logit_rows, {&list.residual, 1});
    const plan::Node& node = list.nodes[static_cast<size_t>(i)];
    if (batch.op_times == nullptr) {
      launch_node(node, env);
    } else {
      const auto start = std::chrono::steady_clock::now();
      launch_node(node, env);
      const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
      OpTime& time = batch.op_times[node.key];
      time.seconds += elapsed.count();
      ++time.launches;
    }
    if (!range.all_rows && i == list.select_node) select_rows(env, batch.logit_rows, list.select_values);
  }
}

}  // namespace dyno::runtime
