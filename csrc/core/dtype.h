// Tensor element types: the ids of the GGUF specification, their names and block geometry.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace dyno {

// Values are ggml type ids as stored in GGUF files; gaps are ids that were removed from the format.
enum class DType : uint32_t {
  f32 = 0,
  f16 = 1,
  q4_0 = 2,
  q4_1 = 3,
  q5_0 = 6,
  q5_1 = 7,
  q8_0 = 8,
  q8_1 = 9,
  q2_k = 10,
  q3_k = 11,
  q4_k = 12,
  q5_k = 13,
  q6_k = 14,
  q8_k = 15,
  iq2_xxs = 16,
  iq2_xs = 17,
  iq3_xxs = 18,
  iq1_s = 19,
  iq4_nl = 20,
  iq3_s = 21,
  iq2_s = 22,
  iq4_xs = 23,
  i8 = 24,
  i16 = 25,
  i32 = 26,
  i64 = 27,
  f64 = 28,
  iq1_m = 29,
  bf16 = 30,
  tq1_0 = 34,
  tq2_0 = 35,
  mxfp4 = 39,
  nvfp4 = 40,
  q1_0 = 41,
  q2_0 = 42,
};

struct DTypeInfo {
  DType type;
  std::string_view name;  // lower case, as in profiles: "q4_k"
  uint32_t block_elements;
  uint32_t block_bytes;
  bool is_weight;  // the engine has kernels that multiply with it
};

// nullptr when `id` is no type of the format.
const DTypeInfo* find_dtype(uint32_t id);
const DTypeInfo& dtype_info(DType type);
std::optional<DType> dtype_from_name(std::string_view name);  // case-insensitive

inline std::string_view dtype_name(DType type) { return dtype_info(type).name; }
inline bool is_float(DType t) { return t == DType::f32 || t == DType::f16 || t == DType::bf16; }

// Bytes of a row of `elements`, which must be a multiple of the block size (checked by callers that read files).
inline size_t row_bytes(DType type, int64_t elements) {
  const DTypeInfo& info = dtype_info(type);
  return static_cast<size_t>(elements) / info.block_elements * info.block_bytes;
}

}  // namespace dyno
