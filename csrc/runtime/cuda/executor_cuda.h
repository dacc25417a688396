// Runs nodes on one GPU: launches in the order of the list on one stream, or replays of a captured graph for u-batches
// of one token per sequence. Everything that changes between two replays is in device memory. A list that is entirely
// on the GPU runs at once (Executor). For a list on several devices, it runs the GPU's pieces (Backend,
// executor_cuda_pieces.cpp).
#pragma once

#include <array>
#include <functional>
#include <limits>
#include <map>
#include <vector>

#include "core/thread_pool.h"
#include "ops/cuda_stream.h"
#include "runtime/backend.h"
#include "runtime/cuda/cache_memory.h"
#include "runtime/cuda/choice_counts.h"
#include "runtime/cuda/draws.h"
#include "runtime/cuda/handles.h"
#include "runtime/cuda/turns.h"
#include "runtime/cuda/weight_copies.h"
#include "runtime/cuda/weights_cuda.h"
#include "runtime/depth.h"
#include "runtime/executor.h"

namespace dyno::runtime {

class CudaExecutor final : public Executor, public Backend {
 public:
  // Uploads the weights of `device`, which must be the current one, except those that are `lent` (CudaWeights).
  CudaExecutor(const GgufFile& file, const model::ModelDesc& model, const plan::Plan& plan, plan::DeviceId device,
               ThreadPool& pool, int threads, std::span<const std::byte* const> lent = {});
  ~CudaExecutor() override;

  void prepare(const plan::Selection& selection, int max_threads, bool clear_cache) override;
  void run(const MicroBatch& batch, const plan::Selection& selection, int threads) override;
  void use_graphs(bool wanted, bool concurrent) override {
    graphs_wanted_ = wanted;
    concurrent_ = wanted && concurrent;
  }
  std::vector<CaptureReport> captures() const override;
  int64_t capture_failures() const override { return capture_failures_; }
  void fail_next_captures(int count) override { failing_captures_ = count; }
  void finish() override;
  void save_state(int32_t slot, std::byte* to) override;
  void load_state(int32_t slot, const std::byte* from) override;
  void copy_sequence(int32_t from, int32_t to, int64_t positions, std::span<const Rows> windowed) override;
  void take(int32_t slot, int64_t begin, int64_t end, CacheLayers layers) override;
  size_t gpu_cache_bytes() const override { return cache_.taken(); }
  size_t gpu_cache_bytes(plan::DeviceId device) const override { return device == device_ ? cache_.taken() : 0; }
  void give_back(int32_t slot, int64_t begin, int64_t end, CacheLayers layers) override;
  void settle() override;
  std::shared_ptr<float[]> logits_memory(size_t count) override;
  std::shared_ptr<float[]> device_logits_memory(size_t count) override;
  std::shared_ptr<float[]> rows_memory(size_t count) override;
  const std::byte* lendable(model::WeightId weight) const override { return weights_.data(weight); }

  void connect(const ValueMemory& memory) override;
  std::byte* memory_of(plan::ValueId value) const override;
  std::shared_ptr<float[]> host_logits(size_t count) override { return logits_memory(count); }
  std::shared_ptr<float[]> device_logits(size_t count) override { return device_logits_memory(count); }
  void begin(const MicroBatch& batch, const plan::Selection& selection, int threads) override;
  void run_nodes(const plan::NodeList& list, int32_t begin, int32_t end, int64_t tokens) override;
  void select_rows(std::span<const plan::ValueId> values) override;
  void end() override;
  void await_host_copies() override;
  bool start_ahead(const plan::NodeList& list, int32_t begin, int32_t end, int64_t tokens) override;
  void finish_host_turn() override;
  void follow(Backend& other) override;
  void read(plan::ValueId value, size_t begin, std::span<std::byte> out) override;
  void copies_follow_launches() override;
  void bring(model::WeightId weight, const std::byte* from, int64_t matrices,
             std::span<const MatrixRange> ranges) override;
  void bring_own(model::WeightId weight, model::WeightId own, std::span<const MatrixMove> moves) override;
  void set_places(int32_t layer, std::span<const int32_t> places) override;
  void await_copies(model::WeightId weight) override;
  std::vector<int64_t> take_choices(int32_t layer) override { return choices_.take(layer); }
  void set_cached_places(int32_t layer, std::span<const int32_t> places) override;
  void fill_place(model::WeightId weight, const std::byte* from, int64_t matrix, model::WeightId own,
                  int64_t place) override;
  bool has_arrived(model::WeightId own) const override;

  bool draws() const override { return true; }
  void begin_draws(const DrawStart& start) override;
  void launch_draw(std::span<const Draw> ahead, const plan::Selection& selection) override;
  int32_t wait_draw() override;

 private:
  struct Env;
  // Properties of a u-batch that determine its graph.
  struct Shape {
    int64_t tokens, runs, logit_rows;
    int64_t depth;
    auto operator<=>(const Shape&) const = default;
  };
  Shape shape_of(const MicroBatch& batch) const {
    return {std::ssize(batch.tokens), std::ssize(batch.runs), std::ssize(batch.logit_rows), depth_of(batch)};
  }
  int64_t depth_of(const MicroBatch& batch) const { return std::min(launch_depth(batch.runs), plan_.context.ctx); }
  struct Captured {
    CaptureAttempts attempts;
    GraphExec graph;
  };
  // Captured piece: its use of CPU memory, and whether its graph has run.
  struct CapturedPiece : Captured {
    bool crosses = false, receives = false, ran = false;
  };

  // A piece of a list in u-batches of one shape.
  struct Piece {
    plan::ListId list;
    int32_t begin, end;
    Shape shape;
    auto operator<=>(const Piece&) const = default;
  };

  const DeviceInfo& info() const { return plan_.device(device_); }
  const plan::PlannedDevice& planned() const { return plan_.devices[static_cast<size_t>(device_)]; }
  int64_t most_used_experts() const;
  // The address of a value on any device.
  std::byte* address_of(plan::ValueId value) const;
  const plan::NodeList& list_for(const MicroBatch& batch) const { return list_of(plan_, batch); }
  ops::CudaStream context() const;
  void fit_logits(size_t bytes);
  void drop_graphs();
  void copy_state(int32_t slot, std::byte* host, bool save);
  // Calls `use` with the byte range in cache_ for positions [begin, end) of a sequence, for the keys and values of each
  // layer on this GPU.
  void for_rows(int32_t slot, int64_t begin, int64_t end, CacheLayers layers,
                const std::function<void(size_t, size_t)>& use) const;
  void upload(const MicroBatch& batch);
  Env env_of(const MicroBatch& batch, const plan::Selection& selection);
  // In a captured graph, independent neighbouring nodes may run on separate streams. `draws`: the most probable token
  // is sampled at the end. `most`: later launches of nodes are skipped.
  struct Launching {
    bool capturing = false, draws = false;
    int32_t most = std::numeric_limits<int32_t>::max();
  };
  void launch_all(const MicroBatch& batch, const plan::Selection& selection, const Launching& how);
  // The piece of a repeated u-batch; null if it is not captured.
  CapturedPiece* piece_of(const plan::NodeList& list, int32_t begin, int32_t end);
  // A piece that exchanges values with the CPU by kernels: for the CPU's turns, see Turns.
  void launch_in_turns(Env& env, const plan::NodeList& list, int32_t begin, int32_t end, const MicroBatch& batch,
                       const Launching& how);
  bool crosses_host(const plan::Node& node) const;
  // Nodes [begin, end) of a list.
  void launch_nodes(Env& env, const plan::NodeList& list, int32_t begin, int32_t end, const MicroBatch& batch,
                    const Launching& how);
  // Hidden rows: from the caller to a draft head, and from the model to the caller.
  void upload_rows(const MicroBatch& batch);
  void download_rows(const MicroBatch& batch);
  // Uploads pinned routing, and reserves memory for captured routing.
  void upload_routing(const MicroBatch& batch);
  // Downloads the routing of the layers whose experts are chosen on this GPU.
  void download_routing(const MicroBatch& batch);
  // Launches node `first` on the main stream and the nodes up to `last` on one of beside_ each.
  void launch_beside(Env& env, const plan::NodeList& list, int32_t first, int32_t last);
  void select_rows(Env& env, int64_t wanted, std::span<const plan::ValueId> values);
  // Launches the node unless Env::left is 0; returns whether it did.
  bool launch_one(const plan::Node& node, Env& env);
  const Event& timing_event(size_t index);
  double seconds_between(size_t before, size_t after);  // between two completed timing events
  // Records an event after the launch if times are requested.
  void launch_timed(const plan::Node& node, Env& env, const MicroBatch& batch);
  void add_op_times(const MicroBatch& batch);
  // The time that each launch adds to a replay. Graphs of the first 1, 2, … launches are timed, each after a graph of
  // all launches.
  void add_times_in_graph(const MicroBatch& batch, const plan::Selection& selection);
  GraphExec captured(const std::function<void()>& launch);
  // Counts a use of `work` and captures it if that is due. Returns whether it has a graph now; `work` keeps the reason
  // if not.
  bool ready(Captured& work, const std::function<void()>& launch);
  // Allocates memory for sampling and sets its initial state. Random numbers follow with upload_draws().
  void set_draw_state(const ops::SampleSettings& settings, uint32_t step);
  void upload_draws(std::span<const Draw> ahead);
  // No running work may use the old memory.
  void fit_row_results(size_t bytes);
  // Samples from the rows of logits of the previous launches, and waits for the tokens.
  void draw_rows(const MicroBatch& batch, const plan::Selection& selection);
  // Waits for the tokens that kernels write to page-locked memory.
  void await_rows(std::span<int32_t> tokens);
  // Computes MicroBatch::likely from the rows of logits of the previous launches.
  void find_likely_rows(const MicroBatch& batch);
  // Samples from the current logits and advances to the next step.
  void launch_sampling(const MicroBatch& batch, const plan::Selection& selection);

  // The first `count` rows of a sequence, whose expanded keys and values a layer still has.
  struct Expanded {
    int32_t slot = -1;
    int64_t count = 0;
  };
  // The sequence gets other rows from this position on.
  void forget_expanded(int32_t slot, int64_t position);

  const model::ModelDesc& model_;
  const plan::Plan& plan_;
  plan::DeviceId device_;
  std::vector<Expanded> expanded_;  // by layer
  Stream stream_;
  CudaWeights weights_;
  DeviceBuffer tables_;  // inverse frequencies of the rope tables
  std::vector<size_t> table_offsets_;
  DeviceBuffer places_;  // of cached experts, by layer
  std::vector<size_t> place_offsets_;
  int32_t* places_of(int32_t layer) const {
    return reinterpret_cast<int32_t*>(places_.data()) + place_offsets_[static_cast<size_t>(layer)];
  }
  ChoiceCounts choices_;
  int32_t* shared_places_of(int32_t layer) const {
    return reinterpret_cast<int32_t*>(shared_places_.data()) + layer * model_.experts();
  }
  DeviceBuffer shared_places_;  // [layers, experts()]: of experts that the CPU shares
  DeviceBuffer arena_, states_, workspace_, counters_;
  CacheMemory cache_;
  Blas blas_;
  DeviceBuffer inputs_, logits_, pinned_routing_, captured_routing_;
  // Two, so that one can be filled while the other is being copied.
  std::array<PinnedBuffer, 2> staged_;
  std::array<Event, 2> staged_copied_;
  size_t next_stage_ = 0;
  std::shared_ptr<PinnedPool> host_logits_ = std::make_shared<PinnedPool>();
  std::vector<Event> timing_;      // before the first launch and after each one, if times are requested
  std::vector<int32_t> launched_;  // the key of each launch of the last launch_all()
  bool graphs_wanted_ = false, concurrent_ = false;
  // Buffers that each additional stream needs for itself.
  struct Beside {
    Stream stream;
    Event done;
    DeviceBuffer workspace, counters;
  };
  std::array<Beside, kBesideStreams> beside_;
  Event fork_;
  std::map<Shape, Captured> graphs_;
  // For lists on several devices.
  std::map<Piece, CapturedPiece> pieces_;
  Turns turns_;
  bool reaches_host_ = false;            // kernels can access page-locked memory, and no other GPU takes turns
  bool last_by_turns_ = false;           // whether the last of copies_host_ used turns
  const ValueMemory* values_ = nullptr;  // null if this GPU computes the whole model
  MicroBatch micro_batch_;
  const plan::Selection* selection_ = nullptr;
  Event host_copies_, followed_;
  WeightCopies copies_;
  bool copies_host_ = false;  // whether copies were started since the last wait for host_copies_
  int64_t capture_failures_ = 0;
  int failing_captures_ = 0;
  // The current generation.
  struct Drawing {
    DeviceBuffer state;  // DrawState
    PinnedBuffer drawn;  // kDrawnSlots
    std::array<PinnedBuffer, 2> staged;
    std::array<Event, 2> copied;
    size_t next_stage = 0;
    PinnedBuffer fence;
    // Decoding, sampling and the advance to the next token in one graph, by depth_of().
    std::map<int64_t, Captured> steps;
    DrawStart at;          // of the next step to launch; without its token
    int32_t uploaded = 0;  // uploaded samples that no step has used yet
    uint32_t waited = 0;   // number of the next step to wait for
  };
  Drawing drawing_;
  // Page-locked memory to which kernels write the results of several rows: sampled or most probable tokens.
  PinnedBuffer row_results_;
};

}  // namespace dyno::runtime
