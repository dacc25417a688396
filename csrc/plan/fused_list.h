// The op list for few tokens: the same layer in fewer, larger launches, for devices whose launches cost more than the
// work of a small op. What no fused launch covers stays as OpList emits it. Internal to plan/.
#pragma once

#include "plan/op_list.h"

namespace dyno::plan {

class FusedList final : public OpList {
 public:
  using OpList::OpList;
};

}  // namespace dyno::plan
