#include "plan/fused_list.h"

namespace dyno::plan {}  // namespace dyno::plan
