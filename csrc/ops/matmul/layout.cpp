#include "ops/matmul/layout.h"

#include <algorithm>

#include "core/error.h"
#include "gguf/dequantize.h"
#include "ops/matmul/gpu_layout.h"
#include "ops/matmul/kernels.h"
#include "ops/matmul/quant_format.h"

namespace dyno::ops {
namespace {

// Zero for types without the layout.
int record_bytes_of(DType type) {
  switch (type) {
#define DYNO_QUANT_TYPE(name, ...) \
  case DType::name:                \
    return record_bytes(kFormat<DType::name>);
#define DYNO_CODED_TYPE(name, ...) \
  case DType::name:                \
    return record_bytes(kFormat<DType::name>);
#include "core/weight_types.def"
    default:
      return 0;
  }
}

CpuIsa repack_isa() {
  static const CpuIsa isa = detect_cpu().isa;
  return isa;
}

}  // namespace

bool layout_supported(DType type, Layout layout) {
  if (layout == Layout::gpu) return has_gpu_layout(type);
  return layout == Layout::plain ? can_dequantize(type) : record_bytes_of(type) != 0;
}

size_t layout_bytes(DType type, Layout layout, int64_t rows, int64_t k) {
  DYNO_CHECK(UnsupportedError, layout_supported(type, layout), "[layout] ", dtype_name(type), " has no layout ",
             layout_name(layout));
  const int64_t block = dtype_info(type).block_elements;
  DYNO_CHECK(UnsupportedError, rows >= 0 && k >= 0 && k % block == 0, "[layout] a matrix of ", rows, " rows of ", k,
             " values of ", dtype_name(type), ": rows must be multiples of ", block, " values");
  if (layout == Layout::plain) return static_cast<size_t>(rows) * row_bytes(type, k);
  if (layout == Layout::gpu) return static_cast<size_t>(gpu_layout_bytes(type, rows, k));
  const size_t tile = static_cast<size_t>(k / block) * static_cast<size_t>(record_bytes_of(type));
  return static_cast<size_t>((rows + kTileRows - 1) / kTileRows) * tile;
}

void repack_rows(DType type, const void* plain, void* out, int64_t rows, int64_t k) {
  repack_rows(type, plain, out, rows, k, 0, (rows + kTileRows - 1) / kTileRows);
}

void repack_rows(DType type, const void* plain, void* out, int64_t rows, int64_t k, int64_t first_tile,
                 int64_t n_tiles) {
  (void)layout_bytes(type, Layout::x16, rows, k);  // for its checks
  const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
  DYNO_CHECK(PlanError, first_tile >= 0 && n_tiles >= 0 && n_tiles <= tiles - first_tile, "[layout] tiles ", first_tile,
             " to ", first_tile + n_tiles, " do not lie in a matrix of ", tiles, " tiles");
  DYNO_DISPATCH_ISA(repack_isa(), repack_tiles(type, static_cast<const std::byte*>(plain), static_cast<std::byte*>(out),
                                               rows, k, first_tile, n_tiles));
}

void unpack_rows(DType type, Layout layout, const void* w, float* out, int64_t rows, int64_t k, CpuIsa isa) {
  const size_t tile_bytes = layout_bytes(type, layout, kTileRows, k);
  if (layout == Layout::gpu) {
    for (int64_t row = 0; row < rows; ++row) {
      dequantize_gpu_row(type, k, static_cast<const std::byte*>(w), row, out + row * k);
    }
    return;
  }
  DYNO_CHECK(UnsupportedError, !is_float(type), "[layout] ", dtype_name(type), " is not quantised");
  for (int64_t row = 0; row < rows; row += kTileRows) {
    const WeightTile tile = {static_cast<const std::byte*>(w) + static_cast<size_t>(row / kTileRows) * tile_bytes,
                             static_cast<int64_t>(row_bytes(type, k)),
                             static_cast<int>(std::min(kTileRows, rows - row))};
    DYNO_DISPATCH_ISA(isa, tile_to_f32(type, layout, tile, k, out + row * k, k));
  }
}

}  // namespace dyno::ops
