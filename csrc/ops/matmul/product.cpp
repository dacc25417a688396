#include "ops/matmul/product.h"

#include "core/error.h"

namespace dyno::ops {
namespace {

size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

// Register tiles that are compiled: as many accumulators as the instruction set has room for (kMaxAccumulators).
int max_accumulators(CpuIsa isa) { return isa == CpuIsa::avx512_vnni ? 12 : 4; }

}  // namespace

Support supports_weights(DType type, Layout layout, ActType act, int64_t k) {
  if (!dtype_info(type).is_weight) return Support::no(str_cat("no kernels multiply with ", dtype_name(type)));
  if (!layout_supported(type, layout)) {
    return Support::no(str_cat(dtype_name(type), " has no layout ", layout_name(layout)));
  }
  if (act == ActType::q8 && is_float(type)) {
    return Support::no(str_cat(dtype_name(type), " weights need f32 activations, not q8"));
  }
  const int64_t block = dtype_info(type).block_elements;
  if (k < 1 || k % block != 0) {
    return Support::no(str_cat("k=", k, " is no multiple of ", block, ", the block of ", dtype_name(type)));
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
  if (is_float(type)) return Support::no(str_cat(dtype_name(type), " is not quantised"));
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

ProductScratch::ProductScratch(std::byte* base, const Tiling& tiling, int matrices) {
  const size_t pointers = aligned(static_cast<size_t>(tiling.block) * sizeof(void*));
  rows = reinterpret_cast<const std::byte**>(base);
  residual = reinterpret_cast<const float**>(base + pointers);
  y = reinterpret_cast<float**>(base + 2 * pointers);
  c = reinterpret_cast<float*>(base + 3 * pointers);
  kernel = base + 3 * pointers +
           static_cast<size_t>(tiling.block) * static_cast<size_t>(matrices * tiling.group) * 16 * sizeof(float);
}

size_t product_scratch_bytes(const Tiling& tiling, const Weights& weights, int matrices) {
  size_t bytes = 3 * aligned(static_cast<size_t>(tiling.block) * sizeof(void*));
  bytes += static_cast<size_t>(tiling.block) * static_cast<size_t>(matrices * tiling.group) * 16 * sizeof(float);
  if (tiling.method == Method::gemm) bytes += gemm_scratch_bytes(tiling.nr, tiling.kc);
  if (tiling.method == Method::dot && !is_float(weights.type)) bytes += dot_scratch_bytes(weights.k);
  return aligned(bytes);
}

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
  if (tiling.method == Method::dot) {
    DYNO_DISPATCH_ISA(isa, dot_f32(job));
  } else if (tiling.method == Method::matvec || m <= tiling.few) {
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
