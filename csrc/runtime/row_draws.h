// Samples from several rows of logits at once, each with its own settings: the step of a server.
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

// Whether any row needs sorted chunks (ops::sorts_row()).
bool sorts_rows(std::span<const RowDraw> draws, int64_t n_vocab);
// Rows that a GPU samples in one launch: the number of sequences, but at most 16 if it sorts rows. A sorted row needs
// scratch memory of about 20 bytes per token of the vocabulary; two hundred times as many other rows fit the same
// memory.
int64_t rows_drawn_together(const plan::Plan& plan, const plan::Selection& selection, bool sorts);
// The launch that samples from this many rows on the main device, which is a GPU.
plan::Selection::Launch row_draw(const plan::Plan& plan, const plan::Selection& selection, int64_t rows);
// Bytes of workspace that the largest of these launches needs.
size_t row_draw_scratch(const plan::Plan& plan, const plan::Selection& selection);

// Settings and random numbers of all rows as arrays, which launches read.
struct RowDrawInputs {
  explicit RowDrawInputs(std::span<const RowDraw> draws);
  std::vector<ops::SampleSettings> settings;
  std::vector<float> uniforms;
};

// Host memory for logits that the host samples from. It is allocated at the first use and grows with the number of
// rows.
class RowLogits {
 public:
  void fit(Executor& executor, size_t count);
  float* data() const { return memory_.get(); }

 private:
  std::shared_ptr<float[]> memory_;
  size_t count_ = 0;
};

// Samples the tokens of a u-batch from its logits, [row_draws, n_vocab] on the host, with rows in parallel.
void draw_rows_on_host(const MicroBatch& batch, int64_t n_vocab, ThreadPool& pool, int threads);
// Computes MicroBatch::likely from these logits.
void find_likely_on_host(const MicroBatch& batch, int64_t n_vocab, ThreadPool& pool, int threads);

}  // namespace dyno::runtime
