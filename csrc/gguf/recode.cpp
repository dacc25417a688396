#include "gguf/recode.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "gguf/decode.h"
#include "gguf/quant_blocks.h"
#include "gguf/weight_format.h"

namespace dyno {
namespace {

// Integers that a type multiplies its scales with.
struct Range {
  int least = 0, most = 0;
  constexpr bool within(int low, int high) const { return least >= low && most <= high; }
};

template <DType T>
constexpr Range range_of() {
  constexpr WeightFormat f = kFormat<T>;
  if (!f.lookup) return {-f.offset, (1 << f.bits) - 1 - f.offset};
  constexpr const Codebook& book = *kCodebook<T>;
  Range r{book.values[0], book.values[0]};
  for (int i = 1; i < book.size; ++i) {
    r.least = std::min<int>(r.least, book.values[i]);
    r.most = std::max<int>(r.most, book.values[i]);
  }
  return {std::min(r.least, r.least + kShift<T>), std::max(r.most, r.most + kShift<T>)};
}

// A codebook with a unit would need its factor in the binary16 scale, which may round.
template <DType T>
constexpr DType form_of() {
  constexpr WeightFormat f = kFormat<T>;
  constexpr Range r = range_of<T>();
  if (f.scaled) return T;
  if (f.header == Header::d) {
    if (r.within(-8, 7)) return DType::q4_0;
    return r.within(-128, 127) ? DType::q8_0 : T;
  }
  const bool scales = f.header == Header::k_scale16 || f.header == Header::k_scale32;
  return scales && f.block == kSuperBlock && r.within(-32, 31) ? DType::q6_k : T;
}

template <DType T>
int value_at(const CodedBlock& b, int i) {
  constexpr WeightFormat f = kFormat<T>;
  int value = b.code[i];
  if constexpr (f.lookup) {
    value = kCodebook<T>->values[value];
  } else {
    value -= f.offset;
  }
  if constexpr (f.every != 0) value += static_cast<int>(b.shifted >> (i / f.every) & 1u) * kShift<T>;
  return value;
}

template <DType T>
void write_block(const CodedBlock& b, std::byte* out) {
  constexpr WeightFormat f = kFormat<T>;
  if constexpr (form_of<T>() == DType::q4_0) {
    for (int first = 0; first < f.block; first += kQuantBlock, out += sizeof(BlockQ4_0)) {
      BlockQ4_0 to{.d = b.d_half, .qs = {}};
      for (int i = 0; i < 16; ++i) {
        to.qs[i] = static_cast<uint8_t>((value_at<T>(b, first + i) + 8) | (value_at<T>(b, first + 16 + i) + 8) << 4);
      }
      std::memcpy(out, &to, sizeof to);
    }
  } else if constexpr (form_of<T>() == DType::q8_0) {
    for (int first = 0; first < f.block; first += kQuantBlock, out += sizeof(BlockQ8_0)) {
      BlockQ8_0 to{.d = b.d_half, .qs = {}};
      for (int i = 0; i < kQuantBlock; ++i) to.qs[i] = static_cast<int8_t>(value_at<T>(b, first + i));
      std::memcpy(out, &to, sizeof to);
    }
  } else {
    static_assert(form_of<T>() == DType::q6_k);
    BlockQ6K to{};
    to.d = b.d_half;
    for (int s = 0; s < 16; ++s) to.scales[s] = b.scale[s * 16 / f.group];
    for (int i = 0; i < kSuperBlock; ++i) {
      const int code = value_at<T>(b, i) + 32, half = i / 128, at = i % 128;
      uint8_t& low = to.ql[64 * half + at % 64];
      low = static_cast<uint8_t>(low | (code & 15) << (at / 64 * 4));
      uint8_t& high = to.qh[32 * half + at % 32];
      high = static_cast<uint8_t>(high | (code >> 4) << (at / 32 * 2));
    }
    std::memcpy(out, &to, sizeof to);
  }
}

template <DType T>
void recode(const std::byte* in, std::byte* out, int64_t rows, int64_t k) {
  if constexpr (form_of<T>() == T) {
    throw UnsupportedError(str_cat("[gguf] type ", dtype_name(T), " has no form of another type for a GPU"));
  } else {
    constexpr int kValues = kFormat<T>.block;
    const size_t out_bytes = row_bytes(form_of<T>(), kValues);  // of a block
    CodedBlock b;
    for (int64_t r = 0; r < rows; ++r, in += row_bytes(T, k)) {
      const auto* row = reinterpret_cast<const uint8_t*>(in);
      const uint8_t* block = row + kMetaBytes<T>;
      for (int64_t at = 0; at < k; at += kValues, block += kBlockBytes<T>, out += out_bytes) {
        block_decoder(T)(row, block, b);
        write_block<T>(b, out);
      }
    }
  }
}

}  // namespace

DType gpu_type(DType type) {
  switch (type) {
#define DYNO_CODED_TYPE(name, ...) \
  case DType::name:                \
    return form_of<DType::name>();
#include "core/weight_types.def"
    default:
      return type;
  }
}

void recode_rows(DType type, const std::byte* in, std::byte* out, int64_t rows, int64_t k) {
  DYNO_CHECK(UnsupportedError, k > 0 && k % dtype_info(type).block_elements == 0, "[gguf] k=", k,
             " is not a multiple of the ", dtype_info(type).block_elements, " elements of a ", dtype_name(type),
             " block");
  switch (type) {
#define DYNO_CODED_TYPE(name, ...) \
  case DType::name:                \
    return recode<DType::name>(in, out, rows, k);
#include "core/weight_types.def"
    default:
      throw UnsupportedError(str_cat("[gguf] type ", dtype_name(type), " has no form of another type for a GPU"));
  }
}

}  // namespace dyno
