// dyno._core.ops: the op contract by family name, with descs, configurations and devices as dicts.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "bindings/gil_release.h"
#include "bindings/ops_convert.h"
#include "bindings/ops_run.h"
#include "bindings/ops_time.h"
#include "bindings/synthetic_args.h"
#include "core/error.h"
#include "ops/attention/adaptive.h"
#include "ops/contract.h"
#include "ops/names.h"
#include "ops/registry.h"
#include "ops/sample/sample.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace dyno {

void bind_ops_matmul(nb::module_& o);

namespace {

using OptionalDict = std::optional<nb::dict>;

nb::list list_families() {
  nb::list names;
  for (const std::string_view name : ops::kFamilyNames) names.append(nb::str(name.data(), name.size()));
  return names;
}

nb::list list_variants(std::string_view family) {
  nb::list out;
  for (const ops::VariantInfo& variant : ops::variants(ops::family_from_name(family))) {
    nb::list params;
    for (const std::string_view name : variant.param_names) {
      if (!name.empty()) params.append(nb::str(name.data(), name.size()));
    }
    nb::dict entry;
    entry["name"] = nb::str(variant.name.data(), variant.name.size());
    entry["device"] = variant.device == DeviceKind::cpu ? "cpu" : "cuda";
    const std::string_view isa = cpu_isa_name(variant.min_isa);
    entry["min_isa"] = nb::str(isa.data(), isa.size());
    entry["params"] = params;
    out.append(entry);
  }
  return out;
}

nb::list list_candidates(std::string_view family_text, const nb::dict& desc, const OptionalDict& device,
                         std::string_view set) {
  DYNO_CHECK(ProfileError, set == "compiled" || set == "legal", "[ops] unknown candidate set '", set,
             "'; expected compiled or legal");
  const ops::Family family = ops::family_from_name(family_text);
  nb::list out;
  for (const ops::Config& config :
       ops::candidates(desc_from_dict(family, desc), device_from_dict(device),
                       set == "legal" ? ops::CandidateSet::legal : ops::CandidateSet::compiled)) {
    out.append(config_to_dict(family, config));
  }
  return out;
}

std::vector<std::string_view> groups_of_key(std::string_view key) {
  const uint32_t bits = std::visit([](const auto& desc) { return ops::groups_of(desc); }, ops::parse_key(key, 1));
  std::vector<std::string_view> names;
#define DYNO_KERNEL_GROUP(name, words) \
  if ((bits & ops::group_bit(ops::KernelGroup::name)) != 0) names.push_back(#name);
#include "ops/kernel_groups.def"
  return names;
}

int32_t sample_one(const nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>& logits,
                   float temperature, int32_t top_k, float top_p, float min_p, float uniform) {
  DYNO_CHECK(PlanError, logits.shape(0) > 0,
             "[sample] logits is empty; expected one value for each token of the vocabulary");
  const ops::SampleDesc desc{.m = 1, .n_vocab = static_cast<int64_t>(logits.shape(0))};
  const ops::Config config = ops::default_config(desc, DeviceInfo{});
  int32_t token = 0;
  const ops::SampleArgs args{.logits = logits.data(),
                             .uniform = &uniform,
                             .temperature = temperature,
                             .top_k = top_k,
                             .top_p = top_p,
                             .min_p = min_p,
                             .out = &token};
  std::vector<std::byte> scratch(ops::scratch_bytes(desc, config));
  ops::CpuContext context{.scratch = scratch.data(), .scratch_per_thread = scratch.size()};
  const GilRelease unlocked;
  ops::launch(config, desc, args, context);
  return token;
}

}  // namespace

static ops::Config adaptive_config(const ops::OpDesc& desc, int64_t sequences, int64_t depth,
                                   const DeviceInfo& device) {
  return std::visit(
      [&]<typename D>(const D& d) -> ops::Config {
        if constexpr (std::is_same_v<D, ops::AttentionDesc> || std::is_same_v<D, ops::RopeAttentionDesc>) {
          DYNO_CHECK(PlanError, sequences >= 1 && sequences <= d.m && depth >= 1, "[ops] sequences=", sequences,
                     " with depth=", depth, "; expected 1 to m=", d.m, " sequences of at least one position");
          const std::vector<ops::SequenceRun> runs = divided_runs(d.m, sequences, depth);
          ops::AttentionArgs args;
          args.host_runs = runs.data();
          args.n_runs = static_cast<int32_t>(sequences);
          args.slot_positions = depth;
          args.window = static_cast<int32_t>(depth);
          ops::LaunchShape shape;
          if constexpr (std::is_same_v<D, ops::AttentionDesc>) {
            shape = ops::launch_shape(d, args);
          } else {
            shape = ops::launch_shape(d.attention(), args);
          }
          return ops::launch_config(d, shape, device);
        } else {
          throw PlanError(str_cat("[ops] ", ops::family_name(ops::family_of(desc)), " has no variant adaptive"));
        }
      },
      desc);
}

void bind_ops(nb::module_& m) {
  nb::module_ o = m.def_submodule("ops", "Op families: descriptions, configurations, candidates and launches.");
  o.def("families", &list_families, nb::sig("def families() -> list[str]"), "Names of all op families.");
  o.def("variants", &list_variants, "family"_a, nb::sig("def variants(family: str) -> list[dict[str, typing.Any]]"),
        "Variants of a family: name, device, min_isa and parameter names.");
  o.def("candidates", &list_candidates, "family"_a, "desc"_a, "device"_a = nb::none(), "set"_a = "compiled",
        nb::sig("def candidates(family: str, desc: dict, device: dict | None = None, set: str = 'compiled') -> "
                "list[dict[str, typing.Any]]"),
        "Every configuration of an op on a device, in a stable order.");
  o.def(
      "default_config",
      [](std::string_view family_text, const nb::dict& desc, const OptionalDict& device) {
        const ops::Family family = ops::family_from_name(family_text);
        return config_to_dict(family, ops::default_config(desc_from_dict(family, desc), device_from_dict(device)));
      },
      "family"_a, "desc"_a, "device"_a = nb::none(), "What runs without a profile.");
  o.def(
      "launch_config",
      [](std::string_view family_text, const nb::dict& desc, int64_t sequences, int64_t depth,
         const OptionalDict& device) {
        const ops::Family family = ops::family_from_name(family_text);
        return config_to_dict(
            family, adaptive_config(desc_from_dict(family, desc), sequences, depth, device_from_dict(device)));
      },
      "family"_a, "desc"_a, nb::kw_only(), "sequences"_a, "depth"_a, "device"_a = nb::none(),
      "The configuration of a launch of variant adaptive (attention, rope_attention) for tokens that are divided among "
      "sequences of up to depth positions.");
  o.def(
      "supports",
      [](std::string_view family_text, const nb::dict& desc, const nb::dict& config, const OptionalDict& device) {
        const ops::Family family = ops::family_from_name(family_text);
        const ops::Support support =
            ops::supports(desc_from_dict(family, desc), config_from_dict(family, config), device_from_dict(device));
        return std::pair(support.ok, support.reason);
      },
      "family"_a, "desc"_a, "config"_a, "device"_a = nb::none(), "(True, '') or (False, the reason).");
  o.def(
      "op_key",
      [](std::string_view family, const nb::dict& desc) {
        return ops::op_key(desc_from_dict(ops::family_from_name(family), desc));
      },
      "family"_a, "desc"_a, "The string that profiles use for an op, without its number of tokens.");
  o.def(
      "parse_key",
      [](std::string_view key, int64_t tokens) {
        const ops::OpDesc desc = ops::parse_key(key, tokens);
        return nb::make_tuple(ops::family_name(ops::family_of(desc)), desc_to_dict(desc));
      },
      "key"_a, "tokens"_a = 1, nb::sig("def parse_key(key: str, tokens: int = 1) -> tuple[str, dict[str, typing.Any]]"),
      "(family, desc) of an op key. Raises ProfileError that names what is wrong.");
  o.def("groups", &groups_of_key, "key"_a,
        "The groups of GPU kernels that an op needs, by its key. A build for one model may lack groups.");
  o.def(
      "cost",
      [](std::string_view family, const nb::dict& desc) {
        const ops::Cost cost = ops::cost(desc_from_dict(ops::family_from_name(family), desc));
        return std::pair(cost.bytes, cost.flops);
      },
      "family"_a, "desc"_a, "(bytes moved, floating-point operations), both the least possible.");
  o.def(
      "scratch_bytes",
      [](std::string_view family_text, const nb::dict& desc, const nb::dict& config) {
        const ops::Family family = ops::family_from_name(family_text);
        const ops::OpDesc parsed = desc_from_dict(family, desc);
        const ops::Config chosen = config_from_dict(family, config);
        const ops::Support support = ops::supports(parsed, chosen, detect_cpu());
        DYNO_CHECK(UnsupportedError, support.ok, "[", family_text, "] ", support.reason);
        return ops::scratch_bytes(parsed, chosen);
      },
      "family"_a, "desc"_a, "config"_a, "Bytes of scratch memory a launch needs for each thread.");
  o.def(
      "bucket_name", [](int64_t tokens) { return ops::bucket_name(ops::bucket_of(tokens)); }, "tokens"_a,
      "The bucket of a number of tokens: m1, m2-4, m5-8, …");
  o.def(
      "parse_tokens",
      [](std::string_view text) -> std::optional<std::pair<int64_t, int64_t>> {
        const auto buckets = ops::parse_tokens(text);
        if (!buckets) return std::nullopt;
        return std::pair(ops::bucket_range(buckets->first).first, ops::bucket_range(buckets->second).second);
      },
      "text"_a, "First and last number of tokens of a range such as m1, m1-8 or m513+; None if it is not one.");
  o.def("run", &run_op, "family"_a, "desc"_a, "config"_a, "args"_a, "threads"_a = 1, "isa"_a = "auto",
        "device"_a = "cpu", "captured"_a = false, "sm_count"_a = 0,
        "Launches an op on NumPy arrays. `args` has the names of the family's C++ Args struct; outputs are written in "
        "place. config=None takes the default. On a GPU (device=cuda:N) arrays are copied there and back, and captured "
        "launches run as a replayed graph; sm_count: launch as if the GPU had that many multiprocessors.");
  bind_ops_matmul(o);
  o.def(
      "time", &time_op, "family"_a, "desc"_a, "config"_a = nb::none(), nb::kw_only(), "threads"_a = 1,
      "min_seconds"_a = 0.1, "rotate_bytes"_a = 0, "seed"_a = 0, "depth"_a = 0, "sequences"_a = 1, "absent"_a = 0.0,
      "isa"_a = "auto", "device"_a = "cpu",
      "Seconds of each launch on synthetic data: at least min_seconds of them in all, after a warm-up. Launches walk "
      "through copies of all arguments that fill rotate_bytes, so that caches are as cold as in a whole model; depth "
      "is the number of positions before the batch (attention, kv_store), sequences the number of sequences that the "
      "tokens belong to, absent the share of rows (token, slot) of matmul_id and moe_up_gate without an expert here.");
  o.def("time_configs", &time_op_configs, "family"_a, "desc"_a, "configs"_a, nb::kw_only(), "threads"_a = 1,
        "min_seconds"_a = 0.1, "rotate_bytes"_a = 0, "seed"_a = 0, "depth"_a = 0, "sequences"_a = 1, "absent"_a = 0.0,
        "isa"_a = "auto", "device"_a = "cpu",
        "As `time` for several configurations on the same data, one list each; empty where one cannot be launched.");
  m.def("sample", &sample_one, "logits"_a, "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a, "uniform"_a,
        "Draws one token from logits [n_vocab]: top-k, top-p, min-p, temperature; greedy at temperature 0.");
}

}  // namespace dyno
