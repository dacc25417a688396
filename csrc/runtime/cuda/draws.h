// The state of a generation in device memory. The launches of one token read it and prepare it for the next token, so
// the same graph runs for token after token without the host.
#pragma once

#include <cstdint>

#include "ops/args.h"
#include "ops/sample/settings.h"

struct CUstream_st;

namespace dyno::runtime {

// Number of samples that are uploaded at once.
inline constexpr int32_t kDrawBlock = 64;
// Slots for sampled tokens on the host; more than the steps that may be running.
inline constexpr uint32_t kDrawnSlots = 8;

struct DrawState {
  ops::SampleSettings settings{};
  uint32_t step = 0;  // number of the next step to end
  int32_t drawn = 0;  // the sampled token; -1: its logits were not finite
  // The following members are uploaded for every block.
  float uniform = 0;  // random number of the next sample
  int32_t at = 0;     // index of the next sample in the block
  float uniforms[kDrawBlock] = {};
  int32_t forced[kDrawBlock] = {};  // token to feed instead of the sampled one; -1: none
};

// Addresses of a step's inputs.
struct DrawInputs {
  int32_t* token = nullptr;
  int32_t* position = nullptr;
  ops::SequenceRun* run = nullptr;
};

// Ends a step: feeds the sampled (or forced) token, and advances position and sample by one. `drawn`: kDrawnSlots words
// in page-locked memory. The word of the step gets its number in the upper half and the token in the lower half, in one
// store, so that the host sees both or neither.
void advance_draw(DrawState* state, const DrawInputs& inputs, uint64_t* drawn, CUstream_st* stream);

}  // namespace dyno::runtime
