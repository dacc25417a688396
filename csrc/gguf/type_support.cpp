#include "gguf/type_support.h"

namespace dyno {

std::string_view type_support(DType type) {
  switch (dtype_info(type).kind) {
    case TypeClass::floats:
      return "kernels for CPU and GPU";
    case TypeClass::quant:
      return "kernels for CPU and GPU, repacked at load";
    case TypeClass::coded:
      return "kernels for the CPU, re-coded at load";
    case TypeClass::interleaved: {
      const bool gpu = dtype_info(dtype_info(type).plain).kind == TypeClass::quant;
      return gpu ? "kernels for CPU and GPU, taken apart at load" : "kernels for the CPU, taken apart at load";
    }
    case TypeClass::values:
      return "CPU, multiplied in float32";
    case TypeClass::data:
      break;
  }
  return "no kernels";
}

double bits_per_weight(DType type, int64_t k) {
  return 8.0 * static_cast<double>(row_bytes(type, k)) / static_cast<double>(k);
}

}  // namespace dyno
