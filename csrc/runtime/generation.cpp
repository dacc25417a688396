#include "runtime/generation.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "core/error.h"
#include "ops/sample/sample.h"
#include "runtime/session.h"

namespace dyno::runtime {
namespace {

[[noreturn]] void fail_not_finite(int64_t position) {
  throw ModelError(str_cat("[generation] the logits after position ", position,
                           " are not finite: the model's weights are damaged, or its activations overflow"));
}

}  // namespace

void check_uniform(float uniform) {
  DYNO_CHECK(PlanError, uniform >= 0.0f && uniform < 1.0f, "[generation] uniform ", uniform, " is not in [0, 1)");
}

void Generation::queue(std::span<const Draw> draws, int64_t n_vocab) {
  for (const Draw& draw : draws) {
    check_uniform(draw.uniform);
    DYNO_CHECK(PlanError, draw.forced >= -1 && draw.forced < n_vocab, "[generation] the token to feed is ", draw.forced,
               "; expected one of the ", n_vocab, " of the vocabulary, or -1 for the drawn one");
  }
  draws_.erase(draws_.begin(), draws_.begin() + static_cast<std::ptrdiff_t>(made_));
  made_ = 0;
  draws_.insert(draws_.end(), draws.begin(), draws.end());
}

Generation Session::generation(int32_t slot, std::span<const int32_t> tokens,
                               const ops::SampleSettings& settings) const {
  check_slot(slot);
  DYNO_CHECK(PlanError, !tokens.empty(),
             "[generation] tokens is empty; a generation needs at least one token to feed first");
  for (size_t i = 0; i < tokens.size(); ++i) check_token(tokens[i], static_cast<int64_t>(i), slot);
  ops::check_settings(settings);
  return {slot, tokens, settings};
}

void Session::end_steps() {
  if (steps_of_ == 0) return;
  steps_of_ = 0;
  under_way_ = 0;
  finish();
}

// A prompt runs through the normal lists. Its last token is completed by a sample, which is the step of that token; its
// position counts when the sampled token is read.
void Session::begin_steps(Generation& generation, const std::function<void()>& between) {
  end_steps();
  const int32_t slot = generation.slot();
  const std::span<const int32_t> tokens = generation.tokens();
  check_room(slot, static_cast<int64_t>(tokens.size()));  // the context may have been recreated since
  const bool prompt = tokens.size() > 1;
  begun_[static_cast<size_t>(slot)] = position(slot);
  if (prompt) {
    feed({.sequences = {{.slot = slot, .tokens = tokens}}, .between = between});
    --positions_[static_cast<size_t>(slot)];
  }
  executor_->begin_draws({.slot = slot,
                          .token = tokens.back(),
                          .position = position(slot),
                          .computed = prompt,
                          .settings = generation.settings()});
  steps_of_ = generation.number_ = ++generations_;
}

// Maps memory for the tokens to feed and, if the cache has room, for the steps ahead. It may end running steps.
void Session::take_memory_for(const Generation& generation) {
  const int32_t slot = generation.slot();
  const int64_t end = position(slot) + static_cast<int64_t>(generation.tokens().size());
  const int64_t ahead = end + static_cast<int64_t>(kStepsAhead);
  if (filled_[static_cast<size_t>(slot)] >= std::min(ahead, plan_.context.ctx)) return;
  check_room(slot, end - position(slot));
  const int64_t limit = plan_.context.cache_tokens;
  const int64_t others = std::accumulate(positions_.begin(), positions_.end(), int64_t{0}) - position(slot);
  take_memory(slot, limit > 0 && others + ahead > limit ? end : ahead);
}

int32_t Session::next_token(Generation& generation, const std::function<void()>& between) {
  check_ready();
  DYNO_CHECK(PlanError, !generation.queued().empty(), "[generation] no draw is queued; call queue() first");
  if (!draws_on_device()) return draw_on_host(generation, between);
  const int32_t slot = generation.slot();
  const int64_t before = position(slot);
  const auto launch_ahead = [&] {
    const int64_t most = std::min(filled_[static_cast<size_t>(slot)], plan_.context.ctx);
    if (windows_.active()) {
      const int64_t ahead = std::min(position(slot) + static_cast<int64_t>(kStepsAhead), most);
      executor_->take(slot, position(slot), ahead, CacheLayers::windowed);
    }
    while (under_way_ < kStepsAhead && under_way_ < generation.queued().size() &&
           position(slot) + static_cast<int64_t>(under_way_) < most) {
      executor_->launch_draw(generation.queued().subspan(under_way_), *selection_);
      ++under_way_;
    }
  };
  take_memory_for(generation);
  try {
    if (steps_of_ == 0 || steps_of_ != generation.number_) begin_steps(generation, between);
    launch_ahead();
    if (under_way_ == 0) check_room(slot, 1);  // throws
    const int32_t token = executor_->wait_draw();
    --under_way_;
    if (token < 0) {
      const int64_t last = position(slot);
      end_steps();
      fail_not_finite(last);
    }
    ++positions_[static_cast<size_t>(slot)];
    generation.accept(token);
    give_back_windows(slot);
    try {
      launch_ahead();
    } catch (...) {  // the token counts anyway; the next call starts again and gets the error
      steps_of_ = 0;
      under_way_ = 0;
    }
    return token;
  } catch (const PlanError&) {
    roll_back(slot, before);
    throw;  // no step was launched
  } catch (...) {
    steps_of_ = 0;  // the caller must see the device's error, not an error of the wait
    under_way_ = 0;
    roll_back(slot, before);  // a prompt without a sample does not count either
    throw;
  }
}

// Each token is computed on request, because running ahead gains nothing on the CPU.
int32_t Session::draw_on_host(Generation& generation, const std::function<void()>& between) {
  const int64_t n_vocab = model_.n_vocab;
  const int32_t slot = generation.slot();
  const std::vector<int64_t> before = positions_;
  const std::shared_ptr<float[]> logits = logits_memory(static_cast<size_t>(n_vocab));
  decode({.sequences = {{.slot = slot, .tokens = generation.tokens()}}, .logits = logits.get(), .between = between});
  const ops::SampleDesc desc{.m = 1, .n_vocab = n_vocab};
  const ops::Config config = ops::default_config(desc, DeviceInfo{});
  const ops::SampleSettings& settings = generation.settings();
  int32_t token = 0;
  std::vector<std::byte> scratch(ops::scratch_bytes(desc, config));
  ops::CpuContext context{.scratch = scratch.data(), .scratch_per_thread = scratch.size()};
  ops::launch(config, desc,
              ops::SampleArgs{.logits = logits.get(),
                              .uniform = &generation.queued().front().uniform,
                              .temperature = settings.temperature,
                              .top_k = settings.top_k,
                              .top_p = settings.top_p,
                              .min_p = settings.min_p,
                              .finite_only = true,
                              .out = &token},
              context);
  if (token < 0) {
    const int64_t last = position(slot) - 1;
    roll_back(before);
    fail_not_finite(last);
  }
  generation.accept(token);
  return token;
}

}  // namespace dyno::runtime
