// Conversion between layout plain, layout x16 and floats. Lossless: the same integers and the same scales.
#include "gguf/decode.h"
#include "gguf/dequantize.h"
#include "ops/matmul/kernels.h"
#include "ops/matmul/unpack.h"

namespace DYNO_KERNEL_NAMESPACE {
namespace {

template <DType T>
void repack_typed(const std::byte* plain, std::byte* out, int64_t rows, int64_t k, int64_t first, int64_t count) {
  using Record = TileSource<T, Layout::x16>;
  constexpr WeightFormat f = kFormat<T>;
  const int64_t records = k / f.block;
  const int64_t row_bytes = records * kBlockBytes<T>;
  for (int64_t tile = first; tile < first + count; ++tile) {
    const int64_t left = rows - 16 * tile;
    const int real = static_cast<int>(left < 16 ? left : 16);
    TileSource<T, Layout::plain> source(
        {reinterpret_cast<const uint8_t*>(plain) + 16 * tile * row_bytes, row_bytes, real}, T);
    uint8_t* p = reinterpret_cast<uint8_t*>(out) + tile * records * Record::bytes;
    for (int64_t record = 0; record < records; ++record, p += Record::bytes) {
      source.seek(record);
      std::memcpy(p, source.header(), static_cast<size_t>(Record::header));
      for (int sub = 0; sub < f.block / 32; ++sub) {
        B w[8];
        source.load_indices(sub, w);
        store_planes<tile_format<T>()>(p + Record::header + sub * Record::planes, w);
      }
    }
  }
}

// One record of layout x16 from the blocks of 16 rows.
template <WeightFormat f>
void pack_record(const CodedBlock blocks[16], uint8_t* p) {
  for (int r = 0; r < 16; ++r) {
    const CodedBlock& b = blocks[r];
    constexpr bool kFloat = f.header == Header::d_float || f.header == Header::f_scale32;
    if constexpr (f.header == Header::halves16) {
      for (int g = 0; g < f.block / 16; ++g) std::memcpy(p + 32 * g + 2 * r, b.halves + g, 2);
    } else if constexpr (kFloat) {
      std::memcpy(p + 4 * r, &b.d, 4);
    } else {
      std::memcpy(p + 2 * r, &b.d_half, 2);
    }
    if constexpr (f.header == Header::k_scale16 || f.header == Header::k_scale32 || f.header == Header::f_scale32) {
      uint8_t* const scales = p + (kFloat ? 64 : 32) + r;
      for (int g = 0; g < f.block / f.group; ++g) scales[16 * g] = static_cast<uint8_t>(b.scale[g]);
    }
  }
  p += header_bytes(f);
  if constexpr (f.every != 0) {
    for (int run = 0; run < f.block / f.every; ++run) {
      unsigned rows = 0;
      for (int r = 0; r < 16; ++r) rows |= (blocks[r].shifted >> run & 1u) << r;
      const auto word = static_cast<uint16_t>(rows);
      std::memcpy(p + 2 * run, &word, 2);
    }
    p += shift_bytes(f);
  }
  for (int sub = 0; sub < f.block / 32; ++sub, p += planes_bytes(f)) {
    alignas(64) uint8_t step[8][16][4];
    for (int j = 0; j < 8; ++j) {
      for (int r = 0; r < 16; ++r) std::memcpy(step[j][r], blocks[r].code + 32 * sub + 4 * j, 4);
    }
    B w[8];
    for (int j = 0; j < 8; ++j) w[j] = b_load(step[j]);
    store_planes<TileFormat{f, 8}>(p, w);
  }
}

// If the last tile has fewer than 16 rows, its last row is repeated.
template <WeightFormat f>
void repack_coded(BlockDecoder decode, int meta_bytes, int block_bytes, const std::byte* plain, std::byte* out,
                  int64_t rows, int64_t k, int64_t first, int64_t count) {
  const int64_t records = k / f.block;
  const int64_t row_bytes = meta_bytes + records * block_bytes;
  CodedBlock blocks[16];
  for (int64_t tile = first; tile < first + count; ++tile) {
    const int64_t left = rows - 16 * tile;
    const int real = static_cast<int>(left < 16 ? left : 16);
    const auto* from = reinterpret_cast<const uint8_t*>(plain) + 16 * tile * row_bytes;
    uint8_t* p = reinterpret_cast<uint8_t*>(out) + tile * records * record_bytes(f);
    for (int64_t record = 0; record < records; ++record, p += record_bytes(f)) {
      for (int r = 0; r < 16; ++r) {
        if (r < real) {
          decode(from + r * row_bytes, from + r * row_bytes + meta_bytes + record * block_bytes, blocks[r]);
        } else {
          blocks[r] = blocks[real - 1];
        }
      }
      pack_record<f>(blocks, p);
    }
  }
}

template <typename Source>
void to_f32_typed(DType type, const WeightTile& tile, int64_t k, float* out, int64_t stride) {
  constexpr WeightFormat f = Source::format;
  Source source({reinterpret_cast<const uint8_t*>(tile.base), tile.row_bytes, tile.rows}, type);
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
          const int value = (Source::tile.widen == 0 ? static_cast<int8_t>(byte) : byte) - source.offset();
          // s * value is exact if there is a minimum (at most 22 bits), so a fused multiply-add changes nothing.
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
#define DYNO_QUANT_TYPE(name, ...) \
  case DType::name:                \
    return repack_typed<DType::name>(plain, out, rows, k, first, count);
#define DYNO_CODED_TYPE(name, ...)                                                                 \
  case DType::name:                                                                                \
    return repack_coded<kFormat<DType::name>>(block_decoder(DType::name), kMetaBytes<DType::name>, \
                                              kBlockBytes<DType::name>, plain, out, rows, k, first, count);
#include "core/weight_types.def"
    default:
      break;
  }
}

void tile_to_f32(DType type, Layout layout, const WeightTile& tile, int64_t k, float* out, int64_t stride) {
  if (layout == Layout::plain && dtype_info(type).kind != TypeClass::quant) {
    for (int r = 0; r < tile.rows; ++r) dequantize_row(type, tile.base + r * tile.row_bytes, out + r * stride, k);
    return;
  }
  switch (type) {
#define DYNO_QUANT_TYPE(name, ...)                                                      \
  case DType::name:                                                                     \
    if (layout == Layout::x16) {                                                        \
      to_f32_typed<TileSource<DType::name, Layout::x16>>(type, tile, k, out, stride);   \
    } else {                                                                            \
      to_f32_typed<TileSource<DType::name, Layout::plain>>(type, tile, k, out, stride); \
    }                                                                                   \
    break;
#define DYNO_CODED_TYPE(name, ...) \
  case DType::name:                \
    return to_f32_typed<TileSource<DType::name, Layout::x16>>(type, tile, k, out, stride);
#include "core/weight_types.def"
    default:
      break;
  }
}

}  // namespace DYNO_KERNEL_NAMESPACE
