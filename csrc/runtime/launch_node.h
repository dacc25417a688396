// Launches the op of a node, for every family and device. An Env provides the pointers and the context of a device:
//   model, plan, selection, context, tokens (number of rows), batch (LaunchBatch);
//   ids_settled: the choice of this layer's experts is complete when a launch after its up_gate begins;
//   keys_of(layer), values_of(layer): the cache; state_of(index): the state of all sequences;
//   at(operand), weight(id), weight_bytes(id), inverse_frequencies(table), expert_places(table),
//   first_expanded(node, run): the first row of a sequence that mla_expand computes, because memory has the others;
//   expanded(node, run): notes that it has all of them;
//   soft_cap(values, count, cap), copy_ids(from, count, to), sample(config, desc, logits): samples with the
//   settings of the current generation.
#pragma once

#include <algorithm>
#include <span>

#include "core/error.h"
#include "ops/launch.h"
#include "plan/plan.h"
#include "plan/selection.h"
#include "runtime/launch_args.h"

namespace dyno::runtime {

// A MicroBatch in memory that the kernels can read.
struct LaunchBatch {
  const int32_t* tokens = nullptr;
  const int32_t* positions = nullptr;
  const ops::SequenceRun* runs = nullptr;
  int32_t n_runs = 0;
  std::span<const ops::SequenceRun> host_runs{};  // `runs` in host memory
  int64_t depth = 0;                              // upper bound of their positions, see AttentionArgs
  int32_t run = 0;                                // index of the run that a per_run node computes
  const int32_t* pinned_routing = nullptr;
  int32_t* captured_routing = nullptr;
  int64_t routing_stride = 0;
};

// The inputs of a launch other than the operands of its node: the u-batch, the cache, rope tables. There is one
// overload for each kind of arguments that is listed in from_batch().
template <typename Env>
class Surroundings {
 public:
  // first: the first row that mla_expand computes.
  Surroundings(const plan::Node& node, Env& env, const ops::SequenceRun& run, int64_t first)
      : node_(node), env_(env), run_(run), first_(first) {}

  template <typename Args, typename O>
    requires(from_batch(std::type_identity<Args>{}) == FieldNames{})
  void give(Args&, const O&) const {}
  void give(ops::EmbedArgs& args, const plan::EmbedOperands&) const {
    args.rows = env_.model.n_vocab;
    args.ids = env_.batch.tokens;
  }
  void give(ops::RopeArgs& args, const plan::RopeOperands& o) const {
    rotate(args, o.rope_table);
    const plan::RopeTable& table = env_.plan.rope_tables[static_cast<size_t>(o.rope_table)];
    args.position_scale = table.position_scale;
    args.position_step = table.position_step;
    args.positions = env_.batch.positions;
  }
  void give(ops::MoeSplitArgs& args, const plan::MoeSplitOperands& o) const {
    args.places = env_.expert_places(o.place_table);
    args.counts = env_.choice_counts(o.place_table);
  }
  void give(ops::MoeRouteArgs& args, const plan::MoeRouteOperands& o) const { pin(args, o.moe_index); }
  void give(ops::NormRouteArgs& args, const plan::NormRouteOperands& o) const {
    fill_args(args.route, o, env_);
    pin(args.route, o.moe_index);
  }
  void give(ops::MoeDownSumArgs& args, const plan::MoeDownSumOperands&) const { args.settled = env_.ids_settled; }
  void give(ops::AttentionArgs& args, const plan::AttentionOperands& o) const {
    if (!o.keys) {
      read_cache(args, o.cache_layer >= 0 ? o.cache_layer : node_.layer);
      args.settled = true;
      return;
    }
    // The expanded keys and values have only the sequence of this run.
    const auto& d = std::get<ops::AttentionDesc>(env_.plan.keys[static_cast<size_t>(node_.key)].desc);
    args.k_cache = env_.at(o.keys);
    args.v_cache = env_.at(o.values);
    args.k_row_bytes = static_cast<int64_t>(row_bytes(d.k_type, d.kv_heads * d.dk));
    args.v_row_bytes = static_cast<int64_t>(row_bytes(d.v_type, d.kv_heads * d.dv));
    args.runs = env_.batch.runs + env_.batch.run;
    args.n_runs = 1;
    args.host_runs = env_.batch.host_runs.data() + env_.batch.run;
    args.depth = int64_t{run_.position} + run_.n_tokens;
  }
  void give(ops::KvStoreArgs& args, const plan::KvStoreOperands& o) const {
    args.cache = o.into_values ? env_.values_of(node_.layer) : env_.keys_of(node_.layer);
    args.row_bytes = o.into_values ? kv().v_row_bytes : kv().k_row_bytes;
    args.slot_positions = env_.plan.context.ctx;
    args.runs = env_.batch.runs;
    args.n_runs = env_.batch.n_runs;
  }
  void give(ops::IndexSelectArgs& args, const plan::IndexSelectOperands&) const {
    args.keys = env_.values_of(node_.layer);
    args.key_row_bytes = kv().v_row_bytes;
    args.slot_positions = env_.plan.context.ctx;
    args.runs = env_.batch.runs;
    args.n_runs = env_.batch.n_runs;
  }
  void give(ops::ShortConvArgs& args, const plan::ShortConvOperands& o) const { keep_state(args, o.state_index); }
  void give(ops::LinearAttentionArgs& args, const plan::LinearAttentionOperands& o) const {
    keep_state(args, o.state_index);
  }
  void give(ops::QkvRopeStoreArgs& args, const plan::QkvRopeStoreOperands& o) const {
    rotate(args, o.rope_table);
    args.positions = env_.batch.positions;
    read_cache(args);
  }
  void give(ops::RopeAttentionArgs& args, const plan::RopeAttentionOperands& o) const {
    rotate(args, o.rope_table);
    args.positions = env_.batch.positions;
    read_cache(args);
    args.settled = true;
  }
  void give(ops::MlaExpandArgs& args, const plan::MlaExpandOperands&) const {
    args.row_bytes = kv().k_row_bytes;
    args.latents = env_.keys_of(node_.layer) + (run_.slot * env_.plan.context.ctx + first_) * args.row_bytes;
    const auto& d = std::get<ops::MlaExpandDesc>(env_.plan.keys[static_cast<size_t>(node_.key)].desc);
    const auto halves = [&](int64_t width) {
      return first_ * static_cast<int64_t>(row_bytes(ops::expanded_type(d.cache_type), d.heads * width)) / 2;
    };
    args.keys += halves(d.nope + d.rope);
    args.values += halves(d.dv);
  }

 private:
  const plan::KvLayer& kv() const { return env_.plan.kv[static_cast<size_t>(node_.layer)]; }
  template <typename Args>
  void keep_state(Args& args, int32_t index) const {
    args.state = env_.state_of(index);
    args.slot_positions = env_.plan.context.ctx;
    args.runs = env_.batch.runs;
    args.n_runs = env_.batch.n_runs;
  }
  template <typename Args>
  void rotate(Args& args, int32_t table) const {
    args.inv_freq = env_.inverse_frequencies(table);
    args.mscale = env_.plan.rope_tables[static_cast<size_t>(table)].mscale;
  }
  template <typename Args>
  void read_cache(Args& args) const {
    read_cache(args, node_.layer);
  }
  template <typename Args>
  void read_cache(Args& args, int32_t layer) const {
    const plan::KvLayer& rows = env_.plan.kv[static_cast<size_t>(layer)];
    args.k_cache = env_.keys_of(layer);
    args.v_cache = env_.values_of(layer);
    args.k_row_bytes = rows.k_row_bytes;
    args.v_row_bytes = rows.v_row_bytes;
    args.slot_positions = env_.plan.context.ctx;
    args.runs = env_.batch.runs;
    args.n_runs = env_.batch.n_runs;
    if constexpr (requires { args.depth; }) {
      args.host_runs = env_.batch.host_runs.data();
      args.depth = env_.batch.depth;
    }
  }
  void pin(ops::MoeRouteArgs& args, int32_t moe_index) const {
    if (env_.batch.pinned_routing == nullptr) return;
    args.pinned = env_.batch.pinned_routing + moe_index * env_.batch.routing_stride * used();
  }
  int64_t used() const {
    return std::visit(
        [](const auto& d) -> int64_t {
          if constexpr (requires { d.used; }) return d.used;
          return 0;
        },
        env_.plan.keys[static_cast<size_t>(node_.key)].desc);
  }

  const plan::Node& node_;
  Env& env_;
  const ops::SequenceRun& run_;
  int64_t first_;
};

// Work after a launch.
template <typename Desc, typename O, typename Env>
void after_launch(const ops::Config& config, const Desc& d, const O& o, Env& env) {
  if constexpr (std::is_same_v<Desc, ops::MatmulDesc>) {
    if (o.softcap > 0) env.soft_cap(reinterpret_cast<float*>(env.at(o.y)), d.m * d.n, o.softcap);
  } else if constexpr (std::is_same_v<Desc, ops::MoeUpGateDesc>) {
    env.ids_settled = ops::settles_ids(config, d);
  } else if constexpr (requires { o.moe_index; }) {
    env.ids_settled = false;
    if (env.batch.captured_routing == nullptr) return;
    env.copy_ids(reinterpret_cast<const int32_t*>(env.at(o.ids)), d.m * d.used,
                 env.batch.captured_routing + o.moe_index * env.batch.routing_stride * d.used);
  }
}

// Separate, because q, k and v are arrays in QkvArgs.
template <typename Env>
ops::QkvArgs qkv_args(const plan::QkvOperands& o, const Env& env) {
  const auto weight = [&](model::WeightId id) { return id == model::kNone ? nullptr : env.weight(id); };
  const auto floats = [&](const plan::Operand& y) { return reinterpret_cast<float*>(env.at(y)); };
  constexpr int64_t kFloat = sizeof(float);
  return {.x = floats(o.x),
          .x_stride_bytes = o.x.stride_bytes,
          .w = {weight(o.w_q.id), weight(o.w_k.id), weight(o.w_v.id)},
          .bias = {vector_of(env, o.bias_q.id), vector_of(env, o.bias_k.id), vector_of(env, o.bias_v.id)},
          .y = {floats(o.q), floats(o.k), floats(o.v)},
          .y_stride = {o.q.stride_bytes / kFloat, o.k.stride_bytes / kFloat, o.v.stride_bytes / kFloat},
          .norm = {.weight = vector_of(env, o.norm.weight.id), .eps = o.norm.eps}};
}

template <typename Env>
void launch_node(const plan::Node& node, Env& env) {
  const plan::OpUse& use = env.plan.keys[static_cast<size_t>(node.key)];
  const bool expansion = ops::family_of(use.desc) == ops::Family::mla_expand;
  const ops::SequenceRun run =
      node.per_run ? env.batch.host_runs[static_cast<size_t>(env.batch.run)] : ops::SequenceRun{};
  const int64_t first = expansion ? env.first_expanded(node, run) : 0;
  const int64_t rows = expansion      ? int64_t{run.position} + run.n_tokens - first
                       : node.per_run ? int64_t{run.n_tokens}
                                      : env.tokens * node.rows_factor;
  const plan::Selection::Launch launch =
      env.selection.launch(node, env.tokens, env.batch.n_runs, rows, env.batch.depth);
  std::visit(
      [&]<typename Desc>(const Desc& d) {
        const auto& o = std::get<plan::OperandsOf<Desc>>(node.operands);
        if constexpr (std::is_same_v<Desc, ops::SampleDesc>) {
          env.sample(launch.config, d, reinterpret_cast<const float*>(env.at(o.logits)));
        } else if constexpr (std::is_same_v<Desc, ops::QkvDesc>) {
          ops::launch_op(launch.config, d, qkv_args(o, env), env.context);
        } else {
          auto args = args_of<ops::ArgsOf<Desc>>(o, env);
          Surroundings<Env>(node, env, run, first).give(args, o);
          ops::launch_op(launch.config, d, args, env.context);
        }
        after_launch(launch.config, d, o, env);
      },
      launch.desc);
  if (expansion) env.expanded(node, run);
}

}  // namespace dyno::runtime
