// Reads quantised activations (ops/copy/act_q8.h) in a kernel.
#pragma once

#include <cstring>

#include "ops/copy/act_q8.h"
#include "ops/isa.h"

namespace DYNO_KERNEL_NAMESPACE {

// One token row, from column `k0` on.
struct ActRow {
  const uint8_t* q;
  const uint8_t* d;    // f32, one per 32 values
  const uint8_t* sum;  // int16, one per 16 values

  ActRow() = default;
  ActRow(const void* row, int64_t k, int64_t k0) {
    const uint8_t* base = static_cast<const uint8_t*>(row);
    q = base + k0;
    d = base + k + k0 / 32 * 4;
    sum = base + k + k / 32 * 4 + k0 / 16 * 2;
  }
  float scale(int64_t block) const {
    float x;
    std::memcpy(&x, d + 4 * block, 4);
    return x;
  }
  int sum16(int64_t group) const {
    int16_t x;
    std::memcpy(&x, sum + 2 * group, 2);
    return x;
  }
};

}  // namespace DYNO_KERNEL_NAMESPACE
