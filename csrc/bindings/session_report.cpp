#include "bindings/session_report.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <string>

#include "bindings/convert.h"
#include "bindings/cuda_launch.h"
#include "bindings/ops_convert.h"
#include "core/error.h"

namespace nb = nanobind;

namespace dyno {

plan::PlanCost session_cost(const runtime::Session& session, const plan::Load& load,
                            const std::vector<plan::NamedRates>& rates,
                            const std::vector<std::tuple<std::string, std::string, int64_t, double>>& measured) {
  const plan::Plan& p = session.plan();
  std::vector<plan::NamedRates> all = p.load.placement.rates;
  all.insert(all.end(), rates.begin(), rates.end());  // the last entry of a name wins
  std::vector<plan::DeviceRates> devices = plan::rates_for(p, all);
  for (const auto& [name, key, rows, seconds] : measured) {
    DYNO_CHECK(PlanError, seconds >= 0, "[plan] ", key, " has the time ", seconds, " s; expected 0 or more");
    for (size_t i = 0; i < p.devices.size(); ++i) {
      if (device_name(p.devices[i].info) == name) devices[i].measured[{key, rows}] = seconds;
    }
  }
  return plan::estimate(p, session.model(), devices, load);
}

nb::dict plan_dict(const runtime::Session& session) {
  const plan::Plan& p = session.plan();
  nb::dict d;
  d["device"] = device_dict(p.main_device());
  d["weights_bytes"] = p.weights_bytes;
  d["kv_bytes"] = p.kv_bytes;
  d["kv_address_bytes"] = p.kv_address_bytes;
  d["cache_window"] = p.cache_window();
  d["window_slack"] = plan::kWindowSlack;
  d["window_stride"] = p.cache_stride();
  d["window_checkpoints"] = p.window_checkpoints();
  d["state_bytes"] = p.state_bytes;
  d["arena_bytes"] = p.arena_bytes;
  d["scratch_bytes"] = p.scratch_bytes;
  d["total_bytes"] = p.total_bytes();
  d["numa_nodes"] = p.numa_nodes();
  d["mirror_bytes"] = p.mirror_bytes;
  nb::list devices;
  for (const plan::PlannedDevice& device : p.devices) {
    nb::dict one;
    one["name"] = device_name(device.info);
    one["weights_bytes"] = device.weights_bytes;
    one["kv_bytes"] = device.kv_bytes;
    one["state_bytes"] = device.state_bytes;
    one["arena_bytes"] = device.arena_bytes;
    one["stream_bytes"] = device.stream_bytes;
    one["memory_limit"] = device.memory_limit;
    one["link_gbps"] = device.link.bytes_per_second / 1e9;
    one["latency_us"] = device.link.latency_seconds * 1e6;
    devices.append(one);
  }
  d["devices"] = devices;
  d["draft_head"] = nb::none();
  if (const runtime::Session* head = session.draft_session()) {
    const plan::Plan& own = head->plan();
    nb::dict one;
    one["weights_bytes"] = own.weights_bytes;
    one["lent_bytes"] = own.lent_bytes();
    one["kv_bytes"] = own.kv_bytes;
    one["arena_bytes"] = own.arena_bytes;
    one["scratch_bytes"] = own.scratch_bytes;
    one["total_bytes"] = own.total_bytes();
    d["draft_head"] = one;
  }
  const plan::PlacementOptions& placed = p.load.placement;
  nb::dict placement;
  placement["rules"] = placed.rules;
  placement["cpu_moe"] = placed.cpu_moe;
  placement["n_cpu_moe"] = placed.n_cpu_moe;
  placement["n_gpu_layers"] = placed.n_gpu_layers ? nb::cast(*placed.n_gpu_layers) : nb::none();
  placement["note"] = p.placement_note;
  d["placement"] = placement;
  nb::dict settings;
  settings["numerics"] = std::string(plan::numerics_name(p.load.numerics));
  settings["cpu_repack"] = p.load.cpu_repack;
  settings["cpu_isa"] = std::string(cpu_isa_name(p.main_device().isa));
  settings["numa"] = std::string(plan::numa_name(p.load.numa));
  settings["expert_cache_mib"] = p.load.expert_cache.mib;
  settings["expert_cache"] = p.load.expert_cache.adaptive ? "adaptive" : "static";
  settings["device"] = device_name(p.main_device());
  settings["cuda_graphs"] = session.settings().cuda_graphs;
  settings["fusion"] = session.settings().fusion;
  settings["flash_attention"] = session.settings().flash_attention;
  settings["graph_concurrency"] = session.settings().graph_concurrency;
  settings["mla_mode"] = std::string(plan::mla_mode_name(session.settings().mla_mode));
  const plan::PathSettings& paths = session.settings().paths;
  settings["matvec_max_tokens"] = paths.matvec_max_tokens;
  settings["matvec_id_max_tokens"] = paths.matvec_id_max_tokens;
  settings["mmq_max_tokens"] = paths.mmq_max_tokens;
  settings["mmq_id_max_tokens"] = paths.mmq_id_max_tokens;
  settings["compute_type"] = std::string(ops::compute_type_name(paths.compute));
  const plan::OffloadOptions& offload = session.settings().offload;
  settings["offload_min_tokens"] = offload.min_tokens;
  settings["cpu_share"] = offload.cpu_share;
  settings["op_offload.matmul"] = offload.matmul;
  settings["op_offload.matmul_id"] = offload.matmul_id;
  settings["op_offload.up_gate"] = offload.up_gate;
  settings["op_offload.moe_up_gate"] = offload.moe_up_gate;
  settings["ctx"] = p.context.ctx;
  settings["kv_type_k"] = std::string(dtype_name(p.kv_type_k));
  settings["kv_type_v"] = std::string(dtype_name(p.kv_type_v));
  settings["sequences"] = p.context.sequences;
  settings["window_cache"] = std::string(plan::window_cache_name(p.window_cache));
  settings["ubatch"] = session.settings().ubatch;
  settings["threads"] = session.settings().threads;
  settings["threads_batch"] = session.settings().threads_batch;
  d["settings"] = settings;
  nb::list tensors;
  for (size_t i = 0; i < p.weights.size(); ++i) {
    const model::Weight& w = session.model().weights[i];
    nb::dict t;
    t["name"] = w.name;
    t["dtype"] = std::string(dtype_name(p.weights[i].type));
    t["layout"] = std::string(ops::layout_name(p.weights[i].layout));
    t["device"] = device_name(p.device(p.weights[i].device));
    t["mapped"] = p.weights[i].mapped;
    t["bytes"] = p.weights[i].bytes;
    tensors.append(t);
  }
  d["tensors"] = tensors;
  return d;
}

namespace {

// The desc's field for f16 tiles of that height, if the session's op reads or writes tiles; otherwise empty.
nb::dict tiles_dict(const ops::OpDesc& desc, int64_t height) {
  nb::dict tiles;
  std::visit(
      [&](const auto& d) {
        if (height == 0) return;
        if constexpr (requires { d.x_tiles; }) tiles["x_tiles"] = height;
        if constexpr (requires { d.y_tiles; }) tiles["y_tiles"] = height;
        if constexpr (requires { d.out_tiles; }) tiles["out_tiles"] = height;
      },
      desc);
  return tiles;
}

}  // namespace

nb::list ops_list(const runtime::Session& session, std::optional<int64_t> tokens, std::optional<int64_t> sequences) {
  const plan::Plan& p = session.plan();
  nb::list out;
  std::vector<int64_t> counts;
  if (tokens) {
    DYNO_CHECK(PlanError, *tokens >= 1 && *tokens <= p.ubatch, "[session] tokens is ", *tokens, "; expected 1 to ",
               p.ubatch);
    counts.push_back(*tokens);
  } else {
    counts = {1};
    if (p.ubatch > 1) counts.push_back(p.ubatch);
  }
  DYNO_CHECK(PlanError, !sequences || (*sequences >= 1 && *sequences <= counts.front()), "[session] sequences is ",
             sequences.value_or(0), "; expected 1 to the ", counts.front(), " tokens of a u-batch");
  for (size_t k = 0; k < p.keys.size(); ++k) {
    const plan::OpUse& use = p.keys[k];
    for (const int64_t count : counts) {
      // A u-batch of one token is a step of generation, which also samples.
      const plan::ListId list =
          count == 1 && use.count_in(plan::ListId::draw) > 0 ? plan::ListId::draw : p.list_for(count).id;
      if (use.count_in(list) == 0) continue;
      const int64_t rows = count * use.rows_factor;
      const int bucket = std::min(ops::bucket_of(rows), plan::kBuckets - 1);
      const ops::OpDesc desc = session.selection().launch(static_cast<int32_t>(k), count, rows).desc;
      const plan::Choice choice = session.selection().choice(static_cast<int32_t>(k), count);
      const ops::Cost cost = ops::cost(desc);
      nb::dict d;
      d["family"] = std::string(ops::family_name(ops::family_of(desc)));
      d["key"] = use.key;
      d["device"] = device_name(p.device(use.device));
      d["list"] = std::string(plan::list_name(list));
      d["count"] = use.count_in(list);
      d["rows"] = rows;
      d["tokens"] = ops::bucket_name(bucket);
      d["config"] = config_to_dict(ops::family_of(desc), choice.config);
      d["reason"] = choice.reason;
      d["tiles"] =
          tiles_dict(desc, session.selection().tiles_of(static_cast<int32_t>(k), count, sequences.value_or(count)));
      d["path"] = std::string(ops::product_path_name(session.selection().path_of(static_cast<int32_t>(k), count)));
      d["bytes"] = cost.bytes;
      d["flops"] = cost.flops;
      out.append(d);
    }
  }
  return out;
}

nb::list kernel_report(const runtime::Session& session) {
  nb::list out;
  for (const plan::EntryReport& entry : session.selection().report()) {
    nb::dict d;
    d["key"] = entry.op_key;
    d["tokens"] = entry.tokens;
    d["status"] = std::string(plan::entry_status_name(entry.status));
    d["reason"] = entry.reason;
    out.append(d);
  }
  return out;
}

nb::list capture_list(const std::vector<runtime::CaptureReport>& captures) {
  nb::list out;
  for (const runtime::CaptureReport& capture : captures) {
    nb::dict d;
    d["work"] = capture.draws ? "draw" : "decode";
    d["tokens"] = capture.tokens;
    d["sequences"] = capture.sequences;
    d["rows"] = capture.rows;
    d["depth"] = capture.depth;
    d["captured"] = capture.captured;
    d["uses"] = capture.attempts.uses();
    d["failures"] = capture.attempts.failures();
    d["next_attempt"] = capture.captured ? nb::none() : nb::cast(capture.attempts.next());
    d["reason"] = capture.attempts.reason();
    out.append(d);
  }
  return out;
}

}  // namespace dyno
