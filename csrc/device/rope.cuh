// Cosine and sine of position * frequency. The angle is computed and reduced in double precision: in single precision a
// position of 100,000 would leave two digits of it.
#pragma once

namespace dyno::device {

__device__ __forceinline__ float2 cos_sin(int position, float frequency, float mscale) {
  const double angle = static_cast<double>(position) * static_cast<double>(frequency);
  // Two pieces of 2 pi: the first has so few bits that its product with the number of turns is exact.
  const double turns = rint(angle * 0.15915494309189533577);
  const double reduced = fma(turns, -2.430840202602477e-10, fma(turns, -6.2831853069365025, angle));
  float sine, cosine;
  sincosf(static_cast<float>(reduced), &sine, &cosine);
  return make_float2(cosine * mscale, sine * mscale);
}

}  // namespace dyno::device
