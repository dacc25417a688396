// Two tiles of a stripe (16 rows of w by 128 k of Layout::gpu) in registers, multiplied by one row of x: codes as
// unsigned bytes, or their values in a table as signed ones, x as pairs of signed bytes, on tensor cores with exact
// integer sums. The order of k in an operand is 2·t, 2·t + 8, 2·t + 1, 2·t + 9 of a step of 16, for the codes and for
// x.
//
// The bits of a 4-bit tile serve twice: of a word that a lane reads, one mask leaves four codes of row g and another
// one 16 times the codes of row g + 8. So unpacking takes one instruction for four codes.
//
// A table has two registers of values below zero (codes 0 … 7) and two of the other values (codes 15 … 8). The first
// are indexed with the codes, the others with the inverted codes. For an index of 8 or more, a permutation returns the
// sign of the selected byte. So the first two registers give −1 for the codes of the others, which have their values
// plus 1; and those give 0 for the codes of the first. The tensor cores add the two, so that no code is masked and no
// result selected. The codes of mxfp4 have a sign and a magnitude: their first half is not below zero, so the plus 1
// moves there, except for magnitude 0, whose negative has no sign.
//
// Values of x are 16-bit numbers, 256·h + l with signed bytes h and l, and have a scale for each 128. Columns 2·c and
// 2·c + 1 of an MMA have h and l of 32 k, number c of the two tiles, and zeros for all other k. So lane 4·g + t gets
// both sums over the 32 k with number t, and multiplies them by the scales of these k.
#pragma once

#include "device/ptx.cuh"
#include "device/reduce.cuh"
#include "ops/matmul/cuda/ring.h"
#include "ops/matmul/cuda/row_bytes.cuh"
#include "ops/matmul/cuda/weight_tile.cuh"

namespace dyno::ops::cuda {

static_assert(kUnitK == kUnitTiles * kGpuTile);

// A lane's part of two tiles.
template <DType kType>
struct RowUnit {
  static constexpr GpuFormat kFormat = gpu_format(kType);
  static constexpr GpuScale kScale = kFormat.scale;
  static constexpr bool kSmall = kScale == GpuScale::k_scale16 || kScale == GpuScale::k_min16 ||
                                 kScale == GpuScale::d_scale16 || kScale == GpuScale::f_table16;  // scales of 16 k
  static constexpr int kSets = kSmall ? 2 : 1;
  static constexpr int kLow = kFormat.low_bits, kHigh = kFormat.high_bits;
  static constexpr bool kLookup = kFormat.lookup();
  static constexpr bool kOwnTable = kFormat.codebook == GpuCodebook::table;  // stored with the weights
  // Whether operands of rows g + 8 have 16 times their codes.
  static constexpr bool kHigher = kLow == 4 && kHigh == 0 && !kLookup;
  static constexpr int kOffset = kFormat.offset;
  static constexpr int kSumsOf = kLookup && !kOwnTable ? 0 : kSmall ? 16 : 32;  // of x

  uint32_t low[kUnitTiles][kLow], high[kUnitTiles][kHigh == 0 ? 1 : kHigh];
  uint32_t scale[2], super[2];
  uint32_t own[kOwnTable ? 5 : 1];  // the table, biased by 128, then its bias and shift

  // The table of a type, for multiply(): codes 0 … 7 forwards, then codes 15 … 8.
  struct Table {
    uint32_t words[4];
    uint32_t minus_one = 0xffffffffu;
    __device__ __forceinline__ Table() {
      if constexpr (kFormat.codebook == GpuCodebook::iq4nl) {
        // -127 -104 -83 -65 | -49 -35 -22 -10 | 113 89 69 53 | 38 25 13 1
        words[0] = 0xbfad9881u, words[1] = 0xf6eaddcfu, words[2] = 0x36465a72u, words[3] = 0x020e1a27u;
      } else if constexpr (kFormat.codebook == GpuCodebook::mxfp4) {
        // Twice the values: 0 1 2 3 | 4 6 8 12 and their negatives, backwards.
        words[0] = 0x04030200u, words[1] = 0x0d090705u, words[2] = 0xfcfaf8f4u, words[3] = 0x00fffefdu;
      }
      // From another lane, so that the compiler does not know that these are the same constants in all lanes. It would
      // keep no registers for them, and emit a move before each permutation: a sixth of the instructions of multiply().
      if constexpr (kLookup) {
        const int lane = static_cast<int>(threadIdx.x & 31);
        const auto hide = [&](uint32_t& v) { v = __shfl_sync(device::kFullMask, lane < 16 ? v : 0u, lane & 15); };
        hide(minus_one);
#pragma unroll
        for (int i = 0; i < 4 && !kOwnTable; ++i) hide(words[i]);
      }
    }
    // All bits inverted. The multipliers have time for it; logic and permutations share a pipe, which has none.
    __device__ __forceinline__ uint32_t inverse(uint32_t v) const { return v * minus_one + minus_one; }
  };

  // Where a lane's bytes of a unit are.
  struct Place {
    const uint8_t* codes;     // of the first tile
    int high, scales, super;  // from there
    int second;               // from the first to the second tile
  };
  // The place of unit `unit` of a stripe, with a second tile; see second_tile().
  static __device__ __forceinline__ Place place(const uint8_t* stripe, int unit, int lane) {
    const int g = lane >> 2, half = lane & 1, at = lane * (kLow == 8 ? 16 : kLow * 4);
    constexpr int kTile = kFormat.tile_bytes();
    Place out;
    out.codes = stripe + at;
    out.high = kGpuRows * kGpuTile * kLow / 8 + lane * kHigh * 4 - at;
    constexpr bool kHalves = kScale != GpuScale::d && kScale != GpuScale::e8m0 && kScale != GpuScale::k_scale32;
    constexpr int kBefore = kScale == GpuScale::d_scale16 ? 8 : 0;  // d of the tile
    out.scales = kFormat.code_bytes() + g * (kFormat.scale_bytes() / 8) + kBefore + (kHalves ? 4 * half : 0) - at;
    out.super = 0;
    if constexpr (kFormat.super_block()) {
      out.codes += (unit >> 1) * kFormat.unit_bytes() + (unit & 1) * kUnitTiles * kTile;
      out.super = (4 - (unit & 1) * kUnitTiles) * kTile + g * (kFormat.super_row_bytes() / 8) - at;
    } else {
      out.codes += unit * kUnitTiles * kTile;
      if constexpr (kScale == GpuScale::d_scale16) out.super = out.scales - kBefore - 4 * half;
    }
    out.second = kTile;
    return out;
  }
  // If a unit's second tile does not exist, the first one is there twice: x is zero for it.
  static __device__ __forceinline__ int second_tile(int unit, int tiles) {
    return kFormat.super_block() || unit * kUnitTiles + 1 < tiles ? kFormat.tile_bytes() : 0;
  }
  // Bytes from a unit to the one `units` units later; an even number of units for types with super-blocks.
  static __device__ __forceinline__ int stride(int units) {
    return kFormat.super_block() ? units / 2 * kFormat.unit_bytes() : units * kUnitTiles * kFormat.tile_bytes();
  }

  // kShared: the unit is in shared memory.
  template <bool kShared = false>
  __device__ __forceinline__ void load(const Place& place, int lane) {
    const auto words = [](uint32_t* to, const uint8_t* from, auto count) {
      if constexpr (kShared) {
        load_shared_words<count()>(to, from);
      } else {
        load_words<count()>(to, from);
      }
    };
#pragma unroll
    for (int i = 0; i < kUnitTiles; ++i) {
      const uint8_t* at = place.codes + (i == 0 ? 0 : place.second);
      if constexpr (kLow == 8) {
        words(low[i], at, Count<4>{});
        words(low[i] + 4, at + 512, Count<4>{});
      } else {
        words(low[i], at, Count<kLow>{});
      }
      if constexpr (kHigh != 0) words(high[i], at + place.high, Count<kHigh>{});
    }
    const uint8_t* scales = place.codes + (place.scales + ((lane & 2) != 0 ? place.second : 0));
    if constexpr (kScale == GpuScale::d) {
      words(scale, scales, Count<2>{});
    } else if constexpr (kScale == GpuScale::d_m) {
      words(scale, scales, Count<1>{});
      words(scale + 1, scales + 8, Count<1>{});
    } else {
      words(scale, scales, Count<1>{});
    }
    if constexpr (kScale == GpuScale::d_scale16) {
      words(super, place.codes + (place.super + ((lane & 2) != 0 ? place.second : 0)), Count<2>{});
    } else if constexpr (kFormat.super_block()) {
      const uint8_t* of_super = place.codes + place.super;
      words(super, of_super, Count<kFormat.super_row_bytes() / 32>{});
      if constexpr (kOwnTable) {
        const uint8_t* table = of_super + (kFormat.super_row_bytes() - (lane >> 2) * (kFormat.super_row_bytes() / 8));
        words(own, table, Count<4>{});
        words(own + 4, table + 16, Count<1>{});
      }
    }
  }
  // Unit `unit` of a stripe of `tiles` tiles.
  template <bool kShared = false>
  __device__ __forceinline__ void load(const uint8_t* stripe, int unit, int tiles, int lane) {
    Place at = place(stripe, unit, lane);
    at.second = second_tile(unit, tiles);
    load<kShared>(at, lane);
  }

  // Adds the products with `x` to the sums of rows g and g + 8.
  __device__ __forceinline__ void multiply(const RowBytes& x, const Table& table, int lane, float (&value)[2]) const {
    Products products = {};
    multiply_codes(x, table, lane, products);
    add(products, x, lane, value);
  }
  // Lanes 0 to 15 have a part of the unit that `x`[0] belongs to, lanes 16 to 31 of that of `x`[1], if there is one.
  // The tensor cores multiply both units by both, and each lane adds its own products.
  __device__ __forceinline__ void multiply_halves(const RowBytes (&x)[2], bool both, const Table& table, int lane,
                                                  float (&value)[2]) const {
    Products products = {}, later = {};
    multiply_codes(x[0], table, lane, products);
    if (both) multiply_codes(x[1], table, lane, later);
    RowBytes own = x[0];
    if (lane >= 16) {
      own = x[1];
#pragma unroll
      for (int set = 0; set < kSets; ++set) {
#pragma unroll
        for (int i = 0; i < 4; ++i) products[set][i] = later[set][i];
      }
    }
    if (both || lane < 16) add(products, own, lane, value);
  }

 private:
  using Products = int32_t[kSets][4];

  __device__ __forceinline__ void multiply_codes(const RowBytes& x, const Table& table, int lane,
                                                 Products& products) const {
    uint32_t values[4] = {};  // of the table
    if constexpr (kOwnTable) {
      values[0] = own[0] | 0x80808080u, values[1] = own[1] | 0x80808080u;  // without the bias of 128: below zero
      values[2] = __byte_perm(own[3] - 0x7f7f7f7fu, 0u, 0x0123);
      values[3] = __byte_perm(own[2] - 0x7f7f7f7fu, 0u, 0x0123);
    } else if constexpr (kLookup) {
#pragma unroll
      for (int i = 0; i < 4; ++i) values[i] = table.words[i];
    }
    const auto quarter = [&]<int kHalf>() {
      const bool own = lane / 8 == kHalf;
      const uint32_t b0 = own ? x.b[0] : 0u, b1 = own ? x.b[1] : 0u;
      constexpr int kTile = kHalf / 2, kStep = kHalf % 2 * 2;
      if constexpr (kLookup) {
        uint32_t code[4];
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          code[2 * step] = low[kTile][kStep + step];
          code[2 * step + 1] = code[2 * step] >> 16;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint32_t a[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            a[i] = device::permute_or_sign(values[2 * half], values[2 * half + 1],
                                           half == 0 ? code[i] : table.inverse(code[i]));
          }
          if constexpr (kSmall) {
            device::mma_s8(products[0], a, b0, 0u);
            device::mma_s8(products[1], a, 0u, b1);
          } else {
            device::mma_s8(products[0], a, b0, b1);
          }
        }
      } else {
        const uint32_t a[4] = {codes<kTile, kStep, 0>(), codes<kTile, kStep, 1>(), codes<kTile, kStep + 1, 0>(),
                               codes<kTile, kStep + 1, 1>()};
        if constexpr (kSmall) {
          device::mma_u8s8(products[0], a, b0, 0u);
          device::mma_u8s8(products[1], a, 0u, b1);
        } else {
          device::mma_u8s8(products[0], a, b0, b1);
        }
      }
    };
    for_each_step(quarter);
  }

  // Adds the values of products with the codes.
  __device__ __forceinline__ void add(const Products& products, const RowBytes& x, int lane, float (&value)[2]) const {
    float total[2] = {};
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      float s[2], c[2];
      factors(set, lane, s, c);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        constexpr int kUp = kHigher ? 16 : 1;
        const int32_t product = products[set][2 * r] * 256 + products[set][2 * r + 1];
        const int32_t centred = product - kOffset * (r == 1 ? kUp : 1) * x.sums[set];
        total[r] += s[r] * (r == 1 ? 1.0f / kUp : 1.0f) * static_cast<float>(centred);
        if constexpr (kMin) total[r] += c[r] * static_cast<float>(x.sums[set]);
      }
    }
    value[0] += x.back * total[0], value[1] += x.back * total[1];
  }

  static constexpr bool kMin = kScale == GpuScale::d_m || kScale == GpuScale::k_min32 || kScale == GpuScale::k_min16 ||
                               kScale == GpuScale::f_table16;

  template <int kWords>
  static __device__ __forceinline__ void load_shared_words(uint32_t* out, const uint8_t* from) {
    if constexpr (kWords == 4) {
      const uint4 v = *reinterpret_cast<const uint4*>(from);
      out[0] = v.x, out[1] = v.y, out[2] = v.z, out[3] = v.w;
    } else if constexpr (kWords == 2) {
      const uint2 v = *reinterpret_cast<const uint2*>(from);
      out[0] = v.x, out[1] = v.y;
    } else {
      static_assert(kWords == 1);
      out[0] = *reinterpret_cast<const uint32_t*>(from);
    }
  }

  // The A operand of step kStep of a tile for rows g + 8·kRow.
  template <int kTile, int kStep, int kRow>
  __device__ __forceinline__ uint32_t codes() const {
    if constexpr (kLow == 8) {
      return __byte_perm(low[kTile][2 * kStep], low[kTile][2 * kStep + 1], kRow == 0 ? 0x5140 : 0x7362);
    } else {
      uint32_t code;
      if constexpr (kLow == 4) {
        const uint32_t word = low[kTile][kStep];
        code = kRow == 0 ? word & 0x0f0f0f0fu : kHigher ? word & 0xf0f0f0f0u : word >> 4 & 0x0f0f0f0fu;
      } else {
        static_assert(kLow == 2);
        code = plane<2, kStep, kRow, 0>(low[kTile][kStep / 2], 0u);
        code = plane<2, kStep, kRow + 2, 0>(low[kTile][kStep / 2], code);
      }
      if constexpr (kHigh != 0) {
        const uint32_t word = high[kTile][kHigh == 1 ? 0 : kStep / 2];
        code = plane<kHigh, kStep, kRow, kLow>(word, code);
        code = plane<kHigh, kStep, kRow + 2, kLow>(word, code);
      }
      return code;
    }
  }
  // Adds the bits of pair kPair in a plane of kBits bits to two bytes of `code`, kTo bits up: bytes 0 and 2, or 1
  // and 3.
  template <int kBits, int kStep, int kPair, int kTo>
  static __device__ __forceinline__ uint32_t plane(uint32_t word, uint32_t code) {
    constexpr int kFrom = kBits == 1 ? 4 * kStep + kPair : 2 * (4 * (kStep % 2) + kPair);
    constexpr int kAt = kTo + kPair / 2 * 8;
    const uint32_t moved = kFrom >= kAt ? word >> (kFrom - kAt & 31) : word << (kAt - kFrom & 31);
    return and_or(moved, ((1u << kBits) - 1u) * 0x10001u << kAt, code);
  }

  // Byte kAt of a word minus an integer as an exact float; `bias` is 2^23 plus that integer.
  static __device__ __forceinline__ float byte(uint32_t word, int at, float bias = 8388608.0f) {
    return __uint_as_float(__byte_perm(word, 0x4b000000u, static_cast<uint32_t>(at) | 0x7440u)) - bias;
  }
  static __device__ __forceinline__ void pair(uint32_t halves, float (&out)[2]) {
    const float2 v = __half22float2(as_half2(halves));
    out[0] = v.x, out[1] = v.y;
  }
  // w = s·code + c for rows g and g + 8.
  __device__ __forceinline__ void factors(int set, int lane, float (&s)[2], float (&c)[2]) const {
    [[maybe_unused]] constexpr float kBias128 = 8388608.0f + 128.0f;
    c[0] = c[1] = 0;
    if constexpr (kScale == GpuScale::d) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float both[2];
        pair(scale[r], both);
        s[r] = lane & 1 ? both[1] : both[0];
      }
    } else if constexpr (kScale == GpuScale::d_m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float both[2];
        pair(scale[r], both);
        s[r] = both[0], c[r] = both[1];
      }
    } else if constexpr (kScale == GpuScale::e8m0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        // 2^(e − 128), because the table has twice the values; the float of exponent 0 is 2^-127.
        const uint32_t e = scale[0] >> (16 * (lane & 1) + 8 * r) & 0xffu;
        s[r] = 0.5f * __uint_as_float(e == 0 ? 0x00400000u : e << 23);
      }
    } else if constexpr (kScale == GpuScale::d_scale16) {
#pragma unroll
      for (int r = 0; r < 2; ++r) s[r] = __uint_as_float(super[r]) * byte(scale[0], 2 * set + r, kBias128);
    } else if constexpr (kScale == GpuScale::f_table16) {
      const float bias = __uint_as_float(0x4b000000u | (own[4] & 0xffu));
      const auto shift = static_cast<float>(static_cast<int>(own[4] << 16) >> 24);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        s[r] = __uint_as_float(super[r]) * byte(scale[0] & 0xfefefefeu, 2 * set + r, bias);
        c[r] = s[r] * shift * byte(scale[0] & 0x01010101u, 2 * set + r);
      }
    } else {
      float d[2];
      pair(super[0], d);
      if constexpr (kScale == GpuScale::k_scale16) {
#pragma unroll
        for (int r = 0; r < 2; ++r) s[r] = d[r] * byte(scale[0], 2 * set + r, kBias128);
      } else if constexpr (kScale == GpuScale::k_scale32) {
#pragma unroll
        for (int r = 0; r < 2; ++r) s[r] = d[r] * byte(scale[0], 2 * (lane & 1) + r, kBias128);
      } else {
        float dmin[2];
        pair(super[1], dmin);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          if constexpr (kScale == GpuScale::k_min32) {
            s[r] = d[r] * byte(scale[0], r), c[r] = -dmin[r] * byte(scale[0], 2 + r);
          } else {
            s[r] = d[r] * byte(scale[0] & 0x0f0f0f0fu, 2 * set + r);
            c[r] = -dmin[r] * byte(scale[0] >> 4 & 0x0f0f0f0fu, 2 * set + r);
          }
        }
      }
    }
  }
};

}  // namespace dyno::ops::cuda
