// Runs nodes on the CPU and on its virtual devices, each with its own memory. All of them share threads and scratch
// memory.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/thread_pool.h"
#include "ops/cpu_context.h"
#include "plan/plan.h"
#include "plan/selection.h"
#include "runtime/backend.h"
#include "runtime/host_buffer.h"
#include "runtime/page_lock.h"
#include "runtime/virtual_devices.h"
#include "runtime/weights.h"

namespace dyno::runtime {

class CpuExecutor final : public Backend {
 public:
  CpuExecutor(const model::ModelDesc& model, const plan::Plan& plan, Weights& weights, ThreadPool& pool);
  ~CpuExecutor() override;

  void prepare(const plan::Selection& selection, int max_threads, bool clear_cache) override;
  void use_graphs(bool, bool) override {}
  void finish() override {}
  void save_state(int32_t slot, std::byte* to) override;
  void load_state(int32_t slot, const std::byte* from) override;
  void copy_sequence(int32_t from, int32_t to, int64_t positions, std::span<const Rows> windowed) override;
  void give_back(int32_t slot, int64_t begin, int64_t end, CacheLayers layers) override;
  void connect(const ValueMemory& memory) override { values_ = &memory; }
  std::byte* memory_of(plan::ValueId value) const override;
  bool values_locked() const override;
  std::vector<std::string> warnings() const override;
  void begin(const MicroBatch& batch, const plan::Selection& selection, int threads) override;
  void run_nodes(const plan::NodeList& list, int32_t begin, int32_t end, int64_t tokens) override;
  void select_rows(std::span<const plan::ValueId> values) override;
  void end() override;
  void read(plan::ValueId value, size_t begin, std::span<std::byte> out) override;
  const std::byte* weight_memory(model::WeightId weight) const override { return weights_.data(weight); }
  void bring(model::WeightId weight, const std::byte* from, int64_t matrices,
             std::span<const MatrixRange> ranges) override;
  void bring_own(model::WeightId weight, model::WeightId own, std::span<const MatrixMove> moves) override;
  void set_places(int32_t layer, std::span<const int32_t> places) override;
  void await_copies(model::WeightId weight) override;
  std::vector<int64_t> take_choices(int32_t layer) override;
  void set_cached_places(int32_t layer, std::span<const int32_t> places) override;
  void fill_place(model::WeightId weight, const std::byte* from, int64_t matrix, model::WeightId own,
                  int64_t place) override;
  bool has_arrived(model::WeightId own) const override;
  ExpertCounts expert_counts() const override { return expert_counts_; }
  void lose(plan::DeviceId device, int64_t after_segments) override { virtual_.lose(device, after_segments); }
  void check_devices() const override { virtual_.check(); }

 private:
  struct Env;
  struct Memory {
    PartedBuffer arena;   // by value
    PageLock lock;        // of the arena, if the plan has a GPU
    PartedBuffer cache;   // keys and values of each layer
    PartedBuffer states;  // by state
  };

  bool holds(plan::DeviceId device) const { return plan_.device(device).kind == DeviceKind::cpu; }
  // The state of a sequence on the CPU.
  std::byte* state_at(size_t index, int32_t slot) const;
  void prepare_memory(plan::DeviceId device, bool clear_cache);
  void launch(const plan::Node& node);
  void launch_and_wait(const plan::Node& node);
  void count_experts(const plan::Node& node);

  const model::ModelDesc& model_;
  const plan::Plan& plan_;
  Weights& weights_;
  ThreadPool& pool_;
  std::vector<Memory> memory_;  // of each device
  VirtualDevices virtual_;
  StripedBuffer scratch_;  // by thread
  HostBuffer copies_;      // of streamed weights, on a virtual main device
  const ValueMemory* values_ = nullptr;
  ExpertCounts expert_counts_;
  std::vector<std::vector<int32_t>> places_;         // by layer, for shared experts
  std::vector<std::vector<int32_t>> cached_places_;  // by layer, for cached experts
  std::vector<std::vector<int32_t>> choices_;        // by layer and expert, since take_choices()
  MicroBatch micro_batch_;
  std::unique_ptr<Env> env_;  // of the current u-batch
};

}  // namespace dyno::runtime
