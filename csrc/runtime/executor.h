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

// The times of the launches of one op.
struct OpTime {
  double seconds = 0;
  int64_t launches = 0;
};

// Layers of the cache: that keep the rows of all positions, or of their window alone (KvLayer::window).
enum class CacheLayers : uint8_t { all, whole, windowed };
inline bool concerns(CacheLayers layers, const plan::KvLayer& kv) {
  return layers == CacheLayers::all || (layers == CacheLayers::windowed) == (kv.window > 0);
}

// A draw from one row of logits, with settings of its own.
struct RowDraw {
  ops::SampleSettings settings{};
  float uniform = 0;        // in [0, 1)
  float* logits = nullptr;  // [n_vocab] on the host: the row is copied there as well
};

// One u-batch: tokens of one or several sequences, and which rows' logits are wanted.
struct MicroBatch {
  std::span<const int32_t> tokens;
  std::span<const int32_t> positions;
  std::span<const ops::SequenceRun> runs;
  std::span<const int32_t> logit_rows;  // ascending
  float* logits = nullptr;              // [logit_rows, n_vocab]; null: they stay where draws() reads them
  float* hidden = nullptr;              // [logit_rows, n_embd], instead of logits: the rows that the output reads
  Likely* likely = nullptr;             // [logit_rows] on the host, instead of logits and draws; only where draws()
  // [tokens], or empty: where on the host the same row of each token goes, beside logits; null: nowhere.
  std::span<float* const> rows_to{};
  // [tokens] of a head: the row of each that NodeList::rows_in gets, in host memory that a GPU may read until finish().
  std::span<const float* const> rows_from{};
  // [logit_rows], or empty: a token is drawn from each row; -1: its logits are not finite. Only where draws().
  std::span<const RowDraw> row_draws{};
  int32_t* drawn = nullptr;  // [row_draws], on the host
  // Routing of mixtures of experts, [moe layer][token][slot] with `routing_stride` tokens a layer; null when not asked.
  const int32_t* pinned_routing = nullptr;
  int32_t* captured_routing = nullptr;
  int64_t routing_stride = 0;
  OpTime* op_times = nullptr;  // [Plan::keys], added to; null when not asked
  // op_times within the captured graph of this u-batch, not launch by launch. PlanError where nothing is captured.
  bool in_graph = false;
  // Called between two nodes, on the CPU alone; null: not at all. If it throws, the u-batch ends where it stands.
  const std::function<void()>* between_nodes = nullptr;
};

// One draw of a generation: the random number in [0, 1), and the token that is fed next whatever is drawn (-1: that).
struct Draw {
  float uniform = 0;
  int32_t forced = -1;
};

// Where a generation on the device begins: `token` is fed at `position` of the sequence in `slot`. `computed`: the last
// run() has fed it and left its logits, as the only ones, on the device; the first step only draws.
struct DrawStart {
  int32_t slot = 0;
  int32_t token = 0;
  int64_t position = 0;
  bool computed = false;
  ops::SampleSettings settings{};
};

// Streams beside the main one in a captured graph: k and v beside q.
inline constexpr size_t kBesideStreams = 2;
// A u-batch that is captured has one token a sequence.
inline int64_t captured_tokens(const plan::Plan& plan) { return std::min(plan.ubatch, plan.context.sequences); }

// Weights of the CPU that crossed to the main device, since the session began.
struct StreamCounts {
  int64_t bytes = 0;
  int64_t matrices = 0;   // an expert is one; of other weights all are one
  int64_t predicted = 0;  // of these, before the routing was known
  int64_t cached = 0;     // matrices that did not cross, because the main device has these experts in its cache
  int64_t shared = 0;     // experts that the CPU multiplied by instead
  int64_t wanted = 0;     // matrices that u-batches needed on the main device, there already or not
};

// Choices of experts in layers of which some experts are cached, since the session began.
struct ExpertCounts {
  int64_t chosen = 0;
  int64_t cached = 0;   // of these, on the main device
  int64_t swapped = 0;  // experts that took the place of another one, where the cache adapts
};

class Executor {
 public:
  virtual ~Executor() = default;

  // Re-allocates what the plan's u-batch, cache or thread count needs. `clear_cache` forgets all positions. Throws
  // OutOfMemoryError.
  virtual void prepare(const plan::Selection& selection, int max_threads, bool clear_cache) = 0;
  // Logits, rows and captured routing are in host memory when it returns; without any it may return earlier.
  virtual void run(const MicroBatch& batch, const plan::Selection& selection, int threads) = 0;
  // Whether u-batches whose shape repeats are captured and replayed, where the device can; `concurrent`: nodes that
  // stand beside each other on streams of their own. To be said before prepare().
  virtual void use_graphs(bool wanted, bool concurrent) = 0;
  // The result of use_graphs() for all work that repeats, and how many captures have ever failed.
  virtual std::vector<CaptureReport> captures() const { return {}; }
  virtual int64_t capture_failures() const { return 0; }
  // So many captures will fail at their end: for tests.
  virtual void fail_next_captures(int) {}
  // A virtual device is lost after so many more segments: for tests. Throws PlanError for any other device.
  virtual void lose(plan::DeviceId, int64_t) { throw PlanError("[device] a GPU cannot be lost on purpose"); }
  // Throws DeviceLostError once a device of the executor is lost.
  virtual void check_devices() const {}
  virtual StreamCounts stream_counts() const { return {}; }
  virtual ExpertCounts expert_counts() const { return {}; }
  // Warnings for the user about the memory that prepare() got.
  virtual std::vector<std::string> warnings() const { return {}; }
  // Waits for everything that was started.
  virtual void finish() = 0;

  // The states of one sequence, Plan::sequence_state_bytes() in the order of Plan::states, to or from host memory.
  virtual void save_state(int32_t slot, std::byte* to) = 0;
  virtual void load_state(int32_t slot, const std::byte* from) = 0;
  // The first `positions` of a sequence's keys and values, and its states, over those of another; of windowed layers
  // only the rows `windowed`.
  virtual void copy_sequence(int32_t from, int32_t to, int64_t positions, std::span<const Rows> windowed) = 0;
  // Positions [begin, end) of a sequence's keys and values are about to be written: takes memory for them, where that
  // does not come by itself. Throws OutOfMemoryError.
  virtual void take(int32_t, int64_t, int64_t, CacheLayers) {}
  // Bytes of a GPU that the cache takes now.
  virtual size_t gpu_cache_bytes(plan::DeviceId) const { return 0; }
  // Gives back the memory of positions [begin, end) of a sequence's keys and values, where memory is taken as it is
  // written. On a GPU, rows of windowed layers leave with a later take(), which need not wait for the device then.
  virtual void give_back(int32_t slot, int64_t begin, int64_t end, CacheLayers layers) = 0;
  // Memory that is to leave does so now. If there is any, this waits for everything that was started.
  virtual void settle() {}

  // Generation without the host between tokens. A step feeds a token, draws the next one from its logits and leaves
  // that as the input of the next step; settings, random numbers and tokens to feed lie where the steps are computed.
  // Whether this executor can; the three functions below are only for one that does.
  virtual bool draws() const { return false; }
  // Forgets an earlier generation, of which no step may be under way: finish().
  virtual void begin_draws(const DrawStart&) {}
  // Starts the next step and does not wait for it. `ahead`: this step's draw and those behind it as far as they are
  // known, so that several can be uploaded at once; what was given once must be given again.
  virtual void launch_draw(std::span<const Draw>, const plan::Selection&) {}
  // Waits for the first step that was not waited for: the token that it drew.
  virtual int32_t wait_draw() { return 0; }
  // Memory for logits where run() puts them without a detour; may outlive the executor.
  virtual std::shared_ptr<float[]> logits_memory(size_t count) {
    return std::make_shared_for_overwrite<float[]>(count);
  }
  // The same in the memory of the device; run() writes there too. Throws OutOfMemoryError.
  virtual std::shared_ptr<float[]> device_logits_memory(size_t count) { return logits_memory(count); }
  // Memory of the host for MicroBatch::rows_to and rows_from, page-locked where the device is a GPU; may outlive the
  // executor. Throws OutOfMemoryError.
  virtual std::shared_ptr<float[]> rows_memory(size_t count) { return std::make_shared_for_overwrite<float[]>(count); }
  // Of a GPU that computes all: a weight in its memory, which another executor there may read; it stays as long as this
  // executor. Elsewhere null.
  virtual const std::byte* lendable(model::WeightId) const { return nullptr; }
};

// Nodes [0, stop) are run. Routing is reported and pinned for every token, so then all rows go through the last layer's
// feed-forward; else only those whose logits are wanted leave its attention.
struct NodeRange {
  int32_t stop = 0;
  bool all_rows = false;
  int32_t read_behind = -1;  // the rows of all tokens are read behind this node, and selected there instead
};
inline const plan::NodeList& list_of(const plan::Plan& plan, const MicroBatch& batch) {
  const auto tokens = static_cast<int64_t>(batch.tokens.size());
  if (batch.hidden != nullptr) return plan.hidden_list(tokens);
  return plan.list_for(tokens, static_cast<int64_t>(batch.runs.size()));
}
inline NodeRange nodes_to_run(const plan::NodeList& list, const MicroBatch& batch) {
  if (batch.hidden != nullptr) return {list.hidden_node + 1, false};
  if (!batch.rows_to.empty()) {
    // All rows go through the last norm.
    return {batch.logit_rows.empty() ? list.hidden_node + 1 : static_cast<int32_t>(list.nodes.size()), false,
            list.hidden_node};
  }
  const bool all_rows = batch.pinned_routing != nullptr || batch.captured_routing != nullptr;
  if (!batch.logit_rows.empty()) return {static_cast<int32_t>(list.nodes.size()), all_rows};
  return {all_rows ? list.head_node : list.settled_node, all_rows};
}

// Throws PlanError where a head was not given a row of each token.
inline void check_rows_from(const MicroBatch& batch) {
  DYNO_CHECK(PlanError, batch.rows_from.size() == batch.tokens.size(),
             "[executor] a head reads a hidden row of each of ", batch.tokens.size(), " tokens, and ",
             batch.rows_from.size(), " were given");
}

// Calls copy(first, count) for the tokens whose rows of `width` floats stand behind each other; a null row is left out.
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
