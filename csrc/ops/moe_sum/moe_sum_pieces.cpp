// The weighted sum over a token's experts, slot by slot in order.
#include "ops/moe_sum/kernels.h"
#include "ops/simd.h"

namespace DYNO_KERNEL_NAMESPACE {

void moe_sum_pieces(const MoeSumArgs& args, int64_t n, int64_t used, int64_t pieces, int64_t begin, int64_t end) {
  for (int64_t piece = begin; piece < end; ++piece) {
    const int64_t token = piece / pieces;
    const int64_t first = piece % pieces * kMoeSumPiece;
    const int64_t last = first + kMoeSumPiece < n ? first + kMoeSumPiece : n;
    const float* mine = args.x + token * used * n;
    const float* others = args.other_x == nullptr ? nullptr : args.other_x + token * used * n;
    const int32_t* other_ids = args.other_ids == nullptr ? nullptr : args.other_ids + token * used;
    // The row of a slot; null if nothing is added.
    const auto row = [=](int64_t slot) -> const float* {
      if (other_ids == nullptr || other_ids[slot] < 0) return mine + slot * n;
      return others == nullptr ? nullptr : others + slot * n;
    };
    const float* weights = args.weights == nullptr ? nullptr : args.weights + token * used;
    const auto weight = [weights](int64_t slot) { return weights == nullptr ? 1.0f : weights[slot]; };
    const float* residual = args.residual == nullptr ? nullptr : args.residual + token * n;
    float* out = args.out + token * n;
    int64_t i = first;
    for (; i + kLanes <= last; i += kLanes) {
      vf sum = {};
      for (int64_t slot = 0; slot < used; ++slot) {
        if (const float* x = row(slot)) sum += load(x + i) * broadcast(weight(slot));
      }
      sum *= broadcast(args.scale);
      store(out + i, residual == nullptr ? sum : sum + load(residual + i));
    }
    for (; i < last; ++i) {
      float sum = 0;
      for (int64_t slot = 0; slot < used; ++slot) {
        if (const float* x = row(slot)) sum += x[i] * weight(slot);
      }
      sum *= args.scale;
      out[i] = residual == nullptr ? sum : sum + residual[i];
    }
  }
}

}  // namespace DYNO_KERNEL_NAMESPACE
