// Tensor element types: the ids of the GGUF specification, their names and block geometry.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace dyno {

// Values are ggml type ids as stored in GGUF files; gaps are ids that were removed from the format.
enum class DType : uint32_t {
#define DYNO_FLOAT_TYPE(name, id, ...) name = id,
#define DYNO_DATA_TYPE(name, id, ...) name = id,
#define DYNO_QUANT_TYPE(name, id, ...) name = id,
#define DYNO_CODED_TYPE(name, id, ...) name = id,
#define DYNO_VALUES_TYPE(name, id, ...) name = id,
#define DYNO_GPU_TYPE(name, id, ...) name = id,
#define DYNO_INTERLEAVED_TYPE(name, id, ...) name = id,
#include "core/weight_types.def"
};

// How the engine computes with tensors of a type (core/weight_types.def).
enum class TypeClass : uint8_t {
  floats,       // numbers without blocks
  quant,        // kernels read the blocks of the file, or layout x16
  coded,        // blocks become codes and scales; kernels read layout x16
  gpu,          // read by GPU kernels only; coded types are re-coded to it during the upload
  values,       // kernels read the values as float32
  interleaved,  // several rows share one unit; at load it becomes a weight of type `plain`
  data,         // not a weight
};

struct DTypeInfo {
  DType type;
  std::string_view name;  // lower case, as in profiles: "q4_k"
  TypeClass kind;
  uint32_t block_elements;
  uint32_t block_bytes;
  uint32_t row_meta_bytes;  // bytes before the blocks of each row
  DType plain;              // the type of one row of an interleaved type; otherwise the type itself
  uint32_t rows;            // rows in a unit: 1, except for interleaved types
  bool is_weight;           // the engine can multiply with it (interleaved types: after loading)
};

// nullptr if the format has no type with this id.
const DTypeInfo* find_dtype(uint32_t id);
const DTypeInfo& dtype_info(DType type);
std::optional<DType> dtype_from_name(std::string_view name);  // case-insensitive

inline std::string_view dtype_name(DType type) { return dtype_info(type).name; }
inline bool is_float(DType t) { return t == DType::f32 || t == DType::f16 || t == DType::bf16; }

// Whether matrix products with 8-bit activations support the type, because its values are integers times scales.
inline bool has_codes(DType t) {
  const TypeClass kind = dtype_info(t).kind;
  return kind == TypeClass::quant || kind == TypeClass::coded;
}

// Bytes of a row with `elements` values. The number must be a multiple of the block size; callers that read files check
// this. A unit of an interleaved type is `rows` times as long.
inline size_t row_bytes(DType type, int64_t elements) {
  const DTypeInfo& info = dtype_info(type);
  return info.row_meta_bytes + static_cast<size_t>(elements) / info.block_elements * info.block_bytes;
}

}  // namespace dyno
