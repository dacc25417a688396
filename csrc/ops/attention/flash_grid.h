// The grid of a flash attention launch.
#pragma once

namespace dyno::ops {

struct FlashGrid {
  unsigned tiles, kv_heads, splits;
};

}  // namespace dyno::ops
