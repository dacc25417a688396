// Draws from several rows of logits at once, each with settings of its own: the step of a server.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/thread_pool.h"
#include "ops/sample/settings.h"
#include "plan/plan.h"
#include "plan/selection.h"
#include "runtime/executor.h"

namespace dyno::runtime {

// Whether some row has its chunks sorted (ops::sorts_row()).
bool sorts_rows(std::span<const RowDraw> draws, int64_t n_vocab);
// Rows that a GPU draws in one launch: the context's sequences, but if it sorts rows no more than 16, because such a
// row has scratch memory of about 20 bytes a token of the vocabulary. Others share this memory with two hundred times
// as many.
int64_t rows_drawn_together(const plan::Plan& plan, const plan::Selection& selection, bool sorts);
// The launch that draws from so many rows on the main device, a GPU.
plan::Selection::Launch row_draw(const plan::Plan& plan, const plan::Selection& selection, int64_t rows);
// Bytes of workspace that the largest of these launches needs.
size_t row_draw_scratch(const plan::Plan& plan, const plan::Selection& selection);

// Settings and random numbers of rows, one array each, as launches read them.
struct RowDrawInputs {
  explicit RowDrawInputs(std::span<const RowDraw> draws);
  std::vector<ops::SampleSettings> settings;
  std::vector<float> uniforms;
};

// Memory for the rows that the host draws from; made at the first draw, and larger when more rows come.
class RowLogits {
 public:
  void fit(Executor& executor, size_t count);
  float* data() const { return memory_.get(); }

 private:
  std::shared_ptr<float[]> memory_;
  size_t count_ = 0;
};

// Draws the tokens of a u-batch from its logits, [row_draws, n_vocab] on the host, rows side by side.
void draw_rows_on_host(const MicroBatch& batch, int64_t n_vocab, ThreadPool& pool, int threads);
// MicroBatch::likely of these logits.
void find_likely_on_host(const MicroBatch& batch, int64_t n_vocab, ThreadPool& pool, int threads);

}  // namespace dyno::runtime
