#include "runtime/executor_cpu.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <utility>

#include "runtime/launch_node.h"

namespace dyno::runtime {

struct CpuExecutor::Env {
  const model::ModelDesc& model;
  const plan::Plan& plan;
  const plan::Selection& selection;
  const Weights& weights;
  ops::CpuContext context;
  LaunchBatch batch;
  int64_t tokens;
  const std::vector<Memory>& memory;
  const ValueMemory& values;
  float* logits;
  const std::vector<std::vector<int32_t>>& cached;  // places of cached experts, by layer
  const std::vector<std::vector<int32_t>>& shared;  // places of shared experts, by layer
  std::vector<std::vector<int32_t>>& choices;       // counts of chosen experts in layers with cached ones, if the cache
                                                    // adapts
  std::byte* copies = nullptr;                      // copies of streamed weights
  plan::ListId list = plan::ListId::general;
  bool ids_settled = false;  // used by GPUs only

  const PartedBuffer& cache_of(int32_t layer) const {
    return memory[static_cast<size_t>(plan.kv[static_cast<size_t>(layer)].device)].cache;
  }
  std::byte* keys_of(int32_t layer) const { return cache_of(layer).at(2 * static_cast<size_t>(layer)); }
  std::byte* values_of(int32_t layer) const { return cache_of(layer).at(2 * static_cast<size_t>(layer) + 1); }
  float* state_of(int32_t index) const {
    const auto at = static_cast<size_t>(index);
    return reinterpret_cast<float*>(memory[static_cast<size_t>(plan.states[at].device)].states.at(at));
  }
  std::byte* at(const plan::Operand& operand) const {
    if (!operand) return nullptr;
    std::byte* base =
        operand.value == plan.logits ? reinterpret_cast<std::byte*>(logits) : values.address_of(operand.value);
    return base + operand.offset_bytes;
  }
  const std::byte* weight(model::WeightId id) const {
    return plan.streams(list, id) ? copies + plan.weights[static_cast<size_t>(id)].stream.offset : weights.data(id);
  }
  size_t weight_bytes(model::WeightId id) const { return plan.bytes_in(list, id); }
  const float* inverse_frequencies(int32_t table) const {
    return plan.rope_tables[static_cast<size_t>(table)].inv_freq.data();
  }
  const int32_t* expert_places(int32_t table) const {
    const auto at = static_cast<size_t>(table);
    return plan.is_shared_table(table) ? shared[at - cached.size()].data() : cached[at].data();
  }
  // Only GPUs expand latents.
  int64_t first_expanded(const plan::Node&, const ops::SequenceRun&) const { return 0; }
  void expanded(const plan::Node&, const ops::SequenceRun&) const {}
  int32_t* choice_counts(int32_t table) const {
    return plan.counts_choices(table) ? choices[static_cast<size_t>(table)].data() : nullptr;
  }
  void soft_cap(float* values, int64_t count, float cap) const {
    for (int64_t i = 0; i < count; ++i) values[i] = cap * std::tanh(values[i] / cap);
  }
  void copy_ids(const int32_t* from, int64_t count, int32_t* to) const { std::copy_n(from, count, to); }
  void sample(const ops::Config&, const ops::SampleDesc&, const float*) const {
    throw Error("[executor] on the CPU the session draws, not its plan");
  }
};

namespace {

bool beside_gpu(const plan::Plan& plan) { return plan.main_device().kind == DeviceKind::cuda; }

}  // namespace

CpuExecutor::CpuExecutor(const model::ModelDesc& model, const plan::Plan& plan, Weights& weights, ThreadPool& pool)
    : model_(model),
      plan_(plan),
      weights_(weights),
      pool_(pool),
      memory_(plan.devices.size()),
      virtual_(plan),
      cached_places_(plan.expert_places),
      choices_(plan.expert_places) {
  for (std::vector<int32_t>& counts : choices_) counts.assign(counts.size(), 0);
}

CpuExecutor::~CpuExecutor() = default;

std::byte* CpuExecutor::memory_of(plan::ValueId value) const {
  const auto at = static_cast<size_t>(value);
  return memory_[static_cast<size_t>(plan_.values[at].device)].arena.at(at);
}

bool CpuExecutor::values_locked() const {
  return std::all_of(memory_.begin(), memory_.end(),
                     [](const Memory& memory) { return memory.lock.problem().empty(); });
}

std::vector<std::string> CpuExecutor::warnings() const {
  std::vector<std::string> out;
  if (!weights_.lock_problem().empty()) out.push_back(weights_.lock_problem());
  if (!weights_.numa_problem().empty()) out.push_back(weights_.numa_problem());
  if (const std::string problem = pool_.spread_problem(); !problem.empty()) {
    out.push_back(str_cat("[numa] the system refuses to bind threads to their nodes (", problem,
                          "); threads run on any core, which is slower"));
  }
  for (const Memory& memory : memory_) {
    if (!memory.lock.problem().empty()) out.push_back(memory.lock.problem());
  }
  return out;
}

void CpuExecutor::read(plan::ValueId value, size_t begin, std::span<std::byte> out) {
  std::memcpy(out.data(), memory_of(value) + begin, out.size());
}

void CpuExecutor::prepare_memory(plan::DeviceId device, bool clear_cache) {
  const plan::PlannedDevice& planned = plan_.devices[static_cast<size_t>(device)];
  Memory& memory = memory_[static_cast<size_t>(device)];
  std::vector<BufferPart> values(plan_.values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    const plan::Value& value = plan_.values[i];
    if (value.device != device || !plan::in_arena(plan_, static_cast<plan::ValueId>(i))) continue;
    values[i] = {value.offset, value_bytes(plan_, value)};
  }
  if (!memory.arena.holds(planned.arena_bytes, values)) {
    memory.lock = {};
    memory.arena = PartedBuffer(planned.arena_bytes, std::move(values), "the arena");
    if (beside_gpu(plan_))
      memory.lock = PageLock(memory.arena.block(), plan_.main_device().ordinal, "values that cross to a GPU");
  }
  std::vector<BufferPart> layers;
  const auto positions = static_cast<size_t>(plan_.context.ctx * plan_.context.sequences);
  for (const plan::KvLayer& kv : plan_.kv) {
    const bool here = kv.device == device;
    layers.push_back(here ? BufferPart{kv.k_offset, static_cast<size_t>(kv.k_row_bytes) * positions} : BufferPart{});
    layers.push_back(here ? BufferPart{kv.v_offset, static_cast<size_t>(kv.v_row_bytes) * positions} : BufferPart{});
  }
  // Memory is allocated as rows are written. With huge pages, the first row of each sequence would allocate one in each
  // layer.
  const Pages pages = plan_.context.sequences > 1 ? Pages::small : Pages::huge;
  if (clear_cache || !memory.cache.holds(planned.kv_address_bytes, layers)) {
    memory.cache = PartedBuffer(planned.kv_address_bytes, std::move(layers), "the KV cache", pages);
    // A huge page has more rows than most windows.
    for (size_t i = 0; i < memory.cache.parts().size(); ++i) {
      if (plan_.kv[i / 2].window > 0) use_small_pages({memory.cache.at(i), memory.cache.parts()[i].bytes});
    }
  }
  std::vector<BufferPart> states;
  for (const plan::State& state : plan_.states) {
    const size_t bytes = state.sequence_bytes() * static_cast<size_t>(plan_.context.sequences);
    states.push_back(state.device == device ? BufferPart{state.offset, bytes} : BufferPart{});
  }
  if (clear_cache || !memory.states.holds(planned.state_bytes, states)) {
    memory.states = PartedBuffer(planned.state_bytes, std::move(states), "the recurrent state");
  }
}

std::byte* CpuExecutor::state_at(size_t index, int32_t slot) const {
  const plan::State& state = plan_.states[index];
  return memory_[static_cast<size_t>(state.device)].states.at(index) +
         state.sequence_bytes() * static_cast<size_t>(slot);
}

void CpuExecutor::save_state(int32_t slot, std::byte* to) {
  for (size_t i = 0; i < plan_.states.size(); ++i) {
    const size_t bytes = plan_.states[i].sequence_bytes();
    if (holds(plan_.states[i].device)) std::memcpy(to, state_at(i, slot), bytes);
    to += bytes;
  }
}

void CpuExecutor::load_state(int32_t slot, const std::byte* from) {
  for (size_t i = 0; i < plan_.states.size(); ++i) {
    const size_t bytes = plan_.states[i].sequence_bytes();
    if (holds(plan_.states[i].device)) std::memcpy(state_at(i, slot), from, bytes);
    from += bytes;
  }
}

void CpuExecutor::copy_sequence(int32_t from, int32_t to, int64_t positions, std::span<const Rows> windowed) {
  const Rows all[] = {{0, positions}};
  const auto copy_rows = [&](std::byte* rows, int64_t row_bytes, std::span<const Rows> wanted) {
    const int64_t slot_bytes = plan_.context.ctx * row_bytes;
    for (const Rows& each : wanted) {
      std::memcpy(rows + to * slot_bytes + each.begin * row_bytes, rows + from * slot_bytes + each.begin * row_bytes,
                  static_cast<size_t>((each.end - each.begin) * row_bytes));
    }
  };
  for (size_t i = 0; i < plan_.kv.size(); ++i) {
    const plan::KvLayer& kv = plan_.kv[i];
    if (!holds(kv.device) || kv.k_row_bytes == 0) continue;
    const PartedBuffer& cache = memory_[static_cast<size_t>(kv.device)].cache;
    const std::span<const Rows> wanted = kv.window > 0 ? windowed : all;
    copy_rows(cache.at(2 * i), kv.k_row_bytes, wanted);
    if (kv.v_row_bytes > 0) copy_rows(cache.at(2 * i + 1), kv.v_row_bytes, wanted);
  }
  for (size_t i = 0; i < plan_.states.size(); ++i) {
    if (!holds(plan_.states[i].device)) continue;
    std::memcpy(state_at(i, to), state_at(i, from), plan_.states[i].sequence_bytes());
  }
}

void CpuExecutor::give_back(int32_t slot, int64_t begin, int64_t end, CacheLayers layers) {
  const int64_t first = slot * plan_.context.ctx;
  const auto drop = [&](const PartedBuffer& cache, size_t part, int64_t row_bytes) {
    const auto to = std::min(static_cast<size_t>((first + end) * row_bytes), cache.parts()[part].bytes);
    const auto from = std::min(static_cast<size_t>((first + begin) * row_bytes), to);
    give_back_pages({cache.at(part) + from, to - from});
  };
  for (size_t i = 0; i < plan_.kv.size(); ++i) {
    const plan::KvLayer& kv = plan_.kv[i];
    if (!holds(kv.device) || kv.k_row_bytes == 0 || !concerns(layers, kv)) continue;
    const PartedBuffer& cache = memory_[static_cast<size_t>(kv.device)].cache;
    drop(cache, 2 * i, kv.k_row_bytes);
    drop(cache, 2 * i + 1, kv.v_row_bytes);
  }
}

void CpuExecutor::prepare(const plan::Selection& selection, int max_threads, bool clear_cache) {
  size_t scratch = 0;
  for (size_t i = 0; i < memory_.size(); ++i) {
    const auto device = static_cast<plan::DeviceId>(i);
    if (plan_.device(device).kind != DeviceKind::cpu) continue;
    prepare_memory(device, clear_cache);
    scratch = std::max(scratch, selection.scratch_of(device, plan_.ubatch));
  }
  const bool here = plan_.main_device().kind == DeviceKind::cpu;
  const size_t copies = here ? plan_.devices.front().stream_bytes : 0;
  if (copies_.size() != copies) {
    copies_ = {};
    copies_ = HostBuffer(copies, "copies of streamed weights");
  }
  virtual_.forget_copies();
  places_.assign(plan_.shared_experts.size(), {});
  if (!scratch_.holds(scratch, static_cast<size_t>(max_threads))) {
    scratch_ = StripedBuffer(scratch, static_cast<size_t>(max_threads), "kernel scratch");
  }
}

void CpuExecutor::select_rows(std::span<const plan::ValueId> values) {
  for (const plan::ValueId id : values) {
    const plan::Value& value = plan_.values[static_cast<size_t>(id)];
    if (plan_.device(value.device).kind != DeviceKind::cpu) continue;
    std::byte* base = memory_of(id);
    for (size_t row = 0; row < micro_batch_.logit_rows.size(); ++row) {
      const auto from = static_cast<size_t>(micro_batch_.logit_rows[row]);
      if (from != row) {
        std::memcpy(base + value.bytes_per_token * row, base + value.bytes_per_token * from, value.bytes_per_token);
      }
    }
  }
}

void CpuExecutor::begin(const MicroBatch& batch, const plan::Selection& selection, int threads) {
  micro_batch_ = batch;
  // Also until the next token. In prompts the CPU is idle for longer than threads should spin.
  const bool takes_turns = plan_.devices.size() > 1;
  pool_.spread(threads);
  pool_.stay_awake(takes_turns && static_cast<int64_t>(batch.tokens.size()) <= plan::kFusedTokens);
  env_.reset(new Env{.model = model_,
                     .plan = plan_,
                     .selection = selection,
                     .weights = weights_,
                     .context = {.pool = &pool_,
                                 .threads = threads,
                                 .isa = plan_.main_device().isa,
                                 .scratch = scratch_.data(),
                                 .scratch_per_thread = scratch_.stride(),
                                 .copies = weights_.copies()},
                     .batch = {.tokens = batch.tokens.data(),
                               .positions = batch.positions.data(),
                               .runs = batch.runs.data(),
                               .n_runs = static_cast<int32_t>(batch.runs.size()),
                               .host_runs = batch.runs,
                               .pinned_routing = batch.pinned_routing,
                               .captured_routing = batch.captured_routing,
                               .routing_stride = batch.routing_stride},
                     .tokens = static_cast<int64_t>(batch.tokens.size()),
                     .memory = memory_,
                     .values = *values_,
                     .logits = batch.logits,
                     .cached = cached_places_,
                     .shared = places_,
                     .choices = choices_,
                     .copies = copies_.data()});
}

void CpuExecutor::run_nodes(const plan::NodeList& list, int32_t begin, int32_t end, int64_t tokens) {
  env_->tokens = tokens;
  env_->list = list.id;
  virtual_.enter(list.nodes[static_cast<size_t>(begin)].device);
  for (int32_t i = begin; i < end; ++i) {
    const plan::Node& node = list.nodes[static_cast<size_t>(i)];
    if (micro_batch_.between_nodes != nullptr) (*micro_batch_.between_nodes)();
    env_->context.isa = plan_.device(node.device).isa;
    env_->list = plan::Plan::weights_list(node, list.id);
    launch(node);
  }
}

// The copy is made at once, and counts as arrived when the simulated link would have carried it.
void CpuExecutor::bring(model::WeightId weight, const std::byte* from, int64_t matrices,
                        std::span<const MatrixRange> ranges) {
  const auto at = static_cast<size_t>(weight);
  const plan::WeightPlacement& placed = plan_.weights[at];
  const size_t each = placed.stream.bytes / static_cast<size_t>(matrices);
  size_t bytes = 0;
  const auto start = VirtualDevices::Clock::now();
  for (const MatrixRange& range : ranges) {
    const size_t offset = each * static_cast<size_t>(range.first), count = each * static_cast<size_t>(range.count);
    std::memcpy(copies_.data() + placed.stream.offset + offset, from + offset, count);
    bytes += count;
  }
  virtual_.copy(weight, placed.device, bytes, start);
}

void CpuExecutor::bring_own(model::WeightId weight, model::WeightId own, std::span<const MatrixMove> moves) {
  const plan::StreamedWeight& copy = plan_.weights[static_cast<size_t>(weight)].stream;
  const size_t each = copy.bytes / static_cast<size_t>(copy.matrices);
  for (const MatrixMove& move : moves) {
    std::memcpy(copies_.data() + copy.offset + each * static_cast<size_t>(move.to),
                weights_.data(own) + each * static_cast<size_t>(move.from), each * static_cast<size_t>(move.count));
  }
}

void CpuExecutor::set_places(int32_t layer, std::span<const int32_t> places) {
  places_[static_cast<size_t>(layer)].assign(places.begin(), places.end());
}

void CpuExecutor::await_copies(model::WeightId weight) { VirtualDevices::wait_until(virtual_.copy_arrival(weight)); }

std::vector<int64_t> CpuExecutor::take_choices(int32_t layer) {
  std::vector<int32_t>& counts = choices_[static_cast<size_t>(layer)];
  const std::vector<int64_t> taken(counts.begin(), counts.end());
  counts.assign(counts.size(), 0);
  return taken;
}

void CpuExecutor::set_cached_places(int32_t layer, std::span<const int32_t> places) {
  cached_places_[static_cast<size_t>(layer)].assign(places.begin(), places.end());
}

// As bring(): copied at once, and counts as arrived when the simulated link would have carried it.
void CpuExecutor::fill_place(model::WeightId weight, const std::byte*, int64_t matrix, model::WeightId own,
                             int64_t place) {
  const plan::WeightPlacement& placed = plan_.weights[static_cast<size_t>(weight)];
  const size_t bytes = placed.bytes / static_cast<size_t>(model_.weight(weight).batch);
  const auto start = VirtualDevices::Clock::now();
  weights_.copy_matrix(weight, matrix, own, place, bytes);
  virtual_.copy(own, placed.device, bytes, start);
}

bool CpuExecutor::has_arrived(model::WeightId own) const {
  return virtual_.copy_arrival(own) <= VirtualDevices::Clock::now();
}

// Waits for the time at which a device behind a link would have sent the logits to the host.
void CpuExecutor::end() {
  const plan::DeviceId device = plan_.logits_device();
  if (micro_batch_.logit_rows.empty() || plan_.device(device).kind != DeviceKind::cpu) return;
  const size_t bytes = micro_batch_.logit_rows.size() * static_cast<size_t>(model_.n_vocab) * sizeof(float);
  VirtualDevices::wait_until(virtual_.arrival_at_host(device, bytes));
}

// Counts the ids that the CPU got; ids of cached experts are negative there.
void CpuExecutor::count_experts(const plan::Node& node) {
  const auto* product = std::get_if<plan::MatmulIdOperands>(&node.operands);
  const auto* desc = std::get_if<ops::MatmulIdDesc>(&node.desc);
  if (product == nullptr || !desc->x_per_slot ||
      plan_.weights[static_cast<size_t>(product->w.id)].device == plan::kMainDevice) {
    return;
  }
  const auto* ids = reinterpret_cast<const int32_t*>(env_->at(product->ids));
  const int64_t count = env_->tokens * desc->used;
  expert_counts_.chosen += count;
  expert_counts_.cached += std::count_if(ids, ids + count, [](int32_t id) { return id < 0; });
}

// A launch, and its wait for the link of a virtual device.
void CpuExecutor::launch_and_wait(const plan::Node& node) {
  const auto* moved = std::get_if<plan::TransferOperands>(&node.operands);
  if (node.divided && !node.at_home && !plan::is_streamed(env_->list)) count_experts(node);
  if (moved == nullptr || plan_.devices.size() == 1) {
    launch_node(node, *env_);
    return;
  }
  const auto start = VirtualDevices::Clock::now();
  launch_node(node, *env_);
  const plan::Value& value = plan_.values[static_cast<size_t>(moved->x.value)];
  const size_t bytes = value.bytes_fixed + value.bytes_per_token * static_cast<size_t>(env_->tokens);
  VirtualDevices::wait_until(virtual_.arrival(value.device, node.device, bytes, start));
}

void CpuExecutor::launch(const plan::Node& node) {
  if (micro_batch_.op_times == nullptr) {
    launch_and_wait(node);
    return;
  }
  const auto start = std::chrono::steady_clock::now();
  launch_and_wait(node);
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  OpTime& time = micro_batch_.op_times[node.key];
  time.seconds += elapsed.count();
  ++time.launches;
}

}  // namespace dyno::runtime
