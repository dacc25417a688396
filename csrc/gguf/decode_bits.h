// Helpers of the block decoders (decode.h).
#pragma once

#include <cstdint>
#include <cstring>

#include "gguf/decode.h"

namespace dyno {

inline uint16_t load_u16(const uint8_t* p) {
  uint16_t x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
inline uint32_t load_u32(const uint8_t* p) {
  uint32_t x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
inline float load_f32(const uint8_t* p) {
  float x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
inline int nibble(const uint8_t* p, int i) { return p[i / 2] >> (i % 2 * 4) & 15; }
inline int bit(uint32_t word, int i) { return static_cast<int>(word >> i & 1u); }
inline int8_t scale_of(int value) { return static_cast<int8_t>(value); }

}  // namespace dyno
