// Rotary embedding of single tokens: one table of cosines and sines for all heads of a token.
//
// The angle position * inv_freq is computed and reduced in double precision, because single precision would keep only
// two digits at position 100,000.
#include "ops/rope/kernels.h"
#include "ops/simd.h"

namespace DYNO_KERNEL_NAMESPACE {
namespace {

inline constexpr int kDoubles = kLanes / 2;
typedef double vd __attribute__((vector_size(kDoubles * 8)));
typedef int64_t vl __attribute__((vector_size(kDoubles * 8)));

DYNO_INLINE void sincos(vd angle, vd& sine, vd& cosine) {
  // angle = q * pi/2 + r, |r| <= pi/4; the magic number rounds and leaves q in the low bits. pi/2 is split into two
  // parts; the first has 33 bits, so that its product with q is exact.
  const double magic = 6755399441055744.0;  // 1.5 * 2^52
  const vd shifted = angle * 0.63661977236758134308 + magic;
  const vd q = shifted - magic;
  const vd r = (angle - q * 1.57079632673412561417) - q * 6.07710050650619224932e-11;
  const vd z = r * r;
  vd s = z * 1.58969099521155010221e-10 + -2.50507602534068634195e-8;
  s = s * z + 2.75573137070700676789e-6;
  s = s * z + -1.98412698298579493134e-4;
  s = s * z + 8.33333333332248946124e-3;
  s = s * z + -1.66666666666666324348e-1;
  s = s * z * r + r;
  vd c = z * -1.13596475577881948265e-11 + 2.08757232129817482790e-9;
  c = c * z + -2.75573143513906633035e-7;
  c = c * z + 2.48015872894767294178e-5;
  c = c * z + -1.38888888888741095749e-3;
  c = c * z + 4.16666666666666019037e-2;
  c = c * z * z + (1.0 - 0.5 * z);
  const vl quadrant = reinterpret_cast<vl>(shifted);
  const vl odd = -(quadrant & 1);
  sine = odd ? c : s;
  cosine = odd ? s : c;
  const vl sine_sign = (quadrant & 2) << 62;
  const vl cosine_sign = ((quadrant + 1) & 2) << 62;
  sine = reinterpret_cast<vd>(reinterpret_cast<vl>(sine) ^ sine_sign);
  cosine = reinterpret_cast<vd>(reinterpret_cast<vl>(cosine) ^ cosine_sign);
}

// Cosines in table[0, half), sines in table[half, 2 half), both multiplied by mscale.
void fill_table(float* table, const float* inv_freq, int64_t half, int32_t position, float mscale) {
  for (int64_t i = 0; i < half; i += kDoubles) {
    vd angle = {};
    const int64_t count = half - i < kDoubles ? half - i : kDoubles;
    for (int64_t j = 0; j < count; ++j) angle[j] = static_cast<double>(position) * static_cast<double>(inv_freq[i + j]);
    vd sine, cosine;
    sincos(angle, sine, cosine);
    for (int64_t j = 0; j < count; ++j) {
      table[i + j] = static_cast<float>(cosine[j] * static_cast<double>(mscale));
      table[half + i + j] = static_cast<float>(sine[j] * static_cast<double>(mscale));
    }
  }
}

float position_factor(const RopeArgs& args, int32_t position) {
  if (args.position_scale == 0) return 1.0f;
  const auto steps = static_cast<double>(position / args.position_step);
  return static_cast<float>(1.0 + static_cast<double>(args.position_scale) * __builtin_log(1.0 + steps));
}

}  // namespace

void rope_tokens(const RopeArgs& args, int64_t heads, int64_t head_dim, int64_t n_rot, int64_t offset, bool neox,
                 int64_t begin, int64_t end, float* table) {
  const int64_t half = n_rot / 2;
  const float* cosines = table;
  const float* sines = table + half;
  for (int64_t token = begin; token < end; ++token) {
    const int32_t position = args.positions[token];
    fill_table(table, args.inv_freq, half, position, args.mscale * position_factor(args, position));
    for (int64_t head = 0; head < heads; ++head) {
      float* x = args.x + token * args.x_stride + head * head_dim + offset;
      if (neox) {
        int64_t i = 0;
        for (; i + kLanes <= half; i += kLanes) {
          const vf a = load(x + i), b = load(x + half + i), c = load(cosines + i), s = load(sines + i);
          store(x + i, a * c - b * s);
          store(x + half + i, a * s + b * c);
        }
        for (; i < half; ++i) {
          const float a = x[i], b = x[half + i];
          x[i] = a * cosines[i] - b * sines[i];
          x[half + i] = a * sines[i] + b * cosines[i];
        }
      } else {
        for (int64_t i = 0; i < half; ++i) {
          const float a = x[2 * i], b = x[2 * i + 1];
          x[2 * i] = a * cosines[i] - b * sines[i];
          x[2 * i + 1] = a * sines[i] + b * cosines[i];
        }
      }
    }
  }
}

}  // namespace DYNO_KERNEL_NAMESPACE
