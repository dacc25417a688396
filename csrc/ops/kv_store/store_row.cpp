// Conversion of one row of f32 to a cache type, rounding to nearest even.
#include "ops/kv_store/kernels.h"
#include "ops/simd.h"

namespace DYNO_KERNEL_NAMESPACE {
namespace {

template <vh (*Narrow)(vf)>
void store_halves(const float* x, std::byte* out, int64_t width) {
  auto* halves = reinterpret_cast<uint16_t*>(out);
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) *reinterpret_cast<vh_unaligned*>(halves + i) = Narrow(load(x + i));
  if (i == width) return;
  float tail[kLanes] = {};
  for (int64_t j = i; j < width; ++j) tail[j - i] = x[j];
  const vh packed = Narrow(load(tail));
  for (int64_t j = i; j < width; ++j) halves[j] = packed[j - i];
}

vh to_f16(vf v) { return narrow_f16(v); }
vh to_bf16(vf v) { return narrow_bf16(v); }

}  // namespace

void store_row_f32(const float* x, std::byte* out, int64_t width) {
  __builtin_memcpy(out, x, static_cast<size_t>(width) * sizeof(float));
}

void store_row_f16(const float* x, std::byte* out, int64_t width) { store_halves<to_f16>(x, out, width); }

void store_row_bf16(const float* x, std::byte* out, int64_t width) { store_halves<to_bf16>(x, out, width); }

// Blocks of 32: d = max|x| / 127 as f16, then x / d as int8 (with the unrounded d, as in quantised files). A block with
// a non-finite value gets d = NaN, so that the error stays visible.
void store_row_q8_0(const float* x, std::byte* out, int64_t width) {
  for (int64_t block = 0; block < width / 32; ++block, x += 32, out += 34) {
    vf largest = {};
    bool finite = true;
    for (int i = 0; i < 32; i += kLanes) {
      const vf v = load(x + i);
      largest = max(largest, max(v, -v));
      for (int j = 0; j < kLanes; ++j) finite &= x[i + j] - x[i + j] == 0.0f;
    }
    const float amax = horizontal_max(largest);
    const float scale = finite ? amax / 127.0f : __builtin_nanf("");
    const uint16_t half = f32_to_f16(scale);
    __builtin_memcpy(out, &half, 2);
    const float inverse = finite && amax > 0 ? 127.0f / amax : 0.0f;
    auto* q = reinterpret_cast<int8_t*>(out + 2);
    const vf magic = broadcast(12582912.0f);  // 1.5 * 2^23: the low bits of the sum are the nearest integer
    for (int i = 0; i < 32; i += kLanes) {
      const vf product = finite ? load(x + i) * broadcast(inverse) : vf{};
      const vf shifted = product + magic;
      const vi rounded = reinterpret_cast<vi>(shifted) - reinterpret_cast<vi>(magic);
      *reinterpret_cast<vb_unaligned*>(q + i) = narrow_i8(rounded);
    }
  }
}

}  // namespace DYNO_KERNEL_NAMESPACE
