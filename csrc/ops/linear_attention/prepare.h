// Prepares a head's inputs for the recurrence of linear attention: normalisation, gates, decays.
#pragma once

#include "ops/linear_attention/kernels.h"
#include "ops/linear_attention/linear_attention.h"

namespace dyno::ops {

// Prepares tokens [first, first + count) of the batch for value head `head` of the sequence in `slot`. `memory` has
// linear_token_floats().
LinearTokens prepare_tokens(const LinearAttentionArgs& args, const LinearAttentionDesc& desc, int64_t first,
                            int64_t count, int64_t head, int64_t slot, float* memory);

}  // namespace dyno::ops
