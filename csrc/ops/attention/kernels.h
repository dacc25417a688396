// CPU kernels of attention, one set per instruction set, and their plain inputs.
//
// Query rows of one run and one kv head are numbered token by token, the heads of the group within a token: row r is
// token r / group and head kv_head * group + r % group.
#pragma once

#include "ops/args.h"
#include "ops/isa.h"

namespace dyno::ops {

enum class CacheType : int { f32, f16, bf16, q8_0 };

struct AttentionTask {
  const AttentionArgs* args;
  int64_t group, dk, dv;
  CacheType k_type, v_type;
  bool v_in_k, sinks, windowed, softcap;
  int64_t k_head_bytes, v_head_bytes;
  SequenceRun run;
  int64_t kv_head, kv_heads;  // decode: number of adjacent heads in the task
  int64_t row_begin, row_end;
  int64_t key_begin, key_end;  // positions that any row of the task may read
};

// Maximum rows of a decode task, and the keys that it processes together.
inline constexpr int64_t kDecodeRows = 8;
inline constexpr int64_t kDecodeKeys = 64;
// Floats of a partial result before its sum of values: the maximum, the total, padding.
inline constexpr int64_t kPartialHead = 16;
// Rows of the widest panel of the blocked variant.
inline constexpr int64_t kBlockedPanel = 64;

}  // namespace dyno::ops

// clang-format off
DYNO_DECLARE_KERNELS(
    // Processes all keys for rows [row_begin, row_end) and writes their outputs. `scratch` is 64-byte aligned.
    void attention_blocked(const AttentionTask& task, int64_t q_tile, int64_t k_block, float* scratch);

    // Processes keys [key_begin, key_end) for up to kDecodeRows rows of each of kv_heads heads. partial[head][row]: the
    // maximum score, the sum of e^(score - max), then from kPartialHead on the weighted sum of values. `scratch` has
    // kv_heads * kDecodeRows * (dk padded to 16 + kDecodeKeys) floats.
    void attention_decode(const AttentionTask& task, float* scratch, float* partial, int64_t head_stride,
                          int64_t row_stride);
    // Adds the `parts` partial results of one row, in order, and writes the output. `scratch` has dv padded to 16
    // floats.
    void attention_combine(const AttentionTask& task, int64_t row, const float* partial, int64_t part_stride, int64_t parts,
                           float* scratch);
)
// clang-format on
