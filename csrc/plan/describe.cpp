// The text of a plan, which `dyno explain plan` prints.
#include <algorithm>
#include <map>
#include <set>

#include "core/error.h"
#include "plan/expert_cache.h"
#include "plan/mib.h"
#include "plan/plan.h"

namespace dyno::plan {
namespace {

// The memory limit and the link of a virtual device.
std::string limits(const PlannedDevice& device) {
  std::string out;
  if (device.memory_limit > 0) out += str_cat("; limit ", mib(device.memory_limit));
  if (device.link.bytes_per_second > 0) out += str_cat("; link ", device.link.bytes_per_second / 1e9, " GB/s");
  if (device.link.latency_seconds > 0) out += str_cat("; latency ", device.link.latency_seconds * 1e6, " us");
  return out;
}

// The layers with weights on a device: "0-23, 47".
std::string layers_on(const Plan& plan, DeviceId device) {
  std::set<int32_t> layers;
  for (const WeightPlacement& weight : plan.weights) {
    if (weight.device == device && weight.layer >= 0) layers.insert(weight.layer);
  }
  std::string out;
  for (auto it = layers.begin(); it != layers.end();) {
    const int32_t first = *it;
    int32_t last = first;
    while (++it != layers.end() && *it == last + 1) last = *it;
    out += str_cat(out.empty() ? "" : ", ", first, last > first ? str_cat("-", last) : "");
  }
  return out;
}

std::string describe_devices(const Plan& plan) {
  std::string out;
  for (size_t i = 0; i < plan.devices.size(); ++i) {
    const PlannedDevice& device = plan.devices[i];
    const std::string layers = layers_on(plan, static_cast<DeviceId>(i));
    out += str_cat("  ", device_name(device.info), ": weights ", mib(device.weights_bytes),
                   layers.empty() ? "" : str_cat(" of layers ", layers), ", kv cache ", mib(device.kv_bytes),
                   device.state_bytes > 0 ? str_cat(", recurrent state ", mib(device.state_bytes)) : "", ", arena ",
                   mib(device.arena_bytes), limits(device), "\n");
  }
  return out;
}

std::string describe_numa(const Plan& plan) {
  if (plan.load.numa == NumaMode::off) return "";
  const int nodes = plan.numa_nodes();
  std::string out = str_cat("numa ", numa_name(plan.load.numa), ": ");
  if (nodes == 1) {
    const bool host = std::any_of(plan.devices.begin(), plan.devices.end(),
                                  [](const PlannedDevice& d) { return d.info.kind == DeviceKind::cpu; });
    return str_cat(out, host ? "not used, because there is one node\n" : "not used, because the CPU has no weights\n");
  }
  switch (plan.load.numa) {
    case NumaMode::mirror:
      return str_cat(out, "a copy of the CPU's weights on each of ", nodes, " nodes, ", mib(plan.mirror_bytes),
                     " more than one copy\n");
    case NumaMode::pin:
      return str_cat(out, "the rows of each matrix on the node of their threads, over ", nodes,
                     " nodes; experts alternate between the nodes\n");
    default:
      return str_cat(out, "pages of the CPU's weights alternate between ", nodes, " nodes\n");
  }
}

// The source and target layout of copies, and the reason if the source is not the layout that CPU kernels prefer.
std::string describe_copies(const Plan& plan, const model::ModelDesc& model) {
  std::map<std::string, int> groups;
  for (size_t i = 0; i < plan.weights.size(); ++i) {
    const WeightPlacement& weight = plan.weights[i];
    if (!weight.stream.wanted || model.weights[i].transform == model::Transform::to_f32) continue;
    const DType type = weight.type;
    std::string text = str_cat(dtype_name(type), " ", ops::layout_name(weight.layout));
    if (weight.stream.layout != weight.layout) text += str_cat(" to ", ops::layout_name(weight.stream.layout));
    if (weight.layout == ops::Layout::plain && has_codes(type)) {
      text += !plan.load.cpu_repack                   ? ", the file's order: cpu_repack is off"
              : plan.load.numerics == Numerics::exact ? ", the file's order: numerics exact reads it"
                                                      : ", the file's order: x16 cannot be converted";
    }
    ++groups[text];
  }
  std::string out;
  for (const auto& [text, count] : groups)
    out += str_cat("  ", count, count == 1 ? " copy of " : " copies of ", text, "\n");
  return out;
}

// The layers that keep only their window.
std::string describe_windows(const Plan& plan) {
  const auto count = [&](const auto& counts) { return std::count_if(plan.kv.begin(), plan.kv.end(), counts); };
  const auto windowed = count([](const KvLayer& layer) { return layer.window > 0; });
  if (windowed == 0) return "";
  const auto all = count([](const KvLayer& layer) { return layer.k_row_bytes > 0; });
  return str_cat(": ", windowed, " of ", all, " layers keep only their window, of up to ", plan.cache_window(),
                 " positions",
                 plan.cache_stride() > 0 ? str_cat(", also of every ", plan.cache_stride(), "th position") : "");
}

}  // namespace

std::string Plan::describe_head() const {
  return str_cat("draft head weights ", mib(weights_bytes),
                 lent_bytes() > 0 ? str_cat(", and ", mib(lent_bytes()), " of the model's") : "", ", kv cache ",
                 mib(kv_bytes), ", arena ", mib(arena_bytes), ", scratch ", mib(scratch_bytes), "\n");
}

std::string Plan::describe(const model::ModelDesc& model) const {
  const DeviceInfo& device = main_device();
  const std::string properties =
      device.kind == DeviceKind::cuda
          ? str_cat("cuda:", device.ordinal, ", compute capability ", device.compute_capability / 10, ".",
                    device.compute_capability % 10, ", ", device.sm_count, " multiprocessors")
          : str_cat(cpu_isa_name(device.isa), ", ", device.cores, " cores");
  std::string out = str_cat("device ", device.name, " (", properties, ")\n", "numerics ", numerics_name(load.numerics),
                            ", cpu_repack ", load.cpu_repack ? "on" : "off", "\ncontext ", context.ctx, " positions x ",
                            context.sequences, " sequence", context.sequences > 1 ? "s" : "", ", cache k ",
                            dtype_name(kv_type_k), " v ", dtype_name(kv_type_v), ", u-batch ", ubatch, "\n");
  out += str_cat("weights ", mib(weights_bytes), "\nkv cache ", mib(kv_bytes), describe_windows(*this),
                 state_bytes > 0 ? str_cat("\nrecurrent state ", mib(state_bytes)) : "", "\narena ", mib(arena_bytes),
                 "\nscratch ", mib(scratch_bytes), "\ntotal ", mib(total_bytes()), "\n");
  if (devices.size() > 1) out += describe_devices(*this);
  if (!placement_note.empty()) out += str_cat("placement ", placement_note, "\n");
  out += describe_numa(*this);
  std::map<std::string, std::pair<int, size_t>> groups;
  for (size_t i = 0; i < weights.size(); ++i) {
    const std::string place = devices.size() > 1 ? str_cat(device_name(this->device(weights[i].device)), ": ") : "";
    const DType type = weights[i].type, own = model.weights[i].type;
    // A GPU reads some types as another type.
    const std::string name = str_cat(own == type ? "" : str_cat(dtype_name(own), " as "), dtype_name(type));
    auto& [count, bytes] = groups[str_cat(place, name, " ", ops::layout_name(weights[i].layout),
                                          weights[i].mapped ? ", mapped from the file" : ", owned copy")];
    ++count;
    bytes += weights[i].bytes;
  }
  for (const auto& [text, group] : groups) {
    out += str_cat("  ", group.first, group.first == 1 ? " weight " : " weights ", text, ": ", mib(group.second), "\n");
  }
  if (cached_bytes > 0) {
    int64_t experts = 0, all = 0, layers = 0;
    for (const model::LayerSpec& layer : model.layers) {
      const model::FfnSpec* f = layer.mixture();
      if (f == nullptr || f->cached.experts.empty()) continue;
      experts += static_cast<int64_t>(f->cached.experts.size());
      all += f->experts;
      ++layers;
    }
    out += str_cat("expert cache ", mib(cached_bytes), " on ", device_name(device), ": ", experts, " of ", all,
                   " experts of ", layers, layers == 1 ? " layer" : " layers", " that are on the CPU",
                   load.expert_cache.uses.empty() ? ", chosen by number, because no counts are recorded" : "",
                   load.expert_cache.adaptive ? "; they follow the routing of the text\n" : "\n");
  } else if (const std::string why = why_none_cached(*this, model); !why.empty()) {
    out += why + "\n";
  }
  const auto distinct = [&](ListId list) {
    return std::count_if(keys.begin(), keys.end(), [&](const OpUse& use) { return use.count_in(list) > 0; });
  };
  out += str_cat(general.nodes.size(), " ops per u-batch, ", distinct(ListId::general), " distinct\n");
  if (devices.size() > 1) {
    const auto transfers = std::count_if(general.nodes.begin(), general.nodes.end(), [](const Node& node) {
      return std::holds_alternative<TransferOperands>(node.operands);
    });
    out += str_cat(general.segments.size(), " segments of one device, ", transfers,
                   transfers == 1 ? " transfer" : " transfers", " between them\n");
  }
  if (!streamed.nodes.empty()) {
    out += str_cat(streamed.nodes.size(), " ops per u-batch of at least ", streams_from, " tokens, for which ",
                   device_name(main_device()), " copies the CPU's weights through a buffer of ",
                   mib(devices.front().stream_bytes), "\n");
    out += describe_copies(*this, model);
  }
  if (!fused.nodes.empty()) {
    out += str_cat(fused.nodes.size(), " ops per u-batch of at most ", fused_tokens, " tokens, ",
                   distinct(ListId::fused), " distinct", fusion ? "\n" : ", off (fusion)\n");
  }
  if (!single.nodes.empty()) {
    out += str_cat(single.nodes.size(), " ops per u-batch of one token, ", distinct(ListId::single), " distinct",
                   fusion ? "\n" : ", off (fusion)\n");
  }
  if (!batched.nodes.empty()) {
    out += str_cat(batched.nodes.size(), " ops per u-batch of at most ", batched_tokens, " tokens, ",
                   distinct(ListId::batched), " distinct", fusion ? "\n" : ", off (fusion)\n");
  }
  if (!expanded.nodes.empty()) {
    out += str_cat(expanded.nodes.size(), " ops per u-batch with expanded latent attention, ",
                   distinct(ListId::expanded), " distinct; mla_mode ", mla_mode_name(mla_mode), ", ");
    out += expands() ? str_cat("keys and values of ", context.ctx, " positions need ", mib(expanded_bytes()),
                               " of the arena, ",
                               keeps_expanded ? "where each layer keeps them for the next u-batch\n"
                                              : "computed again in each u-batch\n")
                     : str_cat("not used", mla_mode == MlaMode::automatic ? " with an f32 cache on this GPU\n" : "\n");
  }
  if (!draw.nodes.empty()) {
    out += str_cat(draw.nodes.size(), " op per drawn token, ", distinct(ListId::draw), " distinct\n");
  }
  return out;
}

}  // namespace dyno::plan
