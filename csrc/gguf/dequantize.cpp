// Every formula multiplies and adds in float32 in the order of the public `gguf` package. This file is compiled without
// fused multiply-add (gguf/CMakeLists.txt), so that results are bit-exact on every machine.
#include "gguf/dequantize.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "core/error.h"
#include "gguf/decode.h"
#include "gguf/decode_bits.h"
#include "gguf/quant_blocks.h"
#include "gguf/weight_format.h"

namespace dyno {
namespace {

void dequantize_block(const BlockQ4_0& b, float* y) {
  const float d = f16_to_f32(b.d);
  for (int i = 0; i < 16; ++i) {
    y[i] = d * static_cast<float>((b.qs[i] & 0x0f) - 8);
    y[i + 16] = d * static_cast<float>((b.qs[i] >> 4) - 8);
  }
}

void dequantize_block(const BlockQ4_1& b, float* y) {
  const float d = f16_to_f32(b.d);
  const float m = f16_to_f32(b.m);
  for (int i = 0; i < 16; ++i) {
    y[i] = d * static_cast<float>(b.qs[i] & 0x0f) + m;
    y[i + 16] = d * static_cast<float>(b.qs[i] >> 4) + m;
  }
}

// Element `i` of a block with a fifth bit plane.
template <typename Block>
int five_bits(const Block& b, int i) {
  const int low = i < 16 ? b.qs[i] & 0x0f : b.qs[i - 16] >> 4;
  return low | (((b.qh[i / 8] >> (i % 8)) & 1) << 4);
}

void dequantize_block(const BlockQ5_0& b, float* y) {
  const float d = f16_to_f32(b.d);
  for (int i = 0; i < kQuantBlock; ++i) y[i] = d * static_cast<float>(five_bits(b, i) - 16);
}

void dequantize_block(const BlockQ5_1& b, float* y) {
  const float d = f16_to_f32(b.d);
  const float m = f16_to_f32(b.m);
  for (int i = 0; i < kQuantBlock; ++i) y[i] = d * static_cast<float>(five_bits(b, i)) + m;
}

void dequantize_block(const BlockQ8_0& b, float* y) {
  const float d = f16_to_f32(b.d);
  for (int i = 0; i < kQuantBlock; ++i) y[i] = d * static_cast<float>(b.qs[i]);
}

void dequantize_block(const BlockIq4Nl& b, float* y) {
  const float d = f16_to_f32(b.d);
  for (int i = 0; i < 16; ++i) {
    y[i] = d * static_cast<float>(kIq4NlValues[b.qs[i] & 0x0f]);
    y[i + 16] = d * static_cast<float>(kIq4NlValues[b.qs[i] >> 4]);
  }
}

void dequantize_block(const BlockMxfp4& b, float* y) {
  const float d = e8m0_half_to_f32(b.e);
  for (int i = 0; i < 16; ++i) {
    y[i] = d * static_cast<float>(kMxfp4Values[b.qs[i] & 0x0f]);
    y[i + 16] = d * static_cast<float>(kMxfp4Values[b.qs[i] >> 4]);
  }
}

void dequantize_block(const BlockQ2K& b, float* y) {
  const float d = f16_to_f32(b.d);
  const float dmin = f16_to_f32(b.dmin);
  for (int sub = 0; sub < 16; ++sub) {
    const float dl = d * static_cast<float>(b.scales[sub] & 0x0f);
    const float ml = dmin * static_cast<float>(b.scales[sub] >> 4);
    const uint8_t* qs = b.qs + sub / 8 * 32 + sub % 2 * 16;
    const int shift = sub / 2 % 4 * 2;
    for (int i = 0; i < 16; ++i) y[16 * sub + i] = dl * static_cast<float>((qs[i] >> shift) & 3) - ml;
  }
}

void dequantize_block(const BlockQ3K& b, float* y) {
  const float d = f16_to_f32(b.d);
  int8_t scales[16] = {};
  unpack_scales_q3_k(b.scales, scales);
  for (int sub = 0; sub < 16; ++sub) {
    const float dl = d * static_cast<float>(scales[sub]);
    const uint8_t* qs = b.qs + sub / 8 * 32 + sub % 2 * 16;
    const uint8_t* hmask = b.hmask + sub % 2 * 16;
    const int shift = sub / 2 % 4 * 2;
    for (int i = 0; i < 16; ++i) {
      const int minus = ((hmask[i] >> (sub / 2)) & 1) != 0 ? 0 : 4;
      y[16 * sub + i] = dl * static_cast<float>(((qs[i] >> shift) & 3) - minus);
    }
  }
}

void dequantize_block(const BlockQ4K& b, float* y) {
  const float d = f16_to_f32(b.d);
  const float dmin = f16_to_f32(b.dmin);
  uint8_t scales[8] = {};
  uint8_t mins[8] = {};
  unpack_scales_k4(b.scales, scales, mins);
  for (int sub = 0; sub < 8; ++sub) {
    const float dl = d * static_cast<float>(scales[sub]);
    const float ml = dmin * static_cast<float>(mins[sub]);
    const uint8_t* qs = b.qs + sub / 2 * 32;
    const int shift = sub % 2 * 4;
    for (int i = 0; i < 32; ++i) y[32 * sub + i] = dl * static_cast<float>((qs[i] >> shift) & 0x0f) - ml;
  }
}

void dequantize_block(const BlockQ5K& b, float* y) {
  const float d = f16_to_f32(b.d);
  const float dmin = f16_to_f32(b.dmin);
  uint8_t scales[8] = {};
  uint8_t mins[8] = {};
  unpack_scales_k4(b.scales, scales, mins);
  for (int sub = 0; sub < 8; ++sub) {
    const float dl = d * static_cast<float>(scales[sub]);
    const float ml = dmin * static_cast<float>(mins[sub]);
    const uint8_t* qs = b.qs + sub / 2 * 32;
    const int shift = sub % 2 * 4;
    for (int i = 0; i < 32; ++i) {
      const int q = ((qs[i] >> shift) & 0x0f) | (((b.qh[i] >> sub) & 1) << 4);
      y[32 * sub + i] = dl * static_cast<float>(q) - ml;
    }
  }
}

void dequantize_block(const BlockQ6K& b, float* y) {
  const float d = f16_to_f32(b.d);
  for (int sub = 0; sub < 16; ++sub) {
    const float dl = d * static_cast<float>(b.scales[sub]);
    const int half = sub / 8;         // of 128 elements
    const int quarter = sub / 2 % 4;  // of 32 elements within the half
    const uint8_t* ql = b.ql + 64 * half + sub % 4 * 16;
    const uint8_t* qh = b.qh + 32 * half + sub % 2 * 16;
    for (int i = 0; i < 16; ++i) {
      const int q = ((ql[i] >> (quarter / 2 * 4)) & 0x0f) | (((qh[i] >> (2 * quarter)) & 3) << 4);
      y[16 * sub + i] = dl * static_cast<float>(q - 32);
    }
  }
}

void dequantize_block(const BlockIq4Xs& b, float* y) {
  const float d = f16_to_f32(b.d);
  int8_t scales[8] = {};
  unpack_scales_iq4_xs(b.scales_h, b.scales_l, scales);
  for (int sub = 0; sub < 8; ++sub) {
    const float dl = d * static_cast<float>(scales[sub]);
    const uint8_t* qs = b.qs + 16 * sub;
    for (int i = 0; i < 16; ++i) {
      y[32 * sub + i] = dl * static_cast<float>(kIq4NlValues[qs[i] & 0x0f]);
      y[32 * sub + 16 + i] = dl * static_cast<float>(kIq4NlValues[qs[i] >> 4]);
    }
  }
}

void dequantize_block(const BlockQ8_16& b, float* y) {
  for (int sub = 0; sub < kQ8_16Block / 16; ++sub) {
    const float dl = b.d * static_cast<float>(b.scales[sub]);
    for (int i = 16 * sub; i < 16 * sub + 16; ++i) y[i] = dl * static_cast<float>(b.qs[i]);
  }
}

void dequantize_block(const BlockQ4_16& b, float* y) {
  for (int i = 0; i < kSuperBlock; ++i) {
    const int byte = b.scales[i / 16], code = b.qs[i / 32 * 16 + i % 16] >> (i % 32 / 16 * 4) & 15;
    const float s = b.d * static_cast<float>((byte & 254) - b.bias);
    y[i] = s * static_cast<float>(b.table[code] + (byte & 1) * b.shift);
  }
}

// A row of `n` values of a coded type.
template <DType T>
void dequantize_coded(const uint8_t* row, float* out, int64_t n) {
  constexpr WeightFormat f = kFormat<T>;
  CodedBlock b;
  const uint8_t* block = row + kMetaBytes<T>;
  for (int64_t at = 0; at < n; at += f.block, block += kBlockBytes<T>) {
    block_decoder(T)(row, block, b);
    constexpr bool kFloat = f.header == Header::d_float || f.header == Header::f_scale32;
    const float d = kFloat ? b.d : f16_to_f32(b.d_half);
    for (int group = 0; group < f.block / f.group; ++group) {
      float s = d;
      if constexpr (f.header == Header::halves16) {
        s = f16_to_f32(b.halves[group]);
      } else if constexpr (f.header == Header::k_scale16 || f.header == Header::k_scale32 ||
                           f.header == Header::f_scale32) {
        s = d * static_cast<float>(b.scale[group]);
      }
      if constexpr (f.scaled) s *= kCodebook<T>->unit;
      for (int i = group * f.group; i < (group + 1) * f.group; ++i) {
        int value = f.lookup ? kCodebook<T>->values[b.code[i]] : b.code[i] - f.offset;
        if constexpr (f.every != 0) value += kShift<T> * bit(b.shifted, i / f.every);
        out[at + i] = s * static_cast<float>(value);
      }
    }
  }
}

// A polynomial maps a code to its value; shifted groups of 16 add one. ik_llama.cpp defines it this way, and its
// compilers fuse the multiply-adds.
void dequantize_iq6_k(const uint8_t* block, float* y, int64_t n) {
  constexpr float kA = -127.0f, kB = 6.2568f, kC = 0.11218f, kD = 0.0011972f, kShifted = 1.0f;
  for (int64_t at = 0; at < n; at += kSuperBlock, block += 212, y += kSuperBlock) {
    const float d = f16_to_f32(load_u16(block));
    const uint16_t shifted = load_u16(block + 2);
    for (int i = 0; i < kSuperBlock; ++i) {
      const float s = d * static_cast<float>(static_cast<int8_t>(block[4 + i / 16]));
      const int low = block[20 + i / 64 * 32 + i % 32] >> (i % 64 / 32 * 4) & 15;
      const int high = block[148 + i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3;
      const auto q = static_cast<float>(low | high << 4);
      const float value = std::fma(q, std::fma(q, std::fma(q, kD, -kC), kB), kA);
      y[i] = s * (value + (bit(shifted, i / 16) != 0 ? kShifted : 0.0f));
    }
  }
}

void quantize_block(const float* x, BlockQ8_0& b) {
  float largest = 0.0f;
  bool finite = true;
  for (int i = 0; i < kQuantBlock; ++i) {
    finite = finite && std::isfinite(x[i]);
    largest = std::fmax(largest, std::fabs(x[i]));
  }
  if (!finite) {
    b.d = f32_to_f16(std::numeric_limits<float>::quiet_NaN());
    std::memset(b.qs, 0, sizeof(b.qs));
    return;
  }
  const float d = largest / 127.0f;
  // 1/d overflows for blocks of tiny subnormals. Their d is zero as f16, so the codes do not matter.
  const float inverse = d == 0.0f || !std::isfinite(1.0f / d) ? 0.0f : 1.0f / d;
  for (int i = 0; i < kQuantBlock; ++i) b.qs[i] = static_cast<int8_t>(std::round(x[i] * inverse));
  b.d = f32_to_f16(d);
}

template <typename Block, int kElements>
void dequantize_blocks(const void* blocks, float* out, int64_t n) {
  const auto* block = static_cast<const Block*>(blocks);
  for (int64_t i = 0; i < n; i += kElements) dequantize_block(*block++, out + i);
}

template <typename Convert>
void widen_halves(const void* values, float* out, int64_t n, Convert convert) {
  const auto* halves = static_cast<const uint16_t*>(values);
  for (int64_t i = 0; i < n; ++i) out[i] = convert(halves[i]);
}

void check_length(const char* what, DType type, int64_t n) {
  const DTypeInfo& info = dtype_info(type);
  DYNO_CHECK(Error, n >= 0 && n % info.block_elements == 0, "[gguf] ", what, " ", info.name, ": ", n,
             " elements, not a multiple of its block of ", info.block_elements);
}

}  // namespace

bool can_dequantize(DType type) {
  const DTypeInfo& info = dtype_info(type);
  return info.is_weight && info.kind != TypeClass::interleaved;
}

bool can_quantize(DType type) { return is_float(type) || type == DType::q8_0; }

void dequantize_row(DType type, const void* blocks, float* out, int64_t n) {
  check_length("dequantize", type, n);
  switch (type) {
    case DType::f32:
      if (n > 0) std::memcpy(out, blocks, static_cast<size_t>(n) * sizeof(float));
      return;
    case DType::f16:
      return widen_halves(blocks, out, n, f16_to_f32);
    case DType::bf16:
      return widen_halves(blocks, out, n, bf16_to_f32);
    case DType::q4_0:
      return dequantize_blocks<BlockQ4_0, kQuantBlock>(blocks, out, n);
    case DType::q4_1:
      return dequantize_blocks<BlockQ4_1, kQuantBlock>(blocks, out, n);
    case DType::q5_0:
      return dequantize_blocks<BlockQ5_0, kQuantBlock>(blocks, out, n);
    case DType::q5_1:
      return dequantize_blocks<BlockQ5_1, kQuantBlock>(blocks, out, n);
    case DType::q8_0:
      return dequantize_blocks<BlockQ8_0, kQuantBlock>(blocks, out, n);
    case DType::q2_k:
      return dequantize_blocks<BlockQ2K, kSuperBlock>(blocks, out, n);
    case DType::q3_k:
      return dequantize_blocks<BlockQ3K, kSuperBlock>(blocks, out, n);
    case DType::q4_k:
      return dequantize_blocks<BlockQ4K, kSuperBlock>(blocks, out, n);
    case DType::q5_k:
      return dequantize_blocks<BlockQ5K, kSuperBlock>(blocks, out, n);
    case DType::q6_k:
      return dequantize_blocks<BlockQ6K, kSuperBlock>(blocks, out, n);
    case DType::iq4_nl:
      return dequantize_blocks<BlockIq4Nl, kQuantBlock>(blocks, out, n);
    case DType::iq4_xs:
      return dequantize_blocks<BlockIq4Xs, kSuperBlock>(blocks, out, n);
    case DType::mxfp4:
      return dequantize_blocks<BlockMxfp4, kQuantBlock>(blocks, out, n);
    case DType::q4_16:
      return dequantize_blocks<BlockQ4_16, kSuperBlock>(blocks, out, n);
    case DType::q8_16:
      return dequantize_blocks<BlockQ8_16, kQ8_16Block>(blocks, out, n);
#define DYNO_CODED_TYPE(name, ...) \
  case DType::name:                \
    return dequantize_coded<DType::name>(static_cast<const uint8_t*>(blocks), out, n);
#include "core/weight_types.def"
    case DType::iq6_k:
      return dequantize_iq6_k(static_cast<const uint8_t*>(blocks), out, n);
    default:
      throw UnsupportedError(str_cat("[gguf] no kernels for tensor type ", dtype_name(type)));
  }
}

void dequantize_rows(DType type, const void* rows, float* out, int64_t n_rows, int64_t k) {
  const size_t bytes = row_bytes(type, k);
  for (int64_t row = 0; row < n_rows; ++row) {
    dequantize_row(type, static_cast<const std::byte*>(rows) + static_cast<size_t>(row) * bytes, out + row * k, k);
  }
}

void quantize_row(DType type, const float* values, void* blocks, int64_t n) {
  check_length("quantize", type, n);
  switch (type) {
    case DType::f32:
      if (n > 0) std::memcpy(blocks, values, static_cast<size_t>(n) * sizeof(float));
      return;
    case DType::f16:
      for (int64_t i = 0; i < n; ++i) static_cast<uint16_t*>(blocks)[i] = f32_to_f16(values[i]);
      return;
    case DType::bf16:
      for (int64_t i = 0; i < n; ++i) static_cast<uint16_t*>(blocks)[i] = f32_to_bf16(values[i]);
      return;
    case DType::q8_0:
      for (int64_t i = 0; i < n; i += kQuantBlock) {
        quantize_block(values + i, static_cast<BlockQ8_0*>(blocks)[i / kQuantBlock]);
      }
      return;
    default:
      throw UnsupportedError(str_cat("[gguf] no quantiser for type ", dtype_name(type)));
  }
}

}  // namespace dyno
