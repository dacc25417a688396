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
  floats,       // numbers as they are
  quant,        // kernels read the blocks of the file, or layout x16
  coded,        // blocks become codes and scales; kernels read layout x16
  gpu,          // kernels of a GPU read it; coded types become it on their way there
  values,       // kernels take the values in float32
  interleaved,  // several rows in one unit; a weight of type `plain` once it is loaded
  data,         // no weights
};

struct DTypeInfo {
  DType type;
  std::string_view name;  // lower case, as in profiles: "q4_k"
  TypeClass kind;
  uint32_t block_elements;
  uint32_t block_bytes;
  uint32_t row_meta_bytes;  // before the blocks of each row
  DType plain;              // of one row of an interleaved type, else the type itself
  uint32_t rows;            // in a unit: 1 but for interleaved types
  bool is_weight;           // the engine multiplies with it, after loading where it is interleaved
};

// nullptr when `id` is no type of the format.
const DTypeInfo* find_dtype(uint32_t id);
const DTypeInfo& dtype_info(DType type);
std::optional<DType> dtype_from_name(std::string_view name);  // case-insensitive

inline std::string_view dtype_name(DType type) { return dtype_info(type).name; }
inline bool is_float(DType t) { return t == DType::f32 || t == DType::f16 || t == DType::bf16; }

// Whether products with 8-bit activations multiply with the type: its values are integers times scales.
inline bool has_codes(DType t) {
  const TypeClass kind = dtype_info(t).kind;
  return kind == TypeClass::quant || kind == TypeClass::coded;
}

// Bytes of a row of `elements`, which must be a multiple of the block size (checked by callers that read files). A unit
// of an interleaved type is `rows` times as long.
inline size_t row_bytes(DType type, int64_t elements) {
  const DTypeInfo& info = dtype_info(type);
  return info.row_meta_bytes + static_cast<size_t>(elements) / info.block_elements * info.block_bytes;
}

}  // namespace dyno
