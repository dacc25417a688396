// The part of a generation in device memory: the launches of one token read it and leave it ready for the next, so
// that the same graph goes from token to token without the host.
#pragma once

#include <cstdint>

#include "ops/args.h"
#include "ops/sample/settings.h"

struct CUstream_st;

namespace dyno::runtime {

// Draws that are uploaded at once.
inline constexpr int32_t kDrawBlock = 64;
// Slots of drawn tokens on the host; more than there are steps under way.
inline constexpr uint32_t kDrawnSlots = 8;

struct DrawState {
  ops::SampleSettings settings{};
  uint32_t step = 0;  // number of the next one to end
  int32_t drawn = 0;  // what sampling gives; -1: its logits were not finite
  // From here on as uploaded for every block.
  float uniform = 0;  // of the next draw
  int32_t at = 0;     // which of the block it is
  float uniforms[kDrawBlock] = {};
  int32_t forced[kDrawBlock] = {};  // fed instead of what is drawn; -1: nothing
};

// Where a step takes its input from.
struct DrawInputs {
  int32_t* token = nullptr;
  int32_t* position = nullptr;
  ops::SequenceRun* run = nullptr;
};

// Ends a step: feeds what was drawn (or is forced) and moves on by one position and one draw. `drawn`: kDrawnSlots in
// page-locked memory; that of the step gets its number above and the token below, in one piece, so that the host sees
// both or neither.
void advance_draw(DrawState* state, const DrawInputs& inputs, uint64_t* drawn, CUstream_st* stream);

}  // namespace dyno::runtime
