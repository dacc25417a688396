#include "bindings/ops_run.h"

#include <nanobind/stl/string.h>

#include "bindings/cuda_launch.h"
#include "bindings/launch_context.h"
#include "bindings/matmul_args.h"
#include "bindings/op_args.h"
#include "bindings/ops_convert.h"
#include "ops/launch.h"
#include "ops/runs.h"

namespace nb = nanobind;

namespace dyno {
namespace {

using namespace ops;

// Elements from the first row's start to the last row's end.
int64_t extent(int64_t rows, int64_t stride, int64_t row) { return rows == 0 ? 0 : (rows - 1) * stride + row; }

std::vector<SequenceRun> read_runs(OpArgs& in, int64_t m) {
  const nb::object value = in.get("runs");
  if (!value.is_valid()) return {{0, static_cast<int32_t>(m), 0, 0}};
  std::vector<SequenceRun> runs;
  for (const nb::handle item : value) {
    const auto run = nb::cast<nb::tuple>(item);
    DYNO_CHECK(PlanError, run.size() == 4, "[ops] a run is (first_token, n_tokens, position, slot)");
    runs.push_back(
        {nb::cast<int32_t>(run[0]), nb::cast<int32_t>(run[1]), nb::cast<int32_t>(run[2]), nb::cast<int32_t>(run[3])});
  }
  return runs;
}

// Cells of the cache that the runs reach.
int64_t cells(const std::vector<SequenceRun>& runs, int64_t slot_positions) {
  int64_t most = 0;
  for (const SequenceRun& run : runs) {
    most = std::max(most, int64_t{run.slot} * slot_positions + run.position + run.n_tokens);
  }
  return most;
}

EmbedArgs read_args(OpArgs& in, const EmbedDesc& d, std::vector<SequenceRun>&) {
  EmbedArgs a;
  a.rows = in.number<int64_t>("rows", 0);
  a.table = in.in<uint8_t>("table", a.rows * static_cast<int64_t>(row_bytes(d.type, d.n)));
  a.ids = in.in<int32_t>("ids", d.m);
  a.out = in.out<float>("out", d.m * d.n);
  a.scale = in.number<float>("scale", 1.0f);
  return a;
}

NormArgs read_args(OpArgs& in, const NormDesc& d, std::vector<SequenceRun>&) {
  NormArgs a;
  const int64_t row = d.rows_per_token * d.n;
  a.x_stride = in.number<int64_t>("x_stride", row);
  a.out_stride = in.number<int64_t>("out_stride", row);
  a.x = in.in<float>("x", extent(d.m, a.x_stride, row));
  a.weight = in.optional_in<float>("weight", d.n);
  a.residual = in.optional_in<float>("residual", d.m * row);
  DYNO_CHECK(PlanError, !d.add || a.residual != nullptr, "[norm] argument residual is missing");
  a.out = in.out<float>("out", extent(d.m, a.out_stride, row));
  a.eps = in.number<float>("eps", 0.0f);
  return a;
}

RopeArgs read_args(OpArgs& in, const RopeDesc& d, std::vector<SequenceRun>&) {
  RopeArgs a;
  const int64_t row = d.heads * d.head_dim;
  a.x_stride = in.number<int64_t>("x_stride", row);
  a.x = in.out<float>("x", extent(d.m, a.x_stride, row));
  a.positions = in.in<int32_t>("positions", d.m);
  a.inv_freq = in.in<float>("inv_freq", d.n_rot / 2);
  a.mscale = in.number<float>("mscale", 1.0f);
  return a;
}

MoeRouteArgs read_args(OpArgs& in, const MoeRouteDesc& d, std::vector<SequenceRun>&) {
  MoeRouteArgs a;
  a.logits = in.in<float>("logits", d.m * d.experts);
  a.selection_bias = in.optional_in<float>("selection_bias", d.experts);
  a.pinned = in.optional_in<int32_t>("pinned", d.m * d.used);
  a.scale = in.number<float>("scale", 1.0f);
  a.ids = in.out<int32_t>("ids", d.m * d.used);
  a.weights = in.out<float>("weights", d.m * d.used);
  return a;
}

MoeSumArgs read_args(OpArgs& in, const MoeSumDesc& d, std::vector<SequenceRun>&) {
  MoeSumArgs a;
  a.x = in.in<float>("x", d.m * d.used * d.n);
  a.weights = in.in<float>("weights", d.m * d.used);
  a.residual = in.optional_in<float>("residual", d.m * d.n);
  a.scale = in.number<float>("scale", 1.0f);
  a.out = in.out<float>("out", d.m * d.n);
  return a;
}

AttentionArgs read_args(OpArgs& in, const AttentionDesc& d, std::vector<SequenceRun>& runs) {
  AttentionArgs a;
  runs = read_runs(in, d.m);
  a.runs = runs.data();
  a.n_runs = static_cast<int32_t>(runs.size());
  a.slot_positions = in.number<int64_t>("slot_positions", d.m);
  a.q_stride = in.number<int64_t>("q_stride", d.heads * d.dk);
  a.out_stride = in.number<int64_t>("out_stride", d.heads * d.dv);
  const auto k_row = static_cast<int64_t>(row_bytes(d.k_type, d.kv_heads * d.dk));
  const auto v_row = d.v_in_k ? 0 : static_cast<int64_t>(row_bytes(d.v_type, d.kv_heads * d.dv));
  a.k_row_bytes = in.number<int64_t>("k_row_bytes", k_row);
  a.v_row_bytes = in.number<int64_t>("v_row_bytes", v_row);
  const int64_t rows = cells(runs, a.slot_positions);
  a.q = in.in<float>("q", extent(d.m, a.q_stride, d.heads * d.dk));
  a.k_cache = reinterpret_cast<const std::byte*>(in.in<uint8_t>("k_cache", extent(rows, a.k_row_bytes, k_row)));
  if (!d.v_in_k) {
    a.v_cache = reinterpret_cast<const std::byte*>(in.in<uint8_t>("v_cache", extent(rows, a.v_row_bytes, v_row)));
  }
  a.sinks = in.optional_in<float>("sinks", d.heads);
  DYNO_CHECK(PlanError, !d.sinks || a.sinks != nullptr, "[attention] argument sinks is missing");
  a.scale = in.number<float>("scale", 1.0f);
  a.softcap = in.number<float>("softcap", 0.0f);
  a.window = in.number<int32_t>("window", 0);
  a.settled = in.number<int32_t>("settled", 0) != 0;
  a.out = in.out<float>("out", extent(d.m, a.out_stride, d.heads * d.dv));
  return a;
}

KvStoreArgs read_args(OpArgs& in, const KvStoreDesc& d, std::vector<SequenceRun>& runs) {
  KvStoreArgs a;
  runs = read_runs(in, d.m);
  a.runs = runs.data();
  a.n_runs = static_cast<int32_t>(runs.size());
  const auto row = static_cast<int64_t>(row_bytes(d.type, d.width));
  a.slot_positions = in.number<int64_t>("slot_positions", d.m);
  a.row_bytes = in.number<int64_t>("row_bytes", row);
  a.byte_offset = in.number<int64_t>("byte_offset", 0);
  a.x_stride = in.number<int64_t>("x_stride", d.width);
  a.x = in.in<float>("x", extent(d.m, a.x_stride, d.width));
  const int64_t reach = extent(cells(runs, a.slot_positions), a.row_bytes, a.byte_offset + row);
  a.cache = reinterpret_cast<std::byte*>(in.out<uint8_t>("cache", reach));
  return a;
}

// What both families take that put k and v into the cache.
template <typename Args, typename Desc>
Args read_stored(OpArgs& in, const Desc& d, std::vector<SequenceRun>& runs) {
  Args a;
  runs = read_runs(in, d.m);
  a.runs = runs.data();
  a.n_runs = static_cast<int32_t>(runs.size());
  a.slot_positions = in.number<int64_t>("slot_positions", d.m);
  const int64_t k_row = d.kv_heads * d.dk, v_row = d.kv_heads * d.dv;
  a.k_stride = in.number<int64_t>("k_stride", k_row);
  a.k = in.in<float>("k", extent(d.m, a.k_stride, k_row));
  a.q_norm = in.optional_in<float>("q_norm", d.dk);
  a.k_norm = in.optional_in<float>("k_norm", d.latent ? d.dk - d.n_rot : d.dk);
  a.eps = in.number<float>("eps", 0.0f);
  a.inv_freq = in.in<float>("inv_freq", d.n_rot / 2);
  a.mscale = in.number<float>("mscale", 1.0f);
  const int64_t rows = cells(runs, a.slot_positions);
  const auto k_bytes = static_cast<int64_t>(row_bytes(d.k_type, k_row));
  a.k_row_bytes = in.number<int64_t>("k_row_bytes", k_bytes);
  a.k_cache = reinterpret_cast<std::byte*>(in.out<uint8_t>("k_cache", extent(rows, a.k_row_bytes, k_bytes)));
  if (d.latent) return a;
  a.v_stride = in.number<int64_t>("v_stride", v_row);
  a.v = in.in<float>("v", extent(d.m, a.v_stride, v_row));
  const auto v_bytes = static_cast<int64_t>(row_bytes(d.v_type, v_row));
  a.v_row_bytes = in.number<int64_t>("v_row_bytes", v_bytes);
  a.v_cache = reinterpret_cast<std::byte*>(in.out<uint8_t>("v_cache", extent(rows, a.v_row_bytes, v_bytes)));
  return a;
}

QkvRopeStoreArgs read_args(OpArgs& in, const QkvRopeStoreDesc& d, std::vector<SequenceRun>& runs) {
  auto a = read_stored<QkvRopeStoreArgs>(in, d, runs);
  a.positions = in.in<int32_t>("positions", d.m);
  const int64_t q_row = d.heads * (d.latent ? d.nope + d.n_rot : d.dk);
  a.q_stride = in.number<int64_t>("q_stride", q_row);
  if (d.latent) {
    a.q = const_cast<float*>(in.in<float>("q", extent(d.m, a.q_stride, q_row)));
    a.q_out_stride = in.number<int64_t>("q_out_stride", d.heads * d.dk);
    a.q_out = in.out<float>("q_out", extent(d.m, a.q_out_stride, d.heads * d.dk));
  } else {
    a.q = in.out<float>("q", extent(d.m, a.q_stride, q_row));
  }
  return a;
}

RopeAttentionArgs read_args(OpArgs& in, const RopeAttentionDesc& d, std::vector<SequenceRun>& runs) {
  auto a = read_stored<RopeAttentionArgs>(in, d, runs);
  const int64_t q_row = d.heads * d.dk;
  a.q_stride = in.number<int64_t>("q_stride", q_row);
  a.q = in.in<float>("q", extent(d.m, a.q_stride, q_row));
  if (d.latent) {
    const int64_t rotary_row = d.heads * (d.nope + d.n_rot);
    a.q_rotary_stride = in.number<int64_t>("q_rotary_stride", rotary_row);
    a.q_rotary = in.in<float>("q_rotary", extent(d.m, a.q_rotary_stride, rotary_row));
  }
  a.sinks = in.optional_in<float>("sinks", d.heads);
  DYNO_CHECK(PlanError, !d.sinks || a.sinks != nullptr, "[rope_attention] argument sinks is missing");
  a.scale = in.number<float>("scale", 1.0f);
  a.softcap = in.number<float>("softcap", 0.0f);
  a.window = in.number<int32_t>("window", 0);
  a.settled = in.number<int32_t>("settled", 0) != 0;
  a.out_stride = in.number<int64_t>("out_stride", d.heads * d.dv);
  a.out = in.out<float>("out", extent(d.m, a.out_stride, d.heads * d.dv));
  return a;
}

NormRouteArgs read_args(OpArgs& in, const NormRouteDesc& d, std::vector<SequenceRun>&) {
  NormRouteArgs a;
  a.x_stride = in.number<int64_t>("x_stride", d.k);
  a.normed_stride = in.number<int64_t>("normed_stride", d.k);
  a.x = in.in<float>("x", extent(d.m, a.x_stride, d.k));
  a.norm = in.optional_in<float>("norm", d.k);
  a.eps = in.number<float>("eps", 0.0f);
  a.w = in.in<uint8_t>("w", static_cast<int64_t>(layout_bytes(d.type, d.layout, d.experts, d.k)));
  a.bias = in.optional_in<float>("bias", d.experts);
  a.normed = in.out<float>("normed", extent(d.m, a.normed_stride, d.k));
  a.route.selection_bias = in.optional_in<float>("selection_bias", d.experts);
  a.route.pinned = in.optional_in<int32_t>("pinned", d.m * d.used);
  a.route.scale = in.number<float>("scale", 1.0f);
  a.route.ids = in.out<int32_t>("ids", d.m * d.used);
  a.route.weights = in.out<float>("weights", d.m * d.used);
  return a;
}

GluArgs read_args(OpArgs& in, const GluDesc& d, std::vector<SequenceRun>&) {
  GluArgs a;
  a.gate_stride = in.number<int64_t>("gate_stride", d.n);
  a.up_stride = in.number<int64_t>("up_stride", d.n);
  a.y_stride = in.number<int64_t>("y_stride", d.n);
  a.gate = in.in<float>("gate", extent(d.m, a.gate_stride, d.n));
  a.up = in.in<float>("up", extent(d.m, a.up_stride, d.n));
  a.y = in.out<float>("y", extent(d.m, a.y_stride, d.n));
  return a;
}

MlaExpandArgs read_args(OpArgs& in, const MlaExpandDesc& d, std::vector<SequenceRun>&) {
  MlaExpandArgs a;
  const auto row = static_cast<int64_t>(row_bytes(d.cache_type, d.lora + d.rope));
  a.row_bytes = in.number<int64_t>("row_bytes", row);
  a.latents = reinterpret_cast<const std::byte*>(in.in<uint8_t>("latents", extent(d.m, a.row_bytes, row)));
  a.k_b_stride_bytes = static_cast<int64_t>(layout_bytes(d.k_type, d.k_layout, d.lora, d.nope));
  a.v_b_stride_bytes = static_cast<int64_t>(layout_bytes(d.v_type, d.v_layout, d.dv, d.lora));
  a.k_b = in.in<uint8_t>("k_b", d.heads * a.k_b_stride_bytes);
  a.v_b = in.in<uint8_t>("v_b", d.heads * a.v_b_stride_bytes);
  const DType out_type = expanded_type(d.cache_type);
  const auto rows = [&](int64_t width) { return static_cast<int64_t>(row_bytes(out_type, d.m * d.heads * width)); };
  a.keys = reinterpret_cast<uint16_t*>(in.out<uint8_t>("keys", rows(d.nope + d.rope)));
  a.values = reinterpret_cast<uint16_t*>(in.out<uint8_t>("values", rows(d.dv)));
  return a;
}

SampleArgs read_args(OpArgs& in, const SampleDesc& d, std::vector<SequenceRun>&) {
  SampleArgs a;
  a.logits = in.in<float>("logits", d.m * d.n_vocab);
  a.uniform = in.in<float>("uniform", d.m);
  a.temperature = in.number<float>("temperature", 1.0f);
  a.top_k = in.number<int32_t>("top_k", 0);
  a.top_p = in.number<float>("top_p", 1.0f);
  a.min_p = in.number<float>("min_p", 0.0f);
  a.finite_only = in.number<bool>("finite_only", false);
  a.out = in.out<int32_t>("out", d.m);
  return a;
}

template <typename D>
  requires requires(OpArgs& in, const D& d) { read_matmul_args(in, d); }
auto read_args(OpArgs& in, const D& d, std::vector<SequenceRun>&) {
  return read_matmul_args(in, d);
}

}  // namespace

void run_op(std::string_view family_text, const nb::dict& desc_dict, const std::optional<nb::dict>& config_dict,
            const nb::dict& args_dict, int threads, std::string_view isa, std::string_view device_text,
            [[maybe_unused]] bool captured, int sm_count) {
  const Family family = family_from_name(family_text);
  const OpDesc desc = desc_from_dict(family, desc_dict);
  DeviceInfo device = device_from_name(device_text, isa);
  DYNO_CHECK(PlanError, sm_count >= 0 && (sm_count == 0 || device.kind == DeviceKind::cuda), "[ops] sm_count is ",
             sm_count, "; expected multiprocessors of a GPU, or 0 for those that it has");
  if (sm_count > 0) device.sm_count = sm_count;
  const Config config = config_dict ? config_from_dict(family, *config_dict) : default_config(desc, device);
  const Support support = supports(desc, config, device);
  DYNO_CHECK(UnsupportedError, support.ok, "[", family_text, "] ", support.reason);
  std::visit(
      [&]<typename D>(const D& d) {
        std::vector<SequenceRun> runs;
        if (device.kind == DeviceKind::cpu) {
          LaunchContext launcher(scratch_bytes(desc, config), threads, device.isa);
          OpArgs in(family_text, args_dict);
          const auto args = read_args(in, d, runs);
          in.finish();
          const nb::gil_scoped_release unlocked;
          launch_op(config, d, args, launcher.context());
          launcher.check_scratch();
          return;
        }
#ifdef DYNO_HAVE_CUDA
        CudaLaunch launcher(device, desc, config);
        OpArgs in(family_text, args_dict, &launcher);
        auto args = read_args(in, d, runs);
        in.finish();
        if constexpr (requires { args.runs; }) {
          check_runs("ops", args.runs, args.n_runs, d.m, args.slot_positions);
          const size_t bytes = runs.size() * sizeof(SequenceRun);
          args.runs = static_cast<const SequenceRun*>(launcher.mirror(runs.data(), bytes, false));
        }
        const nb::gil_scoped_release unlocked;
        launcher.begin(captured);
        launch_op(config, d, args, launcher.stream());
        launcher.end(captured);
        launcher.finish();
#else
        throw UnsupportedError(str_cat("[ops] ", family_text, " cannot be run alone on ", device_text));
#endif
      },
      desc);
}

}  // namespace dyno
