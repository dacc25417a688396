// The codebooks of weight types: the integer value of each code. The block's scale has the remaining factor.
//
// Included by kernel sources of every instruction set: everything has internal linkage (see quant_blocks.h).
#pragma once

#include <cstdint>

namespace dyno {

struct Codebook {
  int size = 0;       // 0: codes are integers themselves
  float unit = 1.0f;  // power-of-two factor of the scales that makes the values integers
  int8_t values[32] = {};
};

namespace codebook {

static constexpr Codebook none = {};
static constexpr Codebook iq4nl = {
    16, 1.0f, {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113}};
// e2m1 values times two; their scales are halved. Code 8 is +0, not −0.
static constexpr Codebook e2m1 = {16, 1.0f, {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}};
// Grids: the second half has the negative values. Two codes of grid2 are unused.
static constexpr Codebook grid2 = {8, 0.125f, {8, 25, 43, 0, -8, -25, -43, 0}};
static constexpr Codebook grid3xxs = {
    16, 0.25f, {4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62}};
static constexpr Codebook grid3s = {16, 1.0f, {1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15}};
// −1, 0 and 1 minus an eighth, in eighths. The shift of 2 changes this to plus an eighth.
static constexpr Codebook grid1 = {4, 0.125f, {-9, -1, 7, 0}};
// Tables of ik_llama.cpp. The second half of each original table is the first half plus the type's shift.
static constexpr Codebook iq2k = {4, 1.0f, {-31, -13, 1, 17}};
static constexpr Codebook iq3k = {8, 1.0f, {-63, -40, -23, -10, 1, 13, 28, 47}};
static constexpr Codebook iq5k = {
    32, 1.0f, {-126, -114, -103, -92, -83, -74, -65, -57, -50, -43, -36, -30, -24, -18, -12, -6,
               -1,   5,    11,   17,  23,  29,  36,  43,  51,  59,  68,  77,  87,  97,  109, 121}};

}  // namespace codebook
}  // namespace dyno
