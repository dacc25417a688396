// Sampler: draws tokens from logits on the host with penalties, biases, masks and all filters. A generation that needs
// only ops::SampleSettings uses the op `sample` on the device instead.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "ops/sample/settings.h"

namespace dyno::runtime {

// Applied in this order: bias, repetition, presence and frequency, DRY, mask; then top-k, typical, top-p, min-p, XTC
// and temperature. With temperature 0, the best token after the first five is chosen.
struct SamplerSettings {
  ops::SampleSettings base{};
  float typical_p = 1.0f;             // keeps the tokens whose surprise is nearest the mean, up to this mass; 1 = off
  float xtc_probability = 0.0f;       // how often the most probable tokens are excluded; 0 = off
  float xtc_threshold = 0.1f;         // tokens with at least this probability are excluded, except the least probable
                                      // one of them
  float repeat_penalty = 1.0f;        // divides positive and multiplies negative logits of recent tokens; 1 = off
  int64_t repeat_last_n = 64;         // number of last tokens (prompt and text) for repeat_penalty and DRY; -1 = all
  float presence_penalty = 0.0f;      // subtracted from the logits of tokens that were drawn
  float frequency_penalty = 0.0f;     // subtracted for each time that a token was drawn
  float dry_multiplier = 0.0f;        // penalty of a token that would continue a repeated sequence; 0 = off
  float dry_base = 1.75f;             // growth of the penalty with each token of the sequence
  int64_t dry_allowed_length = 2;     // shorter sequences, and sequences of this length, have no penalty
  std::vector<int32_t> dry_breakers;  // tokens that end a repeated sequence
  std::vector<std::pair<int32_t, float>> bias;
};

struct TokenLogprob {
  int32_t token = 0;
  float logprob = 0;
};

class Sampler {
 public:
  // Throws PlanError for an invalid setting.
  Sampler(SamplerSettings settings, int64_t n_vocab);

  // Sets the tokens of the prompt, before the first draw.
  void begin(std::span<const int32_t> prompt);
  // Draws a token and remembers it. `uniform` and `xtc_uniform` are in [0, 1). `mask`: one bit for each allowed token,
  // 32 per word; tokens past its end are not allowed. An empty mask allows all tokens. Throws PlanError if no token is
  // allowed.
  int32_t draw(std::span<const float> logits, float uniform, float xtc_uniform, std::span<const uint32_t> mask);

  int64_t n_vocab() const { return n_vocab_; }

 private:
  void penalize();
  void dry();
  int32_t filtered(float uniform, float xtc_uniform);

  SamplerSettings settings_;
  int64_t n_vocab_;
  std::vector<int32_t> tokens_;  // prompt and text
  size_t prompt_ = 0;            // number of prompt tokens
  std::vector<bool> breaks_;     // by token
  std::vector<float> logits_;
};

// Log-probabilities of the model itself, without any setting: of `token`, then of the `top` most probable tokens in
// descending order (ties: lower id first).
std::vector<TokenLogprob> logprobs(std::span<const float> logits, int32_t token, int64_t top);

}  // namespace dyno::runtime
