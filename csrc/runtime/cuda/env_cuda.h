// The Env of a CudaExecutor: pointers for launches, see runtime/launch_node.h.
#pragma once

#include "core/cuda/check.h"
#include "ops/sample/sample.h"
#include "runtime/cuda/executor_cuda.h"
#include "runtime/cuda/rows.h"
#include "runtime/launch_node.h"

namespace dyno::runtime {

struct CudaExecutor::Env {
  const model::ModelDesc& model;
  const plan::Plan& plan;
  const plan::Selection& selection;
  const CudaExecutor& executor;
  ops::CudaStream context;
  LaunchBatch batch;
  int64_t tokens;
  std::byte* cache;
  bool ids_settled = false;
  plan::ListId list = plan::ListId::general;
  int32_t left = 0;            // remaining launches of nodes
  std::span<Expanded> kept{};  // by layer

  std::byte* keys_of(int32_t layer) const { return cache + plan.kv[static_cast<size_t>(layer)].k_offset; }
  std::byte* values_of(int32_t layer) const { return cache + plan.kv[static_cast<size_t>(layer)].v_offset; }
  float* state_of(int32_t index) const {
    return reinterpret_cast<float*>(executor.states_.data() + plan.states[static_cast<size_t>(index)].offset);
  }
  std::byte* at(const plan::Operand& operand) const {
    if (!operand) return nullptr;
    return executor.address_of(operand.value) + operand.offset_bytes;
  }
  const std::byte* weight(model::WeightId id) const {
    if (!plan.streams(list, id)) return executor.weights_.data(id);
    return executor.copies_.at(id);
  }
  size_t weight_bytes(model::WeightId id) const { return plan.bytes_in(list, id); }
  const float* inverse_frequencies(int32_t table) const {
    return reinterpret_cast<const float*>(executor.tables_.data() +
                                          executor.table_offsets_[static_cast<size_t>(table)]);
  }
  const int32_t* expert_places(int32_t table) const {
    if (plan.is_shared_table(table)) {
      return executor.shared_places_of(table - static_cast<int32_t>(plan.expert_places.size()));
    }
    return executor.places_of(table);
  }
  int32_t* choice_counts(int32_t table) const {
    return plan.counts_choices(table) ? executor.choices_.of(table) : nullptr;
  }
  bool keeps(const plan::Node& expansion) const {
    const plan::ValueId keys = std::get<plan::MlaExpandOperands>(expansion.operands).keys.value;
    return plan.keeps_expanded && plan.values[static_cast<size_t>(keys)].list == plan::ListId::expanded;
  }
  // The memory of a layer has rows of one sequence, so only the first run of a u-batch can use rows of an earlier one.
  int64_t first_expanded(const plan::Node& node, const ops::SequenceRun& run) const {
    if (!keeps(node) || batch.run > 0) return 0;
    const Expanded& rows = kept[static_cast<size_t>(node.layer)];
    return rows.slot == run.slot ? std::min(rows.count, int64_t{run.position}) : 0;
  }
  void expanded(const plan::Node& node, const ops::SequenceRun& run) const {
    if (keeps(node)) kept[static_cast<size_t>(node.layer)] = {run.slot, int64_t{run.position} + run.n_tokens};
  }
  void soft_cap(float* values, int64_t count, float cap) const {
    runtime::soft_cap(values, count, cap, context.handle);
  }
  void copy_ids(const int32_t* from, int64_t count, int32_t* to) const {
    DYNO_CUDA_CHECK(cudaMemcpyAsync(to, from, static_cast<size_t>(count) * sizeof(int32_t), cudaMemcpyDeviceToDevice,
                                    context.handle));
  }
  void sample(const ops::Config& config, const ops::SampleDesc& desc, const float* logits) {
    auto* state = reinterpret_cast<DrawState*>(executor.drawing_.state.data());
    ops::launch(config, desc,
                {.logits = logits,
                 .uniform = &state->uniform,
                 .row_settings = &state->settings,
                 .finite_only = true,
                 .out = &state->drawn},
                context);
  }
};

}  // namespace dyno::runtime
