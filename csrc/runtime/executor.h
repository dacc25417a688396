// Runs a plan's op lists for one u-batch at a time, on one device.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/error.h"
#include "ops/args.h"
#include "ops/sample/settings.h"
#include "plan/plan.h"
#include "plan/selection.h"
#include "runtime/captures.h"
#include "runtime/likely.h"
#include "runtime/window_rows.h"

namespace dyno::runtime {

// The total time of one op's launches.
struct OpTime {
  double seconds = 0;
  int64_t launches = 0;
};

// Which layers of the cache a call concerns: all, layers with the rows of all positions, or layers with only their
// window (KvLayer::window).
enum class CacheLayers : uint8_t { all, whole, windowed };
inline bool concerns(CacheLayers layers, const plan::KvLayer& kv) {
  return layers == CacheLayers::all || (layers == CacheLayers::windowed) == (kv.window > 0);
}

// A sample from one row of logits, with its own settings.
struct RowDraw {
  ops::SampleSettings settings{};
  float uniform = 0;        // in [0, 1)
  float* logits = nullptr;  // [n_vocab] on the host, or null; the row is also copied there
};

// One u-batch: tokens of one or several sequences, and the rows whose logits are wanted.
struct MicroBatch {
  std::span<const int32_t> tokens;
  std::span<const int32_t> positions;
  std::span<const ops::SequenceRun> runs;
  std::span<const int32_t> logit_rows;  // ascending
  float* logits = nullptr;              // [logit_rows, n_vocab]; null: they stay where draws() reads them
  float* hidden = nullptr;              // [logit_rows, n_embd], instead of logits: the rows that the output matrix
                                        // reads
  Likely* likely = nullptr;             // [logit_rows] on the host, instead of logits and draws; requires draws()
  // [tokens], or empty: host memory for the same row of each token, in addition to logits; null: not copied.
  std::span<float* const> rows_to{};
  // [tokens], for a draft head: the rows for NodeList::rows_in, in host memory that a GPU may read until finish().
  std::span<const float* const> rows_from{};
  // [logit_rows], or empty: a token is sampled from each row; -1: its logits are not finite. Requires draws().
  std::span<const RowDraw> row_draws{};
  int32_t* drawn = nullptr;  // [row_draws], on the host
  // Routing of experts, [moe layer][token][slot] with `routing_stride` tokens per layer; null if not requested.
  const int32_t* pinned_routing = nullptr;
  int32_t* captured_routing = nullptr;
  int64_t routing_stride = 0;
  OpTime* op_times = nullptr;  // [Plan::keys], added to; null if not requested
  // op_times within the captured graph of this u-batch instead of separate launches. PlanError if it is not captured.
  bool in_graph = false;
  // Called between two nodes, on the CPU only; may be null. If it throws, the u-batch ends at once.
  const std::function<void()>* between_nodes = nullptr;
};

// One sample of a generation: the random number in [0, 1), and the next token to feed (-1: the sampled one).
struct Draw {
  float uniform = 0;
  int32_t forced = -1;
};

// The start of a generation on the device: `token` is fed at `position` of the sequence in `slot`. `computed`: the last
// run() has fed it and left its logits on the device, and no other logits; the first step then only samples.
struct DrawStart {
  int32_t slot = 0;
  int32_t token = 0;
  int64_t position = 0;
  bool computed = false;
  ops::SampleSettings settings{};
};

// Additional streams in a captured graph, for k and v concurrent with q.
inline constexpr size_t kBesideStreams = 2;
// A captured u-batch has one token per sequence.
inline int64_t captured_tokens(const plan::Plan& plan) { return std::min(plan.ubatch, plan.context.sequences); }

// Copies of CPU weights to the main device since the session began.
struct StreamCounts {
  int64_t bytes = 0;
  int64_t matrices = 0;   // copied matrices; an expert counts as one, and any other weight as one
  int64_t predicted = 0;  // of these, copied before the routing was known
  int64_t cached = 0;     // matrices that were not copied, because the main device caches these experts
  int64_t shared = 0;     // experts that the CPU multiplied by instead
  int64_t wanted = 0;     // matrices that u-batches needed on the main device, including present ones
};

// Choices of experts, in layers with cached experts, since the session began.
struct ExpertCounts {
  int64_t chosen = 0;
  int64_t cached = 0;   // of these, computed on the main device
  int64_t swapped = 0;  // experts that replaced another one, if the cache adapts
};

class Executor {
 public:
  virtual ~Executor() = default;

  // Allocates memory for the plan's u-batch, cache and thread count. `clear_cache` forgets all positions. Throws
  // OutOfMemoryError.
  virtual void prepare(const plan::Selection& selection, int max_threads, bool clear_cache) = 0;
  // Logits, rows and captured routing are in host memory when it returns. If none was requested, it may return earlier.
  virtual void run(const MicroBatch& batch, const plan::Selection& selection, int threads) = 0;
  // Whether u-batches with a repeated shape are captured and replayed, if the device supports it. `concurrent`:
  // independent neighbouring nodes run on separate streams. Must be called before prepare().
  virtual void use_graphs(bool wanted, bool concurrent) = 0;
  // The captures since use_graphs(), for all repeated work, and the number of captures that have ever failed.
  virtual std::vector<CaptureReport> captures() const { return {}; }
  virtual int64_t capture_failures() const { return 0; }
  // The next `count` captures fail at their end: for tests.
  virtual void fail_next_captures(int) {}
  // A virtual device is lost after it has run this many more segments: for tests. Throws PlanError for other devices.
  virtual void lose(plan::DeviceId, int64_t) { throw PlanError("[device] a GPU cannot be lost on purpose"); }
  // Throws DeviceLostError if a device of the executor is lost.
  virtual void check_devices() const {}
  virtual StreamCounts stream_counts() const { return {}; }
  virtual ExpertCounts expert_counts() const { return {}; }
  // Warnings for the user about the memory that prepare() allocated.
  virtual std::vector<std::string> warnings() const { return {}; }
  // Waits for all started work.
  virtual void finish() = 0;

  // The states of one sequence, Plan::sequence_state_bytes() in the order of Plan::states, to or from host memory.
  virtual void save_state(int32_t slot, std::byte* to) = 0;
  virtual void load_state(int32_t slot, const std::byte* from) = 0;
  // Copies the first `positions` of a sequence's keys and values, and its states, over those of another sequence. For
  // windowed layers, copies only the rows `windowed`.
  virtual void copy_sequence(int32_t from, int32_t to, int64_t positions, std::span<const Rows> windowed) = 0;
  // Maps memory for positions [begin, end) of a sequence before their keys and values are written, if memory is mapped
  // on demand. Throws OutOfMemoryError.
  virtual void take(int32_t, int64_t, int64_t, CacheLayers) {}
  // Bytes of a GPU's memory that the cache uses now.
  virtual size_t gpu_cache_bytes(plan::DeviceId) const { return 0; }
  // Frees the memory of positions [begin, end) of a sequence's keys and values, if memory is mapped on demand. On a
  // GPU, rows of windowed layers are freed by a later take(), which then need not wait for the device.
  virtual void give_back(int32_t slot, int64_t begin, int64_t end, CacheLayers layers) = 0;
  // Frees such pending memory now. If there is any, waits for all started work.
  virtual void settle() {}

  // Generation without the host between tokens. A step feeds a token, samples the next one from its logits and leaves
  // it as the input of the next step. Settings, random numbers and forced tokens are on the device. draws() returns
  // whether this executor supports it; the next three functions require it.
  virtual bool draws() const { return false; }
  // Discards an earlier generation, whose steps must be complete: finish().
  virtual void begin_draws(const DrawStart&) {}
  // Starts the next step without waiting for it. `ahead`: the random number of this step and of the following steps as
  // far as they are known, so that several can be uploaded at once. Numbers must not change between calls.
  virtual void launch_draw(std::span<const Draw>, const plan::Selection&) {}
  // Waits for the oldest step that was not waited for, and returns its token.
  virtual int32_t wait_draw() { return 0; }
  // Memory for logits that run() can write directly; may outlive the executor.
  virtual std::shared_ptr<float[]> logits_memory(size_t count) {
    return std::make_shared_for_overwrite<float[]>(count);
  }
  // The same in device memory; run() accepts it too. Throws OutOfMemoryError.
  virtual std::shared_ptr<float[]> device_logits_memory(size_t count) { return logits_memory(count); }
  // Host memory for MicroBatch::rows_to and rows_from, page-locked if the device is a GPU; may outlive the executor.
  // Throws OutOfMemoryError.
  virtual std::shared_ptr<float[]> rows_memory(size_t count) { return std::make_shared_for_overwrite<float[]>(count); }
  // For a GPU that computes the whole model: a weight in its memory, which another executor there may read while this
  // executor exists. Null otherwise.
  virtual const std::byte* lendable(model::WeightId) const { return nullptr; }
};

// Nodes [0, stop) run. Routing is reported and pinned for every token, so all rows then pass the last layer's
// feed-forward part. Otherwise only rows whose logits are wanted leave its attention.
struct NodeRange {
  int32_t stop = 0;
  bool all_rows = false;
  int32_t read_behind = -1;  // the rows of all tokens are read after this node, and selected there
};
inline const plan::NodeList& list_of(const plan::Plan& plan, const MicroBatch& batch) {
  const auto tokens = static_cast<int64_t>(batch.tokens.size());
  if (batch.hidden != nullptr) return plan.hidden_list(tokens);
  return plan.list_for(tokens, static_cast<int64_t>(batch.runs.size()));
}
inline NodeRange nodes_to_run(const plan::NodeList& list, const MicroBatch& batch) {
  if (batch.hidden != nullptr) return {list.hidden_node + 1, false};
  if (!batch.rows_to.empty()) {
    // All rows pass the last norm.
    return {batch.logit_rows.empty() ? list.hidden_node + 1 : static_cast<int32_t>(list.nodes.size()), false,
            list.hidden_node};
  }
  const bool all_rows = batch.pinned_routing != nullptr || batch.captured_routing != nullptr;
  if (!batch.logit_rows.empty()) return {static_cast<int32_t>(list.nodes.size()), all_rows};
  return {all_rows ? list.head_node : list.settled_node, all_rows};
}

// Throws PlanError if a draft head did not get a row for each token.
inline void check_rows_from(const MicroBatch& batch) {
  DYNO_CHECK(PlanError, batch.rows_from.size() == batch.tokens.size(),
             "[executor] a head reads a hidden row of each of ", batch.tokens.size(), " tokens, and ",
             batch.rows_from.size(), " were given");
}

// Calls copy(first, count) for runs of tokens whose rows of `width` floats are contiguous; null rows are skipped.
template <typename Float, typename Copy>
void for_rows_together(std::span<Float* const> rows, int64_t width, const Copy& copy) {
  for (size_t first = 0, end = 0; first < rows.size(); first = end) {
    end = first + 1;
    if (rows[first] == nullptr) continue;
    while (end < rows.size() && rows[end] == rows[first] + static_cast<int64_t>(end - first) * width) ++end;
    copy(first, end - first);
  }
}

}  // namespace dyno::runtime
