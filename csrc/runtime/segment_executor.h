// Runs op lists whose nodes are on one or several devices: the segments of a list in order, each on the backend of its
// device. Devices take turns in the order of the list. GPU work is asynchronous, so it overlaps with CPU work that does
// not wait for it. The GPU's next piece is started before the CPU's turn if it can wait for the CPU by itself.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "runtime/backend.h"
#include "runtime/expert_places.h"
#include "runtime/weight_stream.h"

namespace dyno::runtime {

class SegmentExecutor final : public Executor, private ValueMemory {
 public:
  // `cpu`: the backend of all CPU devices of the plan, or null. `gpus`: a backend for each GPU. The plan must outlive
  // the executor.
  struct Gpu {
    plan::DeviceId device = plan::kMainDevice;
    std::unique_ptr<Backend> backend;
  };
  SegmentExecutor(const plan::Plan& plan, const model::ModelDesc& model, std::unique_ptr<Backend> cpu,
                  std::vector<Gpu> gpus);

  void prepare(const plan::Selection& selection, int max_threads, bool clear_cache) override;
  void run(const MicroBatch& batch, const plan::Selection& selection, int threads) override;
  void use_graphs(bool wanted, bool concurrent) override;
  std::vector<CaptureReport> captures() const override;
  int64_t capture_failures() const override;
  void fail_next_captures(int count) override;
  void lose(plan::DeviceId device, int64_t after_segments) override;
  void check_devices() const override;
  std::vector<std::string> warnings() const override;
  StreamCounts stream_counts() const override;
  ExpertCounts expert_counts() const override;
  std::shared_ptr<float[]> logits_memory(size_t count) override;
  std::shared_ptr<float[]> device_logits_memory(size_t count) override;
  void finish() override;
  void save_state(int32_t slot, std::byte* to) override;
  void load_state(int32_t slot, const std::byte* from) override;
  void copy_sequence(int32_t from, int32_t to, int64_t positions, std::span<const Rows> windowed) override;
  void take(int32_t slot, int64_t begin, int64_t end, CacheLayers layers) override;
  size_t gpu_cache_bytes(plan::DeviceId device) const override;
  void give_back(int32_t slot, int64_t begin, int64_t end, CacheLayers layers) override;
  void settle() override;

 private:
  std::byte* address_of(plan::ValueId value) const override;
  bool host_locked() const override;
  Backend& backend_of(plan::DeviceId device) const { return *by_device_[static_cast<size_t>(device)]; }
  template <typename Visit>
  void for_each_backend(const Visit& visit) const;
  // Nodes on one device that are started together.
  struct Piece {
    plan::DeviceId device = plan::kMainDevice;
    int32_t begin = 0, end = 0;
  };
  std::vector<Piece> pieces_of(const plan::NodeList& list, const NodeRange& range) const;
  void run_pieces(const plan::NodeList& list, const NodeRange& range, const MicroBatch& batch);
  bool on_cpu(const Piece& piece) const { return &backend_of(piece.device) == cpu_.get(); }
  // The end of the piece that begins at node `begin` of a segment.
  int32_t piece_end(const plan::NodeList& list, int32_t begin, int32_t end, const NodeRange& range) const;
  void run_piece(const plan::NodeList& list, const Piece& piece, int64_t tokens);
  void select(std::span<const plan::ValueId> values);
  // Copies rows of a value, from row `first` on, to the host.
  void read_rows(plan::ValueId id, size_t first, float* to, size_t rows);
  void await_host_copies();

  const plan::Plan& plan_;
  int64_t n_embd_;
  std::unique_ptr<Backend> cpu_;
  std::vector<Gpu> gpus_;
  std::vector<Backend*> by_device_;
  Backend* last_gpu_ = nullptr;           // the last GPU that got work
  std::unique_ptr<ExpertPlaces> places_;  // null if the plan has no CPU, like stream_
  std::unique_ptr<WeightStream> stream_;
};

}  // namespace dyno::runtime
