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

void layout_arena(Plan& plan, int64_t ubatch) {
  DYNO_CHECK(PlanError, ubatch >= 1 && ubatch <= 65536, "[plan] ubatch is ", ubatch, "; expected 1 to 65536");
  plan.ubatch = ubatch;
  count_kv(plan);
  const auto bytes_of = [&](const Value& v) { return aligned(value_bytes(plan, v)); };

  // Largest first, each at the lowest offset that is free during its lifetime.
  std::vector<size_t> order;
  for (size_t i = 0; i < plan.values.size(); ++i) {
    if (in_arena(plan, static_cast<ValueId>(i))) order.push_back(i);
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
  for (const PlannedDevice& device : plan.devices) {
    plan.arena_bytes = checked_add(plan.arena_bytes, device.arena_bytes, "the arenas");
  }
}

}  // namespace dyno::plan
