#include "runtime/cuda/draws.h"

#include <cuda_runtime.h>

#include "core/cuda/launch.h"
#include "device/dependent.cuh"

namespace dyno::runtime {
namespace {

// One thread. It does not let the next launch start early. Its graph has no later kernel, and kernels of the next token
// read runs before they wait (see the executor), so they must not start before these writes are complete.
__global__ void advance_draw_kernel(DrawState* state, DrawInputs inputs, volatile unsigned long long* drawn) {
  // Written at the end of the last step or uploaded after it; both before this step began.
  const int32_t at = state->at;
  const int32_t forced = state->forced[at];
  const float next = state->uniforms[at + 1 < kDrawBlock ? at + 1 : at];
  const uint32_t step = state->step;
  const int32_t position = inputs.position[0], run_position = inputs.run->position;
  device::wait_for_previous();
  const int32_t id = state->drawn;
  drawn[step % kDrawnSlots] = static_cast<unsigned long long>(step) << 32 | static_cast<uint32_t>(id);
  // Steps that were launched ahead continue after non-finite logits; their tokens are not read.
  inputs.token[0] = forced >= 0 ? forced : max(id, 0);
  inputs.position[0] = position + 1;
  inputs.run->position = run_position + 1;
  state->uniform = next;
  state->at = at + 1 < kDrawBlock ? at + 1 : at;
  state->step = step + 1;
}

}  // namespace

void advance_draw(DrawState* state, const DrawInputs& inputs, uint64_t* drawn, CUstream_st* stream) {
  launch_dependent("advance_draw", advance_draw_kernel, 1, 1, 0, stream, state, inputs,
                   reinterpret_cast<volatile unsigned long long*>(drawn));
}

}  // namespace dyno::runtime
