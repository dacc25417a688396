// A chunk of a stripe in shared memory (16 rows by 256 k of Layout::gpu) as A operands of mma.m16n8k16 that contain
// only the codes, and the factors that convert their sums to products with weights afterwards, in float32.
//
// Codes stay where the OR with 1024 puts them: an operand h is 1024 + u; in a row g + 8 of the types of four to six
// bits it is 1024 + 16·u, which saves the shift. With w = s·(h − o) + c for a whole block, sum(w·x) = s·sum(h·x) + (c −
// s·o)·sum(x). This takes one instruction for two codes, and only the sums are rounded.
#pragma once

#include "ops/matmul/cuda/ring.h"
#include "ops/matmul/cuda/weight_tile.cuh"

namespace dyno::ops::cuda {

template <DType kType>
struct BlockCodes {
  using Tile = WeightTile<kType>;
  static constexpr GpuFormat kFormat = gpu_format(kType);
  // k per pair of factors, and the number of groups of eight such blocks in a chunk.
  static constexpr int kBlock =
      kFormat.scale == GpuScale::k_scale16 || kFormat.scale == GpuScale::k_min16 || kFormat.scale == GpuScale::d_scale16
          ? 16
          : 32;
  // The ring multiplies single types with a table in units (row_codes.cuh).
  static_assert(!kFormat.lookup() || kFormat.codebook == GpuCodebook::iq4nl);
  static constexpr int kSets = kBlock == 16 ? 2 : 1;

  static __device__ __forceinline__ void load(Tile& to, const uint8_t* chunk, int tile, int lane) {
    const uint8_t* at = chunk + tile * kFormat.tile_bytes();
    if constexpr (kFormat.low_bits == 8) {
      words<4>(to.low, at + lane * 16);
      words<4>(to.low + 4, at + 512 + lane * 16);
    } else {
      words<Tile::kLowWords>(to.low, at + lane * Tile::kLowWords * 4);
    }
    if constexpr (kFormat.high_bits != 0) {
      words<Tile::kHighWords>(to.high, at + kGpuRows * kGpuTile * kFormat.low_bits / 8 + lane * Tile::kHighWords * 4);
    }
  }

  // The A operand of step kStep of the tile.
  template <int kStep>
  static __device__ __forceinline__ void operand(const Tile& tile, uint32_t (&a)[4]) {
    constexpr uint32_t kMagic = 0x64006400u;
    if constexpr (kFormat.low_bits == 8) {
      const uint32_t w0 = tile.low[2 * kStep], w1 = tile.low[2 * kStep + 1];
      spread(w0, a[0], a[1]);
      spread(w1, a[2], a[3]);
    } else if constexpr (kFormat.lookup()) {
      uint32_t bytes[2];
      iq4nl_bytes(tile.low[kStep], bytes);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        a[r] = as_bits(bytes_above<0, 2>(bytes[r]));
        a[r + 2] = as_bits(bytes_above<1, 3>(bytes[r]));
      }
    } else if constexpr (four_bits_up()) {
      const uint32_t w = tile.low[kStep], next = w >> 8;
      a[0] = and_or(w, 0x000f000fu, kMagic);
      a[1] = and_or(w, 0x00f000f0u, kMagic);
      a[2] = and_or(next, 0x000f000fu, kMagic);
      a[3] = and_or(next, 0x00f000f0u, kMagic);
      if constexpr (kFormat.high_bits != 0) {
        a[0] = with_high<kStep, 0>(tile, a[0]);
        a[1] = with_high<kStep, 1>(tile, a[1]);
        a[2] = with_high<kStep, 2>(tile, a[2]);
        a[3] = with_high<kStep, 3>(tile, a[3]);
      }
    } else {
      a[0] = tile.template magic_code<kStep, 0>();
      a[1] = tile.template magic_code<kStep, 1>();
      a[2] = tile.template magic_code<kStep, 2>();
      a[3] = tile.template magic_code<kStep, 3>();
    }
  }

  // For rows g + 8·r and blocks 8·set + 2·t + b, with lane = 4·g + t: sum(w·x) = scale[r][b]·sum(h·x) +
  // rest[r][b]·sum(x). Blocks of tiles from `tiles` on contribute nothing.
  struct Factors {
    float scale[2][2], rest[2][2];
  };
  static __device__ __forceinline__ Factors factors(const uint8_t* chunk, int set, int tiles, int lane) {
    const int g = lane >> 2, t = lane & 3;
    const int tile = kBlock == 16 ? 2 * set + (t >> 1) : t;
    const uint8_t* at = chunk + tile * kFormat.tile_bytes() + kFormat.code_bytes() + g * (kFormat.scale_bytes() / 8);
    float s[2][2], c[2][2] = {};
    if constexpr (kFormat.scale == GpuScale::d) {
      uint32_t w[2];
      words<2>(w, at);
#pragma unroll
      for (int r = 0; r < 2; ++r) pair(w[r], s[r]);
    } else if constexpr (kFormat.scale == GpuScale::d_m) {
      uint32_t w[4];
      words<4>(w, at);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          float both[2];
          pair(w[2 * r + b], both);
          s[r][b] = both[0], c[r][b] = both[1];
        }
      }
    } else if constexpr (kFormat.scale == GpuScale::d_scale16) {
      uint32_t w[4];
      words<4>(w, at);
      const float d0 = __uint_as_float(w[0]), d1 = __uint_as_float(w[1]);
      const uint32_t sc = t & 1 ? w[3] : w[2];
      s[0][0] = d0 * byte<0>(sc, kBias128), s[1][0] = d1 * byte<1>(sc, kBias128);
      s[0][1] = d0 * byte<2>(sc, kBias128), s[1][1] = d1 * byte<3>(sc, kBias128);
    } else {
      const uint8_t* super = chunk + 4 * kFormat.tile_bytes() + g * (kFormat.super_row_bytes() / 8);
      float d[2], dmin[2] = {};
      if constexpr (kFormat.super_bytes() == 64) {
        uint32_t w[2];
        words<2>(w, super);
        pair(w[0], d);
        pair(w[1], dmin);
      } else {
        pair(*reinterpret_cast<const uint32_t*>(super), d);
      }
      if constexpr (kFormat.scale == GpuScale::k_min32) {
        uint32_t w[2];
        words<2>(w, at);
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          s[0][b] = d[0] * byte<0>(w[b]), s[1][b] = d[1] * byte<1>(w[b]);
          c[0][b] = -dmin[0] * byte<2>(w[b]), c[1][b] = -dmin[1] * byte<3>(w[b]);
        }
      } else if constexpr (kFormat.scale == GpuScale::k_min16) {
        const uint32_t w = reinterpret_cast<const uint32_t*>(at)[t & 1];
        const uint32_t low = w & 0x0f0f0f0fu, high = (w >> 4) & 0x0f0f0f0fu;
        s[0][0] = d[0] * byte<0>(low), s[1][0] = d[1] * byte<1>(low);
        s[0][1] = d[0] * byte<2>(low), s[1][1] = d[1] * byte<3>(low);
        c[0][0] = -dmin[0] * byte<0>(high), c[1][0] = -dmin[1] * byte<1>(high);
        c[0][1] = -dmin[0] * byte<2>(high), c[1][1] = -dmin[1] * byte<3>(high);
      } else {
        static_assert(kFormat.scale == GpuScale::k_scale16 || kFormat.scale == GpuScale::k_scale32);
        const uint32_t w = reinterpret_cast<const uint32_t*>(at)[kBlock == 16 ? t & 1 : 0];
        s[0][0] = d[0] * byte<0>(w, kBias128), s[1][0] = d[1] * byte<1>(w, kBias128);
        s[0][1] = d[0] * byte<2>(w, kBias128), s[1][1] = d[1] * byte<3>(w, kBias128);
      }
    }
    Factors out;
    const bool there = kFormat.super_block() || tile < tiles;  // otherwise the memory has undefined content
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      constexpr float kMagic = 1024.0f;
      constexpr auto kOffset = static_cast<float>(kFormat.lookup() ? 128 : kFormat.offset);
      const float step = four_bits_up() && r == 1 ? 16.0f : 1.0f;
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        out.scale[r][b] = there ? s[r][b] / step : 0.0f;
        out.rest[r][b] = there ? c[r][b] - out.scale[r][b] * (kMagic + step * kOffset) : 0.0f;
      }
    }
    return out;
  }

 private:
  static constexpr float kBias128 = 8388608.0f + 128.0f;  // for byte()
  // Codes whose first plane has four bits, without a codebook: codes of rows g + 8 are four bits higher.
  static constexpr bool four_bits_up() { return kFormat.low_bits == 4 && kFormat.codebook == GpuCodebook::none; }
  // Adds the second plane of pair kPair above the four bits in `code`.
  template <int kStep, int kPair>
  static __device__ __forceinline__ uint32_t with_high(const Tile& tile, uint32_t code) {
    constexpr int kFrom = kFormat.high_bits == 1 ? 4 * kStep + kPair : 2 * (4 * (kStep % 2) + kPair);
    constexpr int kTo = kPair % 2 == 0 ? 4 : 8;
    const uint32_t word = tile.high[kFormat.high_bits == 1 ? 0 : kStep / 2];
    const uint32_t moved = kFrom >= kTo ? word >> (kFrom - kTo & 31) : word << (kTo - kFrom & 31);
    return and_or(moved, ((1u << kFormat.high_bits) - 1u) * 0x10001u << kTo, code);
  }
  template <int kWords>
  static __device__ __forceinline__ void words(uint32_t* out, const uint8_t* at) {
    if constexpr (kWords == 4) {
      const uint4 v = *reinterpret_cast<const uint4*>(at);
      out[0] = v.x, out[1] = v.y, out[2] = v.z, out[3] = v.w;
    } else if constexpr (kWords == 2) {
      const uint2 v = *reinterpret_cast<const uint2*>(at);
      out[0] = v.x, out[1] = v.y;
    } else {
      static_assert(kWords == 1);
      out[0] = *reinterpret_cast<const uint32_t*>(at);
    }
  }
  static __device__ __forceinline__ void pair(uint32_t halves, float (&out)[2]) {
    const float2 v = __half22float2(as_half2(halves));
    out[0] = v.x, out[1] = v.y;
  }
  // Byte kAt minus an integer as an exact float; `bias` is 2^23 plus that integer.
  template <int kAt>
  static __device__ __forceinline__ float byte(uint32_t word, float bias = 8388608.0f) {
    return __uint_as_float(__byte_perm(word, 0x4b000000u, kAt | 4 << 4 | 4 << 8 | 7 << 12)) - bias;
  }
  // Four bytes as 1024 + byte.
  static __device__ __forceinline__ void spread(uint32_t word, uint32_t& low, uint32_t& high) {
    low = __byte_perm(word, 0x64646464u, 0x4140);
    high = __byte_perm(word, 0x64646464u, 0x4342);
  }
};

}  // namespace dyno::ops::cuda
