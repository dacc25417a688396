// The settings of sampling as one value. SampleArgs has them for each launch; a generation keeps them.
#pragma once

#include "ops/args.h"

namespace dyno::ops {

struct SampleSettings {
  float temperature = 1.0f;  // 0 = greedy
  int32_t top_k = 0;         // 0 = off
  float top_p = 1.0f;        // 1 = off
  float min_p = 0.0f;        // 0 = off
};

constexpr SampleSettings settings_of(const SampleArgs& args, int64_t row) {
  if (args.row_settings != nullptr) return args.row_settings[row];
  return {args.temperature, args.top_k, args.top_p, args.min_p};
}

// Whether top-p reads a whole row of `n` logits, so that a GPU sorts its chunks.
constexpr bool sorts_row(const SampleSettings& settings, int64_t n) {
  const bool by_count = settings.top_k > 0 && settings.top_k < n;
  return settings.temperature > 0.0f && !by_count && settings.top_p < 1.0f;
}

}  // namespace dyno::ops
