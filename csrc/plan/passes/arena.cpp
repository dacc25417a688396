// Memory of intermediate values: offsets such that values in use at the same time never overlap.
#include <algorithm>
#include <numeric>

#include "core/checked.h"
#include "core/error.h"
#include "plan/plan.h"

namespace dyno::plan {
namespace {

constexpr size_t kAlignment = 64;

size_t aligned(size_t bytes) { return checked_align(bytes, kAlignment, "the arena"); }

}  // namespace

bool in_arena(const Plan& plan, ValueId id) {
  const Value& value = plan.values[static_cast<size_t>(id)];
  const bool used = !is_expanded(value.list) || plan.expands();
  return used && value.first_use >= 0 && id != plan.logits;
}

size_t value_bytes(const Plan& plan, const Value& value) {
  const int64_t most = value.list == ListId::single    ? 1
                       : value.list == ListId::fused   ? kFusedTokens
                       : value.list == ListId::batched ? kBatchedTokens
                                                       : plan.ubatch;
  const int64_t tokens = std::min(plan.ubatch, most);
  const size_t bytes = checked_mul(value.bytes_per_token, static_cast<size_t>(tokens), "the arena (bytes x tokens)");
  return checked_add(bytes, value.bytes_fixed, "the arena");
}

namespace {

// Of each value: whether it is keys or values of a layer in the expanded list.
std::vector<bool> expanded_values(const Plan& plan) {
  std::vector<bool> found(plan.values.size(), false);
  for (const Node& node : plan.expanded.nodes) {
    if (const auto* made = std::get_if<MlaExpandOperands>(&node.operands)) {
      for (const ValueId id : {made->keys.value, made->values.value}) found[static_cast<size_t>(id)] = true;
    }
  }
  return found;
}

// Lays out the arenas for the current plan.ubatch and plan.keeps_expanded.
void place_values(Plan& plan) {
  const auto bytes_of = [&](const Value& v) { return aligned(value_bytes(plan, v)); };

  // Largest first, each at the lowest offset that is free during its lifetime.
  const std::vector<bool> expanded = expanded_values(plan);
  std::vector<size_t> order, kept;
  for (size_t i = 0; i < plan.values.size(); ++i) {
    if (in_arena(plan, static_cast<ValueId>(i))) (plan.keeps_expanded && expanded[i] ? kept : order).push_back(i);
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return bytes_of(plan.values[a]) > bytes_of(plan.values[b]); });
  std::vector<size_t> placed;
  plan.arena_bytes = 0;
  for (PlannedDevice& device : plan.devices) device.arena_bytes = 0;
  for (const size_t i : order) {
    Value& value = plan.values[i];
    std::vector<std::pair<size_t, size_t>> taken;
    for (const size_t j : placed) {
      const Value& other = plan.values[j];
      if (other.device != value.device) continue;
      // Only one of the lists runs at a time.
      const bool apart =
          other.list != value.list || other.last_use < value.first_use || value.last_use < other.first_use;
      if (!apart) taken.emplace_back(other.offset, other.offset + bytes_of(other));
    }
    std::sort(taken.begin(), taken.end());
    size_t offset = 0;
    for (const auto& [begin, end] : taken) {
      if (checked_add(offset, bytes_of(value), "the arena") <= begin) break;
      offset = std::max(offset, end);
    }
    value.offset = offset;
    placed.push_back(i);
    size_t& end = plan.devices[static_cast<size_t>(value.device)].arena_bytes;
    end = std::max(end, checked_add(offset, bytes_of(value), "the arena"));
  }
  // No list uses the memory of a kept value for another one.
  for (const size_t i : kept) {
    Value& value = plan.values[i];
    size_t& end = plan.devices[static_cast<size_t>(value.device)].arena_bytes;
    value.offset = aligned(end);
    end = checked_add(value.offset, bytes_of(value), "the arena");
  }
  for (const PlannedDevice& device : plan.devices) {
    plan.arena_bytes = checked_add(plan.arena_bytes, device.arena_bytes, "the arenas");
  }
}

// Whether the devices have room for the expanded keys and values of all layers: with them, a plan takes at most three
// quarters of a device's memory, and they take at most a quarter. Assumes a layout without them.
bool room_to_keep(const Plan& plan) {
  if (!plan.may_keep_expanded || !plan.expands()) return false;
  std::vector<size_t> kept(plan.devices.size(), 0);
  const std::vector<bool> expanded = expanded_values(plan);
  for (size_t i = 0; i < plan.values.size(); ++i) {
    if (!expanded[i]) continue;
    size_t& bytes = kept[static_cast<size_t>(plan.values[i].device)];
    bytes = checked_add(bytes, aligned(value_bytes(plan, plan.values[i])), "the arena");
  }
  for (size_t i = 0; i < plan.devices.size(); ++i) {
    if (kept[i] == 0) continue;
    const PlannedDevice& device = plan.devices[i];
    size_t memory = static_cast<size_t>(std::max<int64_t>(device.info.memory_bytes, 0));
    if (device.memory_limit > 0) memory = std::min(memory, device.memory_limit);
    size_t used = kept[i];
    for (const size_t bytes :
         {device.weights_bytes, device.kv_bytes, device.state_bytes, device.stream_bytes, device.arena_bytes}) {
      used = checked_add(used, bytes, "the arena");
    }
    if (kept[i] > memory / 4 || used > memory / 4 * 3) return false;
  }
  return true;
}

}  // namespace

void layout_arena(Plan& plan, int64_t ubatch) {
  DYNO_CHECK(PlanError, ubatch >= 1 && ubatch <= 65536, "[plan] ubatch is ", ubatch, "; expected 1 to 65536");
  plan.ubatch = ubatch;
  count_kv(plan);
  plan.keeps_expanded = false;
  place_values(plan);
  for (PlannedDevice& device : plan.devices) device.least_arena_bytes = device.arena_bytes;
  if (!room_to_keep(plan)) return;
  plan.keeps_expanded = true;
  place_values(plan);
}

}  // namespace dyno::plan
