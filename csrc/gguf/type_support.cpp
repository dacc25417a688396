#include "gguf/type_support.h"

#include "gguf/recode.h"

namespace dyno {
namespace {

std::string_view coded_support(DType on_gpu) {
  switch (on_gpu) {
    case DType::q4_0:
      return "kernels for CPU and GPU, re-coded at load, on a GPU as q4_0";
    case DType::q8_0:
      return "kernels for CPU and GPU, re-coded at load, on a GPU as q8_0";
    case DType::q4_16:
      return "kernels for CPU and GPU, re-coded at load, on a GPU as q4_16";
    case DType::q8_16:
      return "kernels for CPU and GPU, re-coded at load, on a GPU as q8_16";
    default:
      return "kernels for CPU and GPU, re-coded at load, on a GPU as f16";
  }
}

}  // namespace

std::string_view type_support(DType type) {
  switch (dtype_info(type).kind) {
    case TypeClass::floats:
      return "kernels for CPU and GPU";
    case TypeClass::quant:
      return "kernels for CPU and GPU, repacked at load";
    case TypeClass::coded:
      return coded_support(gpu_type(type));
    case TypeClass::interleaved:
      return "kernels for CPU and GPU, de-interleaved at load";
    case TypeClass::gpu:
      return "kernels for a GPU";
    case TypeClass::values:
      return "multiplied in float32, on a GPU as f32";
    case TypeClass::data:
      break;
  }
  return "no kernels";
}

double bits_per_weight(DType type, int64_t k) {
  return 8.0 * static_cast<double>(row_bytes(type, k)) / static_cast<double>(k);
}

}  // namespace dyno
