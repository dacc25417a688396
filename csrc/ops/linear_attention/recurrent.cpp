// Linear attention token by token, for a few columns of the state at a time, which stay in the first-level cache over
// all tokens.
#include "ops/linear_attention/kernels.h"
#include "ops/simd.h"

namespace DYNO_KERNEL_NAMESPACE {
namespace {

constexpr int kWide = 4;

vf load_part(const float* p, int64_t count) {
  if (count == kLanes) return load(p);
  float lanes[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) lanes[i] = p[i];
  return load(lanes);
}

void store_part(float* p, vf v, int64_t count) {
  if (count == kLanes) return store(p, v);
  float lanes[kLanes];
  store(lanes, v);
  for (int64_t i = 0; i < count; ++i) p[i] = lanes[i];
}

// Computes kVectors vectors of columns; the last vector has `last` columns.
template <int kVectors>
void columns(const LinearTokens& x, int64_t t, int64_t at, int64_t last, const float* decays) {
  const float *q = x.q + t * x.dk, *k = x.k + t * x.dk, *v = x.v + t * x.v_stride + at;
  float* out = x.out + t * x.out_stride + at;
  const auto lanes = [last](int j) { return j + 1 < kVectors ? int64_t{kLanes} : last; };
  vf u[kVectors];
  for (int j = 0; j < kVectors; ++j) u[j] = load_part(v + j * kLanes, lanes(j));
  vf skipped[kVectors];
  for (int j = 0; j < kVectors; ++j) skipped[j] = u[j] * broadcast(x.skip);
  if (x.delta) {
    vf known[kVectors] = {};
    for (int64_t i = 0; i < x.dk; ++i) {
      const float* row = x.state + i * x.dv + at;
      const vf key = broadcast(k[i] * decays[i]);
      for (int j = 0; j < kVectors; ++j) known[j] += key * load_part(row + j * kLanes, lanes(j));
    }
    for (int j = 0; j < kVectors; ++j) u[j] -= known[j];
  }
  for (int j = 0; j < kVectors; ++j) u[j] *= broadcast(x.step[t]);
  vf sum[kVectors] = {};
  for (int64_t i = 0; i < x.dk; ++i) {
    float* row = x.state + i * x.dv + at;
    const vf decay = broadcast(decays[i]), key = broadcast(k[i]), query = broadcast(q[i]);
    for (int j = 0; j < kVectors; ++j) {
      const vf s = decay * load_part(row + j * kLanes, lanes(j)) + key * u[j];
      store_part(row + j * kLanes, s, lanes(j));
      sum[j] += query * s;
    }
  }
  for (int j = 0; j < kVectors; ++j) store_part(out + j * kLanes, sum[j] + skipped[j], lanes(j));
}

}  // namespace

void linear_recurrent(const LinearTokens& x, int64_t begin, int64_t end, float* decays) {
  for (int64_t t = 0; t < x.count; ++t) {
    for (int64_t i = 0; i < x.dk; ++i) decays[i] = x.log_decay[x.channel_decay ? t * x.dk + i : t];
    int64_t i = 0;
    for (; i + kLanes <= x.dk; i += kLanes) store(decays + i, exp(load(decays + i)));
    for (; i < x.dk; ++i) decays[i] = exp(broadcast(decays[i]))[0];
    int64_t at = begin;
    for (; at + kWide * kLanes <= end; at += kWide * kLanes) columns<kWide>(x, t, at, kLanes, decays);
    for (; at < end; at += kLanes) columns<1>(x, t, at, end - at < kLanes ? end - at : kLanes, decays);
  }
}

}  // namespace DYNO_KERNEL_NAMESPACE
