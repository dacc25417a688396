#include "runtime/row_draws.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "ops/op.h"
#include "ops/sample/sample.h"

namespace dyno::runtime {
namespace {

constexpr int64_t kRowsSortedTogether = 16;

}  // namespace

bool sorts_rows(std::span<const RowDraw> draws, int64_t n_vocab) {
  return std::any_of(draws.begin(), draws.end(),
                     [&](const RowDraw& draw) { return ops::sorts_row(draw.settings, n_vocab); });
}

int64_t rows_drawn_together(const plan::Plan& plan, const plan::Selection& selection, bool sorts) {
  const int64_t sorted = std::min(plan.context.sequences, kRowsSortedTogether);
  if (sorts) return sorted;
  const plan::Selection::Launch one = row_draw(plan, selection, 1);
  const size_t each = ops::unsorted_scratch_bytes(std::get<ops::SampleDesc>(one.desc), one.config);
  return std::clamp(static_cast<int64_t>(row_draw_scratch(plan, selection) / each), sorted, plan.context.sequences);
}

plan::Selection::Launch row_draw(const plan::Plan& plan, const plan::Selection& selection, int64_t rows) {
  return selection.launch(plan.draw.nodes.front().key, /*tokens=*/1, rows);
}

size_t row_draw_scratch(const plan::Plan& plan, const plan::Selection& selection) {
  if (plan.draw.nodes.empty()) return 0;
  size_t most = 0;
  for (int64_t rows = 1; rows <= std::min(plan.context.sequences, kRowsSortedTogether); ++rows) {
    const plan::Selection::Launch launch = row_draw(plan, selection, rows);
    most = std::max(most, ops::scratch_bytes(launch.desc, launch.config));
  }
  return (most + 255) / 256 * 256;
}

RowDrawInputs::RowDrawInputs(std::span<const RowDraw> draws) {
  settings.reserve(draws.size());
  uniforms.reserve(draws.size());
  for (const RowDraw& draw : draws) {
    settings.push_back(draw.settings);
    uniforms.push_back(draw.uniform);
  }
}

void RowLogits::fit(Executor& executor, size_t count) {
  if (count <= count_) return;
  memory_.reset();
  count_ = 0;
  memory_ = executor.logits_memory(count);
  count_ = count;
}

void draw_rows_on_host(const MicroBatch& batch, int64_t n_vocab, ThreadPool& pool, int threads) {
  const auto rows = static_cast<int64_t>(batch.row_draws.size());
  const ops::SampleDesc desc{.m = rows, .n_vocab = n_vocab};
  const ops::Config config = ops::default_config(desc, DeviceInfo{});
  const size_t each = ops::scratch_bytes(desc, config);
  std::vector<std::byte> scratch(each * static_cast<size_t>(threads));
  const RowDrawInputs inputs(batch.row_draws);
  ops::CpuContext context{.pool = &pool, .threads = threads, .scratch = scratch.data(), .scratch_per_thread = each};
  ops::launch(config, desc,
              ops::SampleArgs{.logits = batch.logits,
                              .uniform = inputs.uniforms.data(),
                              .row_settings = inputs.settings.data(),
                              .finite_only = true,
                              .out = batch.drawn},
              context);
  for (int64_t row = 0; row < rows; ++row) {
    float* to = batch.row_draws[static_cast<size_t>(row)].logits;
    if (to != nullptr) std::copy_n(batch.logits + row * n_vocab, n_vocab, to);
  }
}

// Each thread takes a part of a row: first its largest value, then the sum relative to the overall maximum.
void find_likely_on_host(const MicroBatch& batch, int64_t n_vocab, ThreadPool& pool, int threads) {
  std::vector<int64_t> places(static_cast<size_t>(threads));
  std::vector<double> sums(places.size());
  for (size_t row = 0; row < batch.logit_rows.size(); ++row) {
    const float* logits = batch.logits + static_cast<int64_t>(row) * n_vocab;
    const auto end_of = [&](int thread, int count) { return n_vocab * (thread + 1) / count; };
    pool.run(threads, [&](int thread, int count) {
      const int64_t begin = n_vocab * thread / count;
      const float* best = std::max_element(logits + begin, logits + end_of(thread, count));
      places[static_cast<size_t>(thread)] = std::min(best - logits, n_vocab - 1);
    });
    int64_t token = places.front();
    for (const int64_t place : places) token = logits[place] > logits[token] ? place : token;
    const float most = logits[token];
    pool.run(threads, [&](int thread, int count) {
      double sum = 0;
      for (int64_t i = n_vocab * thread / count; i < end_of(thread, count); ++i) {
        sum += std::isfinite(logits[i]) || logits[i] < 0 ? std::exp(logits[i] - most) : NAN;
      }
      sums[static_cast<size_t>(thread)] = sum;
    });
    const double sum = std::accumulate(sums.begin(), sums.end(), 0.0);
    // A row of only -inf has no choice either.
    const bool finite = std::isfinite(most) && std::isfinite(sum);
    batch.likely[row] = finite ? Likely{static_cast<int32_t>(token), static_cast<float>(1.0 / sum)} : Likely{};
  }
}

}  // namespace dyno::runtime
