// Blocks of the coded weight types (core/weight_types.def) as codes and scales: the one place that knows how they stand
// in a file. Dequantisation and the layouts of the kernels are made from this.
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace dyno {

// Value i is unit * s * (values[code[i]] + shift): s is d times scale[i / group], or halves[i / group]; the shift
// counts where bit i / every of `shifted` is set. The list of types says which of these fields a type has.
struct CodedBlock {
  uint16_t d_half = 0;  // d where it is a binary16 in the file
  float d = 0.0f;       // d where it is a float32
  int8_t scale[16] = {};
  uint16_t halves[4] = {};
  uint32_t shifted = 0;
  uint8_t code[256] = {};
};

// `meta`: the bytes before the first block of the row. Reads nothing outside of them and of the block; neither need be
// aligned.
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
