#include "gguf/recode.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "core/error.h"
#include "gguf/decode.h"
#include "gguf/dequantize.h"
#include "gguf/quant_blocks.h"
#include "gguf/weight_format.h"

namespace dyno {
namespace {

// The range of the integers that a type multiplies its scales by.
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

constexpr bool has_byte_scales(const WeightFormat& f) {
  return f.header == Header::k_scale16 || f.header == Header::k_scale32 || f.header == Header::f_scale32;
}
constexpr bool has_float_factor(const WeightFormat& f) {
  return f.header == Header::f_scale32 || f.header == Header::d_float;
}

// Number of entries that a table needs for all values of a type, or only for its unshifted values; 0 if 16 are not
// enough.
template <DType T>
constexpr int table_entries(bool shifted) {
  constexpr WeightFormat f = kFormat<T>;
  if (f.block != kSuperBlock || f.bits > 4) return 0;
  const int codes = f.lookup ? kCodebook<T>->size : 1 << f.bits;
  const int entries = shifted && f.every != 0 ? 2 * codes : codes;
  return entries <= 16 ? entries : 0;
}
// The shift is a bit of the scale's byte if the table has no room for the shifted values.
template <DType T>
inline constexpr bool kShiftInScale = table_entries<T>(true) == 0;
template <DType T>
constexpr bool has_table() {
  return table_entries<T>(true) != 0 || (table_entries<T>(false) != 0 && kFormat<T>.every % 16 == 0);
}

// The unit of a codebook needs a float32 factor, because a binary16 factor times the unit may round.
template <DType T>
constexpr DType form_of() {
  constexpr WeightFormat f = kFormat<T>;
  constexpr Range r = range_of<T>();
  static_assert(r.within(-128, 127));
  if (f.header == Header::d) return r.within(-8, 7) ? DType::q4_0 : DType::q8_0;
  if (f.header == Header::halves16) return DType::f16;  // the product of two numbers with few bits
  if (has_table<T>()) return DType::q4_16;
  return DType::q8_16;
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

// Values [first, first + count) of a block into `to` from value `at` on.
template <DType T>
void write_bytes(const CodedBlock& b, int first, int count, BlockQ8_16& to, int at) {
  constexpr WeightFormat f = kFormat<T>;
  to.d = (has_float_factor(f) ? b.d : f16_to_f32(b.d_half)) * (f.scaled ? kCodebook<T>->unit : 1.0f);
  for (int i = 0; i < count; i += 16) {
    to.scales[(at + i) / 16] = has_byte_scales(f) ? b.scale[(first + i) / f.group] : int8_t{1};
  }
  for (int i = 0; i < count; ++i) to.qs[at + i] = static_cast<int8_t>(value_at<T>(b, first + i));
}

// Rows whose blocks are shorter than q8_16 blocks. They have one factor for the row, before the blocks.
template <DType T>
void recode_short_blocks(const std::byte* in, std::byte* out, int64_t rows, int64_t k) {
  constexpr int kValues = kFormat<T>.block;
  static_assert(kMetaBytes<T> > 0 && kQ8_16Block % kValues == 0);
  CodedBlock b;
  for (int64_t r = 0; r < rows; ++r, in += row_bytes(T, k)) {
    const auto* row = reinterpret_cast<const uint8_t*>(in);
    const uint8_t* block = row + kMetaBytes<T>;
    for (int64_t done = 0; done < k; done += kQ8_16Block, out += sizeof(BlockQ8_16)) {
      BlockQ8_16 to{};
      for (int at = 0; at < kQ8_16Block; at += kValues, block += kBlockBytes<T>) {
        block_decoder(T)(row, block, b);
        write_bytes<T>(b, 0, kValues, to, at);
      }
      std::memcpy(out, &to, sizeof to);
    }
  }
}

// The table of a type in BlockQ4_16, with the index of each code; codes of shifted values come after all others.
struct Table {
  std::array<int8_t, 16> values{};
  std::array<uint8_t, 16> slot{};
  bool fits = true;
};
template <DType T>
constexpr Table table_of() {
  constexpr WeightFormat f = kFormat<T>;
  constexpr int kCodes = table_entries<T>(false), kEntries = table_entries<T>(!kShiftInScale<T>);
  Table out;
  int below = 0, others = 8;
  for (int i = 0; i < 8; ++i) out.values[i] = -1;
  for (int i = 0; i < kEntries; ++i) {
    const int value = (f.lookup ? kCodebook<T>->values[i % kCodes] : i % kCodes - f.offset) +
                      (!kShiftInScale<T> && i >= kCodes ? kShift<T> : 0);
    int& next = value < 0 ? below : others;
    if (next == (value < 0 ? 8 : 16) || value > 126) {
      out.fits = false;
      break;
    }
    out.values[next] = static_cast<int8_t>(value);
    out.slot[i] = static_cast<uint8_t>(next++);
  }
  return out;
}

// Scales of types with float32 factors are odd numbers of eight bits. Others have seven bits: they are doubled and the
// factor is halved, which also frees the lowest bit of the byte.
template <DType T>
void write_codes(const CodedBlock& b, std::byte* out) {
  constexpr WeightFormat f = kFormat<T>;
  constexpr bool kOdd = f.header == Header::f_scale32;
  constexpr int kCodes = table_entries<T>(false);
  static constexpr Table kTable = table_of<T>();
  static_assert(f.block == kSuperBlock && has_byte_scales(f) && kTable.fits);
  BlockQ4_16 to{};
  to.d = kOdd ? b.d : f16_to_f32(b.d_half) * 0.5f * (f.scaled ? kCodebook<T>->unit : 1.0f);
  to.bias = kOdd ? 127 : 128;
  to.shift = kShiftInScale<T> ? kShift<T> : 0;
  std::copy(kTable.values.begin(), kTable.values.end(), to.table);
  const auto shifted = [&](int i) { return f.every != 0 ? static_cast<int>(b.shifted >> (i / f.every) & 1u) : 0; };
  for (int s = 0; s < 16; ++s) {
    const int scale = b.scale[16 * s / f.group];
    to.scales[s] =
        static_cast<uint8_t>((kOdd ? scale : 2 * scale) + to.bias + (kShiftInScale<T> ? shifted(16 * s) : 0));
  }
  for (int i = 0; i < kSuperBlock; ++i) {
    const int code = kTable.slot[b.code[i] + (kShiftInScale<T> ? 0 : kCodes * shifted(i))];
    uint8_t& both = to.qs[i / 32 * 16 + i % 16];
    both = static_cast<uint8_t>(both | code << (i % 32 / 16 * 4));
  }
  std::memcpy(out, &to, sizeof to);
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
  } else if constexpr (form_of<T>() == DType::q8_16) {
    for (int first = 0; first < f.block; first += kQ8_16Block, out += sizeof(BlockQ8_16)) {
      BlockQ8_16 to{};
      write_bytes<T>(b, first, kQ8_16Block, to, 0);
      std::memcpy(out, &to, sizeof to);
    }
  } else if constexpr (form_of<T>() == DType::q4_16) {
    write_codes<T>(b, out);
  } else {
    static_assert(form_of<T>() == DType::f16);
    for (int i = 0; i < f.block; ++i, out += sizeof(uint16_t)) {
      const float scale = f16_to_f32(b.halves[i / f.group]);
      const uint16_t value = f32_to_f16(scale * static_cast<float>(value_at<T>(b, i)));
      std::memcpy(out, &value, sizeof value);
    }
  }
}

template <DType T>
void recode(const std::byte* in, std::byte* out, int64_t rows, int64_t k) {
  if constexpr (form_of<T>() == DType::q8_16 && kFormat<T>.block < kQ8_16Block) {
    recode_short_blocks<T>(in, out, rows, k);
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

constexpr DType listed_form(DType type) {
  switch (type) {
#define DYNO_GPU_FORM(name, form) \
  case DType::name:               \
    return DType::form;
#include "gguf/gpu_forms.def"
    default:
      return type;
  }
}
#define DYNO_CODED_TYPE(name, ...)                                  \
  static_assert(listed_form(DType::name) == form_of<DType::name>(), \
                "csrc/gguf/gpu_forms.def has another form of " #name);
#include "core/weight_types.def"

}  // namespace

DType gpu_type(DType type) { return listed_form(type); }

void recode_rows(DType type, const std::byte* in, std::byte* out, int64_t rows, int64_t k) {
  DYNO_CHECK(UnsupportedError, k > 0 && k % dtype_info(type).block_elements == 0, "[gguf] k=", k,
             " is not a multiple of the ", dtype_info(type).block_elements, " elements of a ", dtype_name(type),
             " block");
  const DTypeInfo& to = dtype_info(gpu_type(type));
  DYNO_CHECK(UnsupportedError, k % to.block_elements == 0, "[gguf] rows of ", k, " values of ", dtype_name(type),
             " have no form for a GPU, which reads them as ", to.name, " in blocks of ", to.block_elements);
  switch (type) {
#define DYNO_CODED_TYPE(name, ...) \
  case DType::name:                \
    return recode<DType::name>(in, out, rows, k);
#include "core/weight_types.def"
    case DType::iq6_k:
      for (int64_t r = 0; r < rows; ++r, in += row_bytes(type, k), out += static_cast<size_t>(k) * sizeof(float)) {
        dequantize_row(type, in, reinterpret_cast<float*>(out), k);
      }
      return;
    default:
      throw UnsupportedError(str_cat("[gguf] type ", dtype_name(type), " has no form of another type for a GPU"));
  }
}

}  // namespace dyno
