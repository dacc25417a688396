#include "ops/op.h"

#include "ops/names.h"

namespace dyno::ops {

std::string_view family_name(Family family) { return kFamilyNames[static_cast<size_t>(family)]; }
std::string_view layout_name(Layout layout) { return kLayoutNames[static_cast<size_t>(layout)]; }
std::string_view act_name(ActType act) { return kActNames[static_cast<size_t>(act)]; }
std::string_view activation_name(Activation activation) { return kActivationNames[static_cast<size_t>(activation)]; }
std::string_view gating_name(Gating gating) { return kGatingNames[static_cast<size_t>(gating)]; }

}  // namespace dyno::ops
