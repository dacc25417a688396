// Quotients and roots computed by the special function unit, with errors up to 2 units in the last place. The
// language's own versions are exact to half a unit, but call a function for operands with subnormal intermediate
// results. After a call the compiler no longer assumes that a warp's lanes are converged, and emits a second, slower
// form of every following shuffle.
#pragma once

namespace dyno::device {

// a / b for |b| below 2^126; a signed zero above it.
__device__ __forceinline__ float quotient(float a, float b) { return __fdividef(a, b); }

__device__ __forceinline__ float inverse_root(float x) { return rsqrtf(x); }

}  // namespace dyno::device
