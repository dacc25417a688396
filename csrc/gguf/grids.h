// The grids of the IQ1 to IQ3 types (grids.cpp). An entry has eight codes of two bits (kGrid1, kGrid2…) or four codes
// of three bits (kGrid3…), starting at the lowest bits. Codes are indices into the first half of the type's codebook.
#pragma once

#include <cstdint>

namespace dyno {

extern const uint16_t kGrid2Xxs[256];
extern const uint16_t kGrid2Xs[512];
extern const uint16_t kGrid2S[1024];
extern const uint16_t kGrid3Xxs[256];
extern const uint16_t kGrid3S[512];
extern const uint16_t kGrid1[2048];

}  // namespace dyno
