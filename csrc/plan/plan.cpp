#include "plan/plan.h"

#include <algorithm>
#include <array>

#include "core/checked.h"
#include "core/error.h"
#include "plan/passes/passes.h"
#include "plan/placement.h"

namespace dyno::plan {
namespace {

constexpr int64_t kDefaultContext = 4096;
constexpr size_t kPage = 4096;

bool is_cache_type(DType t) { return t == DType::f32 || t == DType::f16 || t == DType::bf16 || t == DType::q8_0; }

void check_cache_type(DType type, int64_t dim, const char* which, size_t layer) {
  DYNO_CHECK(PlanError, is_cache_type(type), "[plan] kv_type_", which, " is ", dtype_name(type),
             "; expected f32, f16, bf16 or q8_0");
  DYNO_CHECK(PlanError, type != DType::q8_0 || dim % 32 == 0, "[plan] kv_type_", which,
             " q8_0 needs heads that are a multiple of 32 wide; layer ", layer, " has ", dim,
             ". Use f16 or bf16 for this model");
}

bool has_latents(const model::ModelDesc& model) {
  return std::any_of(model.layers.begin(), model.layers.end(),
                     [](const model::LayerSpec& layer) { return layer.attention.kind == model::AttentionKind::mla; });
}

// The device of the weights that compute the keys and values of the cache.
DeviceId attention_device(const Plan& plan, const model::AttentionSpec& a) {
  const model::WeightId w = a.kind == model::AttentionKind::mla ? a.kv_a : a.qkv != model::kNone ? a.qkv : a.k;
  return plan.weights[static_cast<size_t>(w)].device;
}

void check_cache_tokens(const Plan& plan) {
  const ContextOptions& c = plan.context;
  DYNO_CHECK(PlanError, c.cache_tokens == 0 || c.cache_tokens >= c.ctx, "[plan] cache_tokens is ", c.cache_tokens,
             "; expected 0 (room for all sequences), or at least ctx=", c.ctx, ", so that one sequence can be full");
}

// Positions of all sequences together for which the cache has room.
size_t cache_positions(const ContextOptions& c) {
  const int64_t all = c.ctx * c.sequences;
  return static_cast<size_t>(c.cache_tokens > 0 ? std::min(c.cache_tokens, all) : all);
}

struct WindowedRows {
  size_t rows = 0;
  size_t pieces = 0;  // contiguous runs of rows
};

// The maximum of rows that a layer keeps for all sequences: for each sequence, the window at its position with the
// u-batch that it writes, and the window at the start of its decode; for each checkpoint and each stop, a window.
WindowedRows windowed_rows(const ContextOptions& c, int64_t window, int64_t stride, int64_t ubatch) {
  const auto sequences = static_cast<size_t>(c.sequences);
  const auto kept = static_cast<size_t>(window + kWindowSlack), steps = static_cast<size_t>(kWindowStep + ubatch);
  const size_t stops = stride > 0 ? cache_positions(c) / static_cast<size_t>(stride) : 0;
  const size_t rows = sequences * (2 * kept + steps) + (sequences + 1) * kept + stops * static_cast<size_t>(window);
  return {rows, 4 * sequences + 1 + stops};  // and on a GPU, rows after the end of the previous sequence
}

// Bytes of the keys or values of one layer, including the u-batch that is written.
size_t memory_of_rows(const Plan& plan, const ContextOptions& c, const KvLayer& layer, int64_t row, int64_t ubatch) {
  const DeviceInfo& device = plan.device(layer.device);
  const size_t sequences = static_cast<size_t>(c.sequences), positions = static_cast<size_t>(c.ctx) * sequences;
  const size_t all = positions * static_cast<size_t>(row);
  size_t held = cache_positions(c);
  size_t pieces = sequences;
  if (layer.window > 0) {
    // All windowed layers keep rows for the longest window.
    WindowedRows kept = windowed_rows(c, plan.cache_window(), plan.cache_stride(), ubatch);
    // A GPU frees the rows of one u-batch while the next one runs.
    if (device.kind == DeviceKind::cuda) kept.rows += static_cast<size_t>(ubatch);
    if (kept.rows < held) pieces = kept.pieces;
    held = std::min(held, kept.rows);
  }
  if (held >= positions) return all;
  // The first and last page of each run may be used by that run alone.
  const bool gpu = device.kind == DeviceKind::cuda;
  const size_t beside = gpu ? 2 * kMappedPiece + static_cast<size_t>(kRowsBehind * row) : 2 * kPage;
  return std::min(all, held * static_cast<size_t>(row) + beside * pieces);
}

}  // namespace

size_t kv_memory(const Plan& plan, const ContextOptions& c, const KvLayer& layer, int64_t row) {
  return memory_of_rows(plan, c, layer, row, plan.ubatch);
}

std::string_view numerics_name(Numerics numerics) { return numerics == Numerics::exact ? "exact" : "default"; }
std::string_view list_name(ListId list) {
  constexpr std::array<std::string_view, kListCount> names = {"general",  "fused", "single",   "batched",
                                                              "expanded", "draw",  "streamed", "streamed_expanded"};
  return names[static_cast<size_t>(list)];
}
std::string_view numa_name(NumaMode mode) {
  constexpr std::array<std::string_view, 4> names = {"off", "interleave", "pin", "mirror"};
  return names[static_cast<size_t>(mode)];
}
std::string_view mla_mode_name(MlaMode mode) {
  constexpr std::array<std::string_view, 3> names = {"auto", "expanded", "absorbed"};
  return names[static_cast<size_t>(mode)];
}

std::string_view window_cache_name(WindowCache mode) {
  constexpr std::array<std::string_view, 3> names = {"auto", "full", "window"};
  return names[static_cast<size_t>(mode)];
}

int64_t Plan::cache_window() const {
  int64_t longest = 0;
  for (const KvLayer& layer : kv) longest = std::max(longest, layer.window);
  return longest;
}

bool Plan::maps_cache() const {
  return std::all_of(kv.begin(), kv.end(), [&](const KvLayer& layer) {
    const DeviceInfo& holder = device(layer.device);
    return holder.kind != DeviceKind::cuda || holder.maps_memory || layer.k_row_bytes + layer.v_row_bytes == 0;
  });
}

namespace {

bool on_cpu_alone(const Plan& plan) {
  return std::none_of(plan.devices.begin(), plan.devices.end(),
                      [](const PlannedDevice& device) { return device.info.kind == DeviceKind::cuda; });
}

}  // namespace

int64_t Plan::cache_stride() const {
  const int64_t window = cache_window();
  if (window == 0) return 0;
  int64_t stride = window_stride(window);
  for (const KvLayer& layer : kv) {
    if (layer.window == 0 || device(layer.device).kind != DeviceKind::cuda) continue;
    for (const int64_t row : {layer.k_row_bytes, layer.v_row_bytes}) {
      if (row == 0) continue;
      const auto pieces = static_cast<int64_t>(8 * kMappedPiece) / row;
      stride = std::max(stride, (pieces + kWindowStep - 1) / kWindowStep * kWindowStep);
    }
  }
  return stride;
}

namespace {

// The longest window in which the layer's rows are read, by itself or by layers that share its cache; 0: all rows are
// read.
int64_t window_of(const model::ModelDesc& model, size_t layer) {
  int64_t longest = model.layers[layer].attention.window;
  for (const model::LayerSpec& reader : model.layers) {
    const model::AttentionSpec& a = reader.attention;
    if (a.heads == 0 || a.shared_kv != static_cast<int64_t>(layer)) continue;
    longest = longest == 0 || a.window == 0 ? 0 : std::max(longest, a.window);
  }
  return longest;
}

// Whether keeping only windows is worth it. Full rows allow a return to any position, and need little memory in a short
// context. The u-batch is not part of the rule, so that it affects nothing but memory. A GPU maps whole pieces, so
// bytes are compared.
bool windows_halve_the_cache(const Plan& windowed) {
  if (windowed.cache_window() == 0) return false;
  const ContextOptions& c = windowed.context;
  if (on_cpu_alone(windowed)) {
    return 2 * windowed_rows(c, windowed.cache_window(), windowed.cache_stride(), 0).rows <= cache_positions(c);
  }
  size_t kept = 0, all = 0;
  for (const KvLayer& layer : windowed.kv) {
    if (layer.window == 0) continue;
    KvLayer whole = layer;
    whole.window = 0;
    for (const int64_t row : {layer.k_row_bytes, layer.v_row_bytes}) {
      kept += memory_of_rows(windowed, c, layer, row, 0);
      all += memory_of_rows(windowed, c, whole, row, 0);
    }
  }
  return 2 * kept <= all;
}

void choose_window_cache(Plan& plan) {
  const auto keep = [&](WindowCache mode) {
    plan.window_cache = mode;
    for (KvLayer& layer : plan.kv) layer.window = mode == WindowCache::window ? layer.reads : 0;
  };
  if (plan.context.window_cache != WindowCache::automatic) return keep(plan.context.window_cache);
  keep(WindowCache::window);
  if (!plan.maps_cache() || !windows_halve_the_cache(plan)) keep(WindowCache::full);
}

}  // namespace

void count_kv(Plan& plan) {
  plan.kv_bytes = 0;
  for (PlannedDevice& device : plan.devices) device.kv_bytes = 0;
  for (const KvLayer& layer : plan.kv) {
    PlannedDevice& device = plan.devices[static_cast<size_t>(layer.device)];
    for (const int64_t row : {layer.k_row_bytes, layer.v_row_bytes}) {
      const size_t memory = checked_align(kv_memory(plan, plan.context, layer, row), 64, "the KV cache");
      device.kv_bytes = checked_add(device.kv_bytes, memory, "the KV cache");
      plan.kv_bytes = checked_add(plan.kv_bytes, memory, "the KV cache");
    }
  }
}

void layout_kv(Plan& plan, const model::ModelDesc& model, const ContextOptions& context) {
  ContextOptions c = context;
  DYNO_CHECK(PlanError, c.ctx >= 0, "[plan] ctx is ", c.ctx, "; expected 0 (the default) or more");
  if (c.ctx == 0) c.ctx = std::min(model.n_ctx_train, kDefaultContext);
  DYNO_CHECK(PlanError, c.ctx <= model.n_ctx_train, "[plan] ctx is ", c.ctx, ", but the model was made for ",
             model.n_ctx_train, " positions; use ctx=", model.n_ctx_train, " or less");
  DYNO_CHECK(PlanError, c.sequences >= 1 && c.sequences <= 1024, "[plan] sequences is ", c.sequences,
             "; expected 1 to 1024");
  const bool latent = has_latents(model);
  plan.kv_type_k = c.kv_type_k.value_or(latent ? DType::f32 : DType::f16);
  plan.kv_type_v = c.kv_type_v.value_or(latent ? plan.kv_type_k : DType::f16);
  plan.context = c;
  plan.selects = c.ctx > model.chosen_positions ? model.chosen_positions : 0;
  plan.kv.clear();
  plan.kv_address_bytes = 0;
  for (PlannedDevice& device : plan.devices) device.kv_address_bytes = 0;
  const size_t positions =
      checked_mul(static_cast<size_t>(c.ctx), static_cast<size_t>(c.sequences), "the KV cache (ctx x sequences)");
  check_cache_tokens(plan);
  // Reserves memory for a layer's keys or values and returns its offset.
  const auto take = [&](DeviceId device, int64_t row) {
    const size_t bytes = checked_align(
        checked_mul(static_cast<size_t>(row), positions, "the KV cache (bytes x positions)"), 64, "the KV cache");
    PlannedDevice& planned = plan.devices[static_cast<size_t>(device)];
    const size_t offset = planned.kv_address_bytes;
    planned.kv_address_bytes = checked_add(planned.kv_address_bytes, bytes, "the KV cache");
    plan.kv_address_bytes = checked_add(plan.kv_address_bytes, bytes, "the KV cache");
    return offset;
  };
  for (size_t i = 0; i < model.layers.size(); ++i) {
    const model::AttentionSpec& a = model.layers[i].attention;
    if (a.heads == 0 || a.shared_kv >= 0) {  // recurrent, or a reader of another layer's cache
      plan.kv.push_back({});
      continue;
    }
    check_cache_type(plan.kv_type_k, a.dk, "k", i);
    KvLayer kv{.device = attention_device(plan, a), .reads = window_of(model, i)};
    kv.k_row_bytes = static_cast<int64_t>(row_bytes(plan.kv_type_k, a.kv_heads * a.dk));
    kv.k_offset = take(kv.device, kv.k_row_bytes);
    if (a.kind == model::AttentionKind::gqa) {
      check_cache_type(plan.kv_type_v, a.dv, "v", i);
      kv.v_row_bytes = static_cast<int64_t>(row_bytes(plan.kv_type_v, a.kv_heads * a.dv));
      kv.v_offset = take(kv.device, kv.v_row_bytes);
    } else if (plan.selects > 0 && a.indexer.heads > 0) {
      kv.v_is_index = true;
      kv.v_row_bytes = static_cast<int64_t>(row_bytes(DType::f32, a.indexer.dk));
      kv.v_offset = take(kv.device, kv.v_row_bytes);
    }
    plan.kv.push_back(kv);
  }
  choose_window_cache(plan);
  count_kv(plan);
}

void layout_states(Plan& plan) {
  plan.state_bytes = 0;
  for (PlannedDevice& device : plan.devices) device.state_bytes = 0;
  for (State& state : plan.states) {
    const size_t bytes = checked_align(
        checked_mul(state.sequence_bytes(), static_cast<size_t>(plan.context.sequences), "the recurrent state"), 64,
        "the recurrent state");
    size_t& taken = plan.devices[static_cast<size_t>(state.device)].state_bytes;
    state.offset = taken;
    taken = checked_add(taken, bytes, "the recurrent state");
    plan.state_bytes = checked_add(plan.state_bytes, bytes, "the recurrent state");
  }
}

size_t Plan::sequence_state_bytes() const {
  size_t bytes = 0;
  for (const State& state : states) bytes += state.sequence_bytes();
  return bytes;
}

namespace {

void find_expert_places(Plan& plan, const model::ModelDesc& model) {
  plan.expert_places.resize(model.layers.size());
  plan.shared_experts.resize(model.layers.size());
  for (size_t i = 0; i < model.layers.size(); ++i) {
    const model::FfnSpec* f = model.layers[i].mixture();
    if (f == nullptr || f->cached.experts.empty()) continue;
    std::vector<int32_t>& places = plan.expert_places[i];
    places.assign(static_cast<size_t>(f->experts), -1);
    for (size_t place = 0; place < f->cached.experts.size(); ++place) {
      places[static_cast<size_t>(f->cached.experts[place])] = static_cast<int32_t>(place);
    }
  }
}

// Checks that the rows which a draft head gets from the model, and writes, exist in every list that can replace
// `general`.
void check_head_values(const Plan& plan, const model::ModelDesc& model, const NodeList& list) {
  if (list.nodes.empty() || list.id == ListId::draw) return;
  const bool rows = list.rows_in != kNoValue || plan.general.rows_in == kNoValue;
  const bool hidden = list.hidden != kNoValue || model.draft_blocks == 0;
  DYNO_CHECK(PlanError, rows && hidden, "[plan] a list of ", list.nodes.size(),
             " ops has no hidden rows, which the model's head needs");
}

// A build for one model lacks kernels of others: no op of the plan may need these.
void check_kernels(const Plan& plan, const NodeList& list) {
  for (const Node& node : list.nodes) {
    const OpUse& use = plan.keys[static_cast<size_t>(node.key)];
    const ops::Support built = ops::kernels_built(use.desc, plan.device(use.device));
    DYNO_CHECK(UnsupportedError, built.ok, "[plan] ", node.name, " (", use.key, "): ", built.reason,
               "; run with device=cpu");
  }
}

}  // namespace

Plan build_plan(const model::ModelDesc& model, const DeviceInfo& device, const LoadOptions& load,
                const ContextOptions& context, int64_t ubatch, MlaMode mla_mode, const OffloadOptions& offload) {
  Plan plan;
  plan.mla_mode = mla_mode;
  plan.offload = offload;
  plan.load = load;
  plan.devices = plan_devices(device, load.placement);
  place_weights(plan, model);
  layout_kv(plan, model, context);
  find_expert_places(plan, model);
  const bool gpu = device.kind == DeviceKind::cuda;
  plan.general = emit(plan, model);
  if (gpu && load.numerics == Numerics::standard) {
    plan.fused = fuse(plan, model, plan.general);
    plan.single = join_shared(plan, model, plan.fused);
    plan.batched = batch(plan, model, plan.general);
    if (has_latents(model)) plan.expanded = expand_mla(plan, model, plan.general, ListId::expanded);
  }
  // A token is sampled on the GPU if it computes the whole step.
  if (gpu && plan.devices.size() == 1) plan.draw = emit_draw(plan, model);
  mark_streamed(plan, model);
  mark_refilled(plan, model);
  const auto streamed = [](const WeightPlacement& weight) { return weight.stream.wanted; };
  if (std::any_of(plan.weights.begin(), plan.weights.end(), streamed)) {
    plan.streamed = emit_streamed(plan, model);
    if (!plan.expanded.nodes.empty()) {
      plan.streamed_expanded = expand_mla(plan, model, plan.streamed, ListId::streamed_expanded);
    }
  }
  for (NodeList* list : {&plan.general, &plan.fused, &plan.single, &plan.batched, &plan.expanded, &plan.draw,
                         &plan.streamed, &plan.streamed_expanded}) {
    own_values(plan, *list);
    place_nodes(plan, model, *list);
    transfer(plan, *list);
    hoist(plan, *list);
    finish_list(plan, *list);
    check_kernels(plan, *list);
    check_head_values(plan, model, *list);
    segment(plan, *list);
  }
  stream(plan);
  check_places(plan, model);
  layout_states(plan);
  count_weights(plan, model);
  layout_arena(plan, ubatch);
  return plan;
}

size_t Plan::expanded_bytes() const {
  size_t most = 0, all = 0;  // of any layer, and of all layers
  for (const Node& node : expanded.nodes) {
    const auto* made = std::get_if<MlaExpandOperands>(&node.operands);
    if (!expands() || made == nullptr) continue;
    const auto bytes = [&](const Operand& o) { return values[static_cast<size_t>(o.value)].bytes_fixed; };
    const size_t layer = checked_add(bytes(made->keys), bytes(made->values), "the arena");
    most = std::max(most, layer);
    all = checked_add(all, layer, "the arena");
  }
  return keeps_expanded ? all : most;
}

size_t Plan::stage_bytes() const {
  // Enough for the full rate of the link, and little compared with a layer.
  constexpr size_t kEnough = size_t{32} << 20;
  constexpr size_t kAlignment = 256;
  size_t most = 0;
  for (const WeightPlacement& weight : weights) {
    most = std::max(most, weight.refill_stage);
    if (!weight.stream.wanted || weight.stream.layout == weight.layout) continue;
    const size_t matrix = weight.bytes / static_cast<size_t>(weight.stream.matrices);
    most = std::max(most, std::min(weight.bytes, std::max(matrix, kEnough)));
  }
  return (most + kAlignment - 1) / kAlignment * kAlignment;
}

int Plan::numa_nodes() const {
  if (load.numa == NumaMode::off) return 1;
  const auto host = std::find_if(devices.begin(), devices.end(),
                                 [](const PlannedDevice& d) { return d.info.kind == DeviceKind::cpu; });
  return host == devices.end() ? 1 : host->info.numa_nodes;
}

}  // namespace dyno::plan
