// Kernels of kv_store, one set per instruction set.
#pragma once

#include "ops/args.h"
#include "ops/isa.h"

// clang-format off
DYNO_DECLARE_KERNELS(
    void store_row_f32(const float* x, std::byte* out, int64_t width);
    void store_row_f16(const float* x, std::byte* out, int64_t width);
    void store_row_bf16(const float* x, std::byte* out, int64_t width);
    void store_row_q8_0(const float* x, std::byte* out, int64_t width);
)
// clang-format on
