// Decodes blocks of the coded weight types (core/weight_types.def) to codes and scales. Only this code knows their
// layout in files. Dequantisation and the kernels' layouts are derived from its output.
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace dyno {

// Value i is unit * s * (values[code[i]] + shift). s is d times scale[i / group], or halves[i / group]. The shift
// applies if bit i / every of `shifted` is set. The list of types says which of these fields a type has.
struct CodedBlock {
  uint16_t d_half = 0;  // d, if the file has it as binary16
  float d = 0.0f;       // d, if the file has it as float32
  int8_t scale[16] = {};
  uint16_t halves[4] = {};
  uint32_t shifted = 0;
  uint8_t code[256] = {};
};

// `meta`: the bytes before the first block of the row. Reads only these bytes and the block; neither needs alignment.
using BlockDecoder = void (*)(const uint8_t* meta, const uint8_t* block, CodedBlock& out);

#define DYNO_CODED_TYPE(name, ...) void decode_##name(const uint8_t* meta, const uint8_t* block, CodedBlock& out);
#include "core/weight_types.def"

// nullptr for a type that is not coded.
constexpr BlockDecoder block_decoder(DType type) {
  switch (type) {
#define DYNO_CODED_TYPE(name, ...) \
  case DType::name:                \
    return decode_##name;
#include "core/weight_types.def"
    default:
      return nullptr;
  }
}

}  // namespace dyno
