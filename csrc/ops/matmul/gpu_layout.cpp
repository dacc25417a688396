#include "ops/matmul/gpu_layout.h"

#include <algorithm>

#include "core/error.h"
#include "ops/matmul/gpu_pack.h"
#include "ops/matmul/gpu_unpack.h"

namespace dyno::ops {
namespace {

// Calls f<type>() for a type with this layout.
template <typename F>
void with_gpu_type(DType type, F&& f) {
  switch (type) {
#define DYNO_CASE(t) \
  case DType::t:     \
    return f.template operator()<DType::t>();
    DYNO_CASE(f16)
    DYNO_CASE(bf16)
#define DYNO_QUANT_TYPE(name, ...) DYNO_CASE(name)
#define DYNO_GPU_TYPE(name, ...) DYNO_CASE(name)
#include "core/weight_types.def"
#undef DYNO_CASE
    default:
      throw UnsupportedError(str_cat("[gpu layout] type ", dtype_name(type), " has no layout for the GPU"));
  }
}

// Packs the stripe of the rows from row0 on.
template <DType kType, typename Rows>
void pack_stripe(const Rows& rows, typename Rows::Index row0, int64_t k, std::byte* out) {
  constexpr GpuFormat f = gpu_format(kType);
  for (int64_t at_k = 0; at_k < k; at_k += f.unit_k(), out += f.unit_bytes()) {
    const auto unit = static_cast<typename Rows::Index>(at_k);
    for (int word = 0; word < f.unit_bytes() / 4; ++word) {
      const uint32_t value = pack_word<kType>(rows, row0, unit, word);
      std::memcpy(out + 4 * word, &value, 4);
    }
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
    const FileRows<kType> rows{reinterpret_cast<const uint8_t*>(plain), n, k};
    for (int64_t stripe = first; stripe < last; ++stripe) {
      pack_stripe<kType>(rows, stripe * kGpuRows, k, out + stripe * gpu_stripe_bytes(kType, k));
    }
  });
}

void repack_gpu_from_x16(DType type, int64_t n, int64_t k, const std::byte* x16, std::byte* out, int64_t first,
                         int64_t last) {
  check_k(type, k);
  DYNO_CHECK(UnsupportedError, packs_from_x16(type), "[gpu layout] type ", dtype_name(type), " has no layout x16");
  with_gpu_type(type, [&]<DType kType>() {
    if constexpr (packs_from_x16(kType)) {
      constexpr GpuFormat f = gpu_format(kType);
      using Rows = X16Rows<kType>;
      const int64_t tile = k / Rows::per_block * Rows::record;
      for (int64_t stripe = first; stripe < last; ++stripe) {
        const auto left = static_cast<int>(std::min<int64_t>(kX16Rows, n - stripe * kGpuRows));
        const auto* from = reinterpret_cast<const uint8_t*>(x16) + stripe * tile;
        std::byte* to = out + stripe * gpu_stripe_bytes(kType, k);
        for (int64_t k0 = 0; k0 < k; k0 += kX16RunK) {  // as in the kernel
          const auto here = static_cast<int>(std::min<int64_t>(kX16RunK, k - k0));
          const Rows rows{from + k0 / Rows::per_block * Rows::record, left, here};
          pack_stripe<kType>(rows, 0, here, to + k0 / f.unit_k() * f.unit_bytes());
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
