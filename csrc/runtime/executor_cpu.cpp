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
  const std::vector<Memory>& memory;
  float* logits;
  bool ids_settled = false;  // a matter of GPUs

  const PartedBuffer& cache_of(int32_t layer) const {
    return memory[static_cast<size_t>(plan.kv[static_cast<size_t>(layer)].device)].cache;
  }
  std::byte* keys_of(int32_t layer) const { return cache_of(layer).at(2 * static_cast<size_t>(layer)); }
  std::byte* values_of(int32_t layer) const { return cache_of(layer).at(2 * static_cast<size_t>(layer) + 1); }
  std::byte* base_of(plan::ValueId id) const {
    const auto at = static_cast<size_t>(id);
    return memory[static_cast<size_t>(plan.values[at].device)].arena.at(at);
  }

  std::byte* at(const plan::Operand& operand) const {
    if (!operand) return nullptr;
    std::byte* base = operand.value == plan.logits ? reinterpret_cast<std::byte*>(logits) : base_of(operand.value);
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
    : model_(model), plan_(plan), weights_(weights), pool_(pool), memory_(plan.devices.size()), virtual_(plan) {}

void CpuExecutor::prepare_memory(plan::DeviceId device, bool clear_cache) {
  const plan::PlannedDevice& planned = plan_.devices[static_cast<size_t>(device)];
  Memory& memory = memory_[static_cast<size_t>(device)];
  std::vector<BufferPart> values(plan_.values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    const plan::Value& value = plan_.values[i];
    if (value.device != device || !plan::in_arena(plan_, static_cast<plan::ValueId>(i))) continue;
    values[i] = {value.offset, value_bytes(plan_, value)};
  }
  if (!memory.arena.holds(planned.arena_bytes, values)) {
    memory.arena = PartedBuffer(planned.arena_bytes, std::move(values), "the arena");
  }
  std::vector<BufferPart> layers;
  const auto positions = static_cast<size_t>(plan_.context.ctx * plan_.context.sequences);
  for (const plan::KvLayer& kv : plan_.kv) {
    const bool here = kv.device == device;
    layers.push_back(here ? BufferPart{kv.k_offset, static_cast<size_t>(kv.k_row_bytes) * positions} : BufferPart{});
    layers.push_back(here ? BufferPart{kv.v_offset, static_cast<size_t>(kv.v_row_bytes) * positions} : BufferPart{});
  }
  if (clear_cache || !memory.cache.holds(planned.kv_bytes, layers)) {
    memory.cache = PartedBuffer(planned.kv_bytes, std::move(layers), "the KV cache");
  }
}

void CpuExecutor::prepare(const plan::Selection& selection, int max_threads, bool clear_cache) {
  for (size_t i = 0; i < memory_.size(); ++i) prepare_memory(static_cast<plan::DeviceId>(i), clear_cache);
  const size_t scratch = selection.scratch_per_thread(plan_.ubatch);
  if (!scratch_.holds(scratch, static_cast<size_t>(max_threads))) {
    scratch_ = StripedBuffer(scratch, static_cast<size_t>(max_threads), "kernel scratch");
  }
}

// Moves the rows whose logits are wanted together; the others stop here.
void CpuExecutor::select_rows(Env& env, std::span<const int32_t> rows, std::span<const plan::ValueId> values) const {
  const auto wanted = static_cast<int64_t>(rows.size());
  if (wanted == env.tokens) return;
  for (const plan::ValueId id : values) {
    const plan::Value& value = plan_.values[static_cast<size_t>(id)];
    std::byte* base = env.base_of(id);
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
  DYNO_CHECK(PlanError, !batch.in_graph, "[cpu] nothing is captured on a CPU, so no op can be timed in a graph");
  Env env{.model = model_,
          .plan = plan_,
          .selection = selection,
          .weights = weights_,
          .context = {.pool = &pool_,
                      .threads = threads,
                      .isa = plan_.main_device().isa,
                      .scratch = scratch_.data(),
                      .scratch_per_thread = scratch_.stride()},
          .batch = {.tokens = batch.tokens.data(),
                    .positions = batch.positions.data(),
                    .runs = batch.runs.data(),
                    .n_runs = static_cast<int32_t>(batch.runs.size()),
                    .host_runs = batch.runs,
                    .pinned_routing = batch.pinned_routing,
                    .captured_routing = batch.captured_routing,
                    .routing_stride = batch.routing_stride},
          .tokens = static_cast<int64_t>(batch.tokens.size()),
          .memory = memory_,
          .logits = batch.logits};
  const plan::NodeList& list = plan_.list_for(env.tokens);
  const NodeRange range = nodes_to_run(list, batch);
  for (const plan::Segment& segment : list.segments) {
    virtual_.enter(segment.device);
    env.context.isa = plan_.device(segment.device).isa;
    for (int32_t i = segment.begin; i < std::min(segment.end, range.stop); ++i) {
      if (range.all_rows && i == list.head_node) select_rows(env, batch.logit_rows, list.head_values);
      launch(list.nodes[static_cast<size_t>(i)], env, batch.op_times);
      if (!range.all_rows && i == list.select_node) select_rows(env, batch.logit_rows, list.select_values);
    }
  }
  bring_logits(list, batch);
}

// Logits are written to the memory of the machine, where a device behind a link would have sent them.
void CpuExecutor::bring_logits(const plan::NodeList& list, const MicroBatch& batch) {
  if (batch.logit_rows.empty() || list.segments.empty()) return;
  const size_t bytes = batch.logit_rows.size() * static_cast<size_t>(model_.n_vocab) * sizeof(float);
  VirtualDevices::wait_until(virtual_.arrival_at_host(list.segments.back().device, bytes));
}

// A launch, and what it has to wait for on the link of a virtual device.
void CpuExecutor::launch_and_wait(const plan::Node& node, Env& env) {
  const auto* moved = std::get_if<plan::TransferOperands>(&node.operands);
  if (moved == nullptr || plan_.devices.size() == 1) {
    launch_node(node, env);
    return;
  }
  const auto start = VirtualDevices::Clock::now();
  launch_node(node, env);
  const plan::Value& value = plan_.values[static_cast<size_t>(moved->x.value)];
  const size_t bytes = value.bytes_fixed + value.bytes_per_token * static_cast<size_t>(env.tokens);
  VirtualDevices::wait_until(virtual_.arrival(value.device, node.device, bytes, start));
}

void CpuExecutor::launch(const plan::Node& node, Env& env, OpTime* op_times) {
  if (op_times == nullptr) {
    launch_and_wait(node, env);
    return;
  }
  const auto start = std::chrono::steady_clock::now();
  launch_and_wait(node, env);
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  OpTime& time = op_times[node.key];
  time.seconds += elapsed.count();
  ++time.launches;
}

}  // namespace dyno::runtime
