#include "ops/matmul/gpu_layout.h"

#include <algorithm>

#include "core/error.h"
#include "ops/matmul/gpu_pack.h"
#include "ops/matmul/gpu_unpack.h"

namespace dyno::ops {

namespace {

// Calls f<type>() for a type that has the layout.
template <typename F>
void with_gpu_type(DType type, F&& f) {
  switch (type) {
#define DYNO_CASE(t) \
  case DType::t:     \
    return f.template operator()<DType::t>();
    DYNO_CASE(f16)
    DYNO_CASE(bf16)
#define DYNO_QUANT_TYPE(name, ...) DYNO_CASE(name)
#include "core/weight_types.def"
#undef DYNO_CASE
    default:
      throw UnsupportedError(str_cat("[gpu layout] type ", dtype_name(type), " has no layout for the GPU"));
  }
}

void check_k(DType type, int64_t k) {
  DYNO_CHECK(UnsupportedError, k > 0 && k % dtype_info(type).block_elements == 0, "[gpu layout] k=", k,
             " is not a multiple of the ", dtype_info(type).block_elements, " elements of a ", dtype_name(type),
             " block");
}

}  // namespace

void repack_gpu(DType type, int64_t n, int64_t k, const std::byte* plain, std::byte* out, int64_t first, int64_t last) {
  check_k(type, k);
  with_gpu_type(type, [&]<DType kType>() {
    constexpr GpuFormat f = gpu_format(kType);
    const FileRows<kType> rows{reinterpret_cast<const uint8_t*>(plain), n, k};
    const int64_t units = (k + f.unit_k() - 1) / f.unit_k();
    for (int64_t stripe = first; stripe < last; ++stripe) {
      for (int64_t unit = 0; unit < units; ++unit) {
        std::byte* at = out + (stripe * units + unit) * f.unit_bytes();
        for (int word = 0; word < f.unit_bytes() / 4; ++word) {
          const uint32_t value = pack_word<kType>(rows, stripe * kGpuRows, unit * f.unit_k(), word);
          std::memcpy(at + 4 * word, &value, 4);
        }
      }
    }
  });
}

void dequantize_gpu_row(DType type, int64_t k, const std::byte* packed, int64_t row, float* out) {
  check_k(type, k);
  with_gpu_type(type, [&]<DType kType>() {
    constexpr GpuFormat f = gpu_format(kType);
    const auto* stripe = reinterpret_cast<const uint8_t*>(packed) + row / kGpuRows * gpu_stripe_bytes(kType, k);
    for (int64_t i = 0; i < k; ++i) {
      out[i] = gpu_value<kType>(stripe + i / f.unit_k() * f.unit_bytes(), static_cast<int>(row % kGpuRows),
                                static_cast<int>(i % f.unit_k()));
    }
  });
}

}  // namespace dyno::ops
