// The order in which a list that takes turns between a GPU and the CPU is handed to its backends, with backends that
// only write it down: the GPU's next piece is started before the CPU's turn, where it can be, and an error in that turn
// lets the GPU go on.
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "core/error.h"
#include "plan/expert_cache.h"
#include "plan/expert_share.h"
#include "runtime/segment_executor.h"

namespace dyno {
// For messages alone: its own file needs a configured build.
std::string device_name(const DeviceInfo&) { return "a device"; }
// Of streamed lists alone, and this plan has none.
int64_t plan::experts_for_cpu(const Plan&, const model::ModelDesc&, const model::FfnSpec&, int64_t, int64_t,
                              std::span<const int64_t>) {
  throw PlanError("no experts are shared here");
}
// Of an adaptive expert cache alone, and this plan has none.
const std::vector<int64_t>* plan::recorded_uses(const Plan&, const model::ModelDesc&, size_t) {
  throw PlanError("no experts are cached here");
}
}  // namespace dyno

namespace {

using namespace dyno;
using namespace dyno::runtime;

std::vector<std::string> told;

class Teller : public Backend {
 public:
  Teller(std::string name, bool can_start_ahead) : name_(std::move(name)), can_start_ahead_(can_start_ahead) {}

  void prepare(const plan::Selection&, int, bool) override {}
  void use_graphs(bool, bool) override {}
  void finish() override {}
  void save_state(int32_t, std::byte*) override {}
  void load_state(int32_t, const std::byte*) override {}
  void copy_sequence(int32_t, int32_t, int64_t, std::span<const Rows>) override {}
  void give_back(int32_t, int64_t, int64_t, CacheLayers) override {}
  void connect(const ValueMemory&) override {}
  std::byte* memory_of(plan::ValueId) const override { return nullptr; }
  void begin(const MicroBatch&, const plan::Selection&, int) override {}
  void run_nodes(const plan::NodeList&, int32_t begin, int32_t end, int64_t) override {
    told.push_back(name_ + " " + std::to_string(begin) + "-" + std::to_string(end));
    if (begin == fails_at) throw PlanError("this node fails");
  }
  void select_rows(std::span<const plan::ValueId>) override { told.push_back(name_ + " selects"); }
  void end() override {}
  void await_host_copies() override { told.push_back("awaited"); }
  bool start_ahead(const plan::NodeList&, int32_t begin, int32_t end, int64_t) override {
    if (can_start_ahead_) told.push_back(name_ + " ahead " + std::to_string(begin) + "-" + std::to_string(end));
    return can_start_ahead_;
  }
  void finish_host_turn() override { told.push_back("turn over"); }
  void bring(model::WeightId, const std::byte*, int64_t, std::span<const MatrixRange>) override {}
  void bring_own(model::WeightId, model::WeightId, std::span<const MatrixMove>) override {}
  void set_places(int32_t, std::span<const int32_t>) override {}
  void await_copies(model::WeightId) override {}
  void read(plan::ValueId, size_t, std::span<std::byte>) override {}

  int32_t fails_at = -1;

 private:
  std::string name_;
  bool can_start_ahead_;
};

// These backends never look at it.
const plan::Selection& no_selection() {
  alignas(plan::Selection) static std::byte memory[sizeof(plan::Selection)];
  return *reinterpret_cast<const plan::Selection*>(memory);
}

plan::Node copy(plan::DeviceId device, plan::ValueId from, plan::ValueId to) {
  return {.device = device,
          .desc = ops::TransferDesc{},
          .operands = plan::TransferOperands{.x = plan::Operand{.value = from}, .y = plan::Operand{.value = to}}};
}
// A node that crosses to nobody.
plan::Node node(plan::DeviceId device) { return copy(device, device, device); }

// Values 0 and 1 of the GPU and the CPU; a layer is: GPU, its copy to the CPU, the CPU twice, the copy back, GPU.
plan::Plan two_layers() {
  plan::Plan plan;
  plan.devices.resize(2);
  plan.devices[0].info.kind = DeviceKind::cuda;
  plan.devices[1].info.kind = DeviceKind::cpu;
  plan.values.resize(2);
  plan.values[1].device = 1;
  for (int layer = 0; layer < 2; ++layer) {
    for (plan::Node& next : std::vector<plan::Node>{node(0), copy(0, 0, 1), node(1), node(1), copy(0, 1, 0), node(0)}) {
      plan.general.nodes.push_back(std::move(next));
    }
  }
  plan.general.segments = {{0, 0, 2}, {1, 2, 4}, {0, 4, 8}, {1, 8, 10}, {0, 10, 12}};
  plan.general.settled_node = plan.general.head_node = 12;
  plan.general.select_node = 6;
  return plan;
}

int faults = 0;

void expect(const char* what, const std::vector<std::string>& wanted) {
  if (told == wanted) return;
  ++faults;
  std::printf("%s:\n", what);
  for (const std::string& line : told) std::printf("  %s\n", line.c_str());
}

void run(const plan::Plan& plan, bool can_start_ahead, std::vector<int32_t> tokens, std::vector<int32_t> rows,
         int32_t cpu_fails_at = -1) {
  told.clear();
  const model::ModelDesc model;
  auto cpu = std::make_unique<Teller>("cpu", false);
  cpu->fails_at = cpu_fails_at;
  std::vector<SegmentExecutor::Gpu> gpus;
  gpus.push_back({0, std::make_unique<Teller>("gpu", can_start_ahead)});
  SegmentExecutor executor(plan, model, std::move(cpu), std::move(gpus));
  const std::vector<int32_t> positions(tokens.size());
  const std::vector<ops::SequenceRun> runs(1);
  MicroBatch batch{.tokens = tokens, .positions = positions, .runs = runs, .logit_rows = rows};
  try {
    executor.run(batch, no_selection(), 1);
  } catch (const PlanError&) {
    told.push_back("error");
  }
}

}  // namespace

int main() {
  const plan::Plan plan = two_layers();
  run(plan, true, {1}, {0});
  expect("ahead", {"gpu 0-2", "gpu ahead 4-7", "awaited", "cpu 2-4", "turn over", "gpu 7-8", "gpu ahead 10-12",
                   "awaited", "cpu 8-10", "turn over"});
  run(plan, false, {1}, {0});
  expect("one after the other",
         {"gpu 0-2", "awaited", "cpu 2-4", "gpu 4-7", "gpu 7-8", "awaited", "cpu 8-10", "gpu 10-12"});
  // Rows are selected between two pieces: nothing may have begun by then.
  run(plan, true, {1, 2}, {1});
  expect("selected rows", {"gpu 0-2", "awaited", "cpu 2-4", "gpu 4-7", "awaited", "cpu selects", "gpu selects",
                           "gpu 7-8", "awaited", "cpu 8-10", "gpu 10-12"});
  run(plan, true, {1}, {0}, 8);
  expect("an error in the second turn", {"gpu 0-2", "gpu ahead 4-7", "awaited", "cpu 2-4", "turn over", "gpu 7-8",
                                         "gpu ahead 10-12", "awaited", "cpu 8-10", "turn over", "error"});
  std::printf("%d faults\n", faults);
  return faults == 0 ? 0 : 1;
}
