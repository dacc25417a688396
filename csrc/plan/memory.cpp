// Checks whether a plan fits the memory of its devices, and finds remedies, before anything is allocated.
#include <algorithm>
#include <optional>
#include <vector>

#include "core/checked.h"
#include "core/error.h"
#include "plan/mib.h"
#include "plan/plan.h"
#include "plan/remedies.h"

namespace dyno::plan {
namespace {

// Bytes of CPU weights that are repacked, converted or transposed.
size_t copied_bytes(const Plan& plan) {
  size_t bytes = 0;
  for (const WeightPlacement& weight : plan.weights) {
    if (plan.device(weight.device).kind != DeviceKind::cpu) continue;
    if (!weight.mapped) bytes = checked_add(bytes, weight.bytes * weight.copies, "the weights");
  }
  return bytes;
}

// The bytes that a plan needs in one memory, and the free bytes there.
struct Demand {
  std::string where;          // "this machine"
  std::string weights_words;  // "copied weights"
  std::string larger;         // "a machine with more memory"
  size_t weights = 0, streams = 0, reserve = 0, kv = 0, state = 0, arena = 0, scratch = 0;
  size_t free = 0;
  bool own_limit = false;  // the limit of a virtual device

  size_t needed() const {
    size_t sum = 0;
    for (const size_t bytes : {weights, streams, reserve, kv, state, arena, scratch})
      sum = checked_add(sum, bytes, "all memory");
    return sum;
  }
};

void check_demand(const Plan& plan, const Demand& demand, const Holder& holder, bool weights_loaded) {
  const size_t needed = demand.needed();
  if (needed <= demand.free) return;
  const size_t missing = needed - demand.free;
  std::string enough, all;
  size_t together = 0;
  for (const Remedy& remedy : remedies(plan, holder, missing, weights_loaded)) {
    const std::string text = str_cat(remedy.text, " (frees ", mib(remedy.frees), ")");
    if (remedy.frees >= missing) enough += str_cat(enough.empty() ? "" : ", or ", text);
    all += str_cat(all.empty() ? "" : ", ", text);
    together += remedy.frees;
  }
  const std::string advice =
      !enough.empty()       ? str_cat("Use ", enough)
      : together >= missing ? str_cat("Use some of these together: ", all)
                            : str_cat("The settings cannot make it fit", all.empty() ? "" : str_cat(" (", all, ")"),
                                      ": use a smaller quantisation, a model of fewer layers, or ", demand.larger);
  throw OutOfMemoryError(
      str_cat("[plan] ", demand.where, " is ", mib(missing), " short: ", mib(demand.free),
              demand.own_limit ? " allowed, " : " free, ", mib(needed), " needed (",
              weights_loaded && !demand.own_limit ? "" : str_cat(demand.weights_words, " ", mib(demand.weights), ", "),
              "KV cache ", mib(demand.kv), " for ctx=", plan.context.ctx, " x ", plan.context.sequences, " sequence",
              plan.context.sequences == 1 ? ", " : "s, ",
              demand.state > 0 ? str_cat("recurrent state ", mib(demand.state), ", ") : "", "arena ", mib(demand.arena),
              " for ubatch=", plan.ubatch,
              demand.streams > 0 ? str_cat(", copies of the CPU's weights ", mib(demand.streams)) : "",
              demand.own_limit && demand.scratch == 0 ? "" : str_cat(", workspace ", mib(demand.scratch)),
              demand.reserve > 0 ? str_cat(", ", mib(demand.reserve), " for the runtime") : "", "). ", advice));
}

}  // namespace

void check_memory(const Plan& plan, DeviceId gpu, size_t free_bytes, bool weights_loaded) {
  const PlannedDevice& planned = plan.devices[static_cast<size_t>(gpu)];
  const Demand demand{.where = str_cat("device ", device_name(planned.info)),
                      .weights_words = "weights",
                      .larger = "a GPU with more memory",
                      .weights = weights_loaded ? 0 : planned.weights_bytes,
                      .streams = planned.stream_bytes,
                      .reserve = weights_loaded ? 0 : kDeviceReserve,
                      .kv = planned.kv_bytes,
                      .state = planned.state_bytes,
                      .arena = planned.arena_bytes,
                      .scratch = planned.scratch_bytes,
                      .free = free_bytes};
  check_demand(plan, demand,
               {.device = gpu,
                .kv_bytes = planned.kv_bytes,
                .state_bytes = planned.state_bytes,
                .arena_bytes = planned.arena_bytes,
                .gpu = true},
               weights_loaded);
}

void check_host_memory(const Plan& plan, size_t free_bytes, bool weights_loaded) {
  // Not counted: pages of the file that the CPU reads in place, which the system can drop at any time.
  Demand demand{.where = "this machine",
                .weights_words = "copied weights",
                .larger = "a machine with more memory",
                .weights = weights_loaded ? 0 : copied_bytes(plan),
                .free = free_bytes};
  for (const PlannedDevice& device : plan.devices) {
    if (device.info.kind != DeviceKind::cpu) continue;
    demand.kv = checked_add(demand.kv, device.kv_bytes, "the KV cache");
    demand.state = checked_add(demand.state, device.state_bytes, "the recurrent state");
    demand.arena = checked_add(demand.arena, device.arena_bytes, "the arenas");
    demand.scratch = checked_add(demand.scratch, device.scratch_bytes, "the scratch memory");
  }
  check_demand(plan, demand,
               {.device = std::nullopt,
                .kv_bytes = demand.kv,
                .state_bytes = demand.state,
                .arena_bytes = demand.arena,
                .gpu = false},
               weights_loaded);
}

void check_limits(const Plan& plan, bool weights_loaded) {
  for (size_t i = 0; i < plan.devices.size(); ++i) {
    const PlannedDevice& device = plan.devices[i];
    if (device.memory_limit == 0) continue;
    const std::string name = device_name(device.info);
    const bool gpu = device.info.kind == DeviceKind::cuda;
    const bool host = !gpu && device.info.ordinal == 0;
    const Demand demand{.where = gpu    ? str_cat("device ", name)
                                 : host ? "the CPU"
                                        : str_cat("virtual device ", name),
                        .weights_words = "weights",
                        .larger = gpu    ? "a larger limit (vram)"
                                  : host ? "a larger limit (ram)"
                                         : str_cat("a larger memory_mib of ", name),
                        .weights = device.weights_bytes,
                        .streams = device.stream_bytes,
                        .reserve = gpu ? kDeviceReserve : 0,
                        .kv = device.kv_bytes,
                        .state = device.state_bytes,
                        .arena = device.arena_bytes,
                        .scratch = gpu || host ? device.scratch_bytes : 0,
                        .free = device.memory_limit,
                        .own_limit = true};
    check_demand(plan, demand,
                 {.device = static_cast<DeviceId>(i),
                  .kv_bytes = device.kv_bytes,
                  .state_bytes = device.state_bytes,
                  .arena_bytes = device.arena_bytes,
                  .gpu = gpu},
                 weights_loaded);
  }
}

}  // namespace dyno::plan
