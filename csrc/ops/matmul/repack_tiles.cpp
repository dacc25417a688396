// Between layout plain, layout x16 and floats. Lossless: the same integers and the same scales.
#include "ops/matmul/kernels.h"
#include "ops/matmul/unpack.h"

namespace DYNO_KERNEL_NAMESPACE {
namespace {

template <DType T>
void repack_typed(const std::byte* plain, std::byte* out, int64_t rows, int64_t k, int64_t first, int64_t count) {
  constexpr QuantFormat f = kFormat<T>;
  const int64_t records = k / f.block;
  const int64_t row_bytes = records * f.block_bytes;
  for (int64_t tile = first; tile < first + count; ++tile) {
    const int64_t left = rows - 16 * tile;
    const int real = static_cast<int>(left < 16 ? left : 16);
    TileSource<T, Layout::plain> source(
        {reinterpret_cast<const uint8_t*>(plain) + 16 * tile * row_bytes, row_bytes, real});
    uint8_t* p = reinterpret_cast<uint8_t*>(out) + tile * records * kRecordBytes<T>;
    for (int64_t record = 0; record < records; ++record, p += kRecordBytes<T>) {
      source.seek(record);
      std::memcpy(p, source.header(), static_cast<size_t>(kHeaderBytes<T>));
      for (int sub = 0; sub < f.block / 32; ++sub) {
        B w[8];
        source.load_indices(sub, w);
        store_planes<T>(p + kHeaderBytes<T> + sub * kPlanesBytes<T>, w);
      }
    }
  }
}

template <DType T, Layout L>
void to_f32_typed(const WeightTile& tile, int64_t k, float* out, int64_t stride) {
  constexpr QuantFormat f = kFormat<T>;
  TileSource<T, L> source({reinterpret_cast<const uint8_t*>(tile.base), tile.row_bytes, tile.rows});
  int64_t at = 0;
  for (int64_t record = 0; record < k / f.block; ++record) {
    source.seek(record);
    for (int sub = 0; sub < f.block / 32; ++sub, at += 32) {
      B w[8];
      source.load(sub, w);
      alignas(64) uint8_t q[8][16][4];
      for (int j = 0; j < 8; ++j) b_store(q[j], w[j]);
      F scale[2], min[2];
      source.scales(sub, scale, min);
      alignas(64) float s[2][16], b[2][16];
      for (int g = 0; g < 32 / f.group; ++g) {
        f_store(s[g], scale[g]);
        if constexpr (f.has_min) f_store(b[g], min[g]);
      }
      for (int r = 0; r < tile.rows; ++r) {
        float* row = out + r * stride + at;
        for (int i = 0; i < 32; ++i) {
          const int g = f.group == 32 ? 0 : i / 16;
          const uint8_t byte = q[i / 4][r][i % 4];
          const int value = (kBytesSigned<T> ? static_cast<int8_t>(byte) : byte) - kTileOffset<T>;
          // s * value is exact wherever there is a minimum (at most 22 bits), so a fused multiply-add changes nothing.
          const float x = s[g][r] * static_cast<float>(value);
          row[i] = f.has_min ? x - b[g][r] : x;
        }
      }
    }
  }
}

}  // namespace

void repack_tiles(DType type, const std::byte* plain, std::byte* out, int64_t rows, int64_t k, int64_t first,
                  int64_t count) {
  switch (type) {
#define DYNO_CASE(T)                                           \
  case DType::T:                                               \
    repack_typed<DType::T>(plain, out, rows, k, first, count); \
    break;
    DYNO_QUANT_TYPES(DYNO_CASE)
#undef DYNO_CASE
    default:
      break;
  }
}

void tile_to_f32(DType type, Layout layout, const WeightTile& tile, int64_t k, float* out, int64_t stride) {
  switch (type) {
#define DYNO_CASE(T)                                               \
  case DType::T:                                                   \
    if (layout == Layout::x16) {                                   \
      to_f32_typed<DType::T, Layout::x16>(tile, k, out, stride);   \
    } else {                                                       \
      to_f32_typed<DType::T, Layout::plain>(tile, k, out, stride); \
    }                                                              \
    break;
    DYNO_QUANT_TYPES(DYNO_CASE)
#undef DYNO_CASE
    default:
      break;
  }
}

}  // namespace DYNO_KERNEL_NAMESPACE
