// From a node of the op list to the launch of its op: the one place that fills every family's arguments, for every
// device. An Env gives the pointers and the context of a device:
//   model, plan, selection, context, tokens (rows that go on), batch (LaunchBatch);
//   ids_settled: what chose the experts of this layer is over when a launch after its up_gate begins;
//   keys_of(layer), values_of(layer): of the cache;
//   at(operand), weight(id), inverse_frequencies(table), soft_cap(values, count, cap), copy_ids(from, count, to),
//   sample(config, desc, logits): by the settings of the generation that is under way.
#pragma once

#include <algorithm>
#include <span>

#include "core/error.h"
#include "ops/launch.h"
#include "plan/plan.h"
#include "plan/selection.h"

namespace dyno::runtime {

// A MicroBatch where the kernels can read it.
struct LaunchBatch {
  const int32_t* tokens = nullptr;
  const int32_t* positions = nullptr;
  const ops::SequenceRun* runs = nullptr;
  int32_t n_runs = 0;
  std::span<const ops::SequenceRun> host_runs{};  // the same runs in host memory
  int32_t run = 0;                                // which of them a per_run node is launched for
  const int32_t* pinned_routing = nullptr;
  int32_t* captured_routing = nullptr;
  int64_t routing_stride = 0;
};

template <typename... Cases>
struct Overloaded : Cases... {
  using Cases::operator()...;
};
template <typename... Cases>
Overloaded(Cases...) -> Overloaded<Cases...>;  // clang 14 deduces none for aggregates

using ops::launch_op;

template <typename Env>
void launch_node(const plan::Node& node, Env& env) {
  const plan::Plan& plan = env.plan;
  const plan::OpUse& use = plan.keys[static_cast<size_t>(node.key)];
  const bool expansion = ops::family_of(use.desc) == ops::Family::mla_expand;
  const ops::SequenceRun run =
      node.per_run ? env.batch.host_runs[static_cast<size_t>(env.batch.run)] : ops::SequenceRun{};
  const int64_t rows = expansion      ? int64_t{run.position} + run.n_tokens
                       : node.per_run ? int64_t{run.n_tokens}
                                      : env.tokens * node.rows_factor;
  const ops::OpDesc desc = env.selection.desc(node.key, env.tokens, rows);
  const ops::Config& config = env.selection.config(node.key, env.tokens, rows);
  const auto pointer = [&](const plan::Operand& o) { return env.at(o); };
  const auto floats = [&](const plan::Operand& o) { return reinterpret_cast<float*>(env.at(o)); };
  const auto ints = [&](const plan::Operand& o) { return reinterpret_cast<int32_t*>(env.at(o)); };
  const auto weight = [&](model::WeightId id) { return env.weight(id); };
  const auto vector = [&](model::WeightId id) {
    return id == model::kNone ? nullptr : reinterpret_cast<const float*>(env.weight(id));
  };
  const auto norm_inside = [&] { return ops::NormInside{.weight = vector(node.norm), .eps = node.eps}; };
  constexpr int64_t kF32 = sizeof(float);
  const auto stack_stride = [&](model::WeightId id) {
    return static_cast<int64_t>(plan.weights[static_cast<size_t>(id)].bytes) / env.model.weight(id).batch;
  };

  // Of the mixture-of-experts layer of this node.
  const auto route_args = [&](int64_t used, model::WeightId selection_bias) {
    const int64_t at_layer = node.moe_index * env.batch.routing_stride * used;
    return ops::MoeRouteArgs{
        .selection_bias = vector(selection_bias),
        .pinned = env.batch.pinned_routing == nullptr ? nullptr : env.batch.pinned_routing + at_layer,
        .scale = node.scale,
        .ids = ints(node.ids),
        .weights = floats(node.route_weights)};
  };
  const auto report_routing = [&](int64_t m, int64_t used) {
    if (env.batch.captured_routing == nullptr) return;
    env.copy_ids(ints(node.ids), m * used,
                 env.batch.captured_routing + node.moe_index * env.batch.routing_stride * used);
  };

  const Overloaded cases{
      [&](const ops::EmbedDesc& d) {
        launch_op(config, d,
                  ops::EmbedArgs{.table = weight(node.w),
                                 .rows = env.model.n_vocab,
                                 .ids = env.batch.tokens,
                                 .out = floats(node.y),
                                 .scale = node.scale},
                  env.context);
      },
      [&](const ops::NormDesc& d) {
        launch_op(config, d,
                  ops::NormArgs{.x = floats(node.x),
                                .x_stride = node.x.stride_bytes / kF32,
                                .weight = vector(node.w),
                                .residual = floats(node.residual),
                                .out = floats(node.y),
                                .out_stride = node.y.stride_bytes / kF32,
                                .eps = node.eps},
                  env.context);
      },
      [&](const ops::RopeDesc& d) {
        launch_op(config, d,
                  ops::RopeArgs{.x = floats(node.x),
                                .x_stride = node.x.stride_bytes / kF32,
                                .positions = env.batch.positions,
                                .inv_freq = env.inverse_frequencies(node.rope_table),
                                .mscale = plan.rope_tables[static_cast<size_t>(node.rope_table)].mscale},
                  env.context);
      },
      [&](const ops::MatmulDesc& d) {
        launch_op(config, d,
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
                                  .y_batch_stride = node.y.batch_stride_bytes / kF32,
                                  .norm = norm_inside()},
                  env.context);
        if (node.softcap > 0) env.soft_cap(floats(node.y), d.m * d.n, node.softcap);
      },
      [&](const ops::MatmulIdDesc& d) {
        launch_op(config, d,
                  ops::MatmulIdArgs{.x = pointer(node.x),
                                    .x_stride_bytes = node.x.stride_bytes,
                                    .w = weight(node.w),
                                    .w_expert_stride_bytes = stack_stride(node.w),
                                    .bias = vector(node.bias),
                                    .ids = ints(node.ids),
                                    .y = floats(node.y),
                                    .workspace = ints(node.workspace)},
                  env.context);
      },
      [&](const ops::UpGateDesc& d) {
        launch_op(config, d,
                  ops::UpGateArgs{.x = pointer(node.x),
                                  .x_stride_bytes = node.x.stride_bytes,
                                  .w_gate = weight(node.w),
                                  .w_up = weight(node.w2),
                                  .bias_gate = vector(node.bias),
                                  .bias_up = vector(node.bias2),
                                  .y = floats(node.y),
                                  .y_stride = node.y.stride_bytes / kF32,
                                  .norm = norm_inside()},
                  env.context);
      },
      [&](const ops::MoeUpGateDesc& d) {
        launch_op(config, d,
                  ops::MoeUpGateArgs{.x = pointer(node.x),
                                     .x_stride_bytes = node.x.stride_bytes,
                                     .w_gate = weight(node.w),
                                     .w_up = weight(node.w2),
                                     .w_expert_stride_bytes = stack_stride(node.w),
                                     .bias_gate = vector(node.bias),
                                     .bias_up = vector(node.bias2),
                                     .ids = ints(node.ids),
                                     .y = floats(node.y),
                                     .workspace = ints(node.workspace),
                                     .norm = norm_inside()},
                  env.context);
        env.ids_settled = ops::settles_ids(config, d);
      },
      [&](const ops::QkvDesc& d) {
        const auto third = [&](model::WeightId id) { return id == model::kNone ? nullptr : weight(id); };
        launch_op(config, d,
                  ops::QkvArgs{.x = floats(node.x),
                               .x_stride_bytes = node.x.stride_bytes,
                               .w = {weight(node.w), weight(node.w2), third(node.w3)},
                               .bias = {vector(node.bias), vector(node.bias2), vector(node.bias3)},
                               .y = {floats(node.y), floats(node.y2), floats(node.y3)},
                               .y_stride = {node.y.stride_bytes / kF32, node.y2.stride_bytes / kF32,
                                            node.y3.stride_bytes / kF32},
                               .norm = norm_inside()},
                  env.context);
      },
      [&](const ops::MoeDownSumDesc& d) {
        launch_op(config, d,
                  ops::MoeDownSumArgs{.x = floats(node.x),
                                      .w = weight(node.w),
                                      .w_expert_stride_bytes = stack_stride(node.w),
                                      .bias = vector(node.bias),
                                      .ids = ints(node.ids),
                                      .weights = floats(node.route_weights),
                                      .residual = floats(node.residual),
                                      .scale = node.scale,
                                      .settled = env.ids_settled,
                                      .out = floats(node.y)},
                  env.context);
      },
      [&](const ops::MoeRouteDesc& d) {
        ops::MoeRouteArgs args = route_args(d.used, node.w);
        args.logits = floats(node.x);
        launch_op(config, d, args, env.context);
        report_routing(d.m, d.used);
      },
      [&](const ops::NormRouteDesc& d) {
        launch_op(config, d,
                  ops::NormRouteArgs{.x = floats(node.x),
                                     .x_stride = node.x.stride_bytes / kF32,
                                     .norm = vector(node.w2),
                                     .eps = node.eps,
                                     .w = weight(node.w),
                                     .bias = vector(node.bias),
                                     .normed = floats(node.y),
                                     .normed_stride = node.y.stride_bytes / kF32,
                                     .route = route_args(d.used, node.bias2)},
                  env.context);
        report_routing(d.m, d.used);
      },
      [&](const ops::MoeSumDesc& d) {
        launch_op(config, d,
                  ops::MoeSumArgs{.x = floats(node.x),
                                  .weights = floats(node.route_weights),
                                  .residual = floats(node.residual),
                                  .scale = node.scale,
                                  .out = floats(node.y)},
                  env.context);
      },
      [&](const ops::AttentionDesc& d) {
        const plan::KvLayer& kv = plan.kv[static_cast<size_t>(node.layer)];
        if (node.per_run) {
          launch_op(config, d,
                    ops::AttentionArgs{.q = floats(node.x),
                                       .q_stride = node.x.stride_bytes / kF32,
                                       .k_cache = pointer(node.keys),
                                       .v_cache = pointer(node.values),
                                       .k_row_bytes = static_cast<int64_t>(row_bytes(d.k_type, d.kv_heads * d.dk)),
                                       .v_row_bytes = static_cast<int64_t>(row_bytes(d.v_type, d.kv_heads * d.dv)),
                                       .slot_positions = 0,  // they hold this sequence alone
                                       .runs = env.batch.runs + env.batch.run,
                                       .n_runs = 1,
                                       .scale = node.scale,
                                       .out = floats(node.y),
                                       .out_stride = node.y.stride_bytes / kF32},
                    env.context);
          return;
        }
        launch_op(config, d,
                  ops::AttentionArgs{.q = floats(node.x),
                                     .q_stride = node.x.stride_bytes / kF32,
                                     .k_cache = env.keys_of(node.layer),
                                     .v_cache = env.values_of(node.layer),
                                     .k_row_bytes = kv.k_row_bytes,
                                     .v_row_bytes = kv.v_row_bytes,
                                     .slot_positions = plan.context.ctx,
                                     .runs = env.batch.runs,
                                     .n_runs = env.batch.n_runs,
                                     .sinks = vector(node.w),
                                     .scale = node.scale,
                                     .softcap = node.softcap,
                                     .window = node.window,
                                     .settled = true,
                                     .out = floats(node.y),
                                     .out_stride = node.y.stride_bytes / kF32},
                  env.context);
      },
      [&](const ops::KvStoreDesc& d) {
        const plan::KvLayer& kv = plan.kv[static_cast<size_t>(node.layer)];
        launch_op(config, d,
                  ops::KvStoreArgs{.x = floats(node.x),
                                   .x_stride = node.x.stride_bytes / kF32,
                                   .cache = node.value_cache ? env.values_of(node.layer) : env.keys_of(node.layer),
                                   .row_bytes = node.value_cache ? kv.v_row_bytes : kv.k_row_bytes,
                                   .slot_positions = plan.context.ctx,
                                   .runs = env.batch.runs,
                                   .n_runs = env.batch.n_runs},
                  env.context);
      },
      [&](const ops::QkvRopeStoreDesc& d) {
        const plan::KvLayer& kv = plan.kv[static_cast<size_t>(node.layer)];
        launch_op(config, d,
                  ops::QkvRopeStoreArgs{.q = floats(node.x),
                                        .q_stride = node.x.stride_bytes / kF32,
                                        .q_out = floats(node.y),
                                        .q_out_stride = node.y.stride_bytes / kF32,
                                        .k = floats(node.k),
                                        .k_stride = node.k.stride_bytes / kF32,
                                        .v = floats(node.v),
                                        .v_stride = node.v.stride_bytes / kF32,
                                        .q_norm = vector(node.w),
                                        .k_norm = vector(node.w2),
                                        .eps = node.eps,
                                        .positions = env.batch.positions,
                                        .inv_freq = env.inverse_frequencies(node.rope_table),
                                        .mscale = plan.rope_tables[static_cast<size_t>(node.rope_table)].mscale,
                                        .k_cache = env.keys_of(node.layer),
                                        .v_cache = env.values_of(node.layer),
                                        .k_row_bytes = kv.k_row_bytes,
                                        .v_row_bytes = kv.v_row_bytes,
                                        .slot_positions = plan.context.ctx,
                                        .runs = env.batch.runs,
                                        .n_runs = env.batch.n_runs},
                  env.context);
      },
      [&](const ops::RopeAttentionDesc& d) {
        const plan::KvLayer& kv = plan.kv[static_cast<size_t>(node.layer)];
        launch_op(config, d,
                  ops::RopeAttentionArgs{.q = floats(node.x),
                                         .q_stride = node.x.stride_bytes / kF32,
                                         .q_rotary = floats(node.q_rotary),
                                         .q_rotary_stride = node.q_rotary.stride_bytes / kF32,
                                         .k = floats(node.k),
                                         .k_stride = node.k.stride_bytes / kF32,
                                         .v = floats(node.v),
                                         .v_stride = node.v.stride_bytes / kF32,
                                         .q_norm = vector(node.w2),
                                         .k_norm = vector(node.w3),
                                         .eps = node.eps,
                                         .inv_freq = env.inverse_frequencies(node.rope_table),
                                         .mscale = plan.rope_tables[static_cast<size_t>(node.rope_table)].mscale,
                                         .k_cache = env.keys_of(node.layer),
                                         .v_cache = env.values_of(node.layer),
                                         .k_row_bytes = kv.k_row_bytes,
                                         .v_row_bytes = kv.v_row_bytes,
                                         .slot_positions = plan.context.ctx,
                                         .runs = env.batch.runs,
                                         .n_runs = env.batch.n_runs,
                                         .sinks = vector(node.w),
                                         .scale = node.scale,
                                         .softcap = node.softcap,
                                         .window = node.window,
                                         .settled = true,
                                         .out = floats(node.y),
                                         .out_stride = node.y.stride_bytes / kF32},
                  env.context);
      },
      [&](const ops::CopyDesc& d) {
        launch_op(config, d,
                  ops::CopyArgs{.x = floats(node.x),
                                .x_stride = node.x.stride_bytes / kF32,
                                .out = pointer(node.y),
                                .out_stride_bytes = node.y.stride_bytes},
                  env.context);
      },
      [&](const ops::GluDesc& d) {
        launch_op(config, d,
                  ops::GluArgs{.gate = floats(node.gate),
                               .gate_stride = node.gate.stride_bytes / kF32,
                               .up = floats(node.x),
                               .up_stride = node.x.stride_bytes / kF32,
                               .y = floats(node.y),
                               .y_stride = node.y.stride_bytes / kF32},
                  env.context);
      },
      [&](const ops::MlaExpandDesc& d) {
        const plan::KvLayer& kv = plan.kv[static_cast<size_t>(node.layer)];
        const int64_t slot_bytes = plan.context.ctx * kv.k_row_bytes;
        launch_op(config, d,
                  ops::MlaExpandArgs{.latents = env.keys_of(node.layer) + run.slot * slot_bytes,
                                     .row_bytes = kv.k_row_bytes,
                                     .k_b = weight(node.w),
                                     .k_b_stride_bytes = stack_stride(node.w),
                                     .v_b = weight(node.w2),
                                     .v_b_stride_bytes = stack_stride(node.w2),
                                     .keys = reinterpret_cast<uint16_t*>(env.at(node.keys)),
                                     .values = reinterpret_cast<uint16_t*>(env.at(node.values))},
                  env.context);
      },
      [&](const ops::SampleDesc& d) { env.sample(config, d, floats(node.x)); },
  };
  std::visit(cases, desc);
}

}  // namespace dyno::runtime
