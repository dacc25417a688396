// Adds a launch wherever a node reads a value that another device wrote. Each device that uses a value has its own
// copy. A copied value stays valid until the value is written again, so it moves to a device at most once between two
// writes.
#include <algorithm>
#include <map>

#include "core/error.h"
#include "plan/passes/passes.h"

namespace dyno::plan {
namespace {

// Whether a node writes all rows of a value, so that their previous content does not matter.
bool writes_all(const Value& value, const Operand& operand) {
  return operand.offset_bytes == 0 && operand.batch_stride_bytes == 0 &&
         operand.stride_bytes == static_cast<int64_t>(value.bytes_per_token);
}

class Transfers {
 public:
  Transfers(Plan& plan, NodeList& list) : plan_(plan), list_(list) {}

  void run() {
    Nodes nodes = std::move(list_.nodes);
    list_.nodes.clear();
    for (Node& node : nodes) add(std::move(node));
  }

 private:
  // For each value and device: the copy there, and whether it holds the last written content: always, or only if the
  // nodes for the CPU's share run.
  struct Copy {
    ValueId id = kNoValue;
    bool good = false;
    bool for_cpu_share = false;
    bool serves(const Node& node) const { return good && (!for_cpu_share || node.for_cpu_share); }
  };
  using Copies = std::map<DeviceId, Copy>;

  void add(Node node) {
    const size_t before = list_.nodes.size();
    for_each_operand(node.operands, [&](std::string_view, auto& operand) {
      if (operand && operand.value != plan_.logits) bring(node, operand, operand.kUse);
    });
    // The ids of the originals are needed until all operands are processed.
    struct Uses {
      bool read = false, written = false;
    };
    std::map<ValueId, Uses> uses;
    for_each_operand(node.operands, [&](std::string_view, auto& operand) {
      if (!operand || operand.value == plan_.logits) return;
      uses[operand.value].read |= operand.kUse != Access::write;
      uses[operand.value].written |= operand.kUse != Access::read;
    });
    for (const auto& [value, use] : uses) {
      if (!use.written) continue;
      for (auto& [device, copy] : copies_[value]) {
        copy.good = device == node.device;
        // A value that such a node updates is complete even without the update.
        copy.for_cpu_share = node.for_cpu_share && !use.read;
      }
    }
    for_each_operand(node.operands, [&](std::string_view, auto& operand) {
      if (operand && operand.value != plan_.logits) operand.value = copies_[operand.value][node.device].id;
    });
    const bool stands_alone = list_.nodes.size() > before || (before > 0 && list_.nodes.back().device != node.device);
    if (stands_alone) node.beside = false;
    list_.nodes.push_back(std::move(node));
  }

  // Creates a copy on the node's device with the content of the value that the node needs.
  void bring(const Node& node, const Operand& operand, Access use) {
    Copies& copies = copies_[operand.value];
    const Value value = plan_.values[static_cast<size_t>(operand.value)];
    const bool first = copies.empty();
    const Copy* source = nullptr;
    for (const auto& [device, copy] : copies) {
      if (copy.serves(node) && source == nullptr) source = &copy;
    }
    const bool left_out = std::any_of(copies.begin(), copies.end(), [](const auto& one) { return one.second.good; });
    DYNO_CHECK(PlanError, source != nullptr || !left_out || use == Access::write, "[plan] ", node.name, " reads ",
               value.name, ", which is not written if the CPU takes no experts of the layer");
    Copy& here = copies[node.device];
    if (first) {
      here.id = operand.value;
      plan_.values[static_cast<size_t>(here.id)].device = node.device;
    } else if (here.id == kNoValue) {
      here.id = add_value(plan_, value.name, value.bytes_per_token, value.bytes_fixed, list_.id, node.device);
    }
    const bool needed = use != Access::write || !writes_all(value, operand);
    if (here.serves(node) || source == nullptr || !needed) return;
    DYNO_CHECK(PlanError, !node.per_run, "[placement] ", node.name, " runs for each sequence by itself and reads ",
               value.name, " of another device");
    const auto row = static_cast<int64_t>(value.bytes_per_token);
    Node copied = make_node(
        str_cat(value.name, " to ", device_name(plan_.device(node.device))), node.layer,
        ops::TransferDesc{.row = row, .fixed = static_cast<int64_t>(value.bytes_fixed)},
        {.x = Operand{.value = source->id, .stride_bytes = row}, .y = Operand{.value = here.id, .stride_bytes = row}});
    // The GPU copies values that leave it or arrive, because the CPU cannot access its memory.
    const DeviceId from = plan_.values[static_cast<size_t>(source->id)].device;
    const bool leaves_gpu =
        plan_.device(from).kind == DeviceKind::cuda && plan_.device(node.device).kind == DeviceKind::cpu;
    copied.device = leaves_gpu ? from : node.device;
    copied.for_cpu_share = node.for_cpu_share;
    list_.nodes.push_back(std::move(copied));
    here.good = true;
    here.for_cpu_share = node.for_cpu_share;
  }

  Plan& plan_;
  NodeList& list_;
  std::map<ValueId, Copies> copies_;  // by the originally emitted value
};

}  // namespace

void transfer(Plan& plan, NodeList& list) { Transfers(plan, list).run(); }

}  // namespace dyno::plan
