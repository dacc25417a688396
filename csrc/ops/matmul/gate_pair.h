// Host code of the gated pair of products, shared by up_gate and moe_up_gate.
#pragma once

#include "ops/matmul/product.h"

namespace dyno::ops {

struct GatePair {
  const void* w_gate = nullptr;
  const void* w_up = nullptr;
  const float* bias_gate = nullptr;
  const float* bias_up = nullptr;
  Activation activation = Activation::silu;
};

// Multiplies tiles [first, first + tiling.group) of both matrices by the m token rows in scratch.rows. The rows of
// scratch.y start at column 0. The products are adjacent in scratch.c: gate tiles, then up tiles.
void run_gate_pair(const Tiling& tiling, const Weights& weights, const GatePair& pair, int64_t first, int m,
                   const ProductScratch& scratch, CpuIsa isa);

}  // namespace dyno::ops
