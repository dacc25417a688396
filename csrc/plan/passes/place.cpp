// The device, memory and layout of each weight.
#include <algorithm>
#include <utility>

#include "core/checked.h"
#include "core/error.h"
#include "gguf/recode.h"
#include "ops/contract.h"
#include "ops/matmul/gpu_layout.h"
#include "ops/matmul/layout.h"
#include "plan/passes/passes.h"
#include "plan/placement.h"

namespace dyno::plan {

using model::WeightId;

namespace {

bool has_gpu_kernels(DType type) {
  const TypeClass kind = dtype_info(type).kind;
  return kind == TypeClass::floats || kind == TypeClass::quant || kind == TypeClass::gpu;
}

}  // namespace

std::string why_not_on_gpu(const model::Weight& w, const DeviceInfo& device) {
  const DType type = gpu_type(w.type);
  if (!has_gpu_kernels(type)) {
    return str_cat("tensor ", w.name, " is ", dtype_name(w.tensor->type), ", a type without kernels for a GPU");
  }
  if (const ops::Support built = ops::type_built(type, device); !built) {
    const bool other = type != w.tensor->type;
    return str_cat("tensor ", w.name, " is ", dtype_name(w.tensor->type),
                   other ? str_cat(", which a GPU reads as ", dtype_name(type)) : "", ", but ", built.reason);
  }
  const int64_t block = dtype_info(type).block_elements;
  if (w.cols % block == 0) return "";
  return str_cat("tensor ", w.name, " has rows of ", w.cols, " values of ", dtype_name(w.tensor->type),
                 ", which a GPU reads as ", dtype_name(type), " in blocks of ", block);
}

namespace {

// Placement of a weight on a device. Owned copies are made if it is repacked, converted or transposed.
WeightPlacement place(const model::Weight& w, const DeviceInfo& device, const LoadOptions& load, bool beside_gpu) {
  WeightPlacement p;
  p.type = w.type;
  if (device.kind == DeviceKind::cuda) {
    p.type = gpu_type(w.type);
    const std::string why_not = why_not_on_gpu(w, device);
    DYNO_CHECK(UnsupportedError, why_not.empty(), "[plan] ", why_not, "; keep it on the CPU or run with device=cpu");
    // Exact products and lookups by token id read the file's order. So do matrices that do not fit the tiles of tensor
    // cores.
    const bool vector = w.transform == model::Transform::to_f32;
    if (load.numerics == Numerics::standard && !vector && !w.table && w.cols % 32 == 0 &&
        ops::layout_supported(p.type, ops::Layout::gpu)) {
      p.layout = ops::Layout::gpu;
    }
    p.bytes =
        checked_mul(static_cast<size_t>(w.batch), ops::layout_bytes(p.type, p.layout, w.rows, w.cols), "a weight");
    return p;
  }
  const bool quantised = has_codes(w.type);
  const bool matrix = w.transform != model::Transform::to_f32 && w.transform != model::Transform::kv_b_k_transposed;
  // A GPU repacks a copy when it arrives, from the file's order or from x16. The source must be page-locked memory, so
  // it cannot be the file's pages.
  const bool may_stream = beside_gpu && w.transform == model::Transform::none && !w.table && has_gpu_kernels(w.type);
  const bool crosses = !may_stream || ops::packs_from_x16(w.type);
  if (matrix && !w.table && crosses && quantised && load.cpu_repack && load.numerics == Numerics::standard &&
      ops::layout_supported(w.type, ops::Layout::x16)) {
    p.layout = ops::Layout::x16;
  }
  // Most pages of a lookup table are never touched.
  const bool placed = load.numa != NumaMode::off && device.numa_nodes > 1 && !w.table;
  if (placed && load.numa == NumaMode::mirror) p.copies = static_cast<size_t>(device.numa_nodes);
  // A virtual device has separate memory.
  p.mappable = w.transform == model::Transform::none && w.tensor->type == w.type && p.layout == ops::Layout::plain &&
               device.ordinal == 0 && !may_stream && w.picks.empty();
  p.mapped = load.mmap && p.mappable && !placed;
  p.bytes = checked_mul(static_cast<size_t>(w.batch), ops::layout_bytes(w.type, p.layout, w.rows, w.cols), "a weight");
  return p;
}

// Drops GPUs without weights, so that they are not touched, and a CPU without weights, which needs no memory.
void drop_unused(Plan& plan, std::vector<DeviceId>& placed) {
  std::vector<DeviceId> moved(plan.devices.size(), -1);
  std::vector<PlannedDevice> kept;
  for (size_t i = 0; i < plan.devices.size(); ++i) {
    const auto id = static_cast<DeviceId>(i);
    if (id != kMainDevice && std::find(placed.begin(), placed.end(), id) == placed.end()) continue;
    moved[i] = static_cast<DeviceId>(kept.size());
    kept.push_back(std::move(plan.devices[i]));
  }
  plan.devices = std::move(kept);
  for (DeviceId& device : placed) device = moved[static_cast<size_t>(device)];
}

// Whether the main device is a GPU that may copy the weight from the CPU.
bool may_cross(const Plan& plan, const model::Weight& w) {
  const DeviceInfo& device = plan.main_device();
  return device.kind == DeviceKind::cuda && ops::type_built(gpu_type(w.type), device).ok;
}

}  // namespace

size_t placed_bytes(const Plan& plan, const model::Weight& weight) {
  return place(weight, plan.main_device(), plan.load, may_cross(plan, weight)).bytes;
}

void place_weights(Plan& plan, const model::ModelDesc& model) {
  std::vector<DeviceId> devices = weight_devices(plan, model);
  if (plan.main_device().kind == DeviceKind::cuda) drop_unused(plan, devices);
  for (size_t i = 0; i < model.weights.size(); ++i) {
    const model::Weight& w = model.weights[i];
    plan.weights.push_back(place(w, plan.device(devices[i]), plan.load, may_cross(plan, w)));
    plan.weights.back().device = devices[i];
    plan.weights.back().layer = static_cast<int32_t>(layer_of(model.weights[i].name));
  }
  for (const model::LayerSpec& layer : model.layers) {
    const model::FfnSpec* f = layer.mixture();
    if (f == nullptr) continue;
    for (const model::WeightId id : {f->experts_gate, f->experts_up, f->experts_down}) {
      if (id != model::kNone) plan.weights[static_cast<size_t>(id)].experts = true;
    }
  }
}

void mark_streamed(Plan& plan, const model::ModelDesc& model) {
  if (!plan.devices.front().streams) return;
  bool experts = false;
  const auto mark = [&](WeightId id, bool on) {
    if (id == model::kNone || !on) return;
    WeightPlacement& weight = plan.weights[static_cast<size_t>(id)];
    const model::Weight& w = model.weight(id);
    const DeviceInfo& at = plan.device(weight.device);
    if (weight.device == kMainDevice || at.kind != DeviceKind::cpu || w.transform != model::Transform::none) return;
    if (plan.main_device().kind == DeviceKind::cuda && !(has_gpu_kernels(w.type) && may_cross(plan, w))) return;
    // The placement that the weight would have on the main device.
    const WeightPlacement there = place(w, plan.main_device(), plan.load, false);
    const bool repacks = plan.main_device().kind == DeviceKind::cuda && there.layout == ops::Layout::gpu;
    if (!repacks && there.layout != weight.layout) return;
    weight.stream = {
        .wanted = true, .layout = there.layout, .bytes = there.bytes, .matrices = weight.experts ? w.batch : 1};
    experts |= weight.experts;
  };
  const OffloadOptions& on = plan.offload;
  int64_t ratio = 1;
  for (const model::LayerSpec& layer : model.layers) {
    const model::AttentionSpec& a = layer.attention;
    for (const WeightId id : {a.q, a.k, a.v, a.qkv, a.q_a, a.q_b, a.kv_a, a.gate, a.output}) mark(id, on.matmul);
    const model::FfnSpec& f = layer.ffn;
    const auto alike = [&](WeightId x, WeightId y) {
      return x != model::kNone && y != model::kNone && model.weight(x).type == model.weight(y).type &&
             plan.weights[static_cast<size_t>(x)].device == plan.weights[static_cast<size_t>(y)].device;
    };
    const bool dense = alike(f.gate, f.up) ? on.up_gate : on.matmul;
    const bool chosen = alike(f.experts_gate, f.experts_up) ? on.moe_up_gate : on.matmul_id;
    for (const WeightId id : {f.gate, f.up}) mark(id, dense);
    for (const WeightId id : {f.router, f.down}) mark(id, on.matmul);
    for (const WeightId id : {f.experts_gate, f.experts_up}) mark(id, chosen);
    mark(f.experts_down, on.matmul_id);
    for (const auto& [id, cached] : {std::pair(f.experts_gate, f.cached.gate), std::pair(f.experts_up, f.cached.up),
                                     std::pair(f.experts_down, f.cached.down)}) {
      if (id != model::kNone) plan.weights[static_cast<size_t>(id)].stream.cached = cached;
    }
    if (f.used > 0) ratio = std::max(ratio, (f.experts + f.used - 1) / f.used);
  }
  constexpr int64_t kNever = int64_t{1} << 40;
  plan.streams_from = std::min(kNever, on.min_tokens) * (experts ? ratio : 1);
}

bool can_refill(const Plan& plan, const model::Weight& weight, const WeightPlacement& host) {
  if (weight.transform != model::Transform::none || gpu_type(weight.type) != weight.type) return false;
  if (!has_gpu_kernels(weight.type) || !may_cross(plan, weight)) return false;
  const ops::Layout there = place(weight, plan.main_device(), plan.load, false).layout;
  return there == ops::Layout::gpu || there == host.layout;
}

void mark_refilled(Plan& plan, const model::ModelDesc& model) {
  if (!plan.load.expert_cache.adaptive || plan.main_device().kind != DeviceKind::cuda) return;
  for (const model::LayerSpec& layer : model.layers) {
    const model::FfnSpec* f = layer.mixture();
    if (f == nullptr || f->cached.experts.empty()) continue;
    for (const auto& [all, cached] :
         {std::pair(f->experts_gate, f->cached.gate), std::pair(f->experts_up, f->cached.up),
          std::pair(f->experts_down, f->cached.down), std::pair(f->experts_gate_bias, f->cached.gate_bias),
          std::pair(f->experts_up_bias, f->cached.up_bias), std::pair(f->experts_down_bias, f->cached.down_bias)}) {
      if (all == model::kNone) continue;
      WeightPlacement& weight = plan.weights[static_cast<size_t>(all)];
      if (weight.device == kMainDevice) continue;
      weight.refills = true;
      const bool repacked = plan.weights[static_cast<size_t>(cached)].layout != weight.layout;
      weight.refill_stage = repacked ? weight.bytes / static_cast<size_t>(model.weight(all).batch) : 0;
    }
  }
}

void count_weights(Plan& plan, const model::ModelDesc& model) {
  // The embedding table is read by rows, but over a long text nearly all of its pages become resident. If it is also
  // the output matrix and both are pages of the file, it is counted once.
  const bool table_is_output = model.tied_output && plan.weights[static_cast<size_t>(model.output)].mapped;
  for (size_t i = 0; i < plan.weights.size(); ++i) {
    const WeightPlacement& weight = plan.weights[i];
    if (weight.lent || (model.weights[i].table && weight.mapped && table_is_output)) continue;
    const size_t bytes = checked_mul(weight.bytes, weight.copies, "the weights");
    plan.weights_bytes = checked_add(plan.weights_bytes, bytes, "the weights");
    plan.mirror_bytes += bytes - weight.bytes;  // also part of the sum above
    if (!model.weights[i].picks.empty()) plan.cached_bytes += weight.bytes;
    plan.devices[static_cast<size_t>(weight.device)].weights_bytes += bytes;  // the same
  }
}

namespace {

// Whether both weights have the same numbers in the file.
bool same_matrix(const model::Weight& a, const model::Weight& b) {
  return a.tensor == b.tensor && a.type == b.type && a.transform == b.transform && a.batch == b.batch &&
         a.rows == b.rows && a.cols == b.cols && a.parts == b.parts && a.scale == b.scale && a.picks == b.picks;
}

}  // namespace

size_t Plan::lent_bytes() const {
  size_t bytes = 0;
  for (const WeightPlacement& weight : weights) bytes += weight.lent ? weight.bytes : 0;
  return bytes;
}

std::vector<WeightId> borrow_weights(Plan& plan, const model::ModelDesc& model, const Plan& lender,
                                     const model::ModelDesc& lending) {
  std::vector<WeightId> lenders(model.weights.size(), model::kNone);
  for (size_t i = 0; i < plan.weights.size(); ++i) {
    WeightPlacement& own = plan.weights[i];
    own.lent = false;
    const DeviceInfo& device = plan.device(own.device);
    if (device.kind != DeviceKind::cuda) continue;
    for (size_t j = 0; j < lender.weights.size() && !own.lent; ++j) {
      const WeightPlacement& other = lender.weights[j];
      const DeviceInfo& there = lender.device(other.device);
      own.lent = there.kind == DeviceKind::cuda && there.ordinal == device.ordinal && other.type == own.type &&
                 other.layout == own.layout && same_matrix(model.weights[i], lending.weights[j]);
      if (own.lent) lenders[i] = static_cast<WeightId>(j);
    }
  }
  plan.weights_bytes = plan.mirror_bytes = plan.cached_bytes = 0;
  for (PlannedDevice& device : plan.devices) device.weights_bytes = 0;
  count_weights(plan, model);
  return lenders;
}

}  // namespace dyno::plan
