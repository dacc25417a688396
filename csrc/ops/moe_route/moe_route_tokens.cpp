// Routing of single tokens. The order of the steps is documented at MoeRouteDesc (ops/op.h).
#include "ops/moe_route/kernels.h"
#include "ops/simd.h"

namespace DYNO_KERNEL_NAMESPACE {
namespace {

enum { kSoftmax = 0, kSigmoid = 1, kSoftmaxSelected = 2 };  // ops::Gating

// A sum of selected probabilities below the smallest normal f16 is replaced by that number.
constexpr float kSmallestSum = 6.103515625e-5f;

// Marks an expert that cannot be chosen (any more). Real scores are made finite first, so there is always a choice.
constexpr float kNever = -__builtin_inff();

float finite_score(float x) { return x > -3.0e38f ? x : -3.0e38f; }

// out = e^(x - max x); returns the sum.
float exp_all(const float* x, float* out, int64_t count) {
  float best = kNever;
  for (int64_t i = 0; i < count; ++i) best = x[i] > best ? x[i] : best;
  float sum = 0;
  for (int64_t i = 0; i < count; i += kLanes) {
    float part[kLanes];
    const int64_t width = count - i < kLanes ? count - i : kLanes;
    for (int64_t j = 0; j < kLanes; ++j) part[j] = j < width ? x[i + j] - best : kNever;
    const vf e = exp(load(part));
    sum += horizontal_sum(e);
    store(part, e);
    for (int64_t j = 0; j < width; ++j) out[i + j] = part[j];
  }
  return sum;
}

void softmax(const float* x, float* out, int64_t count) {
  const float sum = exp_all(x, out, count);
  for (int64_t i = 0; i < count; ++i) out[i] /= sum;
}

void sigmoid(const float* x, float* out, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) {
    float part[kLanes];
    const int64_t width = count - i < kLanes ? count - i : kLanes;
    for (int64_t j = 0; j < kLanes; ++j) part[j] = j < width ? -x[i + j] : 0.0f;
    store(part, broadcast(1.0f) / (broadcast(1.0f) + exp(load(part))));
    for (int64_t j = 0; j < width; ++j) out[i + j] = part[j];
  }
}

// Index of the best score, the lower one of equals.
int64_t best_of(const float* scores, int64_t count) {
  int64_t best = 0;
  for (int64_t i = 1; i < count; ++i) best = scores[i] > scores[best] ? i : best;
  return best;
}

// Masks all experts except in the `keep` groups with the largest sums of their two best scores.
void mask_groups(float* scores, float* group_scores, int64_t experts, int64_t groups, int64_t keep) {
  const int64_t size = experts / groups;
  for (int64_t g = 0; g < groups; ++g) {
    const float* in = scores + g * size;
    const int64_t first = best_of(in, size);
    float second = kNever;
    for (int64_t i = 0; i < size; ++i) second = i != first && in[i] > second ? in[i] : second;
    group_scores[g] = finite_score(size > 1 ? in[first] + second : in[first]);
  }
  for (int64_t kept = 0; kept < keep; ++kept) group_scores[best_of(group_scores, groups)] = kNever;
  for (int64_t g = 0; g < groups; ++g) {
    if (group_scores[g] == kNever) continue;
    for (int64_t i = 0; i < size; ++i) scores[g * size + i] = kNever;
  }
}

void choose(const MoeRouteShape& shape, const float* logits, const float* probabilities, const float* bias,
            float* scores, float* group_scores, int32_t* ids) {
  // Softmax and sigmoid preserve the order, but round distinct logits to equal probabilities. So without a bias or
  // groups, the logits themselves are compared.
  const bool by_logit = shape.gating == kSoftmaxSelected || (bias == nullptr && shape.groups == 1);
  const float* base = by_logit ? logits : probabilities;
  for (int64_t e = 0; e < shape.experts; ++e) scores[e] = finite_score(bias == nullptr ? base[e] : base[e] + bias[e]);
  if (shape.groups_used < shape.groups) {
    mask_groups(scores, group_scores, shape.experts, shape.groups, shape.groups_used);
  }
  for (int64_t slot = 0; slot < shape.used; ++slot) {
    const int64_t best = best_of(scores, shape.experts);
    scores[best] = kNever;
    ids[slot] = static_cast<int32_t>(best);
  }
}

}  // namespace

void moe_route_tokens(const MoeRouteArgs& args, const MoeRouteShape& shape, int64_t begin, int64_t end,
                      float* scratch) {
  float* probabilities = scratch;
  float* scores = scratch + shape.experts;
  float* group_scores = scores + shape.experts;
  for (int64_t token = begin; token < end; ++token) {
    const float* logits = args.logits + token * shape.experts;
    int32_t* ids = args.ids + token * shape.used;
    float* weights = args.weights + token * shape.used;
    if (shape.gating == kSoftmax) softmax(logits, probabilities, shape.experts);
    if (shape.gating == kSigmoid) sigmoid(logits, probabilities, shape.experts);
    if (args.pinned != nullptr) {
      for (int64_t slot = 0; slot < shape.used; ++slot) ids[slot] = args.pinned[token * shape.used + slot];
    } else {
      choose(shape, logits, probabilities, args.selection_bias, scores, group_scores, ids);
    }
    const float* source = shape.gating == kSoftmaxSelected ? logits : probabilities;
    for (int64_t slot = 0; slot < shape.used; ++slot) weights[slot] = source[ids[slot]];
    if (shape.gating == kSoftmaxSelected) softmax(weights, weights, shape.used);
    float factor = args.scale;
    if (shape.normalize) {
      float sum = 0;
      for (int64_t slot = 0; slot < shape.used; ++slot) sum += weights[slot];
      factor /= sum > kSmallestSum ? sum : kSmallestSum;
    }
    for (int64_t slot = 0; slot < shape.used; ++slot) weights[slot] *= factor;
    if (args.expert_scale == nullptr) continue;
    for (int64_t slot = 0; slot < shape.used; ++slot) weights[slot] *= args.expert_scale[ids[slot]];
  }
}

}  // namespace DYNO_KERNEL_NAMESPACE
