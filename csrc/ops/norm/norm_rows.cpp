// RMS and layer norm of single rows.
#include "ops/norm/kernels.h"
#include "ops/simd.h"

namespace DYNO_KERNEL_NAMESPACE {
namespace {

// Four accumulators and then pairwise sums, so that rounding grows with n/64 instead of n.
// The mean of (x - centre)².
float mean_of_squares(const float* x, int64_t n, float centre = 0.0f) {
  vf sum[4] = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    for (int j = 0; j < 4; ++j) {
      const vf v = load(x + i + j * kLanes) - broadcast(centre);
      sum[j] += v * v;
    }
  }
  for (; i + kLanes <= n; i += kLanes) {
    const vf v = load(x + i) - broadcast(centre);
    sum[0] += v * v;
  }
  float tail = 0;
  for (; i < n; ++i) tail += (x[i] - centre) * (x[i] - centre);
  return (horizontal_sum((sum[0] + sum[1]) + (sum[2] + sum[3])) + tail) / static_cast<float>(n);
}

float mean(const float* x, int64_t n) {
  vf sum[4] = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    for (int j = 0; j < 4; ++j) sum[j] += load(x + i + j * kLanes);
  }
  for (; i + kLanes <= n; i += kLanes) sum[0] += load(x + i);
  float tail = 0;
  for (; i < n; ++i) tail += x[i];
  return (horizontal_sum((sum[0] + sum[1]) + (sum[2] + sum[3])) + tail) / static_cast<float>(n);
}

}  // namespace

void layer_norm_rows(const NormArgs& args, int64_t n, int64_t rows_per_token, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const int64_t token = row / rows_per_token, within = row % rows_per_token;
    const float* x = args.x + token * args.x_stride + within * n;
    const float* residual = args.residual == nullptr ? nullptr : args.residual + row * n;
    const float* weight = args.weight == nullptr ? nullptr : args.weight + within * args.weight_stride;
    float* out = args.out + token * args.out_stride + within * n;
    const float centre = mean(x, n), scale = 1.0f / __builtin_sqrtf(mean_of_squares(x, n, centre) + args.eps);
    for (int64_t i = 0; i < n; ++i) {
      float v = (x[i] - centre) * scale;
      if (weight != nullptr) v *= weight[i];
      if (args.bias != nullptr) v += args.bias[i];
      out[i] = (residual != nullptr ? v + residual[i] : v) * args.scale;
    }
  }
}

void norm_rows(const NormArgs& args, int64_t n, int64_t rows_per_token, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const int64_t token = row / rows_per_token, within = row % rows_per_token;
    const float* x = args.x + token * args.x_stride + within * n;
    const float* residual = args.residual == nullptr ? nullptr : args.residual + row * n;
    const float* weight = args.weight == nullptr ? nullptr : args.weight + within * args.weight_stride;
    float* out = args.out + token * args.out_stride + within * n;
    const float scale = 1.0f / __builtin_sqrtf(mean_of_squares(x, n) + args.eps);
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
      vf v = load(x + i) * broadcast(scale);
      if (weight != nullptr) v *= load(weight + i);
      if (residual != nullptr) v += load(residual + i);
      store(out + i, v * broadcast(args.scale));
    }
    for (; i < n; ++i) {
      float v = x[i] * scale;
      if (weight != nullptr) v *= weight[i];
      out[i] = (residual != nullptr ? v + residual[i] : v) * args.scale;
    }
  }
}

}  // namespace DYNO_KERNEL_NAMESPACE
