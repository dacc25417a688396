// Session: a loaded model with its cache, ready to decode. It owns all stages: GgufFile, ModelDesc, Plan, Weights,
// cache and arena.
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
  int threads = 0;                      // for u-batches of one token per sequence; 0: all cores
  int threads_batch = 0;                // for larger u-batches; 0: as `threads`
  bool cuda_graphs = kCudaGraphsBuilt;  // replay captured graphs on a GPU
  plan::PathSettings paths;             // the path of matrix products on a GPU
  bool fusion = true;                   // use the plan's fused list for few tokens, if it has one
  plan::MlaMode mla_mode = plan::MlaMode::automatic;
  bool flash_attention = true;                // on a GPU
  bool graph_concurrency = kCudaGraphsBuilt;  // in captured graphs of the general list
  plan::OffloadOptions offload;               // for weights on the CPU, if the main device streams
};

// New tokens of one sequence, appended to its slot.
struct SequenceInput {
  int32_t slot = 0;
  std::span<const int32_t> tokens;
  int64_t first_row = 0;  // for LogitRows::all: no rows of the tokens before this one are wanted
};

enum class LogitRows : uint8_t { none, last, all };  // `last`: of each sequence

struct DecodeRequest {
  std::vector<SequenceInput> sequences;
  LogitRows rows = LogitRows::last;
  int64_t every = 1;  // for `all`: every this many tokens of a sequence, and its last one
  // [row_count(request), n_vocab] on the host or on the device, in the order of the sequences. Null is allowed only if
  // tokens are sampled from the rows.
  float* logits = nullptr;
  // [row_count(request), n_embd] on the host, instead of logits and draws: the rows that the output matrix reads, after
  // the last norm. The output is then not computed.
  float* hidden = nullptr;
  // For a draft head, [tokens] or empty, in rows_memory(): the row that it reads for each token; and the memory for the
  // row that the output matrix reads; null: not copied.
  std::span<const float* const> rows_from{};
  std::span<float* const> rows_to{};
  // [row_count(request)], or empty: a token is sampled from each row on the device of the logits. Only logits that
  // RowDraw requests are copied to the host.
  std::span<const RowDraw> row_draws{};
  int32_t* drawn = nullptr;                 // [row_draws]; -1: the logits are not finite
  Likely* likely = nullptr;                 // [row_count(request)], instead of logits and draws
  const int32_t* pinned_routing = nullptr;  // [moe layers, tokens, used]
  int32_t* captured_routing = nullptr;      // [moe layers, tokens, used]
  OpTime* op_times = nullptr;               // [plan().keys], added to
  bool in_graph = false;                    // MicroBatch::in_graph
  // Called between two u-batches; in a prompt that one CPU computes, also between two nodes. If it throws, the decode
  // ends and the sequences keep their previous length. It must not use or change the session: check_idle().
  std::function<void()> between = nullptr;
};

// plan_only: everything is decided and can be printed, but nothing is read or allocated, and decode() throws.
enum class Loading : uint8_t { weights, plan_only };

// Every call that computes on a GPU throws DeviceLostError if this process has lost it.
class Session {
 public:
  // `device`: the CPU (possibly with a lower isa) or one of detect_cuda(); any description for plan_only. `lender`: a
  // session of the same file that outlives this one; weights that it has on a GPU are not loaded again. Throws
  // GgufError, ModelError, PlanError, UnsupportedError, DeviceError, OutOfMemoryError.
  Session(std::shared_ptr<const GgufFile> file, const plan::LoadOptions& load, const plan::ContextOptions& context,
          const SessionSettings& settings, const DeviceInfo& device, std::vector<profile::KernelEntry> kernels,
          Loading loading = Loading::weights, model::Part part = model::Part::trunk, const Session* lender = nullptr);

  const model::ModelDesc& model() const { return model_; }
  const plan::Plan& plan() const { return plan_; }
  const plan::Selection& selection() const { return *selection_; }
  const SessionSettings& settings() const { return settings_; }

  // Changes session settings; the weights and the cached positions stay. A change that does not fit throws
  // OutOfMemoryError and has no effect.
  void set(const SessionSettings& settings);
  void set_kernels(std::vector<profile::KernelEntry> kernels);
  // Changes context settings: the weights stay, and the cache is recreated empty.
  void set_context(const plan::ContextOptions& context);

  void reset();
  void reset(int32_t slot);
  int64_t position(int32_t slot) const;
  // Drops the positions from `position` on. A model with recurrent state can return only to 0 and to existing
  // checkpoints; other positions throw PlanError. If windowed layers keep only their window, the same holds, but the
  // sequence can also go back by kWindowSlack, to the start of its last decode, and on a CPU to stops.
  void rewind(int32_t slot, int64_t position);
  // The last position up to `position` that rewind() accepts.
  int64_t rewindable(int32_t slot, int64_t position) const;
  // Copies all positions of a sequence to another. If a GPU has no memory for the rows of windows, the target is empty.
  void copy(int32_t from, int32_t to);
  // Copies the first `positions` of a sequence to another; keys and values are copied on their device. Throws PlanError
  // if the source could not be rewound to that position.
  void copy_prefix(int32_t from, int32_t to, int64_t positions);
  // Frees the memory of positions that a sequence has forgotten, if memory is mapped on demand. It is mapped again when
  // they are written.
  void trim(int32_t slot);
  // Positions whose memory is allocated: held positions, and forgotten ones that were not freed.
  int64_t cached_positions() const;
  // Bytes of the rows in the cache: for cached_positions(); for windowed layers, only the rows that sequences hold.
  size_t cache_bytes() const;
  // Bytes of GPU memory that the cache uses now.
  size_t gpu_cache_bytes() const;
  // Bytes that the cache uses now: gpu_cache_bytes(), plus the rows in host memory.
  size_t cache_memory() const;
  // The current position of the sequence, with a copy of its state. Layers that keep only their window also keep the
  // windows of plan().window_checkpoints() checkpoints. Beyond this number the oldest one becomes invalid, spare ones
  // first.
  std::shared_ptr<const Checkpoint> checkpoint(int32_t slot, bool spare = false);
  // Returns the checkpoint's sequence to the checkpoint. Throws PlanError if the sequence has forgotten positions
  // before it, or if another session created it.
  void restore(const Checkpoint& checkpoint);

  static int64_t token_count(const DecodeRequest& request);
  static int64_t row_count(const DecodeRequest& request);
  // Host memory for `count` logits, the fastest for DecodeRequest::logits; may outlive the session.
  std::shared_ptr<float[]> logits_memory(size_t count) const;
  // The same in the memory of the session's device. Throws OutOfMemoryError.
  std::shared_ptr<float[]> device_logits_memory(size_t count) const;
  // Memory for DecodeRequest::rows_from and rows_to. Throws OutOfMemoryError.
  std::shared_ptr<float[]> rows_memory(size_t count) const;
  // Throws PlanError (context full, unknown slot, token out of range), or GgufError if weights are read from the file
  // and the file has changed before or during the call. After an error, every sequence has its previous length.
  void decode(const DecodeRequest& request);

  // Loads the draft head (MTP) of the model. Drafts are possible for sequences that begin after this call. The hidden
  // rows of their tokens are kept in host memory, n_embd floats each. Throws UnsupportedError if the file or the engine
  // has no such head, or if the model is neither entirely on CPU devices nor entirely on one GPU. In a session without
  // weights, only the head's plan is built.
  void load_draft_head();
  bool has_draft_head() const { return draft_head_ != nullptr; }
  // The head's session; null if there is no head.
  const Session* draft_session() const { return draft_head_ != nullptr ? &draft_head_->session() : nullptr; }
  // Bytes of host memory for the hidden rows of sequences.
  size_t draft_row_bytes() const;
  // Unloads the head and frees its hidden rows.
  void drop_draft_head() {
    check_idle();
    draft_head_.reset();
  }
  // Whether a head has all hidden rows of a sequence, and the sequence is not empty.
  bool can_draft(int32_t slot) const;
  // draft_lacks(): tokens of such a sequence that the head has not read yet; a draft would read them all at once.
  // read_for_draft(): reads up to `tokens` of them now.
  int64_t draft_lacks(int32_t slot) const;
  void read_for_draft(int32_t slot, int64_t tokens);
  // Logits [texts, n_vocab] of the token after each text. A text is a slot (at most once) and the token that will
  // follow its sequence; that token is not decoded. `further`: the token is the last draft of the sequence, and follows
  // the token given then. Throws PlanError.
  void draft(std::span<const std::pair<int32_t, int32_t>> texts, bool further, float* logits);
  // The same, but returns the most probable token of each text, computed on the device of the logits.
  void draft(std::span<const std::pair<int32_t, int32_t>> texts, bool further, Likely* likely);

  // Waits for all started work.
  void finish() const;

  StreamCounts stream_counts() const;
  ExpertCounts expert_counts() const { return executor_ != nullptr ? executor_->expert_counts() : ExpertCounts{}; }
  // Warnings for the user about the memory of this session, and about settings without effect.
  std::vector<std::string> warnings() const;
  // Bytes of the CPU's weights by NUMA node, as Weights::bytes_by_node(); empty if the CPU has no weights.
  std::vector<std::map<int, size_t>> weights_by_node() const;
  // The captures of repeated work since the last change of settings, and the number of captures that have failed since
  // the session began. Work that could not be captured runs launch by launch, which is slower, until a later attempt
  // succeeds.
  std::vector<CaptureReport> captures() const;
  int64_t capture_failures() const { return executor_ != nullptr ? executor_->capture_failures() : 0; }
  // The next `count` captures fail at their end: for tests.
  void fail_next_captures(int count) {
    if (executor_ != nullptr) executor_->fail_next_captures(count);
  }

  // The virtual device with that name is lost after this many more segments: for tests. Throws PlanError for other
  // devices.
  void lose_device(std::string_view name, int64_t after_segments);

  // Whether the device samples the tokens of a generation without the host in between. Not with recurrent state, which
  // cannot forget steps that run ahead of the host. Not with a draft head, which needs the rows of each step.
  bool draws_on_device() const {
    return executor_ != nullptr && executor_->draws() && plan_.states.empty() && draft_head_ == nullptr;
  }
  // `tokens`: the tokens to feed before the first sample, one or a whole prompt. Throws PlanError for an invalid slot,
  // token or setting.
  Generation generation(int32_t slot, std::span<const int32_t> tokens, const ops::SampleSettings& settings) const;
  // Feeds the next token of a generation, or its prompt, and samples the token after it. The fed tokens are appended to
  // the sequence. If the device samples, no logits are copied to the host, and up to kStepsAhead more steps may be
  // running when the call returns. Any other call that concerns the cache, or another generation, ends these steps and
  // discards their tokens; the next call continues at the end of the sequence.
  // Throws PlanError without queued samples or room in the context, and ModelError, with the position, if the logits
  // are not finite; generation and sequence are then unchanged. `between`: as in DecodeRequest, for a prompt.
  int32_t next_token(Generation& generation, const std::function<void()>& between = nullptr);

 private:
  void check_room(int32_t slot, int64_t tokens) const;
  // Maps memory for sequences of the lengths `ends` (by slot). Forgotten positions of all sequences may be freed for
  // it. Throws PlanError.
  void take_memory(const std::vector<int64_t>& ends);
  void take_memory(int32_t slot, int64_t end);
  // Bytes of the rows in the cache, on all devices or only in host memory.
  size_t bytes_of_rows(bool all_devices) const;
  // For layers that keep only their window: maps the rows that a u-batch writes, and frees rows that no later one
  // reads.
  void take_windows(std::span<const ops::SequenceRun> runs);
  void give_back_windows(int32_t slot);
  // Frees the rows between the sequence's position and `before`, which it has forgotten, except rows that a kernel may
  // read after the end of a sequence (plan::kRowsBehind). The memory is free when this returns; if there is any, the
  // call waits for all started work. A few forgotten rows are not freed, because drafts are soon written again.
  void give_back_forgotten(int32_t slot, int64_t before);
  void drop_excess_checkpoints();
  void take_memory_for(const Generation& generation);
  void check_token(int32_t token, int64_t index, int32_t slot) const;
  int32_t draw_on_host(Generation& generation, const std::function<void()>& between);
  // Waits for the steps that are running and discards them.
  void end_steps();
  void begin_steps(Generation& generation, const std::function<void()>& between);
  // Sets a sequence's position; checkpoints after it become invalid.
  void move_back(int32_t slot, int64_t position);
  // move_back(), and frees what the sequence has forgotten.
  void go_back(int32_t slot, int64_t position);
  // The same after a failure; suppresses further errors, so that the caller sees the first one.
  void fall_back(int32_t slot, int64_t position);
  // After a failure: restores all positions. A sequence whose state has advanced becomes empty.
  void roll_back(const std::vector<int64_t>& before);
  void roll_back(int32_t slot, int64_t before);
  // Tokens of a request that the executor runs together.
  struct UBatch {
    std::vector<int32_t> tokens, positions, rows;  // rows: the tokens whose logits are wanted
    std::vector<ops::SequenceRun> runs;
    int64_t tokens_before = 0, rows_before = 0;  // of the request

    // Adds tokens [at, at + n) of a sequence that has `position` tokens now.
    void add(const DecodeRequest& request, const SequenceInput& s, int64_t at, int64_t n, int64_t position);
    // Becomes the empty u-batch after this one.
    void next();
  };
  // Frees the memory that a failed u-batch took. `started`: states may have advanced, so they are reset.
  void end_failed(std::span<const ops::SequenceRun> runs, bool started);
  // decode() after its checks.
  void feed(const DecodeRequest& request);
  void run_ubatch(const UBatch& ubatch, const DecodeRequest& request, int threads);
  MicroBatch micro_batch(const UBatch& ubatch, const DecodeRequest& request);
  void draft(std::span<const std::pair<int32_t, int32_t>> texts, bool further, const Drafts& out);
  // Runs a u-batch, then samples a token from each of its rows or finds the likely ones. The host does this if the
  // executor cannot.
  void run_and_draw(MicroBatch batch, int threads);
  void check(const DecodeRequest& request) const;
  void check_slot(int32_t slot) const;
  // Throws PlanError if the sequence has lost the window before a position.
  void check_window(int32_t slot, int64_t position, const char* doing) const;
  void check_device() const;
  void check_file() const;
  // Throws PlanError without weights, or OutOfMemoryError if a failed change left the executor without memory.
  void check_ready() const;
  // Throws PlanError if called from DecodeRequest::between.
  void check_idle() const;
  std::unique_ptr<DraftHead> make_draft_head() const;
  // A plan with other settings. Lent weights and the note of the placement are kept.
  plan::Plan planned(const plan::ContextOptions& context, const SessionSettings& settings) const;
  std::vector<model::WeightId> borrow(plan::Plan& plan) const;  // as plan::borrow_weights(); empty without a lender
  std::vector<const std::byte*> lent_weights();
  // Bytes that the cache of GPU `ordinal` may still map on demand.
  size_t promised_bytes(int ordinal) const;
  void choose();
  void place(Loading loading);
  void cache_experts();
  void prepare(bool clear_cache);
  // `change` returns the session of the draft head that exists after the change, or null.
  template <typename Change>
  void replan(const Change& change, bool clear_cache);
  void plan_scratch();
  void make_executor(int threads);
  // Checks every device and the machine. `beside`: the session that shares a GPU with this one, or null.
  void check_memory(bool weights_loaded, const Session* beside) const;
  // The same. If memory is short, the plan first gives up expanded keys and values of earlier u-batches.
  void fit_memory(bool weights_loaded, const Session* beside);

  std::shared_ptr<const GgufFile> file_;
  const Session* lender_ = nullptr;
  model::ModelDesc model_;
  plan::Plan plan_;
  SessionSettings settings_;
  std::vector<profile::KernelEntry> kernels_;
  std::unique_ptr<ThreadPool> pool_;
  std::unique_ptr<Weights> weights_;  // on the CPU; on a GPU the executor holds them
  std::unique_ptr<plan::Selection> selection_;
  std::unique_ptr<Executor> executor_;        // null for plan_only
  std::optional<std::string> failed_change_;  // the reason that the executor lacks memory of the plan
  bool computing_ = false;                    // true from the first u-batch of a request to its last
  bool reads_file_ = false;                   // whether weights are pages of the file after loading
  RowLogits row_logits_;                      // logits that the host samples from
  std::unique_ptr<DraftHead> draft_head_;
  std::vector<float*> draft_rows_;  // of a u-batch: memory for the row of each token that the draft head needs
  std::vector<int64_t> positions_;  // per slot
  std::vector<int64_t> filled_;     // per slot: positions whose memory is allocated
  std::vector<int64_t> begun_;      // per slot: start of its last decode
  WindowRows windows_;
  std::vector<std::weak_ptr<Checkpoint>> checkpoints_;
  // By device: arena, states and scratch that the executor holds; for the CPU, also the cache.
  std::vector<size_t> held_bytes_;
  uint64_t steps_of_ = 0;     // number of the generation whose steps are running; 0: none
  uint64_t generations_ = 0;  // number of generations that were started on the device
  size_t under_way_ = 0;      // steps that were launched and not waited for
};

}  // namespace dyno::runtime
