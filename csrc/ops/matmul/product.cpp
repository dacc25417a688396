#include "ops/matmul/product.h"

#include "core/error.h"
#include "gguf/dequantize.h"
#include "gguf/weight_format.h"

namespace dyno::ops {
namespace {

size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

const WeightFormat& format_of(DType type) {
  static constexpr WeightFormat kNone = {};
  switch (type) {
#define DYNO_QUANT_TYPE(name, ...) \
  case DType::name:                \
    return kFormat<DType::name>;
#define DYNO_CODED_TYPE(name, ...) \
  case DType::name:                \
    return kFormat<DType::name>;
#include "core/weight_types.def"
    default:
      return kNone;
  }
}

// Accumulators of the compiled register tiles, limited by the registers of the instruction set (kMaxAccumulators).
int max_accumulators(CpuIsa isa) { return isa == CpuIsa::avx512_vnni ? 12 : 4; }

}  // namespace

Support supports_weights(DType type, Layout layout, ActType act, int64_t k) {
  if (!can_dequantize(type)) return Support::no(str_cat("no kernels multiply with ", dtype_name(type)));
  if (!layout_supported(type, layout)) {
    return Support::no(str_cat(dtype_name(type), " has no layout ", layout_name(layout)));
  }
  if (act == ActType::q8 && !has_codes(type)) {
    return Support::no(str_cat(dtype_name(type), " weights need f32 activations, not q8"));
  }
  const int64_t block = dtype_info(type).block_elements;
  if (k < 1 || k % block != 0) {
    return Support::no(str_cat("k=", k, " is not a multiple of ", block, ", the block of ", dtype_name(type)));
  }
  return Support::yes();
}

Support supports_tiling(const Tiling& tiling, DType type, ActType act, int64_t m, const DeviceInfo& device) {
  if (tiling.method == Method::dot) {
    if (act != ActType::f32) return Support::no("dot takes f32 activations, not q8");
    const int room = 2 * max_accumulators(device.isa);
    if (tiling.weight_rows * tiling.tokens > room) {
      return Support::no(str_cat("rows=", tiling.weight_rows, " tokens=", tiling.tokens, ": the ",
                                 cpu_isa_name(device.isa), " kernels have at most ", room, " accumulators"));
    }
    return Support::yes();
  }
  if (act != ActType::q8) return Support::no("matvec and gemm take q8 activations, not f32");
  if (!has_codes(type)) return Support::no(str_cat(dtype_name(type), " has no integers to multiply"));
  if (tiling.method == Method::matvec) {
    if (m > kMatvecTokens) return Support::no(str_cat("m=", m, ": matvec takes at most ", kMatvecTokens, " tokens"));
    return Support::yes();
  }
  const int room = max_accumulators(device.isa);
  if (tiling.nr * tiling.tokens > room) {
    return Support::no(str_cat("rows=", 16 * tiling.nr, " tokens=", tiling.tokens, ": the ", cpu_isa_name(device.isa),
                               " kernels have at most ", room, " accumulators of 16 rows"));
  }
  return Support::yes();
}

int64_t default_matvec_tokens(DType type, Layout layout, CpuIsa isa) {
  if (isa == CpuIsa::portable) return 2;  // one pass
  if (layout == Layout::plain) return 4;  // rows are transposed while they are unpacked
  const WeightFormat& f = format_of(type);
  const bool whole = f.group == 32 && f.every == 0;
  const bool one_plane = whole && !f.lookup && (f.bits == 2 || f.bits == 4 || f.bits == 8);
  if (one_plane && !f.has_min) return 24;
  if (isa == CpuIsa::avx512_vnni) return whole ? 16 : 8;
  return one_plane ? 8 : 4;
}

ProductScratch::ProductScratch(std::byte* base, const Tiling& tiling, int matrices) {
  const size_t pointers = aligned(static_cast<size_t>(tiling.block) * sizeof(void*));
  rows = reinterpret_cast<const std::byte**>(base);
  residual = reinterpret_cast<const float**>(base + pointers);
  y = reinterpret_cast<float**>(base + 2 * pointers);
  c = reinterpret_cast<float*>(base + 3 * pointers);
  kernel = base + 3 * pointers +
           static_cast<size_t>(tiling.block) * static_cast<size_t>(matrices * tiling.group) * 16 * sizeof(float);
}

namespace {

// Plain matrices of coded types are repacked for each product.
bool repacked_on_the_way(const Weights& weights) {
  return weights.layout == Layout::plain && dtype_info(weights.type).kind == TypeClass::coded;
}

size_t kernel_scratch_bytes(const Tiling& tiling, const Weights& weights) {
  if (tiling.method == Method::gemm) return gemm_scratch_bytes(tiling.nr, tiling.kc);
  if (tiling.method == Method::dot && !is_float(weights.type)) return dot_scratch_bytes(weights.k);
  return 0;
}

}  // namespace

size_t product_scratch_bytes(const Tiling& tiling, const Weights& weights, int matrices) {
  size_t bytes = 3 * aligned(static_cast<size_t>(tiling.block) * sizeof(void*));
  bytes += static_cast<size_t>(tiling.block) * static_cast<size_t>(matrices * tiling.group) * 16 * sizeof(float);
  bytes += kernel_scratch_bytes(tiling, weights);
  if (tiling.method != Method::dot && repacked_on_the_way(weights)) {
    const int tiles = tiling.method == Method::gemm ? tiling.nr : 1;
    bytes = aligned(bytes) + static_cast<size_t>(tiles) * layout_bytes(weights.type, Layout::x16, kTileRows, weights.k);
  }
  return aligned(bytes);
}

namespace {

void run_coded(const ProductJob& job, bool few, CpuIsa isa) {
  if (few) {
    DYNO_DISPATCH_ISA(isa, matvec_q8_coded(job));
  } else {
    DYNO_DISPATCH_ISA(isa, gemm_q8_coded(job));
  }
}

// In layout plain, a few tiles at a time are repacked to layout x16 in `room`.
void coded_product(ProductJob job, bool few, std::byte* room, CpuIsa isa) {
  if (job.layout == Layout::x16) return run_coded(job, few, isa);
  const size_t tile_bytes = layout_bytes(job.type, Layout::x16, kTileRows, job.k);
  const WeightTile* tiles = job.tiles;
  const int total = job.n_tiles, step = few ? 1 : job.nr;
  float* const c = job.c;
  job.layout = Layout::x16;
  job.next_bytes = 0;
  for (int first = 0; first < total; first += step) {
    WeightTile packed[kMaxGroupTiles];
    job.n_tiles = std::min(step, total - first);
    for (int i = 0; i < job.n_tiles; ++i) {
      const WeightTile& tile = tiles[first + i];
      packed[i] = {room + static_cast<size_t>(i) * tile_bytes, tile.row_bytes, tile.rows};
      DYNO_DISPATCH_ISA(
          isa, repack_tiles(job.type, tile.base, room + static_cast<size_t>(i) * tile_bytes, tile.rows, job.k, 0, 1));
    }
    job.tiles = packed;
    job.c = c + 16 * first;
    run_coded(job, few, isa);
  }
}

}  // namespace

void compute_product(const Tiling& tiling, const Weights& weights, const WeightTile* tiles, int n_tiles, int m,
                     const ProductScratch& scratch, CpuIsa isa) {
  ProductJob job;
  job.type = weights.type;
  job.layout = weights.layout;
  job.k = weights.k;
  job.tiles = tiles;
  job.n_tiles = n_tiles;
  job.rows = scratch.rows;
  job.m = m;
  job.c = scratch.c;
  job.ldc = static_cast<int64_t>(n_tiles) * kTileRows;
  job.scratch = scratch.kernel;
  job.nr = tiling.nr;
  job.tokens = tiling.tokens;
  job.weight_rows = tiling.weight_rows;
  job.kc = tiling.kc;
  job.prefetch = tiling.prefetch;
  if (weights.layout == Layout::x16) {
    job.next_bytes = tiling.group * static_cast<int64_t>(layout_bytes(weights.type, Layout::x16, kTileRows, weights.k));
  }
  if (tiling.method == Method::dot) {
    DYNO_DISPATCH_ISA(isa, dot_f32(job));
    return;
  }
  const bool few = tiling.method == Method::matvec || m <= tiling.few;
  if (dtype_info(weights.type).kind == TypeClass::coded) {
    coded_product(job, few, scratch.kernel + aligned(kernel_scratch_bytes(tiling, weights)), isa);
  } else if (few) {
    if (weights.layout == Layout::x16) {
      DYNO_DISPATCH_ISA(isa, matvec_q8_x16(job));
    } else {
      DYNO_DISPATCH_ISA(isa, matvec_q8_plain(job));
    }
  } else {
    DYNO_DISPATCH_ISA(isa, gemm_q8(job));
  }
}

}  // namespace dyno::ops
