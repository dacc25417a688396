// CPU kernels of linear_attention, one set per instruction set, and their inputs.
#pragma once

#include "ops/args.h"
#include "ops/isa.h"

namespace dyno::ops {

// Consecutive tokens of one value head after prepare_tokens(), which applies normalisation, gates and decays.
struct LinearTokens {
  int64_t count = 0, dk = 0, dv = 0;
  float* q = nullptr;          // [count, dk], scaled
  float* k = nullptr;          // [count, dk]
  float* step = nullptr;       // [count]: factor of u
  float* log_decay = nullptr;  // [count], or [count, dk]: at most 0
  bool channel_decay = false;
  bool delta = false;  // u = step * (v - S^T k), else step * v
  float skip = 0;
  const float* v = nullptr;  // [count, dv]
  int64_t v_stride = 0;
  float* out = nullptr;  // [count, dv]
  int64_t out_stride = 0;
  float* state = nullptr;  // [dk, dv]
};

// Floats in the arrays of a LinearTokens with `count` tokens.
inline int64_t linear_token_floats(int64_t count, int64_t dk, bool channel_decay) {
  return count * (2 * dk + 1 + (channel_decay ? dk : 1));
}
// Additional floats that a chunk needs.
inline int64_t linear_chunk_floats(int64_t count, int64_t dk, int64_t dv) { return count * (dk + dv + 2 * count + 2); }

}  // namespace dyno::ops

// clang-format off
DYNO_DECLARE_KERNELS(
    // Computes columns [begin, end) of the state, token by token; `decays` has dk floats.
    void linear_recurrent(const LinearTokens& tokens, int64_t begin, int64_t end, float* decays);
    // Computes all columns as matrix products; not for channel_decay. `scratch` has linear_chunk_floats().
    void linear_chunk(const LinearTokens& tokens, float* scratch);
)
// clang-format on
