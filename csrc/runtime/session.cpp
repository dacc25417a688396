#include "runtime/session.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "core/checked.h"
#include "core/cuda_devices.h"
#include "core/error.h"
#include "core/host_memory.h"
#include "plan/auto_place.h"
#include "plan/expert_cache.h"
#include "runtime/executor_cpu.h"
#include "runtime/executor_cuda.h"
#include "runtime/row_draws.h"
#include "runtime/segment_executor.h"

namespace dyno::runtime {
namespace {

constexpr int kMaxThreads = 1024;
constexpr int64_t kMostTokens = int64_t{1} << 24;

SessionSettings resolved(SessionSettings s, int cores) {
  DYNO_CHECK(PlanError, s.threads >= 0 && s.threads <= kMaxThreads, "[session] threads is ", s.threads,
             "; expected 0 (all cores) to ", kMaxThreads);
  DYNO_CHECK(PlanError, s.threads_batch >= 0 && s.threads_batch <= kMaxThreads, "[session] threads_batch is ",
             s.threads_batch, "; expected 0 (as threads) to ", kMaxThreads);
  if (s.threads == 0) s.threads = cores;
  if (s.threads_batch == 0) s.threads_batch = s.threads;
  DYNO_CHECK(PlanError, !s.cuda_graphs || kCudaGraphsBuilt, "[session] cuda_graphs is on, but ",
             "this build has no CUDA graphs (GGML_CUDA, GGML_CUDA_USE_GRAPHS)");
  plan::resolved(s.paths);  // throws for values out of range
  DYNO_CHECK(PlanError, s.offload.min_tokens >= 0 && s.offload.min_tokens <= kMostTokens,
             "[session] offload_min_tokens is ", s.offload.min_tokens, "; expected 0 to ", kMostTokens);
  DYNO_CHECK(PlanError, s.offload.cpu_share >= plan::kBalanced && s.offload.cpu_share <= 100, "[session] cpu_share is ",
             s.offload.cpu_share, "; expected 0 to 100 (percent), or -1 to balance the CPU and the link");
  return s;
}

// The additional devices of a plan with a GPU: the CPU, and the other GPUs.
plan::LoadOptions with_neighbours(plan::LoadOptions load, const DeviceInfo& device) {
  if (device.kind != DeviceKind::cuda || !load.placement.beside_gpu.empty()) return load;
  load.placement.beside_gpu = {detect_cpu()};
  for (DeviceInfo& gpu : detect_cuda()) load.placement.beside_gpu.push_back(std::move(gpu));
  return load;
}

bool is_gpu(const plan::PlannedDevice& device) { return device.info.kind == DeviceKind::cuda; }

// Sets `flag` during its lifetime.
class Computing {
 public:
  explicit Computing(bool& flag) : flag_(flag) { flag_ = true; }
  ~Computing() { flag_ = false; }
  Computing(const Computing&) = delete;
  Computing& operator=(const Computing&) = delete;

 private:
  bool& flag_;
};

}  // namespace

Session::Session(std::shared_ptr<const GgufFile> file, const plan::LoadOptions& load,
                 const plan::ContextOptions& context, const SessionSettings& settings, const DeviceInfo& device,
                 std::vector<profile::KernelEntry> kernels, Loading loading, model::Part part, const Session* lender)
    : file_(std::move(file)),
      lender_(lender),
      model_(model::first_layers(model::describe_model(*file_, part), load.layers)),
      plan_(plan::build_plan(model_, device, with_neighbours(load, device), context, settings.ubatch, settings.mla_mode,
                             settings.offload)),
      settings_(resolved(settings, detect_cpu().cores)),
      kernels_(std::move(kernels)),
      pool_(std::make_unique<ThreadPool>(kMaxThreads)),
      positions_(static_cast<size_t>(plan_.context.sequences), 0),
      filled_(positions_.size(), 0),
      begun_(filled_) {
  const int threads = std::max(settings_.threads, settings_.threads_batch);
  borrow(plan_);
  choose();
  place(loading);
  cache_experts();
  windows_ = WindowRows(plan_.cache_window(), plan_.cache_stride(), positions_.size());  // with the previous plan
  if (loading == Loading::plan_only) return;
  try {
    fit_memory(/*weights_loaded=*/false, lender_);
    make_executor(threads);
  } catch (const Error&) {
    file_->check_unchanged();  // otherwise the message would blame a file that is being written
    throw;
  }
  file_->check_unchanged();
  prepare(/*clear_cache=*/false);
}

plan::Plan Session::planned(const plan::ContextOptions& context, const SessionSettings& settings) const {
  plan::Plan plan = plan::build_plan(model_, plan_.main_device(), plan_.load, context, settings.ubatch,
                                     settings.mla_mode, settings.offload);
  plan.placement_note = plan_.placement_note;
  borrow(plan);
  return plan;
}

void Session::make_executor(int threads) {
  if (plan_.devices.size() == 1 && is_gpu(plan_.devices.front())) {
    executor_ = make_cuda_executor(*file_, model_, plan_, *pool_, threads, lent_weights());
    return;
  }
  std::unique_ptr<Backend> cpu;
  if (!std::all_of(plan_.devices.begin(), plan_.devices.end(), is_gpu)) {
    if (plan_.numa_nodes() > 1) pool_->set_nodes(detect_numa_nodes());
    weights_ = std::make_unique<Weights>(*file_, model_, plan_, *pool_, threads, settings_.threads);
    cpu = std::make_unique<CpuExecutor>(model_, plan_, *weights_, *pool_);
  }
  std::vector<SegmentExecutor::Gpu> gpus;
  for (size_t i = 0; i < plan_.devices.size(); ++i) {
    const auto id = static_cast<plan::DeviceId>(i);
    if (is_gpu(plan_.devices[i])) gpus.push_back({id, make_cuda_backend(*file_, model_, plan_, id, *pool_, threads)});
  }
  executor_ = std::make_unique<SegmentExecutor>(plan_, model_, std::move(cpu), std::move(gpus));
  reads_file_ = std::any_of(plan_.weights.begin(), plan_.weights.end(),
                            [](const plan::WeightPlacement& weight) { return weight.mapped; });
}

void Session::fit_memory(bool weights_loaded, const Session* beside) {
  if (plan_.keeps_expanded) {
    try {
      return check_memory(weights_loaded, beside);
    } catch (const OutOfMemoryError&) {
      plan_.may_keep_expanded = false;
      plan::layout_arena(plan_, plan_.ubatch);
    }
  }
  check_memory(weights_loaded, beside);
}

void Session::check_memory(bool weights_loaded, const Session* beside) const {
  plan::check_limits(plan_, weights_loaded);
  for (size_t i = 0; i < plan_.devices.size(); ++i) {
    const DeviceInfo& device = plan_.devices[i].info;
    if (device.kind != DeviceKind::cuda) continue;
    const auto id = static_cast<plan::DeviceId>(i);
    // A cache is either kept as part of the new plan, or freed for a new one: in both cases its memory is available.
    const size_t held = weights_loaded ? held_bytes_[i] + executor_->gpu_cache_bytes(id) : 0;
    const size_t free = cuda_free_bytes(device.ordinal) + held;
    // The model's cache and the head's cache may still grow.
    const size_t promised = beside != nullptr ? beside->promised_bytes(device.ordinal) : 0;
    plan::check_memory(plan_, id, free - std::min(free, promised), weights_loaded);
  }
  const bool host = !std::all_of(plan_.devices.begin(), plan_.devices.end(), is_gpu);
  const auto available = host ? available_host_bytes() : std::nullopt;
  if (!available) return;
  size_t held = 0;
  for (size_t i = 0; i < held_bytes_.size(); ++i) {
    if (!is_gpu(plan_.devices[i])) held += held_bytes_[i];
  }
  plan::check_host_memory(plan_, *available + (weights_loaded ? held : 0), weights_loaded);
}

// If the placement is automatic: chooses it for the memory that the main device has free now.
void Session::place(Loading loading) {
  const plan::PlacementOptions& asked = plan_.load.placement;
  const plan::PlannedDevice& main = plan_.devices.front();
  if (!asked.automatic) return;
  size_t free = main.memory_limit;
  if (main.info.kind == DeviceKind::cuda) {
    // A described device need not exist.
    free = loading == Loading::plan_only ? static_cast<size_t>(std::max<int64_t>(main.info.memory_bytes, 0))
                                         : cuda_free_bytes(main.info.ordinal);
    if (main.memory_limit > 0) free = std::min(free, main.memory_limit);
  }
  if (free == 0) return;
  const std::vector<plan::NamedRates> rates = asked.rates;
  const size_t scratch = main.scratch_bytes;
  const size_t cached = static_cast<size_t>(std::max<int64_t>(plan_.load.expert_cache.mib, 0)) << 20;
  plan_ = plan::place_automatically(std::move(plan_), model_, rates, free, scratch, cached);
  choose();
}

// Chooses the cached experts, after all weights have a device.
void Session::cache_experts() {
  if (plan_.load.expert_cache.mib == 0) return;
  const std::vector<std::vector<int32_t>> chosen = plan::choose_cached(plan_, model_);
  if (std::all_of(chosen.begin(), chosen.end(), [](const auto& experts) { return experts.empty(); })) return;
  model_ = model::with_cached_experts(std::move(model_), chosen);
  plan_ = planned(plan_.context, settings_);
  choose();
}

// On the CPU every thread has its own scratch memory, which all CPU devices share; on a GPU a launch has one workspace.
void Session::plan_scratch() {
  constexpr const char* kWhat = "the scratch memory";
  size_t per_thread = 0;
  plan::PlannedDevice* host = nullptr;
  plan_.scratch_bytes = 0;
  for (size_t i = 0; i < plan_.devices.size(); ++i) {
    plan::PlannedDevice& device = plan_.devices[i];
    size_t launch = selection_->scratch_of(static_cast<plan::DeviceId>(i), plan_.ubatch);
    if (is_gpu(device)) launch = std::max(launch, row_draw_scratch(plan_, *selection_));
    device.scratch_bytes = 0;
    if (is_gpu(device)) {
      device.scratch_bytes =
          checked_add(launch, kBesideStreams * selection_->scratch_beside(captured_tokens(plan_)), kWhat);
      plan_.scratch_bytes = checked_add(plan_.scratch_bytes, device.scratch_bytes, kWhat);
    } else {
      per_thread = std::max(per_thread, launch);
      if (host == nullptr) host = &device;
    }
  }
  if (host == nullptr) return;
  const auto threads = static_cast<size_t>(std::max(settings_.threads, settings_.threads_batch));
  host->scratch_bytes = checked_mul(per_thread, threads, kWhat);
  plan_.scratch_bytes = checked_add(plan_.scratch_bytes, host->scratch_bytes, kWhat);
}

void Session::choose() {
  // The fused kernels that store k and v and attend have no float32 version.
  plan_.fusion = settings_.fusion && (settings_.flash_attention || !plan_.fuses_attention());
  plan_.fused_tokens = std::min(plan::kFusedTokens, settings_.paths.matvec_max_tokens);
  if (model_.moe_layers() > 0) {
    plan_.fused_tokens = std::min(plan_.fused_tokens, settings_.paths.matvec_id_max_tokens);
  }
  // Up to kRingTokens tokens, a product that normalises its rows runs a ring whatever the thresholds are.
  const int64_t most_mmq = ops::kDequantizeBuilt ? settings_.paths.mmq_max_tokens : plan::kBatchedTokens;
  plan_.batched_tokens = std::clamp(most_mmq, plan::kRingTokens, plan::kBatchedTokens);
  selection_ = std::make_unique<plan::Selection>(
      plan_, kernels_,
      plan::SelectionSettings{.paths = settings_.paths,
                              .flash_attention = settings_.flash_attention,
                              .graph_concurrency = settings_.graph_concurrency && settings_.cuda_graphs});
  plan_scratch();
}

void Session::prepare(bool clear_cache) {
  if (executor_ == nullptr) return;
  executor_->use_graphs(settings_.cuda_graphs, settings_.graph_concurrency);
  executor_->prepare(*selection_, std::max(settings_.threads, settings_.threads_batch), clear_cache);
  failed_change_.reset();
  held_bytes_.clear();
  for (const plan::PlannedDevice& device : plan_.devices) {
    // The cache of a GPU may map memory on demand, so the executor knows its current size.
    held_bytes_.push_back((is_gpu(device) ? 0 : device.kv_bytes) + device.state_bytes + device.arena_bytes +
                          device.scratch_bytes + device.stream_bytes);
  }
}

// A change that is refused or fails leaves the session as it was. The new memory is checked before the old memory is
// freed.
template <typename Change>
void Session::replan(const Change& change, bool clear_cache) {
  check_idle();
  check_device();
  end_steps();
  finish();
  if (executor_ != nullptr) executor_->settle();  // pending memory becomes free for the new plan
  const plan::Plan plan = plan_;
  const SessionSettings settings = settings_;
  const std::vector<profile::KernelEntry> kernels = kernels_;
  bool touched = false;
  try {
    const Session* head = change();
    choose();
    if (executor_ != nullptr) fit_memory(/*weights_loaded=*/true, lender_ != nullptr ? lender_ : head);
    touched = true;
    prepare(clear_cache);
  } catch (const std::exception& error) {
    plan_ = plan;
    settings_ = settings;
    kernels_ = kernels;
    choose();
    if (!touched) throw;
    if (clear_cache) {
      // The cache is recreated, so none of its memory has to be freed; it may already belong to the new plan.
      for (size_t slot = 0; slot < positions_.size(); ++slot) move_back(static_cast<int32_t>(slot), 0);
      filled_.assign(filled_.size(), 0);
    }
    try {
      prepare(clear_cache);
    } catch (const std::exception&) {
      failed_change_ = error.what();  // check_ready() reports it from now on
    }
    throw;
  }
}

void Session::finish() const {
  if (executor_ != nullptr) executor_->finish();
}

void Session::set(const SessionSettings& settings) {
  const SessionSettings next = resolved(settings, detect_cpu().cores), before = settings_;
  // The head first: if it does not fit, nothing has changed yet.
  if (draft_head_ != nullptr) draft_head_->session().set(next);
  try {
    replan(
        [&] {
          if (next.offload != settings_.offload) {
            plan_ = planned(plan_.context, next);
          } else {
            plan_.mla_mode = next.mla_mode;
            plan::layout_arena(plan_, next.ubatch);
          }
          settings_ = next;
          return draft_session();
        },
        /*clear_cache=*/false);
  } catch (...) {
    const std::exception_ptr error = std::current_exception();
    try {
      if (draft_head_ != nullptr) draft_head_->session().set(before);
    } catch (...) {
      std::rethrow_exception(error);  // the first error has the reason
    }
    throw;
  }
}

void Session::set_kernels(std::vector<profile::KernelEntry> kernels) {
  const auto change = [&] {
    kernels_ = std::move(kernels);
    return draft_session();
  };
  replan(change, /*clear_cache=*/false);
}

void Session::set_context(const plan::ContextOptions& context) {
  std::unique_ptr<DraftHead> head;  // recreated for the new number of sequences, before anything else changes, because
                                    // it may not fit
  // Cache types are part of the attention ops, so the op lists are built again; layouts do not depend on them.
  const auto change = [&]() -> const Session* {
    plan_ = planned(context, settings_);
    if (draft_head_ == nullptr) return nullptr;
    head = make_draft_head();
    return &head->session();  // this head's cache will grow, not the old one's
  };
  try {
    replan(change, /*clear_cache=*/true);
  } catch (const OutOfMemoryError& error) {
    if (draft_head_ == nullptr) throw;
    throw OutOfMemoryError(str_cat(error.what(),
                                   "; the head that drafts tokens also keeps its memory until the change ",
                                   "is over: drop it before (drop_draft_head) and load it again afterwards"));
  }
  positions_.assign(static_cast<size_t>(plan_.context.sequences), 0);
  filled_ = begun_ = positions_;
  windows_ = WindowRows(plan_.cache_window(), plan_.cache_stride(), positions_.size());
  for (const std::weak_ptr<Checkpoint>& kept : checkpoints_) {
    if (const std::shared_ptr<Checkpoint> c = kept.lock()) c->good = false;
  }
  checkpoints_.clear();
  draft_head_ = std::move(head);
}

void Session::lose_device(std::string_view name, int64_t after_segments) {
  check_ready();
  const auto found = std::find_if(plan_.devices.begin(), plan_.devices.end(),
                                  [&](const plan::PlannedDevice& device) { return device_name(device.info) == name; });
  DYNO_CHECK(PlanError, found != plan_.devices.end(), "[device] '", name, "' is not a device of this plan");
  executor_->lose(static_cast<plan::DeviceId>(found - plan_.devices.begin()), after_segments);
}

StreamCounts Session::stream_counts() const {
  return executor_ != nullptr ? executor_->stream_counts() : StreamCounts{};
}

std::vector<std::string> Session::warnings() const {
  if (executor_ == nullptr) return {};
  std::vector<std::string> all = executor_->warnings();
  if (const std::string why = plan::why_none_cached(plan_, model_); !why.empty()) all.push_back(why);
  if (plan_.load.numa != plan::NumaMode::off && plan_.numa_nodes() == 1) {
    const bool host = !std::all_of(plan_.devices.begin(), plan_.devices.end(), is_gpu);
    all.push_back(str_cat("[numa] numa=", plan::numa_name(plan_.load.numa), " changes nothing: ",
                          host ? "this process may use one NUMA node" : "no weights lie on the CPU"));
  }
  return all;
}

std::vector<std::map<int, size_t>> Session::weights_by_node() const {
  return weights_ != nullptr ? weights_->bytes_by_node() : std::vector<std::map<int, size_t>>{};
}

std::vector<CaptureReport> Session::captures() const {
  return executor_ != nullptr ? executor_->captures() : std::vector<CaptureReport>{};
}

std::shared_ptr<float[]> Session::logits_memory(size_t count) const {
  return executor_ != nullptr ? executor_->logits_memory(count) : std::make_shared_for_overwrite<float[]>(count);
}

std::shared_ptr<float[]> Session::rows_memory(size_t count) const {
  return executor_ != nullptr ? executor_->rows_memory(count) : std::make_shared_for_overwrite<float[]>(count);
}

size_t Session::draft_row_bytes() const { return draft_head_ != nullptr ? draft_head_->row_bytes() : 0; }

std::shared_ptr<float[]> Session::device_logits_memory(size_t count) const {
  return executor_ != nullptr ? executor_->device_logits_memory(count) : logits_memory(count);
}

void Session::decode(const DecodeRequest& request) {
  check_ready();
  check(request);
  check_file();
  end_steps();
  std::vector<int64_t> ends(positions_.size(), 0);
  for (const SequenceInput& s : request.sequences) {
    const auto at = static_cast<size_t>(s.slot);
    ends[at] = position(s.slot) + static_cast<int64_t>(s.tokens.size());
    begun_[at] = position(s.slot);
  }
  take_memory(ends);
  const std::vector<int64_t> before = positions_;
  try {
    const auto held = pool_->hold_caller();
    feed(request);
    check_file();
  } catch (...) {
    roll_back(before);
    throw;
  }
}

void Session::run_and_draw(MicroBatch batch, int threads) {
  if (executor_->draws()) return executor_->run(batch, *selection_, threads);
  row_logits_.fit(*executor_, batch.logit_rows.size() * static_cast<size_t>(model_.n_vocab));
  batch.logits = row_logits_.data();
  executor_->run(batch, *selection_, threads);
  if (batch.likely != nullptr) {
    find_likely_on_host(batch, model_.n_vocab, *pool_, threads);
  } else {
    draw_rows_on_host(batch, model_.n_vocab, *pool_, threads);
  }
}

void Session::UBatch::add(const DecodeRequest& request, const SequenceInput& s, int64_t at, int64_t n,
                          int64_t position) {
  runs.push_back({.first_token = static_cast<int32_t>(tokens.size()),
                  .n_tokens = static_cast<int32_t>(n),
                  .position = static_cast<int32_t>(position),
                  .slot = s.slot});
  for (int64_t i = at; i < at + n; ++i) {
    const bool last = i + 1 == static_cast<int64_t>(s.tokens.size());
    const bool due = request.rows == LogitRows::all && i >= s.first_row && (i + 1) % request.every == 0;
    if (due || (request.rows != LogitRows::none && last)) rows.push_back(static_cast<int32_t>(tokens.size()));
    tokens.push_back(s.tokens[static_cast<size_t>(i)]);
    positions.push_back(static_cast<int32_t>(position + i - at));
  }
}

void Session::UBatch::next() {
  tokens_before += static_cast<int64_t>(tokens.size());
  rows_before += static_cast<int64_t>(rows.size());
  for (auto* each : {&tokens, &positions, &rows}) each->clear();
  runs.clear();
}

MicroBatch Session::micro_batch(const UBatch& ubatch, const DecodeRequest& request) {
  const int64_t used = model_.experts_used(), n_embd = model_.n_embd;
  const int64_t tokens = ubatch.tokens_before, rows = ubatch.rows_before;
  const auto from = [](auto* data, int64_t offset) { return data == nullptr ? nullptr : data + offset; };
  const auto part = [&](auto all) {
    return all.empty() ? all : all.subspan(static_cast<size_t>(tokens), ubatch.tokens.size());
  };
  MicroBatch batch{.tokens = ubatch.tokens,
                   .positions = ubatch.positions,
                   .runs = ubatch.runs,
                   .logit_rows = ubatch.rows,
                   .logits = from(request.logits, rows * model_.n_vocab),
                   .hidden = ubatch.rows.empty() ? nullptr : from(request.hidden, rows * n_embd),
                   .likely = ubatch.rows.empty() ? nullptr : from(request.likely, rows),
                   .rows_to = part(request.rows_to),
                   .rows_from = part(request.rows_from),
                   .pinned_routing = from(request.pinned_routing, tokens * used),
                   .captured_routing = from(request.captured_routing, tokens * used),
                   .routing_stride = token_count(request),
                   .op_times = request.op_times,
                   .in_graph = request.in_graph};
  const bool on_cpu_alone = plan_.devices.size() == 1 && !is_gpu(plan_.devices.front());
  const bool is_prompt = std::ssize(ubatch.tokens) > plan::kFusedTokens;  // single tokens are short enough
  if (request.between && on_cpu_alone && is_prompt) batch.between_nodes = &request.between;
  if (draft_head_ != nullptr && request.hidden == nullptr) {
    draft_rows_.assign(ubatch.tokens.size(), nullptr);
    bool wanted = false;
    for (const ops::SequenceRun& run : ubatch.runs) {
      const std::span<float*> rows = std::span(draft_rows_).subspan(static_cast<size_t>(run.first_token));
      wanted |= draft_head_->make_room(run, rows.first(static_cast<size_t>(run.n_tokens)));
    }
    if (wanted) batch.rows_to = draft_rows_;
  }
  if (!request.row_draws.empty() && !ubatch.rows.empty()) {
    batch.row_draws = request.row_draws.subspan(static_cast<size_t>(rows), ubatch.rows.size());
    batch.drawn = request.drawn + rows;
  }
  return batch;
}

void Session::run_ubatch(const UBatch& ubatch, const DecodeRequest& request, int threads) {
  MicroBatch batch;
  bool started = false;
  try {
    batch = micro_batch(ubatch, request);
    take_windows(ubatch.runs);
    started = true;
    if (batch.row_draws.empty() && batch.likely == nullptr) {
      executor_->run(batch, *selection_, threads);
    } else {
      run_and_draw(batch, threads);
    }
  } catch (...) {
    end_failed(ubatch.runs, started);
    throw;
  }
  for (const ops::SequenceRun& run : ubatch.runs) {
    positions_[static_cast<size_t>(run.slot)] += run.n_tokens;
    give_back_windows(run.slot);
    if (draft_head_ == nullptr || batch.rows_to.empty()) continue;
    draft_head_->note(run,
                      batch.tokens.subspan(static_cast<size_t>(run.first_token), static_cast<size_t>(run.n_tokens)));
  }
}

// Cuts the sequences, one after the other, into u-batches. A sequence may span several u-batches, and a u-batch may
// have several sequences.
void Session::feed(const DecodeRequest& request) {
  const bool single = std::all_of(request.sequences.begin(), request.sequences.end(),
                                  [](const SequenceInput& s) { return s.tokens.size() == 1; });
  const int threads = single ? settings_.threads : settings_.threads_batch;
  const Computing computing(computing_);
  UBatch ubatch;
  const auto flush = [&] {
    if (ubatch.tokens_before > 0 && request.between) {
      try {
        request.between();
      } catch (...) {
        finish();  // a device may still write to the caller's memory
        throw;
      }
    }
    run_ubatch(ubatch, request, threads);
    ubatch.next();
  };
  for (const SequenceInput& s : request.sequences) {
    const auto size = static_cast<int64_t>(s.tokens.size());
    for (int64_t at = 0, n = 0; at < size; at += n) {
      n = std::min(plan_.ubatch - static_cast<int64_t>(ubatch.tokens.size()), size - at);
      ubatch.add(request, s, at, n, position(s.slot));
      if (static_cast<int64_t>(ubatch.tokens.size()) == plan_.ubatch) flush();
    }
  }
  if (!ubatch.tokens.empty()) flush();
}

}  // namespace dyno::runtime
