#include "runtime/executor_cpu.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>

#include "core/error.h"
#include "ops/attention/attention.h"
#include "ops/copy/copy.h"
#include "ops/embed/embed.h"
#include "ops/glu/glu.h"
#include "ops/kv_store/kv_store.h"
#include "ops/matmul/matmul.h"
#include "ops/matmul_id/matmul_id.h"
#include "ops/moe_route/moe_route.h"
#include "ops/moe_sum/moe_sum.h"
#include "ops/moe_up_gate/moe_up_gate.h"
#include "ops/norm/norm.h"
#include "ops/rope/rope.h"
#include "ops/up_gate/up_gate.h"

namespace dyno::runtime {
namespace {

constexpr int64_t kF32 = sizeof(float);

template <typename... Cases>
struct Overloaded : Cases... {
  using Cases::operator()...;
};
template <typename... Cases>
Overloaded(Cases...) -> Overloaded<Cases...>;  // clang 14 deduces none for aggregates

void soft_cap(float* logits, size_t n, float cap) {
  for (size_t i = 0; i < n; ++i) logits[i] = cap * std::tanh(logits[i] / cap);
}

}  // namespace

struct CpuExecutor::Run {
  const MicroBatch& batch;
  const plan::Selection& selection;
  ops::CpuContext context;
  int64_t tokens;  // rows that still go on
};

CpuExecutor::CpuExecutor(const model::ModelDesc& model, const plan::Plan& plan, const Weights& weights,
                         ThreadPool& pool)
    : model_(model), plan_(plan), weights_(weights), pool_(pool) {}

void CpuExecutor::prepare(const plan::Selection& selection, int max_threads, bool clear_cache) {
  if (arena_.size() != plan_.arena_bytes) arena_ = HostBuffer(plan_.arena_bytes, "the arena");
  if (clear_cache || cache_.size() != plan_.kv_bytes) cache_ = HostBuffer(plan_.kv_bytes, "the KV cache");
  scratch_per_thread_ = selection.scratch_per_thread(plan_, plan_.ubatch);
  const size_t scratch = scratch_per_thread_ * static_cast<size_t>(max_threads);
  if (scratch_.size() != scratch) scratch_ = HostBuffer(scratch, "kernel scratch");
}

std::byte* CpuExecutor::at(const plan::Operand& operand, const Run& run) const {
  if (!operand) return nullptr;
  std::byte* base = operand.value == plan_.logits
                        ? reinterpret_cast<std::byte*>(run.batch.logits)
                        : arena_.data() + plan_.values[static_cast<size_t>(operand.value)].offset;
  return base + operand.offset_bytes;
}

// Moves the rows whose logits are wanted together; the others stop here.
void CpuExecutor::select_rows(Run& run, std::span<const plan::ValueId> values) {
  const auto wanted = static_cast<int64_t>(run.batch.logit_rows.size());
  if (wanted == run.tokens) return;
  for (const plan::ValueId id : values) {
    const plan::Value& value = plan_.values[static_cast<size_t>(id)];
    std::byte* base = arena_.data() + value.offset;
    for (int64_t row = 0; row < wanted; ++row) {
      const int32_t from = run.batch.logit_rows[static_cast<size_t>(row)];
      if (from != row) {
        std::memcpy(base + value.bytes_per_token * static_cast<size_t>(row),
                    base + value.bytes_per_token * static_cast<size_t>(from), value.bytes_per_token);
      }
    }
  }
  run.tokens = wanted;
}

void CpuExecutor::run(const MicroBatch& batch, const plan::Selection& selection, int threads) {
  Run run{.batch = batch,
          .selection = selection,
          .context = {.pool = &pool_,
                      .threads = threads,
                      .isa = plan_.device.isa,
                      .scratch = scratch_.data(),
                      .scratch_per_thread = scratch_per_thread_},
          .tokens = static_cast<int64_t>(batch.tokens.size())};
  // Routing is reported and pinned for every token, so then all rows go through the last layer's feed-forward.
  const bool all_rows = batch.pinned_routing != nullptr || batch.captured_routing != nullptr;
  const auto stop = static_cast<int32_t>(
      !batch.logit_rows.empty() ? plan_.nodes.size() : static_cast<size_t>(all_rows ? plan_.head_node : plan_.select_node));
  for (int32_t i = 0; i < stop; ++i) {
    if (all_rows && i == plan_.head_node) select_rows(run, {&plan_.residual, 1});
    const plan::Node& node = plan_.nodes[static_cast<size_t>(i)];
    if (batch.op_seconds == nullptr) {
      launch(node, run);
    } else {
      const auto start = std::chrono::steady_clock::now();
      launch(node, run);
      const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
      batch.op_seconds[node.key] += elapsed.count();
    }
    if (!all_rows && i == plan_.select_node) select_rows(run, plan_.select_values);
  }
}

void CpuExecutor::launch(const plan::Node& node, Run& run) {
  const plan::OpUse& use = plan_.keys[static_cast<size_t>(node.key)];
  const int64_t rows = run.tokens * node.rows_factor;
  const ops::OpDesc desc = ops::with_tokens(use.desc, rows);
  const int bucket = std::min(ops::bucket_of(rows), plan::kBuckets - 1);
  const ops::Config& config = run.selection.choice(node.key, bucket).config;
  const auto pointer = [&](const plan::Operand& o) { return at(o, run); };
  const auto floats = [&](const plan::Operand& o) { return reinterpret_cast<float*>(at(o, run)); };
  const auto ints = [&](const plan::Operand& o) { return reinterpret_cast<int32_t*>(at(o, run)); };
  const auto weight = [&](model::WeightId id) { return weights_.data(id); };
  const auto vector = [&](model::WeightId id) { return weights_.floats(id); };
  const auto stack_stride = [&](model::WeightId id) {
    return static_cast<int64_t>(plan_.weights[static_cast<size_t>(id)].bytes) / model_.weight(id).batch;
  };

  const Overloaded cases{
      [&](const ops::EmbedDesc& d) {
        ops::launch(config, d,
                    ops::EmbedArgs{.table = weight(node.w),
                                   .rows = model_.n_vocab,
                                   .ids = run.batch.tokens.data(),
                                   .out = floats(node.y),
                                   .scale = node.scale},
                    run.context);
      },
      [&](const ops::NormDesc& d) {
        ops::launch(config, d,
                    ops::NormArgs{.x = floats(node.x),
                                  .x_stride = node.x.stride_bytes / kF32,
                                  .weight = vector(node.w),
                                  .residual = floats(node.residual),
                                  .out = floats(node.y),
                                  .out_stride = node.y.stride_bytes / kF32,
                                  .eps = node.eps},
                    run.context);
      },
      [&](const ops::RopeDesc& d) {
        const plan::RopeTable& table = plan_.rope_tables[static_cast<size_t>(node.rope_table)];
        ops::launch(config, d,
                    ops::RopeArgs{.x = floats(node.x),
                                  .x_stride = node.x.stride_bytes / kF32,
                                  .positions = run.batch.positions.data(),
                                  .inv_freq = table.inv_freq.data(),
                                  .mscale = table.mscale},
                    run.context);
      },
      [&](const ops::MatmulDesc& d) {
        ops::launch(config, d,
                    ops::MatmulArgs{.x = pointer(node.x),
                                    .x_stride_bytes = node.x.stride_bytes,
                                    .x_batch_stride_bytes = node.x.batch_stride_bytes,
                                    .w = weight(node.w),
                                    .w_batch_stride_bytes = stack_stride(node.w),
                                    .bias = vector(node.bias),
                                    .residual = floats(node.residual),
                                    .scale = node.scale,
                                    .y = floats(node.y),
                                    .y_stride = node.y.stride_bytes / kF32,
                                    .y_batch_stride = node.y.batch_stride_bytes / kF32},
                    run.context);
        if (node.softcap > 0) soft_cap(floats(node.y), static_cast<size_t>(d.m * d.n), node.softcap);
      },
      [&](const ops::MatmulIdDesc& d) {
        ops::launch(config, d,
                    ops::MatmulIdArgs{.x = pointer(node.x),
                                      .x_stride_bytes = node.x.stride_bytes,
                                      .w = weight(node.w),
                                      .w_expert_stride_bytes = stack_stride(node.w),
                                      .bias = vector(node.bias),
                                      .ids = ints(node.ids),
                                      .y = floats(node.y),
                                      .workspace = ints(node.workspace)},
                    run.context);
      },
      [&](const ops::UpGateDesc& d) {
        ops::launch(config, d,
                    ops::UpGateArgs{.x = pointer(node.x),
                                    .x_stride_bytes = node.x.stride_bytes,
                                    .w_gate = weight(node.w),
                                    .w_up = weight(node.w2),
                                    .bias_gate = vector(node.bias),
                                    .bias_up = vector(node.bias2),
                                    .y = floats(node.y),
                                    .y_stride = node.y.stride_bytes / kF32},
                    run.context);
      },
      [&](const ops::MoeUpGateDesc& d) {
        ops::launch(config, d,
                    ops::MoeUpGateArgs{.x = pointer(node.x),
                                       .x_stride_bytes = node.x.stride_bytes,
                                       .w_gate = weight(node.w),
                                       .w_up = weight(node.w2),
                                       .w_expert_stride_bytes = stack_stride(node.w),
                                       .bias_gate = vector(node.bias),
                                       .bias_up = vector(node.bias2),
                                       .ids = ints(node.ids),
                                       .y = floats(node.y),
                                       .workspace = ints(node.workspace)},
                    run.context);
      },
      [&](const ops::MoeRouteDesc& d) {
        const int64_t at_layer = node.moe_index * run.batch.routing_stride * d.used;
        int32_t* ids = ints(node.ids);
        ops::launch(config, d,
                    ops::MoeRouteArgs{.logits = floats(node.x),
                                      .selection_bias = vector(node.w),
                                      .pinned = run.batch.pinned_routing == nullptr
                                                    ? nullptr
                                                    : run.batch.pinned_routing + at_layer,
                                      .scale = node.scale,
                                      .ids = ids,
                                      .weights = floats(node.route_weights)},
                    run.context);
        if (run.batch.captured_routing != nullptr) {
          std::copy_n(ids, d.m * d.used, run.batch.captured_routing + at_layer);
        }
      },
      [&](const ops::MoeSumDesc& d) {
        ops::launch(config, d,
                    ops::MoeSumArgs{.x = floats(node.x),
                                    .weights = floats(node.route_weights),
                                    .residual = floats(node.residual),
                                    .scale = node.scale,
                                    .out = floats(node.y)},
                    run.context);
      },
      [&](const ops::AttentionDesc& d) {
        const plan::KvLayer& kv = plan_.kv[static_cast<size_t>(node.layer)];
        ops::launch(config, d,
                    ops::AttentionArgs{.q = floats(node.x),
                                       .q_stride = node.x.stride_bytes / kF32,
                                       .k_cache = cache_.data() + kv.k_offset,
                                       .v_cache = cache_.data() + kv.v_offset,
                                       .k_row_bytes = kv.k_row_bytes,
                                       .v_row_bytes = kv.v_row_bytes,
                                       .slot_positions = plan_.context.ctx,
                                       .runs = run.batch.runs.data(),
                                       .n_runs = static_cast<int32_t>(run.batch.runs.size()),
                                       .sinks = vector(node.w),
                                       .scale = node.scale,
                                       .softcap = node.softcap,
                                       .window = node.window,
                                       .out = floats(node.y),
                                       .out_stride = node.y.stride_bytes / kF32},
                    run.context);
      },
      [&](const ops::KvStoreDesc& d) {
        const plan::KvLayer& kv = plan_.kv[static_cast<size_t>(node.layer)];
        ops::launch(config, d,
                    ops::KvStoreArgs{.x = floats(node.x),
                                     .x_stride = node.x.stride_bytes / kF32,
                                     .cache = cache_.data() + (node.value_cache ? kv.v_offset : kv.k_offset),
                                     .row_bytes = node.value_cache ? kv.v_row_bytes : kv.k_row_bytes,
                                     .slot_positions = plan_.context.ctx,
                                     .runs = run.batch.runs.data(),
                                     .n_runs = static_cast<int32_t>(run.batch.runs.size())},
                    run.context);
      },
      [&](const ops::CopyDesc& d) {
        ops::launch(config, d,
                    ops::CopyArgs{.x = floats(node.x),
                                  .x_stride = node.x.stride_bytes / kF32,
                                  .out = pointer(node.y),
                                  .out_stride_bytes = node.y.stride_bytes},
                    run.context);
      },
      [&](const ops::GluDesc& d) {
        ops::launch(config, d,
                    ops::GluArgs{.gate = floats(node.gate),
                                 .gate_stride = node.gate.stride_bytes / kF32,
                                 .up = floats(node.x),
                                 .up_stride = node.x.stride_bytes / kF32,
                                 .y = floats(node.y),
                                 .y_stride = node.y.stride_bytes / kF32},
                    run.context);
      },
      [&](const ops::SampleDesc&) { throw Error("[executor] sampling is not part of a plan"); },
  };
  std::visit(cases, desc);
}

}  // namespace dyno::runtime
