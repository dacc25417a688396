#include "ops/matmul/gate_pair.h"

namespace dyno::ops {

void run_gate_pair(const Tiling& tiling, const Weights& weights, const GatePair& pair, int64_t first, int m,
                   const ProductScratch& scratch, CpuIsa isa) {
  const int half = static_cast<int>(std::min<int64_t>(tiling.group, weights.tiles() - first));
  WeightTile tiles[kMaxGroupTiles];
  for (int i = 0; i < half; ++i) {
    tiles[i] = weights.tile(pair.w_gate, first + i);
    tiles[half + i] = weights.tile(pair.w_up, first + i);
  }
  compute_product(tiling, weights, tiles, 2 * half, m, scratch, isa);

  const int64_t column = first * kTileRows;
  for (int t = 0; t < m; ++t) scratch.y[t] += column;
  GateEpilogue epilogue;
  epilogue.gate = scratch.c;
  epilogue.up = scratch.c + half * kTileRows;
  epilogue.ldc = 2 * half * kTileRows;
  epilogue.m = m;
  epilogue.columns = static_cast<int>(std::min<int64_t>(half * kTileRows, weights.n - column));
  epilogue.bias_gate = pair.bias_gate == nullptr ? nullptr : pair.bias_gate + column;
  epilogue.bias_up = pair.bias_up == nullptr ? nullptr : pair.bias_up + column;
  epilogue.activation = pair.activation;
  epilogue.y = scratch.y;
  DYNO_DISPATCH_ISA(isa, epilogue_gate(epilogue));
}

}  // namespace dyno::ops
