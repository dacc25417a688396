// The part of choice_stream.cpp that choice.cpp uses, and the limits of a device for both.
#pragma once

#include <string>
#include <string_view>

#include "core/error.h"
#include "ops/compiled_chips.h"
#include "ops/matmul/cuda/choice.h"

namespace dyno::ops::cuda {

// The shared memory that every chip gives a block, for device descriptions without it.
inline int64_t shared_of(const DeviceInfo& device) {
  return device.shared_per_block_bytes > 0 ? device.shared_per_block_bytes : 48 << 10;
}

// Whether this build has code of sm_90 or later for the device, which ring.cuh needs.
inline bool has_bulk_copy(const DeviceInfo& device) {
  return device.compute_capability >= 90 &&
         kCompiledArchitectures.find(std::to_string(device.compute_capability)) != std::string_view::npos;
}

Support supports_ring(const Shape& s, const Choice& choice, const DeviceInfo& device);
Support supports_walk(const Shape& s, const Choice& choice);
// The minimum shared memory of a block of stream.
int64_t least_shared(const Shape& s, int warps, int stripes);
// The default of path matvec. A gated pair has two stripes, one of each matrix.
Choice default_stream(const Shape& s, const DeviceInfo& device);

}  // namespace dyno::ops::cuda
