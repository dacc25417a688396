// Frequencies of rotary embeddings with context-extension rules. Kernels multiply positions by this table.
#include <algorithm>
#include <cmath>
#include <numbers>

#include "plan/plan.h"

namespace dyno::plan {
namespace {

// The rotary dimension that completes `rotations` turns over the original context (YaRN, arXiv:2309.00071, section
// 3.2).
double yarn_dimension(double rotations, const model::RopeSpec& rope) {
  return static_cast<double>(rope.n_rot) *
         std::log(static_cast<double>(rope.original_context) / (rotations * 2.0 * std::numbers::pi)) /
         (2.0 * std::log(rope.base));
}

}  // namespace

RopeTable make_rope_table(const model::RopeSpec& rope, const float* frequency_factors) {
  RopeTable table;
  table.position_scale = static_cast<float>(rope.position_scale);
  table.position_step = rope.position_step;
  const int64_t half = rope.n_rot / 2;
  table.inv_freq.resize(static_cast<size_t>(half));
  double low = 0;
  double high = 0;
  double magnitude = rope.scaling == model::RopeScaling::still ? 1.0 : rope.attention_factor;
  if (rope.scaling == model::RopeScaling::yarn) {
    low = std::max(0.0, std::floor(yarn_dimension(rope.beta_fast, rope)));
    high = std::min(static_cast<double>(rope.n_rot - 1), std::ceil(yarn_dimension(rope.beta_slow, rope)));
    if (rope.yarn_scales_cos_sin) magnitude *= 1.0 + 0.1 * std::log(rope.factor);
  }
  table.mscale = static_cast<float>(magnitude);
  for (int64_t i = 0; i < half; ++i) {
    double freq = std::pow(rope.base, -2.0 * static_cast<double>(i) / static_cast<double>(rope.n_rot));
    if (frequency_factors != nullptr) freq /= static_cast<double>(frequency_factors[i]);
    switch (rope.scaling) {
      case model::RopeScaling::none:
        break;
      case model::RopeScaling::linear:
        freq /= rope.factor;
        break;
      case model::RopeScaling::still:
        freq = 0;
        break;
      case model::RopeScaling::yarn: {
        // Fast dimensions keep their frequency, slow ones are interpolated, and a ramp connects them.
        const double ramp = std::clamp((static_cast<double>(i) - low) / std::max(0.001, high - low), 0.0, 1.0);
        freq = freq / rope.factor * ramp + freq * (1.0 - ramp);
        break;
      }
    }
    table.inv_freq[static_cast<size_t>(i)] = static_cast<float>(freq);
  }
  return table;
}

}  // namespace dyno::plan
