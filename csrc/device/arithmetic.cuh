// Quotients and roots by the special function unit, within 2 units in the last place. Those of the language are exact
// to half a unit, by a call for numbers whose intermediate results are subnormal; behind a call the compiler no longer
// knows that a warp's lanes go together, and every shuffle that follows gets a second, slower form.
#pragma once

namespace dyno::device {

// a / b for |b| below 2^126, a signed zero above it.
__device__ __forceinline__ float quotient(float a, float b) { return __fdividef(a, b); }

__device__ __forceinline__ float inverse_root(float x) { return rsqrtf(x); }

}  // namespace dyno::device
