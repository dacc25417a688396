// Types without a grid: ternary types, types with one scale per short block, and plain codes.
#include "gguf/decode_bits.h"
#include "gguf/quant_blocks.h"

namespace dyno {
namespace {

// Digit number `digit` of the five ternary digits in a byte; the first one is the most significant digit of a fraction
// of 256.
uint8_t ternary(uint8_t byte, int digit) {
  static constexpr uint8_t kPowers[5] = {1, 3, 9, 27, 81};
  const auto rest = static_cast<uint8_t>(byte * kPowers[digit]);
  return static_cast<uint8_t>(rest * 3 >> 8);
}

// An unsigned e4m3 scale as f16, which represents each of them and half of each. 127 is not a number and counts as 0.
uint16_t half_of_e4m3(uint8_t x) {
  if ((x & 0x7f) == 0 || x == 0x7f) return 0;
  const int exponent = x >> 3 & 15, mantissa = x & 7;
  const float value = exponent == 0 ? static_cast<float>(mantissa) * 0x1p-9f
                                    : static_cast<float>(8 + mantissa) * 0x1p-10f * static_cast<float>(1 << exponent);
  return f32_to_f16(value * 0.5f);  // values of the codebook are doubled
}

}  // namespace

// 48 bytes of five digits, 4 bytes of four digits, f16 d
void decode_tq1_0(const uint8_t*, const uint8_t* block, CodedBlock& out) {
  out.d_half = load_u16(block + 52);
  for (int digit = 0; digit < 5; ++digit) {
    for (int i = 0; i < 32; ++i) out.code[32 * digit + i] = ternary(block[i], digit);
    for (int i = 0; i < 16; ++i) out.code[160 + 16 * digit + i] = ternary(block[32 + i], digit);
  }
  for (int digit = 0; digit < 4; ++digit) {
    for (int i = 0; i < 4; ++i) out.code[240 + 4 * digit + i] = ternary(block[48 + i], digit);
  }
}

// 64 bytes of four codes that lie 32 values apart, f16 d
void decode_tq2_0(const uint8_t*, const uint8_t* block, CodedBlock& out) {
  out.d_half = load_u16(block + 64);
  for (int i = 0; i < 256; ++i) out.code[i] = block[i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3;
}

// 4 scales in e4m3, 4 x 8 bytes: low nibbles, then high ones
void decode_nvfp4(const uint8_t*, const uint8_t* block, CodedBlock& out) {
  for (int sub = 0; sub < 4; ++sub) {
    out.halves[sub] = half_of_e4m3(block[sub]);
    const uint8_t* q = block + 4 + 8 * sub;
    for (int i = 0; i < 8; ++i) {
      out.code[16 * sub + i] = q[i] & 15;
      out.code[16 * sub + 8 + i] = q[i] >> 4;
    }
  }
}

// f16 d, 128 signs; code 2 is +d and code 0 is −d
void decode_q1_0(const uint8_t*, const uint8_t* block, CodedBlock& out) {
  out.d_half = load_u16(block);
  for (int i = 0; i < 128; ++i) out.code[i] = static_cast<uint8_t>(2 * bit(block[2 + i / 8], i % 8));
}

// f16 d, 64 codes of two bits in their order
void decode_q2_0(const uint8_t*, const uint8_t* block, CodedBlock& out) {
  out.d_half = load_u16(block);
  for (int i = 0; i < 64; ++i) out.code[i] = block[2 + i / 4] >> (i % 4 * 2) & 3;
}

// f16 d, 8 bytes of upper bits, 16 bytes: low nibbles, then high ones
void decode_q6_0(const uint8_t*, const uint8_t* block, CodedBlock& out) {
  out.d_half = load_u16(block);
  for (int i = 0; i < 16; ++i) {
    const int high = block[2 + i % 8] >> (i / 8 * 4);
    out.code[i] = static_cast<uint8_t>((block[10 + i] & 15) | (high & 3) << 4);
    out.code[16 + i] = static_cast<uint8_t>(block[10 + i] >> 4 | (high >> 2 & 3) << 4);
  }
}

// Row: f16 d. 12 bytes of five digits and one of four: digit 3 of byte 12 ends the first 16 values, digit 0 the last.
void decode_iq1_bn(const uint8_t* meta, const uint8_t* block, CodedBlock& out) {
  out.d_half = load_u16(meta);
  // A byte stores the digits as a fraction: their number times 2^8 / 3^5, rounded up, with the last digit first.
  const auto digit = [](uint8_t byte, int at) {
    static constexpr uint8_t kPowers[5] = {81, 27, 9, 3, 1};
    const auto rest = static_cast<uint8_t>(byte * kPowers[at]);
    return static_cast<uint8_t>((rest + (rest >> 1)) >> 7);
  };
  for (int part = 0; part < 4; ++part) {
    for (int i = 0; i < 15; ++i) out.code[16 * part + i] = digit(block[3 * part + i / 5], i % 5);
    out.code[16 * part + 15] = digit(block[12], part);
  }
}

// Row: f32 d. 16 bytes of four codes that lie 16 values apart.
void decode_iq2_bn(const uint8_t* meta, const uint8_t* block, CodedBlock& out) {
  out.d = load_f32(meta);
  for (int i = 0; i < 64; ++i) out.code[i] = block[i % 16] >> (i / 16 * 2) & 3;
}

// Row: f32 d and a sum that is not needed. 32 signed bytes.
void decode_q8_kv(const uint8_t* meta, const uint8_t* block, CodedBlock& out) {
  out.d = load_f32(meta);
  for (int i = 0; i < 32; ++i) out.code[i] = block[i] ^ 0x80;
}

// Row: f32 d alone.
void decode_q8_kv_row(const uint8_t* meta, const uint8_t* block, CodedBlock& out) { decode_q8_kv(meta, block, out); }

// f16 d, 256 signed bytes
void decode_q8_k_row(const uint8_t*, const uint8_t* block, CodedBlock& out) {
  out.d_half = load_u16(block);
  for (int i = 0; i < 256; ++i) out.code[i] = block[2 + i] ^ 0x80;
}

}  // namespace dyno
