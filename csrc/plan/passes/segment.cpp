// Runs of nodes on one device: the unit of work that a backend gets.
#include "core/error.h"
#include "plan/passes/passes.h"

namespace dyno::plan {

void segment(Plan& plan, NodeList& list) {
  list.segments.clear();
  for (size_t i = 0; i < list.nodes.size(); ++i) {
    const DeviceId device = list.nodes[i].device;
    DYNO_CHECK(PlanError, device >= 0 && static_cast<size_t>(device) < plan.devices.size(), "[plan] ",
               list.nodes[i].name, " has device number ", device, " of ", plan.devices.size());
    const auto at = static_cast<int32_t>(i);
    if (list.segments.empty() || list.segments.back().device != device) list.segments.push_back({device, at, at});
    list.segments.back().end = at + 1;
  }
}

}  // namespace dyno::plan
