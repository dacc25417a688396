// Session: a model that is loaded, with its cache, ready to decode. The engine's whole life cycle in one noun:
// GgufFile, ModelDesc, Plan, Weights, cache and arena.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/thread_pool.h"
#include "gguf/gguf_file.h"
#include "model/model_desc.h"
#include "plan/plan.h"
#include "plan/selection.h"
#include "runtime/checkpoint.h"
#include "runtime/draft_head.h"
#include "runtime/executor.h"
#include "runtime/generation.h"
#include "runtime/row_draws.h"
#include "runtime/weights.h"
#include "runtime/window_rows.h"

namespace dyno::runtime {

#ifdef DYNO_CUDA_GRAPHS
inline constexpr bool kCudaGraphsBuilt = true;
#else
inline constexpr bool kCudaGraphsBuilt = false;
#endif

struct SessionSettings {
  int64_t ubatch = 512;
  int threads = 0;                      // for u-batches of one token a sequence; 0: all cores
  int threads_batch = 0;                // for larger ones; 0: as `threads`
  bool cuda_graphs = kCudaGraphsBuilt;  // replay captured graphs on a GPU
  plan::PathSettings paths;             // which way matrix products go on a GPU
  bool fusion = true;                   // few tokens go through the plan's fused list, where it has one
  plan::MlaMode mla_mode = plan::MlaMode::automatic;
  bool flash_attention = true;                // on a GPU
  bool graph_concurrency = kCudaGraphsBuilt;  // in captured graphs of the general list
  plan::OffloadOptions offload;               // with weights on the CPU beside a main device that streams
};

// New tokens of one sequence; they follow what its slot holds.
struct SequenceInput {
  int32_t slot = 0;
  std::span<const int32_t> tokens;
  int64_t first_row = 0;  // of LogitRows::all: no rows are wanted of the tokens before this one
};

enum class LogitRows : uint8_t { none, last, all };  // `last`: of each sequence

struct DecodeRequest {
  std::vector<SequenceInput> sequences;
  LogitRows rows = LogitRows::last;
  int64_t every = 1;  // `all`: of every so many tokens of a sequence, and of its last
  // [row_count(request), n_vocab] on the host or on the device, in the order of the sequences; null is only for rows
  // that tokens are drawn from.
  float* logits = nullptr;
  // [row_count(request), n_embd] on the host, instead of logits and draws: the rows that the output reads, after the
  // last norm. The output is not computed then.
  float* hidden = nullptr;
  // Of a head that drafts, [tokens] or empty, in rows_memory(): the row that it reads beside each token, and where its
  // own goes, the one that the output reads; null: nowhere.
  std::span<const float* const> rows_from{};
  std::span<float* const> rows_to{};
  // [row_count(request)], or empty: a token is drawn from each row where its logits are, and no logits but those asked
  // for in RowDraw come to the host.
  std::span<const RowDraw> row_draws{};
  int32_t* drawn = nullptr;                 // [row_draws]; -1: the logits are not finite
  Likely* likely = nullptr;                 // [row_count(request)], instead of logits and draws
  const int32_t* pinned_routing = nullptr;  // [moe layers, tokens, used]
  int32_t* captured_routing = nullptr;      // likewise
  OpTime* op_times = nullptr;               // [plan().keys], added to
  bool in_graph = false;                    // MicroBatch::in_graph
  // Called between two u-batches, and of a prompt between two nodes where one CPU computes all. If it throws, the
  // decode ends and the sequences are as long as before. It cannot use or change the session: check_idle().
  std::function<void()> between = nullptr;
};

// plan_only: everything is decided and can be printed, but nothing is read or allocated, and decode() throws.
enum class Loading : uint8_t { weights, plan_only };

// Every call that computes on a GPU throws DeviceLostError once this process has lost it.
class Session {
 public:
  // `device`: the CPU, its isa perhaps lowered, or one of detect_cuda(); any description for plan_only. Throws
  // GgufError, ModelError, PlanError, UnsupportedError, DeviceError, OutOfMemoryError. `lender`: a session of the same
  // file that lives longer; weights that it has on a GPU are not loaded again.
  Session(std::shared_ptr<const GgufFile> file, const plan::LoadOptions& load, const plan::ContextOptions& context,
          const SessionSettings& settings, const DeviceInfo& device, std::vector<profile::KernelEntry> kernels,
          Loading loading = Loading::weights, model::Part part = model::Part::trunk, const Session* lender = nullptr);

  const model::ModelDesc& model() const { return model_; }
  const plan::Plan& plan() const { return plan_; }
  const plan::Selection& selection() const { return *selection_; }
  const SessionSettings& settings() const { return settings_; }

  // Session settings: the weights and what the cache holds stay. A change that does not fit throws OutOfMemoryError and
  // changes nothing.
  void set(const SessionSettings& settings);
  void set_kernels(std::vector<profile::KernelEntry> kernels);
  // Context settings: the weights stay, the cache is made anew and is empty.
  void set_context(const plan::ContextOptions& context);

  void reset();
  void reset(int32_t slot);
  int64_t position(int32_t slot) const;
  // Drops the positions from `position` on. A model with recurrent state goes back only to 0 and to checkpoints that
  // somebody holds: elsewhere it throws PlanError. So does a model whose windowed layers keep their window alone, but
  // it also goes back by kWindowSlack, to where the last decode of the sequence began, and on a CPU to stops.
  void rewind(int32_t slot, int64_t position);
  // The last position up to `position` that rewind() takes.
  int64_t rewindable(int32_t slot, int64_t position) const;
  // Makes a sequence hold what another holds; if a GPU has no memory for the rows of windows, it holds nothing then.
  void copy(int32_t from, int32_t to);
  // Makes a sequence hold the first `positions` of another; keys and values are copied on their device. Throws
  // PlanError where the other could not be rewound to that position.
  void copy_prefix(int32_t from, int32_t to, int64_t positions);
  // Gives back the memory of positions that a sequence held and has forgotten, where memory is taken as needed. It is
  // taken again when they are written.
  void trim(int32_t slot);
  // Positions whose memory is taken: held, or forgotten and not given back.
  int64_t cached_positions() const;
  // Bytes of the rows that the cache keeps: of cached_positions(), but of windowed layers those that sequences hold.
  size_t cache_bytes() const;
  // Of GPUs, that the cache takes now.
  size_t gpu_cache_bytes() const;
  // Bytes that the cache takes now: of GPUs those, of the host the rows that it keeps.
  size_t cache_memory() const;
  // Where the sequence is now, with a copy of its state. Layers that keep their window alone also keep that of
  // plan().window_checkpoints(); of more, the oldest is no good any more, and spare ones go first.
  std::shared_ptr<const Checkpoint> checkpoint(int32_t slot, bool spare = false);
  // Brings the sequence of a checkpoint back to it. Throws PlanError if the sequence has forgotten positions before it,
  // or if another session made it.
  void restore(const Checkpoint& checkpoint);

  static int64_t token_count(const DecodeRequest& request);
  static int64_t row_count(const DecodeRequest& request);
  // Memory for `count` logits on the host, the best for DecodeRequest::logits; may outlive the session.
  std::shared_ptr<float[]> logits_memory(size_t count) const;
  // Likewise in the memory of the session's device. Throws OutOfMemoryError.
  std::shared_ptr<float[]> device_logits_memory(size_t count) const;
  // For DecodeRequest::rows_from and rows_to. Throws OutOfMemoryError.
  std::shared_ptr<float[]> rows_memory(size_t count) const;
  // Throws PlanError (no room left in the context, unknown slot, token out of range), or GgufError if weights are read
  // from the file and it has changed, before or meanwhile. No sequence is longer then.
  void decode(const DecodeRequest& request);

  // Loads the head that drafts tokens (MTP) beside the model; sequences that begin from now on can be asked for drafts.
  // The hidden rows of their tokens stay in the machine's memory, n_embd floats each. Throws UnsupportedError where the
  // file or the engine has no such head, or the model lies neither on CPU devices alone nor on one GPU alone. Of a
  // session without weights, only its plan is made.
  void load_draft_head();
  bool has_draft_head() const { return draft_head_ != nullptr; }
  // Its session; null without one.
  const Session* draft_session() const { return draft_head_ != nullptr ? &draft_head_->session() : nullptr; }
  // Bytes of host memory that hold hidden rows of sequences for it.
  size_t draft_row_bytes() const;
  // Forgets it, and the rows that it needs.
  void drop_draft_head() {
    check_idle();
    draft_head_.reset();
  }
  // Whether there is a head that knows all that a sequence holds, and it holds something.
  bool can_draft(int32_t slot) const;
  // Tokens of such a sequence that the head has still to read before a draft, which otherwise reads them all at once,
  // and a way to read up to so many of them now.
  int64_t draft_lacks(int32_t slot) const;
  void read_for_draft(int32_t slot, int64_t tokens);
  // Logits [texts, n_vocab] that the head gives to the token behind each, which is about to follow its sequence (by
  // slot, each given once) and is not decoded by this. `further`: each is what was drafted last for its sequence, and
  // follows the token that was given then. Throws PlanError.
  void draft(std::span<const std::pair<int32_t, int32_t>> texts, bool further, float* logits);
  // The same, but the most probable token of each, found where the logits are.
  void draft(std::span<const std::pair<int32_t, int32_t>> texts, bool further, Likely* likely);

  // Waits for everything that was started.
  void finish() const;

  StreamCounts stream_counts() const;
  ExpertCounts expert_counts() const { return executor_ != nullptr ? executor_->expert_counts() : ExpertCounts{}; }
  // Warnings for the user about the memory that this session got, and about settings that change nothing.
  std::vector<std::string> warnings() const;
  // Bytes of the CPU's weights by NUMA node, as Weights::bytes_by_node(); nothing without weights on the CPU.
  std::vector<std::map<int, size_t>> weights_by_node() const;
  // Graphs of what repeats since settings were last changed, and how many captures have failed since the session began:
  // what could not be captured runs launch by launch, slower, until a later attempt succeeds.
  std::vector<CaptureReport> captures() const;
  int64_t capture_failures() const { return executor_ != nullptr ? executor_->capture_failures() : 0; }
  // So many captures will fail at their end: for tests.
  void fail_next_captures(int count) {
    if (executor_ != nullptr) executor_->fail_next_captures(count);
  }

  // The virtual device of that name is lost after so many more segments: for tests. Throws PlanError for another one.
  void lose_device(std::string_view name, int64_t after_segments);

  // Whether tokens of a generation are drawn where the model runs, without the host in between. Not with recurrent
  // state: it cannot forget the steps that run ahead of the host. Nor beside a head, which gets the rows of each step.
  bool draws_on_device() const {
    return executor_ != nullptr && executor_->draws() && plan_.states.empty() && draft_head_ == nullptr;
  }
  // `tokens`: what is fed before the first draw, one or a whole prompt. Throws PlanError for a slot, tokens or settings
  // that cannot be.
  Generation generation(int32_t slot, std::span<const int32_t> tokens, const ops::SampleSettings& settings) const;
  // Feeds the next token of a generation, or its prompt, and draws the one behind it; the sequence is longer by what
  // was fed then. Where tokens are drawn on the device, no logits come to the host. On a device that draws, up to
  // kStepsAhead more are under way when it returns. Any other call that concerns the cache, or another generation, puts
  // an end to these: what they drew is forgotten, and the next call begins again where the sequence ends. Throws
  // PlanError without queued draws or room in the context, ModelError, with the position, when the logits to draw from
  // are not finite; generation and sequence are unchanged then. `between`: as in DecodeRequest, for a prompt.
  int32_t next_token(Generation& generation, const std::function<void()>& between = nullptr);

 private:
  void check_room(int32_t slot, int64_t tokens) const;
  // Memory for sequences as long as `ends` says by slot; for it, forgotten positions of all sequences may be given
  // back. Throws PlanError.
  void take_memory(const std::vector<int64_t>& ends);
  void take_memory(int32_t slot, int64_t end);
  // Of rows that the cache keeps, on all devices or in host memory.
  size_t bytes_of_rows(bool all_devices) const;
  // Of layers that keep their window alone: the rows that a u-batch writes, and rows that no later one reads.
  void take_windows(std::span<const ops::SequenceRun> runs);
  void give_back_windows(int32_t slot);
  // Their rows between where the sequence is now and `before`, which it has forgotten, but those that a kernel may read
  // behind a sequence (plan::kRowsBehind). That memory is free when this returns; if there is any, it waits for
  // everything that was started. A few forgotten rows stay: drafts are written anew at once.
  void give_back_forgotten(int32_t slot, int64_t before);
  void drop_excess_checkpoints();
  void take_memory_for(const Generation& generation);
  void check_token(int32_t token, int64_t index, int32_t slot) const;
  int32_t draw_on_host(Generation& generation, const std::function<void()>& between);
  // Waits for the steps under way and forgets them.
  void end_steps();
  void begin_steps(Generation& generation, const std::function<void()>& between);
  // Sets a sequence's position; checkpoints behind it are no good any more.
  void move_back(int32_t slot, int64_t position);
  // The same, and gives back what it has forgotten.
  void go_back(int32_t slot, int64_t position);
  // The same after a failure, whose error the caller shall see and no other.
  void fall_back(int32_t slot, int64_t position);
  // After a failure: no sequence is longer than before. Where state has gone on meanwhile, it is empty.
  void roll_back(const std::vector<int64_t>& before);
  void roll_back(int32_t slot, int64_t before);
  // Tokens of a request that go through the executor together.
  struct UBatch {
    std::vector<int32_t> tokens, positions, rows;  // rows: the tokens whose logits are wanted
    std::vector<ops::SequenceRun> runs;
    int64_t tokens_before = 0, rows_before = 0;  // of the request

    // Tokens [at, at + n) of a sequence that holds `position` tokens now.
    void add(const DecodeRequest& request, const SequenceInput& s, int64_t at, int64_t n, int64_t position);
    // Becomes the empty one behind it.
    void next();
  };
  // Gives back what a u-batch took that failed. `started`: states may have gone on, and are forgotten.
  void end_failed(std::span<const ops::SequenceRun> runs, bool started);
  // The part of decode() after its checks.
  void feed(const DecodeRequest& request);
  void run_ubatch(const UBatch& ubatch, const DecodeRequest& request, int threads);
  MicroBatch micro_batch(const UBatch& ubatch, const DecodeRequest& request);
  void draft(std::span<const std::pair<int32_t, int32_t>> texts, bool further, const Drafts& out);
  // Runs a u-batch and draws a token from each of its rows, or finds the likely ones, on the host where the executor
  // does not.
  void run_and_draw(MicroBatch batch, int threads);
  void check(const DecodeRequest& request) const;
  void check_slot(int32_t slot) const;
  // Throws PlanError if the sequence has lost the window before a position.
  void check_window(int32_t slot, int64_t position, const char* doing) const;
  void check_device() const;
  void check_file() const;
  // Throws PlanError without weights, OutOfMemoryError if a change has cost the executor its memory.
  void check_ready() const;
  // Throws PlanError where DecodeRequest::between asks.
  void check_idle() const;
  std::unique_ptr<DraftHead> make_draft_head() const;
  // A plan with other settings; what is lent stays so, and so does the note of the placement.
  plan::Plan planned(const plan::ContextOptions& context, const SessionSettings& settings) const;
  std::vector<model::WeightId> borrow(plan::Plan& plan) const;  // as plan::borrow_weights(); empty without a lender
  std::vector<const std::byte*> lent_weights();
  // Of the GPU of that number, that the cache has not taken yet where it takes memory by need.
  size_t promised_bytes(int ordinal) const;
  void choose();
  void place(Loading loading);
  void cache_experts();
  void prepare(bool clear_cache);
  // `change` returns the session of the head that is beside the model then, or null.
  template <typename Change>
  void replan(const Change& change, bool clear_cache);
  void plan_scratch();
  void make_executor(int threads);
  // Of every device, and of the machine. `beside`: the session that shares a GPU with this one, or null.
  void check_memory(bool weights_loaded, const Session* beside) const;

  std::shared_ptr<const GgufFile> file_;
  const Session* lender_ = nullptr;
  model::ModelDesc model_;
  plan::Plan plan_;
  SessionSettings settings_;
  std::vector<profile::KernelEntry> kernels_;
  std::unique_ptr<ThreadPool> pool_;
  std::unique_ptr<Weights> weights_;  // of the CPU; on a GPU the executor holds them
  std::unique_ptr<plan::Selection> selection_;
  std::unique_ptr<Executor> executor_;        // null for plan_only
  std::optional<std::string> failed_change_;  // why the executor lacks memory that the plan names
  bool computing_ = false;                    // between the first u-batch of a request and its last
  bool reads_file_ = false;                   // weights are pages of the file, also after they were loaded
  RowLogits row_logits_;                      // that the host draws from
  std::unique_ptr<DraftHead> draft_head_;
  std::vector<float*> draft_rows_;  // of a u-batch: where the head wants the row of each token
  std::vector<int64_t> positions_;  // per slot
  std::vector<int64_t> filled_;     // per slot: positions whose memory is taken
  std::vector<int64_t> begun_;      // per slot: where its last decode began
  WindowRows windows_;
  std::vector<std::weak_ptr<Checkpoint>> checkpoints_;
  // By device: arena, states and scratch that the executor holds, and of the CPU also the cache.
  std::vector<size_t> held_bytes_;
  uint64_t steps_of_ = 0;     // number of the generation with steps under way; 0: none
  uint64_t generations_ = 0;  // begun on the device so far
  size_t under_way_ = 0;      // steps that were launched and not waited for
};

}  // namespace dyno::runtime
