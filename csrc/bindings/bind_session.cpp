// dyno._core.Session: a loaded model that decodes token ids to logits. Text is handled in Python.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <filesystem>
#include <memory>
#include <optional>

#include "bindings/convert.h"
#include "bindings/device_array.h"
#include "bindings/gil_release.h"
#include "bindings/ops_convert.h"
#include "bindings/owned_array.h"
#include "bindings/py_session.h"
#include "bindings/read_placement.h"
#include "bindings/read_settings.h"
#include "bindings/session_report.h"
#include "core/error.h"

namespace dyno {

using namespace nb::literals;

namespace {

struct PyCheckpoint {
  std::shared_ptr<const runtime::Checkpoint> made;
};

runtime::LogitRows parse_rows(std::string_view rows) {
  if (rows == "all") return runtime::LogitRows::all;
  if (rows == "last") return runtime::LogitRows::last;
  if (rows == "none") return runtime::LogitRows::none;
  throw PlanError(str_cat("[session] rows is '", rows, "'; expected all, last or none"));
}

}  // namespace

PySession::PySession(const nb::object& file, const nb::dict& load, const nb::dict& context, const nb::dict& session,
                     const Kernels& kernels, bool plan_only, const std::optional<nb::dict>& described,
                     const nb::dict& placement) {
  DYNO_CHECK(PlanError, plan_only || !described,
             "[session] device is a description of a device, which needs plan_only=True");
  DeviceInfo device;
  plan::LoadOptions load_options = read_load(load, described, device);
  load_options.placement = read_placement(placement, load_options.placement);
  load_options.expert_cache.uses = read_expert_uses(placement);
  const plan::ContextOptions context_options = read_context(context);
  const runtime::SessionSettings settings = read_session(session, {});
  std::vector<profile::KernelEntry> entries = read_kernels(kernels);
  std::shared_ptr<const GgufFile> opened = gguf_of(file);
  const GilRelease release;
  session_ = std::make_shared<runtime::Session>(std::move(opened), load_options, context_options, settings, device,
                                                std::move(entries),
                                                plan_only ? runtime::Loading::plan_only : runtime::Loading::weights);
}

nb::tuple PySession::decode_into(const Sequences& sequences, std::string_view rows, std::optional<RoutingArray> pinned,
                                 bool capture, int64_t every, bool on_device) {
  return with([&](runtime::Session& session) {
    const model::ModelDesc& model = session.model();
    runtime::DecodeRequest request;
    request.rows = parse_rows(rows);
    request.every = every;
    for (const auto& [slot, tokens] : sequences) {
      request.sequences.push_back({.slot = slot, .tokens = {tokens.data(), tokens.size()}});
    }
    const auto n_tokens = static_cast<size_t>(runtime::Session::token_count(request));
    const auto n_rows = static_cast<size_t>(runtime::Session::row_count(request));
    const auto n_vocab = static_cast<size_t>(model.n_vocab);

    const auto moe_layers = static_cast<size_t>(model.moe_layers());
    const auto used = static_cast<size_t>(model.experts_used());
    DYNO_CHECK(PlanError, !(pinned || capture) || moe_layers > 0,
               "[session] this model has no experts, so there is no routing to pin or capture");
    if (pinned) {
      DYNO_CHECK(PlanError, pinned->shape(0) == moe_layers && pinned->shape(1) == n_tokens && pinned->shape(2) == used,
                 "[session] pinned routing has shape [", pinned->shape(0), ", ", pinned->shape(1), ", ",
                 pinned->shape(2), "]; expected [", moe_layers, ", ", n_tokens, ", ", used, "]");
      const int64_t experts = model.experts();
      for (size_t i = 0; i < pinned->size(); ++i) {
        DYNO_CHECK(PlanError, pinned->data()[i] >= 0 && pinned->data()[i] < experts, "[session] pinned expert ",
                   pinned->data()[i], "; the model has ", experts);
      }
      request.pinned_routing = pinned->data();
    }
    std::shared_ptr<float[]> logits;
    std::unique_ptr<int32_t[]> routing;
    if (capture) routing = std::make_unique<int32_t[]>(moe_layers * n_tokens * used);
    {
      const GilRelease release;
      if (n_rows > 0) {
        logits = on_device ? session.device_logits_memory(n_rows * n_vocab) : session.logits_memory(n_rows * n_vocab);
      }
      request.logits = logits.get();
      request.captured_routing = routing.get();
      request.between = SignalCheck(*this);
      session.decode(request);
    }
    const DeviceInfo& device = session.plan().device(session.plan().logits_device());
    nb::object out_logits = on_device
                                ? nb::cast(DeviceArray{std::move(logits), n_rows, n_vocab, device.kind, device.ordinal})
                            : n_rows > 0 ? owned_array(std::move(logits), {n_rows, n_vocab})
                                         : nb::none();
    nb::object out_routing = capture ? owned_array(std::move(routing), {moe_layers, n_tokens, used}) : nb::none();
    return nb::make_tuple(out_logits, out_routing);
  });
}

nb::list PySession::time_ops(const Sequences& sequences, std::string_view rows, bool in_graph) {
  return with([&](runtime::Session& session) {
    runtime::DecodeRequest request;
    request.rows = parse_rows(rows);
    for (const auto& [slot, tokens] : sequences) {
      request.sequences.push_back({.slot = slot, .tokens = {tokens.data(), tokens.size()}});
    }
    const std::vector<plan::OpUse>& keys = session.plan().keys;
    std::vector<runtime::OpTime> times(keys.size());
    {
      const GilRelease release;
      const auto n_vocab = static_cast<size_t>(session.model().n_vocab);
      const auto logits =
          std::make_unique_for_overwrite<float[]>(static_cast<size_t>(runtime::Session::row_count(request)) * n_vocab);
      request.logits = logits.get();
      request.op_times = times.data();
      request.in_graph = in_graph;
      // Replays of a graph write the same cache rows again, but each one advances recurrent state. So the state is
      // restored, and the tokens are appended once.
      std::vector<std::shared_ptr<const runtime::Checkpoint>> before;
      if (in_graph && !session.plan().states.empty()) {
        for (const auto& [slot, tokens] : sequences) before.push_back(session.checkpoint(slot));
      }
      session.decode(request);
      if (!before.empty()) {
        for (const auto& checkpoint : before) session.restore(*checkpoint);
        request.op_times = nullptr;
        request.in_graph = false;
        session.decode(request);
      }
    }
    nb::list out;
    for (size_t k = 0; k < keys.size(); ++k) {
      if (times[k].launches == 0) continue;  // an op of another list
      nb::dict d;
      d["family"] = std::string(ops::family_name(ops::family_of(keys[k].desc)));
      d["key"] = keys[k].key;
      d["count"] = times[k].launches;
      d["seconds"] = times[k].seconds;
      out.append(d);
    }
    return out;
  });
}

void bind_session(nb::module_& m) {
  m.def("known_settings", &known_settings, nb::sig("def known_settings() -> dict[str, dict[str, typing.Any]]"),
        "{kind: {name: default}}: every setting that Session takes, whatever the device. 0 and 'auto' mean that the "
        "engine decides.");
  nb::class_<PyCheckpoint>(m, "Checkpoint", "A place that a sequence can be brought back to, see Session.checkpoint().")
      .def_prop_ro("slot", [](const PyCheckpoint& c) { return c.made->slot; })
      .def_prop_ro("position", [](const PyCheckpoint& c) { return c.made->position; })
      .def_prop_ro(
          "state_bytes", [](const PyCheckpoint& c) { return c.made->state.size(); },
          "Memory that it holds: the copy of recurrent state, 0 for models without it.");
  nb::class_<PySession> session(m, "Session",
                                "A loaded model with its KV cache. Calls from several threads are serialised.");
  session
      .def(nb::init<const nb::object&, const nb::dict&, const nb::dict&, const nb::dict&, const Kernels&, bool,
                    const std::optional<nb::dict>&, const nb::dict&>(),
           "file"_a, nb::kw_only(), "load"_a = nb::dict(), "context"_a = nb::dict(), "session"_a = nb::dict(),
           "kernels"_a = Kernels(), "plan_only"_a = false, "device"_a = nb::none(), "placement"_a = nb::dict(),
           nb::sig("def __init__(self, file: Gguf | str | os.PathLike[str], *, load: dict = {}, context: dict = {}, "
                   "session: dict = {}, kernels: collections.abc.Sequence[tuple[str, str, dict, str]] = [], "
                   "plan_only: bool = False, device: dict | None = None, placement: dict = {}) -> None"),
           "file: an open file, which the session shares, or a path. "
           "load, context, session: settings by name, as known_settings() lists them; load also takes device (cpu, "
           "cpu:N, "
           "cuda, cuda:N). "
           "kernels: (op key, token range, config dict, origin). "
           "plan_only: decide everything, "
           "read no weights, allocate nothing; decode() raises PlanError. device, for plan_only: a description as in "
           "cpu_info() and devices(), of a device that need not be here. placement: virtual_devices (a list of dicts, "
           "one each for cpu:1, cpu:2, … beside the CPU, with link_gbps, latency_us and memory_mib where they are "
           "limited), rules ('REGEX=DEVICE' by the tensor's name; the first that matches decides), cpu_moe, "
           "n_cpu_moe, n_gpu_layers, beside_gpu (with a described GPU: descriptions of the devices beside it; default: "
           "those of this machine), expert_uses (how often each expert was chosen, a list for each layer with "
           "experts). Raises PlanError for a placement that cannot be.")
      .def_prop_ro(
          "model",
          [](PySession& s) { return s.with([](const runtime::Session& real) { return model_dict(real.model()); }); },
          nb::sig("def model(self) -> dict[str, typing.Any]"))
      .def_prop_ro(
          "plan", [](PySession& s) { return s.with([](const runtime::Session& real) { return plan_dict(real); }); },
          nb::sig("def plan(self) -> dict[str, typing.Any]"))
      .def("describe_plan",
           [](PySession& s) {
             return s.with([](const runtime::Session& real) {
               const runtime::Session* head = real.draft_session();
               return real.plan().describe(real.model()) + (head != nullptr ? head->plan().describe_head() : "");
             });
           })
      .def(
          "cost",
          [](PySession& s, int64_t tokens, int64_t depth, int64_t logit_rows, const nb::dict& rates,
             const std::vector<std::tuple<std::string, std::string, int64_t, double>>& measured) {
            return s.with([&](const runtime::Session& real) {
              return cost_dict(real.plan(),
                               session_cost(real, {tokens, depth, logit_rows}, read_rates(rates), measured));
            });
          },
          "tokens"_a, "depth"_a = 0, "logit_rows"_a = 1, "rates"_a = nb::dict(), "measured"_a = nb::list(),
          nb::sig("def cost(self, tokens: int, depth: int = 0, logit_rows: int = 1, rates: dict = {}, measured: "
                  "collections.abc.Sequence[tuple[str, str, int, float]] = []) -> dict[str, typing.Any]"),
          "Expected time of a u-batch of one sequence: `seconds` in all, where devices run beside each other, "
          "and `parts` by device and layer. rates: of devices by name (memory_gbps, weights_gbps, core_gbps, "
          "gflops_one, gflops_many, launch_us, spread_us, experts_us, link_gbps, latency_us); of others the plan's or "
          "assumed ones. measured: seconds of a launch by (device, op key, rows), which stand instead of the rates'.")
      .def(
          "ops",
          [](PySession& s, std::optional<int64_t> tokens, std::optional<int64_t> sequences) {
            return s.with([&](const runtime::Session& real) { return ops_list(real, tokens, sequences); });
          },
          "tokens"_a = nb::none(), "sequences"_a = nb::none(),
          nb::sig("def ops(self, tokens: int | None = None, sequences: int | None = None) -> "
                  "list[dict[str, typing.Any]]"),
          "Every distinct op with its configuration and why it was chosen, for that many tokens a u-batch (default: 1 "
          "and the u-batch). `list` is the op list that runs (fused for few tokens on a GPU; draw: what draws a token "
          "behind that of a single one), `count` its nodes. `rows` is what the op itself sees: tokens times heads or "
          "experts where it works on those. `path`: which way a matrix product goes (matvec, mmq, dequantize), any for "
          "other ops. `tiles`: the heights of the f16 tiles that the op writes or reads, if the tokens belong to "
          "`sequences` sequences (default: one for each token, as in a step; a prompt belongs to one).")
      .def(
          "draft_head_nodes",
          [](PySession& s) {
            return s.with([](const runtime::Session& real) {
              const runtime::Session* head = real.draft_session();
              return head != nullptr ? node_list(*head) : nb::list();
            });
          },
          nb::sig("def draft_head_nodes(self) -> list[dict[str, typing.Any]]"),
          "The same as nodes() of a loaded head that drafts; empty without one.")
      .def(
          "nodes", [](PySession& s) { return s.with([](const runtime::Session& real) { return node_list(real); }); },
          nb::sig("def nodes(self) -> list[dict[str, typing.Any]]"),
          "Every launch of every op list, in order: `list`, `name`, `key`, `layer` and `operands`. The operands have "
          "the "
          "names of the family's struct; a value has `access` (read, write, update), its place in the arena and the "
          "first and last launch of its list that use it, a weight is the tensor's name.")
      .def(
          "kernel_report",
          [](PySession& s) { return s.with([](const runtime::Session& real) { return kernel_report(real); }); },
          nb::sig("def kernel_report(self) -> list[dict[str, str]]"), "What became of each kernel entry given.")
      .def(
          "captures",
          [](PySession& s) {
            std::vector<runtime::CaptureReport> captures;
            s.change([&](runtime::Session& real) { captures = real.captures(); });
            return capture_list(captures);
          },
          nb::sig("def captures(self) -> list[dict[str, typing.Any]]"),
          "Graphs of what repeats on a GPU since settings were last changed: `work` (draw: a step of a generation; "
          "decode) with its `tokens`, `sequences` and `rows`, `captured`, `uses` until then, `failures`, "
          "`next_attempt` (the use at which it is tried, None once captured) and `reason` (why the last attempt "
          "failed).")
      .def_prop_ro(
          "capture_failures",
          [](PySession& s) {
            int64_t failures = 0;
            s.change([&](runtime::Session& real) { failures = real.capture_failures(); });
            return failures;
          },
          "Captures that have failed since the session began.")
      .def_prop_ro(
          "streamed",
          [](PySession& s) {
            runtime::StreamCounts counts;
            s.change([&](runtime::Session& real) { counts = real.stream_counts(); });
            nb::dict d;
            d["bytes"] = counts.bytes;
            d["matrices"] = counts.matrices;
            d["predicted"] = counts.predicted;
            d["cached"] = counts.cached;
            d["shared"] = counts.shared;
            d["wanted"] = counts.wanted;
            return d;
          },
          nb::sig("def streamed(self) -> dict[str, int]"),
          "Weights of the CPU that crossed to the main device since the session began: `bytes`, `matrices` (an expert "
          "is one), of them `predicted` (before the routing was known), `cached` ones, which did not cross because the "
          "main device has these experts already, `shared`: experts that the CPU multiplied by instead, and `wanted`: "
          "matrices that u-batches needed.")
      .def_prop_ro(
          "experts",
          [](PySession& s) {
            runtime::ExpertCounts counts;
            s.change([&](runtime::Session& real) { counts = real.expert_counts(); });
            nb::dict d;
            d["chosen"] = counts.chosen;
            d["cached"] = counts.cached;
            d["swapped"] = counts.swapped;
            return d;
          },
          nb::sig("def experts(self) -> dict[str, int]"),
          "Of layers with cached experts, since the session began: experts that the router has `chosen` for tokens, "
          "and of these the `cached` ones, which the main device multiplied by; `swapped`: experts that took the place "
          "of another one, if the cache adapts.")
      .def_prop_ro(
          "warnings", [](PySession& s) { return s.with([](const runtime::Session& real) { return real.warnings(); }); },
          "What the user should know of the memory that this session got: where page-locking was refused, and why.")
      .def(
          "weights_by_node",
          [](PySession& s) { return s.with([](const runtime::Session& real) { return real.weights_by_node(); }); },
          "Bytes of the CPU's weights that are resident, by the number of their NUMA node, for each copy of them; the "
          "pages of the file that are read in place do not count.")
      .def(
          "fail_next_captures",
          [](PySession& s, int count) { s.change([&](runtime::Session& real) { real.fail_next_captures(count); }); },
          "count"_a, "So many captures will fail at their end: for tests.")
      .def(
          "lose_device",
          [](PySession& s, const std::string& name, int64_t after_segments) {
            s.change([&](runtime::Session& real) { real.lose_device(name, after_segments); });
          },
          "name"_a, "after_segments"_a = 0,
          "The virtual device is lost after it has run so many more segments: for tests.")
      .def(
          "set",
          [](PySession& s, const nb::dict& session) {
            s.with([&](runtime::Session& real) {
              const runtime::SessionSettings settings = read_session(session, real.settings());
              const GilRelease release;
              real.set(settings);
            });
          },
          "session"_a, nb::sig("def set(self, session: dict[str, typing.Any]) -> None"),
          "Changes session settings; weights and cache stay.")
      .def(
          "set_context",
          [](PySession& s, const nb::dict& context) {
            const plan::ContextOptions options = read_context(context);
            s.change([&](runtime::Session& real) { real.set_context(options); });
          },
          "context"_a, nb::sig("def set_context(self, context: dict[str, typing.Any]) -> None"),
          "Makes the cache anew (and empty) with these context settings; weights stay.")
      .def(
          "set_kernels",
          [](PySession& s, const Kernels& kernels) {
            std::vector<profile::KernelEntry> entries = read_kernels(kernels);
            s.change([&](runtime::Session& real) { real.set_kernels(std::move(entries)); });
          },
          "kernels"_a,
          nb::sig("def set_kernels(self, kernels: collections.abc.Sequence[tuple[str, str, dict[str, typing.Any], "
                  "str]]) -> None"))
      .def(
          "reset",
          [](PySession& s, std::optional<int32_t> slot) {
            s.change([&](runtime::Session& real) { slot ? real.reset(*slot) : real.reset(); });
          },
          "slot"_a = nb::none(), "Forgets what a sequence (default: every one) holds.")
      .def(
          "rewind",
          [](PySession& s, int64_t position, int32_t slot) {
            s.change([&](runtime::Session& real) { real.rewind(slot, position); });
          },
          "position"_a, "slot"_a = 0,
          "Drops the positions from `position` on. With recurrent state: PlanError unless it is 0 or a checkpoint's.")
      .def(
          "rewindable",
          [](PySession& s, int64_t position, int32_t slot) {
            int64_t found = 0;
            s.change([&](runtime::Session& real) { found = real.rewindable(slot, position); });
            return found;
          },
          "position"_a, "slot"_a = 0, "The last position up to `position` that rewind() takes.")
      .def(
          "copy",
          [](PySession& s, int32_t source, int32_t target) {
            s.change([&](runtime::Session& real) { real.copy(source, target); });
          },
          "source"_a, "target"_a, "Makes a sequence hold what another holds.")
      .def(
          "copy_prefix",
          [](PySession& s, int32_t source, int32_t target, int64_t tokens) {
            s.change([&](runtime::Session& real) { real.copy_prefix(source, target, tokens); });
          },
          "source"_a, "target"_a, "tokens"_a,
          "Makes a sequence hold the first `tokens` of another; keys and values are copied on their device. PlanError "
          "where `source` could not be rewound to that position: see rewindable().")
      .def(
          "trim", [](PySession& s, int32_t slot) { s.change([&](runtime::Session& real) { real.trim(slot); }); },
          "slot"_a,
          "Gives back the memory of positions that a sequence held and has forgotten, where memory is taken as needed.")
      .def_prop_ro(
          "cached_positions",
          [](PySession& s) {
            int64_t count = 0;
            s.change([&](runtime::Session& real) { count = real.cached_positions(); });
            return count;
          },
          "Positions of all sequences whose memory is taken: held, or forgotten and not given back.")
      .def_prop_ro(
          "cache_bytes",
          [](PySession& s) {
            size_t bytes = 0;
            s.change([&](runtime::Session& real) { bytes = real.cache_bytes(); });
            return bytes;
          },
          "Bytes of the rows that the cache keeps: of cached_positions, but of windowed layers those that sequences "
          "hold.")
      .def_prop_ro(
          "gpu_cache_bytes",
          [](PySession& s) {
            size_t bytes = 0;
            s.change([&](runtime::Session& real) { bytes = real.gpu_cache_bytes(); });
            return bytes;
          },
          "Bytes of GPUs that the cache takes now; with cache_tokens it takes them as sequences grow.")
      .def_prop_ro(
          "cache_memory",
          [](PySession& s) {
            size_t bytes = 0;
            s.change([&](runtime::Session& real) { bytes = real.cache_memory(); });
            return bytes;
          },
          "Bytes that the cache takes now: gpu_cache_bytes, and the rows that it keeps in host memory.")
      .def_prop_ro(
          "draft_row_bytes",
          [](PySession& s) {
            size_t bytes = 0;
            s.change([&](runtime::Session& real) { bytes = real.draft_row_bytes(); });
            return bytes;
          },
          "Bytes of the machine's memory that hold hidden rows for the head that drafts tokens.")
      .def(
          "checkpoint",
          [](PySession& s, int32_t slot, bool spare) {
            std::shared_ptr<const runtime::Checkpoint> made;
            s.change([&](runtime::Session& real) { made = real.checkpoint(slot, spare); });
            return PyCheckpoint{std::move(made)};
          },
          "slot"_a = 0, "spare"_a = false,
          "Where a sequence is now, to come back to it. spare: if layers keep their window alone, this checkpoint's "
          "window gives way to the ones of all others.")
      .def(
          "restore",
          [](PySession& s, const PyCheckpoint& checkpoint) {
            s.change([&](runtime::Session& real) { real.restore(*checkpoint.made); });
          },
          "checkpoint"_a, "Brings a sequence back to a checkpoint. PlanError if it has forgotten what was before it.")
      .def(
          "position",
          [](PySession& s, int32_t slot) {
            int64_t position = 0;
            s.change([&](runtime::Session& real) { position = real.position(slot); });
            return position;
          },
          "slot"_a = 0)
      .def(
          "decode", &PySession::decode, "sequences"_a, "rows"_a = "last", "pinned_routing"_a = nb::none(),
          "capture_routing"_a = false, "every"_a = 1,
          nb::sig("def decode(self, sequences: collections.abc.Sequence[tuple[int, "
                  "numpy.typing.NDArray[numpy.int32]]], rows: str = 'last', pinned_routing: "
                  "numpy.typing.NDArray[numpy.int32] | None = None, capture_routing: bool = False, every: int = 1) -> "
                  "tuple[numpy.typing.NDArray[numpy.float32] | None, numpy.typing.NDArray[numpy.int32] | None]"),
          "Appends tokens (int32) to sequences and returns (logits float32 [rows, n_vocab] or None, routing int32 "
          "[moe layers, tokens, used] or None). rows: all (or of every so many tokens of a sequence, and of its last), "
          "last (of each sequence) or none. Raises PlanError.")
      .def("decode_to_device", &PySession::decode_to_device, "sequences"_a, "rows"_a = "last",
           "pinned_routing"_a = nb::none(), "capture_routing"_a = false, "every"_a = 1,
           nb::sig("def decode_to_device(self, sequences: collections.abc.Sequence[tuple[int, "
                   "numpy.typing.NDArray[numpy.int32]]], rows: str = 'last', pinned_routing: "
                   "numpy.typing.NDArray[numpy.int32] | None = None, capture_routing: bool = False, every: int = 1) -> "
                   "tuple[DeviceArray, numpy.typing.NDArray[numpy.int32] | None]"),
           "As decode(), but the logits stay in the memory of the session's device. Raises OutOfMemoryError too.")
      .def(
          "time_ops", &PySession::time_ops, "sequences"_a, "rows"_a = "last", "in_graph"_a = false,
          nb::sig("def time_ops(self, sequences: collections.abc.Sequence[tuple[int, "
                  "numpy.typing.NDArray[numpy.int32]]], rows: str = 'last', in_graph: bool = "
                  "False) -> list[dict[str, typing.Any]]"),
          "Decodes like decode() and returns, for every distinct op that ran, how often (`count`) and the seconds that "
          "all its launches took. in_graph: what each adds to a replay of the captured graph, so that they add up to "
          "it; PlanError if this is not captured.")
      .def(
          "check_memory",
          [](PySession& s, size_t free_bytes) {
            s.with([&](const runtime::Session& real) {
              if (real.plan().main_device().kind == DeviceKind::cuda) {
                plan::check_memory(real.plan(), plan::kMainDevice, free_bytes);
              } else {
                plan::check_host_memory(real.plan(), free_bytes);
              }
            });
          },
          "free_bytes"_a,
          "Raises OutOfMemoryError, with what to change, when the plan does not fit into that much free memory of "
          "its main device. Opening a session does this for every device before it allocates anything.")
      .def("close", &PySession::close, "Frees weights and cache; later calls raise DynoError.");
  bind_drawing(m, session);
}

}  // namespace dyno
