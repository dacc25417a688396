#include "ops/op.h"

#include "ops/names.h"

namespace dyno::ops {

std::string_view family_name(Family family) { return kFamilyNames[static_cast<size_t>(family)]; }
std::string_view layout_name(Layout layout) { return kLayoutNames[static_cast<size_t>(layout)]; }
std::string_view act_name(ActType act) { return kActNames[static_cast<size_t>(act)]; }
std::string_view activation_name(Activation activation) { return kActivationNames[static_cast<size_t>(activation)]; }
std::string_view product_path_name(ProductPath path) { return kPathNames[static_cast<size_t>(path)]; }
std::string_view compute_type_name(ComputeType type) { return kComputeNames[static_cast<size_t>(type)]; }
std::string_view gating_name(Gating gating) { return kGatingNames[static_cast<size_t>(gating)]; }
std::string_view linear_rule_name(LinearRule rule) { return kLinearRuleNames[static_cast<size_t>(rule)]; }

}  // namespace dyno::ops
