// How many blocks a launch of flash attention has.
#pragma once

namespace dyno::ops {

struct FlashGrid {
  unsigned tiles, kv_heads, splits;
};

}  // namespace dyno::ops
