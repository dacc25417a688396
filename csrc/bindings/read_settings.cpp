#include "bindings/read_settings.h"

#include <algorithm>
#include <array>
#include <string>

#include "bindings/convert.h"
#include "bindings/cuda_launch.h"
#include "bindings/ops_convert.h"
#include "core/error.h"

namespace dyno {

namespace {

std::optional<DType> read_type(SettingsReader& r, const char* name) {
  const std::string text = r.text(name, "auto");
  if (text == "auto") return std::nullopt;
  const auto type = dtype_from_name(text);
  DYNO_CHECK(ProfileError, type.has_value(), "[settings] ", name, " is '", text,
             "'; expected auto, f32, f16, bf16 or q8_0");
  return type;
}

int thread_count(SettingsReader& r, const char* name, int fallback) {
  const int64_t value = r.integer(name, fallback);
  DYNO_CHECK(ProfileError, value >= 0 && value <= 1024, "[settings] ", name, " is ", value, "; expected 0 to 1024");
  return static_cast<int>(value);
}

}  // namespace

plan::LoadOptions read_load(const nb::dict& dict, const std::optional<nb::dict>& described, DeviceInfo& device,
                            nb::dict* asked) {
  SettingsReader r(dict, "load");
  plan::LoadOptions load;
  const std::string numerics = r.text("numerics", "default");
  DYNO_CHECK(ProfileError, numerics == "default" || numerics == "exact", "[settings] numerics is '", numerics,
             "'; expected default or exact");
  load.numerics = numerics == "exact" ? plan::Numerics::exact : plan::Numerics::standard;
  load.cpu_repack = r.flag("cpu_repack", true);
  load.mmap = r.flag("mmap", true);
  const std::string numa = r.text("numa", "off");
  constexpr std::array kNuma = {plan::NumaMode::off, plan::NumaMode::interleave, plan::NumaMode::pin,
                                plan::NumaMode::mirror};
  const auto mode = std::find_if(kNuma.begin(), kNuma.end(), [&](auto m) { return plan::numa_name(m) == numa; });
  DYNO_CHECK(ProfileError, mode != kNuma.end(), "[settings] numa is '", numa,
             "'; expected off, interleave, pin or mirror");
  load.numa = *mode;
  load.layers = r.integer("layers", 0);
  load.expert_cache.mib = r.integer("expert_cache_mib", 0);
  const std::string cache = r.text("expert_cache", "static");
  DYNO_CHECK(ProfileError, cache == "static" || cache == "adaptive", "[settings] expert_cache is '", cache,
             "'; expected static or adaptive");
  load.expert_cache.adaptive = cache == "adaptive";
  plan::PlacementOptions& placement = load.placement;
  placement.rules = r.texts("placement");
  placement.cpu_moe = r.flag("cpu_moe", false);
  placement.n_cpu_moe = r.integer("n_cpu_moe", 0);
  const int64_t layers = r.integer("n_gpu_layers", -1);  // -1: all
  DYNO_CHECK(PlanError, layers >= -1, "[placement] n_gpu_layers is ", layers, "; expected 0 or more, or -1 for all");
  if (layers >= 0) placement.n_gpu_layers = layers;
  const std::string isa = r.text("cpu_isa", "auto");
  const std::string name = r.text("device", "cpu");
  r.finish();
  if (asked != nullptr) *asked = r.asked();
  device = described ? device_from_dict(described) : device_from_name(name, isa);
  return load;
}

plan::ContextOptions read_context(const nb::dict& dict, nb::dict* asked) {
  SettingsReader r(dict, "context");
  plan::ContextOptions c;
  c.ctx = r.integer("ctx", 0);
  c.kv_type_k = read_type(r, "kv_type_k");
  c.kv_type_v = read_type(r, "kv_type_v");
  c.sequences = r.integer("sequences", 1);
  c.cache_tokens = r.integer("cache_tokens", 0);
  const std::string rows = r.text("window_cache", std::string(plan::window_cache_name(c.window_cache)));
  constexpr std::array kModes = {plan::WindowCache::automatic, plan::WindowCache::full, plan::WindowCache::window};
  const auto known =
      std::find_if(kModes.begin(), kModes.end(), [&](auto m) { return plan::window_cache_name(m) == rows; });
  DYNO_CHECK(ProfileError, known != kModes.end(), "[settings] window_cache is '", rows,
             "'; expected auto, window or full");
  c.window_cache = *known;
  r.finish();
  if (asked != nullptr) *asked = r.asked();
  return c;
}

runtime::SessionSettings read_session(const nb::dict& dict, runtime::SessionSettings s, nb::dict* asked) {
  SettingsReader r(dict, "session");
  s.ubatch = r.integer("ubatch", s.ubatch);
  s.threads = thread_count(r, "threads", s.threads);
  s.threads_batch = thread_count(r, "threads_batch", s.threads_batch);
  s.cuda_graphs = r.flag("cuda_graphs", s.cuda_graphs);
  s.fusion = r.flag("fusion", s.fusion);
  s.flash_attention = r.flag("flash_attention", s.flash_attention);
  s.graph_concurrency = r.flag("graph_concurrency", s.graph_concurrency);
  const std::string mode = r.text("mla_mode", std::string(plan::mla_mode_name(s.mla_mode)));
  constexpr std::array kModes = {plan::MlaMode::automatic, plan::MlaMode::expanded, plan::MlaMode::absorbed};
  const auto known = std::find_if(kModes.begin(), kModes.end(), [&](auto m) { return plan::mla_mode_name(m) == mode; });
  DYNO_CHECK(ProfileError, known != kModes.end(), "[settings] mla_mode is '", mode,
             "'; expected auto, expanded or absorbed");
  s.mla_mode = *known;
  plan::PathSettings& paths = s.paths;
  paths.matvec_max_tokens = r.integer("matvec_max_tokens", paths.matvec_max_tokens);
  paths.matvec_id_max_tokens = r.integer("matvec_id_max_tokens", paths.matvec_id_max_tokens);
  paths.mmq_max_tokens = r.integer("mmq_max_tokens", paths.mmq_max_tokens);
  paths.mmq_id_max_tokens = r.integer("mmq_id_max_tokens", paths.mmq_id_max_tokens);
  const std::string compute = r.text("compute_type", std::string(ops::compute_type_name(paths.compute)));
  DYNO_CHECK(ProfileError, compute == "f16" || compute == "bf16" || compute == "f32", "[settings] compute_type is '",
             compute, "'; expected f16, bf16 or f32");
  paths.compute = compute == "f16"    ? ops::ComputeType::f16
                  : compute == "bf16" ? ops::ComputeType::bf16
                                      : ops::ComputeType::f32;
  plan::OffloadOptions& offload = s.offload;
  offload.min_tokens = r.integer("offload_min_tokens", offload.min_tokens);
  offload.cpu_share = r.integer("cpu_share", offload.cpu_share);
  offload.matmul = r.flag("op_offload.matmul", offload.matmul);
  offload.matmul_id = r.flag("op_offload.matmul_id", offload.matmul_id);
  offload.up_gate = r.flag("op_offload.up_gate", offload.up_gate);
  offload.moe_up_gate = r.flag("op_offload.moe_up_gate", offload.moe_up_gate);
  r.finish();
  if (asked != nullptr) *asked = r.asked();
  return s;
}

nb::dict known_settings() {
  nb::dict load, context, session, all;
  DeviceInfo device;
  read_load(nb::dict(), std::nullopt, device, &load);
  read_context(nb::dict(), &context);
  read_session(nb::dict(), {}, &session);
  all["load"] = load;
  all["context"] = context;
  all["session"] = session;
  return all;
}

std::vector<profile::KernelEntry> read_kernels(const Kernels& kernels) {
  std::vector<profile::KernelEntry> out;
  for (const auto& [key, tokens, config, origin] : kernels) {
    const auto range = ops::parse_tokens(tokens);
    DYNO_CHECK(ProfileError, range.has_value(), "[profile] ", origin, ": '", tokens,
               "' is not a range of token counts; examples: m1, m2-4, m1-8, m513+");
    out.push_back({.op_key = key,
                   .tokens = tokens,
                   .first_bucket = range->first,
                   .last_bucket = range->second,
                   .config = config_entries_from_dict(config),
                   .origin = origin});
  }
  return out;
}

}  // namespace dyno
