// A short convolution: one vector of channels at a time, with their last inputs in registers.
#include "ops/short_conv/kernels.h"
#include "ops/simd.h"

namespace DYNO_KERNEL_NAMESPACE {
namespace {

// Loads `count` lanes of a vector; the others are zeros.
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

template <int kTaps>
void conv(const ShortConvArgs& args, const ShortConvShape& shape, int64_t begin, int64_t end) {
  const int64_t n = shape.n;
  for (int64_t c = begin; c < end; c += kLanes) {
    const int64_t count = end - c < kLanes ? end - c : kLanes;
    vf weights[kTaps];
    for (int j = 0; j < kTaps; ++j) {
      float lanes[kLanes] = {};
      for (int64_t i = 0; i < count; ++i) lanes[i] = args.w[(c + i) * kTaps + j];
      weights[j] = load(lanes);
    }
    const vf bias = args.bias == nullptr ? vf{} : load_part(args.bias + c, count);
    for (int32_t r = 0; r < args.n_runs; ++r) {
      const SequenceRun& run = args.runs[r];
      if (run.n_tokens == 0) continue;
      float* state = args.state + run.slot * ((kTaps - 1) * n) + c;
      vf inputs[kTaps];  // oldest first
      for (int j = 0; j + 1 < kTaps; ++j) inputs[j] = run.position == 0 ? vf{} : load_part(state + j * n, count);
      for (int64_t t = run.first_token; t < int64_t{run.first_token} + run.n_tokens; ++t) {
        vf u = load_part(args.x + t * args.x_stride + c, count);
        if (shape.gated) u *= load_part(args.before + t * args.before_stride + c, count);
        inputs[kTaps - 1] = u;
        vf sum = bias;
        for (int j = 0; j < kTaps; ++j) sum += weights[j] * inputs[j];
        if (shape.silu) sum = sum / (broadcast(1.0f) + exp(-sum));
        if (shape.gated) sum *= load_part(args.after + t * args.after_stride + c, count);
        store_part(args.y + t * args.y_stride + c, sum, count);
        for (int j = 0; j + 1 < kTaps; ++j) inputs[j] = inputs[j + 1];
      }
      for (int j = 0; j + 1 < kTaps; ++j) store_part(state + j * n, inputs[j], count);
    }
  }
}

}  // namespace

void conv_channels(const ShortConvArgs& args, const ShortConvShape& shape, int64_t begin, int64_t end) {
  switch (shape.taps) {
    case 2:
      return conv<2>(args, shape, begin, end);
    case 3:
      return conv<3>(args, shape, begin, end);
    case 4:
      return conv<4>(args, shape, begin, end);
    case 5:
      return conv<5>(args, shape, begin, end);
    case 6:
      return conv<6>(args, shape, begin, end);
    case 7:
      return conv<7>(args, shape, begin, end);
    default:  // kMaxTaps; supports() accepts nothing larger
      return conv<8>(args, shape, begin, end);
  }
}

}  // namespace DYNO_KERNEL_NAMESPACE
