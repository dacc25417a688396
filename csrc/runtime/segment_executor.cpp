#include "runtime/segment_executor.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/error.h"

namespace dyno::runtime {
namespace {

bool is_transfer(const plan::Node& node) { return std::holds_alternative<plan::TransferOperands>(node.operands); }

}  // namespace

SegmentExecutor::SegmentExecutor(const plan::Plan& plan, const model::ModelDesc& model, std::unique_ptr<Backend> cpu,
                                 std::vector<Gpu> gpus)
    : plan_(plan),
      n_embd_(model.n_embd),
      cpu_(std::move(cpu)),
      gpus_(std::move(gpus)),
      by_device_(plan.devices.size(), cpu_.get()) {
  for (const Gpu& gpu : gpus_) by_device_[static_cast<size_t>(gpu.device)] = gpu.backend.get();
  for (size_t i = 0; i < by_device_.size(); ++i) {
    DYNO_CHECK(Error, by_device_[i] != nullptr, "[executor] no backend for ", device_name(plan.devices[i].info));
  }
  for_each_backend([&](Backend& backend) { backend.connect(*this); });
  if (cpu_ == nullptr) return;
  Backend& main = backend_of(plan::kMainDevice);
  places_ = std::make_unique<ExpertPlaces>(plan_, model, *cpu_, main);
  stream_ = std::make_unique<WeightStream>(plan_, model, *places_, *cpu_, main);
}

template <typename Visit>
void SegmentExecutor::for_each_backend(const Visit& visit) const {
  if (cpu_ != nullptr) visit(*cpu_);
  for (const Gpu& gpu : gpus_) visit(*gpu.backend);
}

void SegmentExecutor::prepare(const plan::Selection& selection, int max_threads, bool clear_cache) {
  finish();  // a GPU may still use host memory that is about to be freed
  for_each_backend([&](Backend& backend) { backend.prepare(selection, max_threads, clear_cache); });
  if (stream_ != nullptr) stream_->forget();
}

void SegmentExecutor::use_graphs(bool wanted, bool concurrent) {
  for_each_backend([&](Backend& backend) { backend.use_graphs(wanted, concurrent); });
}

std::vector<CaptureReport> SegmentExecutor::captures() const {
  std::vector<CaptureReport> all;
  for_each_backend([&](const Backend& backend) {
    const std::vector<CaptureReport> of_one = backend.captures();
    all.insert(all.end(), of_one.begin(), of_one.end());
  });
  return all;
}

int64_t SegmentExecutor::capture_failures() const {
  int64_t failures = 0;
  for_each_backend([&](const Backend& backend) { failures += backend.capture_failures(); });
  return failures;
}

void SegmentExecutor::fail_next_captures(int count) {
  if (!gpus_.empty()) gpus_.front().backend->fail_next_captures(count);
}

void SegmentExecutor::lose(plan::DeviceId device, int64_t after_segments) {
  if (plan_.device(device).kind != DeviceKind::cpu) Executor::lose(device, after_segments);  // throws
  cpu_->lose(device, after_segments);
}

void SegmentExecutor::check_devices() const {
  for_each_backend([](const Backend& backend) { backend.check_devices(); });
}

std::vector<std::string> SegmentExecutor::warnings() const {
  std::vector<std::string> all;
  for_each_backend([&](const Backend& backend) {
    const std::vector<std::string> of_one = backend.warnings();
    all.insert(all.end(), of_one.begin(), of_one.end());
  });
  return all;
}

std::shared_ptr<float[]> SegmentExecutor::logits_memory(size_t count) {
  return backend_of(plan_.logits_device()).host_logits(count);
}

std::shared_ptr<float[]> SegmentExecutor::device_logits_memory(size_t count) {
  return backend_of(plan_.logits_device()).device_logits(count);
}

ExpertCounts SegmentExecutor::expert_counts() const {
  if (cpu_ == nullptr) return {};
  ExpertCounts counts = cpu_->expert_counts();
  counts.swapped = places_->swapped();
  return counts;
}

StreamCounts SegmentExecutor::stream_counts() const { return stream_ != nullptr ? stream_->counts() : StreamCounts{}; }

void SegmentExecutor::finish() {
  for_each_backend([](Backend& backend) { backend.finish(); });
}

void SegmentExecutor::save_state(int32_t slot, std::byte* to) {
  for_each_backend([&](Backend& backend) { backend.save_state(slot, to); });
}

void SegmentExecutor::load_state(int32_t slot, const std::byte* from) {
  for_each_backend([&](Backend& backend) { backend.load_state(slot, from); });
}

void SegmentExecutor::copy_sequence(int32_t from, int32_t to, int64_t positions, std::span<const Rows> windowed) {
  for_each_backend([&](Backend& backend) { backend.copy_sequence(from, to, positions, windowed); });
}

void SegmentExecutor::take(int32_t slot, int64_t begin, int64_t end, CacheLayers layers) {
  for_each_backend([&](Backend& backend) { backend.take(slot, begin, end, layers); });
}

size_t SegmentExecutor::gpu_cache_bytes(plan::DeviceId device) const { return backend_of(device).gpu_cache_bytes(); }

void SegmentExecutor::give_back(int32_t slot, int64_t begin, int64_t end, CacheLayers layers) {
  for_each_backend([&](Backend& backend) { backend.give_back(slot, begin, end, layers); });
}

void SegmentExecutor::settle() {
  for_each_backend([](Backend& backend) { backend.settle(); });
}

std::byte* SegmentExecutor::address_of(plan::ValueId value) const {
  return backend_of(plan_.values[static_cast<size_t>(value)].device).memory_of(value);
}

bool SegmentExecutor::host_locked() const { return cpu_ == nullptr || cpu_->values_locked(); }

void SegmentExecutor::await_host_copies() {
  for (const Gpu& gpu : gpus_) gpu.backend->await_host_copies();
}

// Rows are selected between two pieces. A piece also ends where values leave a GPU, so that the CPU need not wait for
// later nodes.
int32_t SegmentExecutor::piece_end(const plan::NodeList& list, int32_t begin, int32_t end,
                                   const NodeRange& range) const {
  int32_t stop = end;
  const int32_t selection = range.all_rows ? list.head_node : list.select_node + 1;
  if (begin < selection && selection < stop) stop = selection;
  if (begin <= range.read_behind && range.read_behind + 1 < stop) stop = range.read_behind + 1;
  const auto leaves = [&](int32_t i) {
    const plan::Node& node = list.nodes[static_cast<size_t>(i)];
    if (!is_transfer(node) || plan_.device(node.device).kind != DeviceKind::cuda) return false;
    const plan::ValueId to = std::get<plan::TransferOperands>(node.operands).y.value;
    return plan_.device(plan_.values[static_cast<size_t>(to)].device).kind == DeviceKind::cpu;
  };
  for (const plan::Fetch& fetch : list.fetches) {
    if (begin < fetch.node && fetch.node < stop) stop = fetch.node;
  }
  const bool shared = list.nodes[static_cast<size_t>(begin)].for_cpu_share;
  for (int32_t i = begin + 1; i < stop; ++i) {
    if (list.nodes[static_cast<size_t>(i)].for_cpu_share != shared) stop = i;
  }
  if (gpus_.empty()) return stop;
  for (int32_t i = begin; i + 1 < stop; ++i) {
    if (leaves(i) && !leaves(i + 1)) return i + 1;
  }
  return stop;
}

std::vector<SegmentExecutor::Piece> SegmentExecutor::pieces_of(const plan::NodeList& list,
                                                               const NodeRange& range) const {
  std::vector<Piece> pieces;
  for (const plan::Segment& segment : list.segments) {
    const int32_t last = std::min(segment.end, range.stop);
    for (int32_t begin = segment.begin; begin < last; begin = pieces.back().end) {
      pieces.push_back({segment.device, begin, piece_end(list, begin, last, range)});
    }
  }
  return pieces;
}

void SegmentExecutor::run_piece(const plan::NodeList& list, const Piece& piece, int64_t tokens) {
  Backend& backend = backend_of(piece.device);
  if (on_cpu(piece)) {
    await_host_copies();
  } else {
    if (last_gpu_ != nullptr && last_gpu_ != &backend) backend.follow(*last_gpu_);
    last_gpu_ = &backend;
  }
  backend.run_nodes(list, piece.begin, piece.end, tokens);
}

void SegmentExecutor::select(std::span<const plan::ValueId> values) {
  await_host_copies();
  for_each_backend([&](Backend& backend) { backend.select_rows(values); });
}

void SegmentExecutor::read_rows(plan::ValueId id, size_t first, float* to, size_t rows) {
  const plan::Value& value = plan_.values[static_cast<size_t>(id)];
  const size_t row = value.bytes_per_token;
  backend_of(value.device).read(id, row * first, {reinterpret_cast<std::byte*>(to), row * rows});
}

void SegmentExecutor::run_pieces(const plan::NodeList& list, const NodeRange& range, const MicroBatch& batch) {
  auto tokens = static_cast<int64_t>(batch.tokens.size());
  const auto wanted = static_cast<int64_t>(batch.logit_rows.size());
  const std::vector<Piece> pieces = pieces_of(list, range);
  if (stream_ != nullptr) stream_->begin(list);
  const bool may_start_ahead = gpus_.size() == 1 && wanted == tokens;
  size_t fetched = 0;
  bool ahead = false;  // the next piece has already been started
  const auto go_on_with = [&](std::span<const plan::ValueId> values) {
    if (wanted != tokens) select(values);
    tokens = wanted;
  };
  for (size_t i = 0; i < pieces.size(); ++i) {
    const Piece& piece = pieces[i];
    const bool begun = std::exchange(ahead, false);
    if (range.all_rows && piece.begin == list.head_node) go_on_with(list.head_values);
    if (fetched < list.fetches.size() && list.fetches[fetched].node == piece.begin) stream_->fetch(fetched++, tokens);
    const bool left_out = stream_ != nullptr && stream_->leaves_out(list.nodes[static_cast<size_t>(piece.begin)]);
    if (!left_out && may_start_ahead && i + 1 < pieces.size() && on_cpu(piece) && !on_cpu(pieces[i + 1])) {
      ahead = gpus_.front().backend->start_ahead(list, pieces[i + 1].begin, pieces[i + 1].end, tokens);
    }
    if (!begun && !left_out) run_piece(list, piece, tokens);
    if (ahead) gpus_.front().backend->finish_host_turn();
    const bool reads_all = range.read_behind >= 0;
    if (!range.all_rows && !reads_all && piece.end - 1 == list.select_node) go_on_with(list.select_values);
    if (reads_all && piece.end - 1 == range.read_behind) {
      for_rows_together(batch.rows_to, n_embd_, [&](size_t first, size_t count) {
        read_rows(list.hidden, first, batch.rows_to[first], count);
      });
      go_on_with({&list.hidden, 1});
    }
  }
}

void SegmentExecutor::run(const MicroBatch& batch, const plan::Selection& selection, int threads) {
  DYNO_CHECK(PlanError, !batch.in_graph, "[executor] ops are timed in a graph where one GPU computes all of them; ",
             "this plan has ", gpus_.empty() ? "no GPU" : "several devices");
  const auto wanted = static_cast<int64_t>(batch.logit_rows.size());
  const plan::NodeList& list = list_of(plan_, batch);
  const NodeRange range = nodes_to_run(list, batch);
  for_each_backend([&](Backend& backend) { backend.begin(batch, selection, threads); });
  if (list.rows_in != plan::kNoValue) {
    check_rows_from(batch);
    const plan::Value& value = plan_.values[static_cast<size_t>(list.rows_in)];
    DYNO_CHECK(PlanError, plan_.device(value.device).kind == DeviceKind::cpu,
               "[executor] a head reads hidden rows on the CPU, or on a GPU that computes all of it");
    for_rows_together(batch.rows_from, n_embd_, [&](size_t first, size_t count) {
      std::memcpy(address_of(list.rows_in) + value.bytes_per_token * first, batch.rows_from[first],
                  value.bytes_per_token * count);
    });
  }
  try {
    run_pieces(list, range, batch);
  } catch (...) {
    for (const Gpu& gpu : gpus_)
      gpu.backend->finish_host_turn();  // releases pieces that wait for a CPU turn which
                                        // will not come
    throw;
  }
  for_each_backend([](Backend& backend) { backend.end(); });
  if (places_ != nullptr) places_->adapt();
  const bool answers = batch.logits != nullptr && wanted > 0;
  if (batch.hidden != nullptr && wanted > 0) {
    read_rows(list.hidden, 0, batch.hidden, static_cast<size_t>(wanted));
  }
  if (answers || batch.pinned_routing != nullptr || batch.captured_routing != nullptr) finish();
}

}  // namespace dyno::runtime
