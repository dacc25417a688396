// Runs a plan's op list on the CPU, and on virtual devices of it, for one u-batch at a time: one segment behind the
// other, each in the memory of its device. Threads and their scratch memory serve all of them.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "core/thread_pool.h"
#include "ops/cpu_context.h"
#include "plan/plan.h"
#include "plan/selection.h"
#include "runtime/executor.h"
#include "runtime/host_buffer.h"
#include "runtime/virtual_devices.h"
#include "runtime/weights.h"

namespace dyno::runtime {

class CpuExecutor final : public Executor {
 public:
  CpuExecutor(const model::ModelDesc& model, const plan::Plan& plan, const Weights& weights, ThreadPool& pool);

  void prepare(const plan::Selection& selection, int max_threads, bool clear_cache) override;
  void run(const MicroBatch& batch, const plan::Selection& selection, int threads) override;
  void use_graphs(bool, bool) override {}
  void finish() override {}
  void lose(plan::DeviceId device, int64_t after_segments) override { virtual_.lose(device, after_segments); }
  void check_devices() const override { virtual_.check(); }

 private:
  struct Env;
  struct Memory {
    PartedBuffer arena;  // by value
    PartedBuffer cache;  // keys and values of each layer
  };

  void prepare_memory(plan::DeviceId device, bool clear_cache);
  void launch(const plan::Node& node, Env& env, OpTime* op_times);
  void launch_and_wait(const plan::Node& node, Env& env);
  void bring_logits(const plan::NodeList& list, const MicroBatch& batch);
  void select_rows(Env& env, std::span<const int32_t> rows, std::span<const plan::ValueId> values) const;

  const model::ModelDesc& model_;
  const plan::Plan& plan_;
  const Weights& weights_;
  ThreadPool& pool_;
  std::vector<Memory> memory_;  // of each device
  VirtualDevices virtual_;
  StripedBuffer scratch_;  // by thread
};

}  // namespace dyno::runtime
