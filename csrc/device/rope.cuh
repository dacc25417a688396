// Cosine and sine of position * frequency. The angle is computed and reduced in double precision, because single
// precision would keep only two digits at position 100,000.
#pragma once

namespace dyno::device {

// Error within 1e-7, without branches; sincosf() has a branch for angles that do not occur here.
__device__ __forceinline__ float2 cos_sin(int position, float frequency, float mscale) {
  const double angle = static_cast<double>(position) * static_cast<double>(frequency);
  // pi / 2 in two parts. The first part has so few bits that its product with the number of quarter turns is exact.
  const int quarter = __double2int_rn(angle * 0.63661977236758134308);
  const double turns = quarter;
  const double reduced = fma(turns, -6.0771005065061925e-11, fma(turns, -1.5707963267341256, angle));
  // Minimax polynomials on [-pi / 4, pi / 4].
  const auto r = static_cast<float>(reduced);
  const float x = r * r;
  const float sine = fmaf(r * x, fmaf(x, fmaf(x, -1.9515282e-4f, 8.3321603e-3f), -1.6666655e-1f), r);
  const float cosine =
      fmaf(x * x, fmaf(x, fmaf(x, 2.4433157e-5f, -1.3887316e-3f), 4.1666646e-2f), fmaf(x, -0.5f, 1.0f));
  float2 turned = (quarter & 1) != 0 ? make_float2(-sine, cosine) : make_float2(cosine, sine);
  if ((quarter & 2) != 0) turned = make_float2(-turned.x, -turned.y);
  return make_float2(turned.x * mscale, turned.y * mscale);
}

}  // namespace dyno::device
