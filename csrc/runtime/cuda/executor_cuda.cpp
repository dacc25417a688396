#include "runtime/cuda/executor_cuda.h"

#include <algorithm>
#include <cstring>

#include "core/cuda/check.h"
#include "core/device_loss.h"
#include "core/error.h"
#include "runtime/cuda/env_cuda.h"
#include "runtime/cuda/input_layout.h"
#include "runtime/row_draws.h"

namespace dyno::runtime {
namespace {

// The times of a single token include the sample of the most probable token.
bool times_draw(const MicroBatch& batch) {
  return batch.op_times != nullptr && batch.tokens.size() == 1 && batch.logit_rows.size() == 1;
}

// Each graph that times ops runs this many times; the median counts.
constexpr size_t kGraphReplays = 5;

// Whether the launches keep fewer rows than MicroBatch::rows_to names.
bool drops_rows(const MicroBatch& batch) {
  return !batch.rows_to.empty() && !batch.logit_rows.empty() && batch.logit_rows.size() < batch.tokens.size();
}

// Logits above this size are copied to ordinary memory, which is slower.
constexpr size_t kPinnedLogits = size_t{4} << 20;

}  // namespace

CudaExecutor::CudaExecutor(const GgufFile& file, const model::ModelDesc& model, const plan::Plan& plan,
                           plan::DeviceId device, ThreadPool& pool, int threads, std::span<const std::byte* const> lent)
    : model_(model),
      plan_(plan),
      device_(device),
      stream_(make_stream()),
      weights_(file, model, plan, device, pool, threads, lent),
      counters_(ops::kStreamCounters * sizeof(int32_t), "counters"),
      copies_(plan, model) {
  size_t bytes = 0;
  for (const plan::RopeTable& table : plan.rope_tables) {
    table_offsets_.push_back(bytes);
    bytes += (table.inv_freq.size() * sizeof(float) + 255) / 256 * 256;
  }
  tables_ = DeviceBuffer(bytes, "rope tables");
  for (size_t i = 0; i < plan.rope_tables.size(); ++i) {
    const std::vector<float>& table = plan.rope_tables[i].inv_freq;
    DYNO_CUDA_CHECK(cudaMemcpy(tables_.data() + table_offsets_[i], table.data(), table.size() * sizeof(float),
                               cudaMemcpyHostToDevice));
  }
  size_t places = 0;
  for (const std::vector<int32_t>& table : plan.expert_places) {
    place_offsets_.push_back(places);
    places += table.size();
  }
  places_ = DeviceBuffer(places * sizeof(int32_t), "places of cached experts");
  for (size_t i = 0; i < plan.expert_places.size(); ++i) {
    const std::vector<int32_t>& table = plan.expert_places[i];
    if (table.empty()) continue;
    DYNO_CUDA_CHECK(cudaMemcpy(places_.data() + place_offsets_[i] * sizeof(int32_t), table.data(),
                               table.size() * sizeof(int32_t), cudaMemcpyHostToDevice));
  }
  if (device == plan::kMainDevice) choices_ = ChoiceCounts(plan, stream_.get());
  DYNO_CUDA_CHECK(cudaMemsetAsync(counters_.data(), 0, counters_.size(), stream_.get()));
  for (Event& event : staged_copied_) event = make_event();
}

CudaExecutor::~CudaExecutor() {
  const CudaStep step(info().ordinal, "closing a session");
  copies_.close();
  DYNO_CUDA_CHECK_NOTHROW(cudaStreamSynchronize(stream_.get()));
}

void CudaExecutor::prepare(const plan::Selection& selection, int, bool clear_cache) {
  const DeviceScope scope(info().ordinal, "preparing a session");
  finish();
  drop_graphs();
  // Frees the old memory first, because both may not fit together.
  const auto resize = [](DeviceBuffer& buffer, size_t bytes, const char* purpose) {
    if (buffer.size() == bytes) return;
    buffer = DeviceBuffer();
    buffer = DeviceBuffer(bytes, purpose);
  };
  resize(arena_, planned().arena_bytes, "the arena");
  expanded_.assign(plan_.kv.size(), {});
  const bool shares =
      std::any_of(plan_.shared_experts.begin(), plan_.shared_experts.end(), [](auto n) { return n > 0; });
  const auto tables = static_cast<size_t>(model_.n_layers * model_.experts());
  resize(shared_places_, shares ? tables * sizeof(int32_t) : 0, "places of shared experts");
  resize(workspace_, std::max(selection.scratch_of(device_, plan_.ubatch), row_draw_scratch(plan_, selection)),
         "kernel workspace");
  if (!blas_ && selection.takes_variant("cublas", plan_.ubatch)) blas_ = Blas(ops::cuda::make_blas());
  const bool by_need = plan_.cache_by_need();
  const size_t cache_bytes = planned().kv_address_bytes;
  const bool new_cache = cache_.size() != cache_bytes || (cache_bytes > 0 && cache_.by_need() != by_need);
  if (new_cache) {
    cache_ = CacheMemory();
    cache_ = CacheMemory(info().ordinal, cache_bytes, by_need);
  }
  // Kernels never use values after a sequence's end, but they may multiply them by zero. Cleared on the stream of later
  // work, which is ordered only with itself; clearing a large cache takes longer than storing a token.
  if (new_cache || clear_cache) cache_.clear(stream_.get());
  // A sequence's state counts as zeros at its start, so this memory is never read before it is written.
  resize(states_, planned().state_bytes, "the recurrent state");
  if (concurrent_) {
    if (fork_.get() == nullptr) fork_ = make_event();
    for (Beside& beside : beside_) {
      if (beside.stream.get() == nullptr) {
        beside.stream = make_stream();
        beside.done = make_event();
        beside.counters = DeviceBuffer(counters_.size(), "counters");
        DYNO_CUDA_CHECK(cudaMemsetAsync(beside.counters.data(), 0, beside.counters.size(), stream_.get()));
      }
      resize(beside.workspace, selection.scratch_beside(captured_tokens(plan_)), "kernel workspace");
    }
  } else {
    for (Beside& beside : beside_) beside = {};
  }
  if (device_ == plan::kMainDevice) copies_.prepare();
  const InputLayout layout(plan_.ubatch);
  if (inputs_.size() != layout.bytes) {
    inputs_ = DeviceBuffer();
    for (PinnedBuffer& stage : staged_) stage = PinnedBuffer(layout.bytes, "inputs");
    inputs_ = DeviceBuffer(layout.bytes, "inputs");  // last, because its size represents all three
  }
}

void CudaExecutor::drop_graphs() {
  graphs_.clear();
  pieces_.clear();
  drawing_.steps.clear();
}

ops::CudaStream CudaExecutor::context() const {
  return {.handle = stream_.get(),
          .device = &info(),
          .workspace = workspace_.data(),
          .workspace_bytes = workspace_.size(),
          .counters = reinterpret_cast<int32_t*>(counters_.data()),
          .blas = blas_.get()};
}

void CudaExecutor::finish() {
  check_not_lost(info().ordinal);
  const CudaStep step(info().ordinal, "waiting for the device");
  copies_.finish();
  DYNO_CUDA_CHECK(cudaStreamSynchronize(stream_.get()));
}

void CudaExecutor::forget_expanded(int32_t slot, int64_t position) {
  for (Expanded& rows : expanded_) {
    if (rows.slot == slot) rows.count = std::min(rows.count, position);
  }
}

void CudaExecutor::upload(const MicroBatch& batch) {
  for (const ops::SequenceRun& run : batch.runs) forget_expanded(run.slot, run.position);
  const InputLayout layout(std::ssize(batch.tokens));
  PinnedBuffer& stage = staged_[next_stage_];
  const Event& copied = staged_copied_[next_stage_];
  next_stage_ = 1 - next_stage_;
  DYNO_CUDA_CHECK(cudaEventSynchronize(copied.get()));
  const auto put = [&](size_t offset, const auto& values) {
    if (!values.empty()) std::memcpy(stage.data() + offset, values.data(), values.size_bytes());
  };
  put(0, batch.tokens);
  put(layout.positions, batch.positions);
  put(layout.rows, batch.logit_rows);
  put(layout.runs, batch.runs);
  size_t bytes = layout.runs + batch.runs.size_bytes();
  if (!batch.row_draws.empty()) {
    const RowDrawInputs draws(batch.row_draws);
    put(layout.settings, std::span(draws.settings));
    put(layout.uniforms, std::span(draws.uniforms));
    bytes = layout.uniforms + std::span(draws.uniforms).size_bytes();
  }
  DYNO_CUDA_CHECK(cudaMemcpyAsync(inputs_.data(), stage.data(), bytes, cudaMemcpyHostToDevice, stream_.get()));
  DYNO_CUDA_CHECK(cudaEventRecord(copied.get(), stream_.get()));
}

void CudaExecutor::select_rows(Env& env, int64_t wanted, std::span<const plan::ValueId> values) {
  if (wanted == env.tokens) return;
  const auto* rows = reinterpret_cast<const int32_t*>(inputs_.data() + InputLayout(env.tokens).rows);
  for (const plan::ValueId id : values) {
    const plan::Value& value = plan_.values[static_cast<size_t>(id)];
    gather_rows(arena_.data() + value.offset, value.bytes_per_token, rows, wanted, stream_.get());
  }
  env.tokens = wanted;
}

void CudaExecutor::launch_beside(Env& env, const plan::NodeList& list, int32_t first, int32_t last) {
  const ops::CudaStream main = env.context;
  // It counts as the first launch of the group, although it is launched last.
  --env.left;
  launched_.push_back(list.nodes[static_cast<size_t>(first)].key);
  DYNO_CUDA_CHECK(cudaEventRecord(fork_.get(), stream_.get()));
  for (int32_t i = first + 1; i <= last; ++i) {
    const Beside& beside = beside_[static_cast<size_t>(i - first - 1)];
    DYNO_CUDA_CHECK(cudaStreamWaitEvent(beside.stream.get(), fork_.get()));
    env.context = {.handle = beside.stream.get(),
                   .device = main.device,
                   .workspace = beside.workspace.data(),
                   .workspace_bytes = beside.workspace.size(),
                   .counters = reinterpret_cast<int32_t*>(beside.counters.data()),
                   .blas = main.blas};
    launch_one(list.nodes[static_cast<size_t>(i)], env);
    DYNO_CUDA_CHECK(cudaEventRecord(beside.done.get(), beside.stream.get()));
  }
  env.context = main;
  launch_node(list.nodes[static_cast<size_t>(first)], env);
  for (int32_t i = first + 1; i <= last; ++i) {
    DYNO_CUDA_CHECK(cudaStreamWaitEvent(stream_.get(), beside_[static_cast<size_t>(i - first - 1)].done.get()));
  }
}

CudaExecutor::Env CudaExecutor::env_of(const MicroBatch& batch, const plan::Selection& selection) {
  const InputLayout layout(std::ssize(batch.tokens));
  const auto ints = [&](size_t offset) { return reinterpret_cast<const int32_t*>(inputs_.data() + offset); };
  return {
      .model = model_,
      .plan = plan_,
      .selection = selection,
      .executor = *this,
      .context = context(),
      .batch = {.tokens = ints(0),
                .positions = ints(layout.positions),
                .runs = reinterpret_cast<const ops::SequenceRun*>(inputs_.data() + layout.runs),
                .n_runs = static_cast<int32_t>(batch.runs.size()),
                .host_runs = batch.runs,
                .depth = depth_of(batch),
                .pinned_routing = batch.pinned_routing == nullptr
                                      ? nullptr
                                      : reinterpret_cast<const int32_t*>(pinned_routing_.data()),
                .captured_routing =
                    batch.captured_routing == nullptr ? nullptr : reinterpret_cast<int32_t*>(captured_routing_.data()),
                .routing_stride = static_cast<int64_t>(batch.tokens.size())},
      .tokens = static_cast<int64_t>(batch.tokens.size()),
      .cache = cache_.data(),
      .kept = expanded_};
}

bool CudaExecutor::launch_one(const plan::Node& node, Env& env) {
  if (env.left == 0) return false;
  --env.left;
  launch_node(node, env);
  launched_.push_back(node.key);
  return true;
}

const Event& CudaExecutor::timing_event(size_t index) {
  while (timing_.size() <= index) timing_.push_back(make_timing_event());
  return timing_[index];
}

void CudaExecutor::launch_timed(const plan::Node& node, Env& env, const MicroBatch& batch) {
  if (!launch_one(node, env) || batch.op_times == nullptr) return;
  DYNO_CUDA_CHECK(cudaEventRecord(timing_event(launched_.size()).get(), stream_.get()));
}

void CudaExecutor::launch_all(const MicroBatch& batch, const plan::Selection& selection, const Launching& how) {
  Env env = env_of(batch, selection);
  env.left = how.most;
  const plan::NodeList& list = list_for(batch);
  const NodeRange range = nodes_to_run(list, batch);
  if (batch.op_times != nullptr) DYNO_CUDA_CHECK(cudaEventRecord(timing_event(0).get(), stream_.get()));
  launched_.clear();
  // Rows are selected before the head, or after the last attention; if all of them are read, after the last norm.
  const bool reads_all = range.read_behind >= 0;
  const int32_t selection_at = reads_all        ? range.read_behind + 1
                               : range.all_rows ? list.head_node
                                                : list.select_node + 1;
  const bool selects = range.all_rows || reads_all ? selection_at < range.stop : selection_at <= range.stop;
  const int32_t first = selects ? selection_at : range.stop;
  launch_nodes(env, list, 0, first, batch, how);
  if (selects) {
    if (drops_rows(batch)) download_rows(batch);
    const std::span<const plan::ValueId> values = reads_all        ? std::span(&list.hidden, 1)
                                                  : range.all_rows ? std::span(list.head_values)
                                                                   : std::span(list.select_values);
    select_rows(env, static_cast<int64_t>(batch.logit_rows.size()), values);
  }
  launch_nodes(env, list, first, range.stop, batch, how);
  if (how.draws) {
    for (const plan::Node& node : plan_.draw.nodes) launch_timed(node, env, batch);
  }
}

void CudaExecutor::launch_nodes(Env& env, const plan::NodeList& list, int32_t begin, int32_t end,
                                const MicroBatch& batch, const Launching& how) {
  const auto launch = [&](int32_t i) { launch_timed(list.nodes[static_cast<size_t>(i)], env, batch); };
  for (int32_t i = begin; i < end; ++i) {
    if (list.nodes[static_cast<size_t>(i)].per_run) {
      // Runs all of these neighbours for one run, then for the next one, because they share memory for the values of
      // one run.
      int32_t last = i;
      while (last + 1 < end && list.nodes[static_cast<size_t>(last) + 1].per_run) ++last;
      for (env.batch.run = 0; env.batch.run < env.batch.n_runs; ++env.batch.run) {
        for (int32_t j = i; j <= last; ++j) launch(j);
      }
      i = last;
    } else if (int32_t last = i; how.capturing && concurrent_) {
      const auto stands_beside = [&](int32_t at) {
        return at < end && at - i < env.left && list.nodes[static_cast<size_t>(at)].beside;
      };
      while (stands_beside(last + 1) && last - i < static_cast<int32_t>(kBesideStreams)) ++last;
      if (last > i) {
        launch_beside(env, list, i, last);
        i = last;
      } else {
        launch(i);
      }
    } else {
      launch(i);
    }
  }
}

void CudaExecutor::launch_sampling(const MicroBatch& batch, const plan::Selection& selection) {
  Env env = env_of(batch, selection);
  for (const plan::Node& node : plan_.draw.nodes) launch_node(node, env);
  const InputLayout layout(std::ssize(batch.tokens));
  std::byte* inputs = inputs_.data();
  advance_draw(reinterpret_cast<DrawState*>(drawing_.state.data()),
               {.token = reinterpret_cast<int32_t*>(inputs),
                .position = reinterpret_cast<int32_t*>(inputs + layout.positions),
                .run = reinterpret_cast<ops::SequenceRun*>(inputs + layout.runs)},
               reinterpret_cast<uint64_t*>(drawing_.drawn.data()), stream_.get());
}

double CudaExecutor::seconds_between(size_t before, size_t after) {
  float milliseconds = 0;
  DYNO_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, timing_event(before).get(), timing_event(after).get()));
  return static_cast<double>(milliseconds) * 1e-3;
}

void CudaExecutor::add_op_times(const MicroBatch& batch) {
  finish();
  for (size_t at = 0; at < launched_.size(); ++at) {
    OpTime& time = batch.op_times[launched_[at]];
    time.seconds += seconds_between(at, at + 1);
    ++time.launches;
  }
}

// Events between launches would remove the overlap of launches. The graph of all launches runs before each timed one,
// so that caches have the content that the previous token leaves. The times add up to the time of the whole graph; the
// first one includes the start of the graph.
void CudaExecutor::add_times_in_graph(const MicroBatch& batch, const plan::Selection& selection) {
  MicroBatch untimed = batch;
  untimed.op_times = nullptr;
  Launching how{.capturing = true, .draws = times_draw(batch)};
  const auto launch = [&] { launch_all(untimed, selection, how); };
  const GraphExec whole = captured(launch);
  const std::vector<int32_t> keys = launched_;
  std::array<double, kGraphReplays> samples{};
  double before = 0;
  for (size_t n = 1; n <= keys.size(); ++n) {
    how.most = static_cast<int32_t>(n);
    const GraphExec part = captured(launch);
    for (size_t i = 0; i < samples.size(); ++i) {
      DYNO_CUDA_CHECK(cudaGraphLaunch(whole.get(), stream_.get()));
      DYNO_CUDA_CHECK(cudaEventRecord(timing_event(2 * i).get(), stream_.get()));
      DYNO_CUDA_CHECK(cudaGraphLaunch(part.get(), stream_.get()));
      DYNO_CUDA_CHECK(cudaEventRecord(timing_event(2 * i + 1).get(), stream_.get()));
    }
    finish();
    for (size_t i = 0; i < samples.size(); ++i) samples[i] = seconds_between(2 * i, 2 * i + 1);
    std::nth_element(samples.begin(), samples.begin() + kGraphReplays / 2, samples.end());
    const double median = samples[kGraphReplays / 2];
    OpTime& time = batch.op_times[keys[n - 1]];
    time.seconds += median - before;
    ++time.launches;
    before = median;
  }
}

GraphExec CudaExecutor::captured(const std::function<void()>& launch) {
  DYNO_CUDA_CHECK(cudaStreamBeginCapture(stream_.get(), cudaStreamCaptureModeThreadLocal));
  cudaGraph_t made = nullptr;
  try {
    launch();
    if (failing_captures_ > 0) {
      --failing_captures_;
      throw DeviceError("[cuda] the capture failed on purpose, for a test");
    }
  } catch (...) {
    cudaStreamEndCapture(stream_.get(), &made);
    const Graph broken(made);
    (void)cudaGetLastError();
    throw;
  }
  DYNO_CUDA_CHECK(cudaStreamEndCapture(stream_.get(), &made));
  const Graph graph(made);
  cudaGraphExec_t exec = nullptr;
  DYNO_CUDA_CHECK(cudaGraphInstantiate(&exec, graph.get(), 0));
  return GraphExec(exec);
}

bool CudaExecutor::ready(Captured& work, const std::function<void()>& launch) {
  if (work.graph) return true;
  if (!work.attempts.due()) return false;
  try {
    work.graph = captured(launch);
    work.attempts.succeeded();
  } catch (const Error& error) {
    // Nothing has run yet. The normal launches will report errors of their own or of the device.
    ++capture_failures_;
    work.attempts.failed(error.what());
  }
  return static_cast<bool>(work.graph);
}

std::vector<CaptureReport> CudaExecutor::captures() const {
  std::vector<CaptureReport> out;
  for (const auto& [shape, work] : graphs_) {
    out.push_back({.tokens = shape.tokens,
                   .sequences = shape.runs,
                   .rows = shape.logit_rows,
                   .depth = shape.depth,
                   .captured = static_cast<bool>(work.graph),
                   .attempts = work.attempts});
  }
  // If not all pieces of a shape are captured, the report shows one that is not.
  std::map<Shape, CaptureReport> spanning;
  for (const auto& [piece, work] : pieces_) {
    const Shape& shape = piece.shape;
    const auto known = spanning.find(shape);
    if (known != spanning.end() && (!known->second.captured || work.graph)) continue;
    spanning[shape] = {.tokens = shape.tokens,
                       .sequences = shape.runs,
                       .rows = shape.logit_rows,
                       .depth = shape.depth,
                       .captured = static_cast<bool>(work.graph),
                       .attempts = work.attempts};
  }
  for (const auto& [shape, report] : spanning) out.push_back(report);
  for (const auto& [depth, step] : drawing_.steps) {
    out.push_back(
        {.draws = true, .depth = depth, .captured = static_cast<bool>(step.graph), .attempts = step.attempts});
  }
  return out;
}

std::shared_ptr<float[]> CudaExecutor::logits_memory(size_t count) {
  const size_t bytes = count * sizeof(float);
  if (bytes > kPinnedLogits) return Executor::logits_memory(count);
  const DeviceScope scope(info().ordinal, "making room for logits");
  const std::shared_ptr<std::byte[]> memory = host_logits_->take(bytes, "logits");
  if (memory == nullptr) return Executor::logits_memory(count);
  return {memory, reinterpret_cast<float*>(memory.get())};
}

std::shared_ptr<float[]> CudaExecutor::device_logits_memory(size_t count) {
  const DeviceScope scope(info().ordinal, "making room for logits");
  const auto memory = std::make_shared<DeviceBuffer>(count * sizeof(float), "logits");
  return {memory, reinterpret_cast<float*>(memory->data())};
}

void CudaExecutor::fit_logits(size_t bytes) {
  if (logits_.size() >= bytes) return;
  finish();
  drop_graphs();  // the graphs write to the old memory
  logits_ = DeviceBuffer();
  logits_ = DeviceBuffer(bytes, "logits");
}

void CudaExecutor::run(const MicroBatch& batch, const plan::Selection& selection, int) {
  const DeviceScope scope(info().ordinal, "decoding", static_cast<int64_t>(batch.tokens.size()));
  const size_t row_bytes = static_cast<size_t>(model_.n_vocab) * sizeof(float);
  const size_t logits_bytes = batch.hidden != nullptr ? 0 : batch.logit_rows.size() * row_bytes;
  fit_logits(logits_bytes);
  upload(batch);
  upload_rows(batch);
  if (times_draw(batch)) set_draw_state({.temperature = 0.0f}, 0);

  upload_routing(batch);
  const bool repeats = batch.tokens.size() == batch.runs.size() && !batch.logit_rows.empty();
  const bool routing = batch.pinned_routing != nullptr || batch.captured_routing != nullptr;
  Captured* work = nullptr;
  // A launch over expanded latents depends on the depth of the context.
  const bool fixed = !plan::is_expanded(list_for(batch).id);
  // A copy of rows to the caller's memory cannot be part of a graph: it follows the graph, or nothing is captured.
  const bool captures = graphs_wanted_ && repeats && fixed && !routing && batch.hidden == nullptr && !drops_rows(batch);
  if (captures && batch.op_times == nullptr) {
    work = &graphs_[shape_of(batch)];
  }
  if (batch.op_times != nullptr && batch.in_graph) {
    DYNO_CHECK(PlanError, captures, "[cuda] a u-batch of ", batch.tokens.size(), " tokens of ", batch.runs.size(),
               " sequences is not captured here, so its ops cannot be timed in a graph; captured are u-batches of one ",
               "token a sequence, with cuda_graphs on");
    add_times_in_graph(batch, selection);
  } else if (work != nullptr && ready(*work, [&] { launch_all(batch, selection, {.capturing = true}); })) {
    DYNO_CUDA_CHECK(cudaGraphLaunch(work->graph.get(), stream_.get()));
  } else {
    launch_all(batch, selection, {.draws = times_draw(batch)});
    if (batch.op_times != nullptr) add_op_times(batch);
  }
  if (!batch.rows_to.empty() && !drops_rows(batch)) download_rows(batch);
  download_routing(batch);
  if (batch.hidden != nullptr) {
    const plan::Value& value = plan_.values[static_cast<size_t>(list_for(batch).hidden)];
    DYNO_CUDA_CHECK(cudaMemcpyAsync(batch.hidden, arena_.data() + value.offset,
                                    value.bytes_per_token * batch.logit_rows.size(), cudaMemcpyDeviceToHost,
                                    stream_.get()));
    finish();
  } else if (batch.likely != nullptr) {
    find_likely_rows(batch);
  } else if (!batch.row_draws.empty()) {
    draw_rows(batch, selection);
  } else if (logits_bytes != 0 && batch.logits != nullptr) {
    // To the host or to device memory; the driver recognises the address.
    DYNO_CUDA_CHECK(cudaMemcpyAsync(batch.logits, logits_.data(), logits_bytes, cudaMemcpyDefault, stream_.get()));
    finish();
  } else if (routing || !batch.rows_to.empty()) {
    finish();
  }
}

}  // namespace dyno::runtime
