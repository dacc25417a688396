// A GPU's part of lists on several devices: runs its pieces and moves values between its memory and host memory.
#include <algorithm>

#include "core/cuda/check.h"
#include "core/device_loss.h"
#include "core/error.h"
#include "runtime/cuda/env_cuda.h"
#include "runtime/cuda/executor_cuda.h"
#include "runtime/cuda/input_layout.h"
#include "runtime/cuda/rows.h"

namespace dyno::runtime {
namespace {

bool on_host(const plan::Plan& plan, const plan::Operand& operand) {
  return plan.device(plan.values[static_cast<size_t>(operand.value)].device).kind == DeviceKind::cpu;
}

}  // namespace

// Whether the launch reads or writes host memory.
bool CudaExecutor::crosses_host(const plan::Node& node) const {
  const auto* moved = std::get_if<plan::TransferOperands>(&node.operands);
  return moved != nullptr && (on_host(plan_, moved->x) || on_host(plan_, moved->y));
}

void CudaExecutor::connect(const ValueMemory& memory) {
  const DeviceScope scope(info().ordinal, "preparing a session");
  values_ = &memory;
  host_copies_ = make_event();
  followed_ = make_event();
  const auto is_gpu = [](const plan::PlannedDevice& device) { return device.info.kind == DeviceKind::cuda; };
  int same_address = 0;
  DYNO_CUDA_CHECK(cudaDeviceGetAttribute(&same_address, cudaDevAttrCanUseHostPointerForRegisteredMem, info().ordinal));
  reaches_host_ = same_address != 0 && std::count_if(plan_.devices.begin(), plan_.devices.end(), is_gpu) == 1;
  if (reaches_host_) turns_.prepare(stream_.get());
  // Enables direct copies between GPUs if the machine supports them; otherwise the driver copies through the host.
  for (const plan::PlannedDevice& other : plan_.devices) {
    if (other.info.kind != DeviceKind::cuda || other.info.ordinal == info().ordinal) continue;
    int direct = 0;
    DYNO_CUDA_CHECK(cudaDeviceCanAccessPeer(&direct, info().ordinal, other.info.ordinal));
    if (direct == 0) continue;
    const cudaError_t status = cudaDeviceEnablePeerAccess(other.info.ordinal, 0);
    if (status == cudaErrorPeerAccessAlreadyEnabled) {
      (void)cudaGetLastError();
    } else {
      DYNO_CUDA_CHECK(status);
    }
  }
}

std::byte* CudaExecutor::memory_of(plan::ValueId value) const {
  if (value == plan_.logits) return logits_.data();
  return arena_.data() + plan_.values[static_cast<size_t>(value)].offset;
}

std::byte* CudaExecutor::address_of(plan::ValueId value) const {
  const bool here = value == plan_.logits || plan_.values[static_cast<size_t>(value)].device == device_;
  return here ? memory_of(value) : values_->address_of(value);
}

void CudaExecutor::begin(const MicroBatch& batch, const plan::Selection& selection, int) {
  const DeviceScope scope(info().ordinal, "decoding", static_cast<int64_t>(batch.tokens.size()));
  micro_batch_ = batch;
  selection_ = &selection;
  if (plan_.logits_device() == device_ && batch.hidden == nullptr) {
    fit_logits(batch.logit_rows.size() * static_cast<size_t>(model_.n_vocab) * sizeof(float));
  }
  upload(batch);
  upload_routing(batch);
}

CudaExecutor::CapturedPiece* CudaExecutor::piece_of(const plan::NodeList& list, int32_t begin, int32_t end) {
  const MicroBatch& batch = micro_batch_;
  const auto nodes = std::span(list.nodes).subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin));
  const bool repeats = batch.tokens.size() == batch.runs.size() && !batch.logit_rows.empty();
  const bool routing = batch.pinned_routing != nullptr || batch.captured_routing != nullptr;
  if (!graphs_wanted_ || !repeats || routing || batch.op_times != nullptr || nodes.size() < 2) return nullptr;
  // A copy to or from pageable memory would make the capture fail.
  const bool host = std::any_of(nodes.begin(), nodes.end(), [&](const auto& node) { return crosses_host(node); });
  if (plan::is_expanded(list.id) || (host && !values_->host_locked())) return nullptr;
  CapturedPiece& piece = pieces_[{list.id, begin, end, shape_of(batch)}];
  piece.crosses = host && reaches_host_;
  piece.receives = piece.crosses && std::any_of(nodes.begin(), nodes.end(), [&](const plan::Node& node) {
                     return crosses_host(node) && on_host(plan_, std::get<plan::TransferOperands>(node.operands).x);
                   });
  return &piece;
}

// The GPU waits for the CPU at its first receive, and gives the CPU the turn at the end. At that point, the CPU may
// overwrite what the piece has read, and everything that the piece wrote has arrived.
void CudaExecutor::launch_in_turns(Env& env, const plan::NodeList& list, int32_t begin, int32_t end,
                                   const MicroBatch& batch, const Launching& how) {
  bool waits = true, gave = false;
  for (int32_t i = begin; i < end;) {
    int32_t last = i;
    while (last < end && !crosses_host(list.nodes[static_cast<size_t>(last)])) ++last;
    if (last > i) {
      launch_nodes(env, list, i, last, batch, how);
      i = last;
      continue;
    }
    const auto receives = [&](int32_t at) {
      return on_host(plan_, std::get<plan::TransferOperands>(list.nodes[static_cast<size_t>(at)].operands).x);
    };
    std::vector<Crossing> rows;
    for (; last < end && crosses_host(list.nodes[static_cast<size_t>(last)]) && receives(last) == receives(i); ++last) {
      const plan::Node& node = list.nodes[static_cast<size_t>(last)];
      const auto& moved = std::get<plan::TransferOperands>(node.operands);
      ops::TransferDesc desc = std::get<ops::TransferDesc>(node.desc);
      desc.m = env.tokens * node.rows_factor;
      rows.push_back({env.at(moved.x), env.at(moved.y), static_cast<size_t>(desc.bytes())});
    }
    if (receives(i)) {
      turns_.receive(rows, waits, stream_.get());
      waits = false;
    } else {
      gave = last == end;
      turns_.send(rows, gave, stream_.get());
    }
    i = last;
  }
  if (!gave) turns_.send({}, /*give=*/true, stream_.get());
}

void CudaExecutor::run_nodes(const plan::NodeList& list, int32_t begin, int32_t end, int64_t tokens) {
  const MicroBatch& batch = micro_batch_;
  const DeviceScope scope(info().ordinal, "decoding", static_cast<int64_t>(batch.tokens.size()));
  CapturedPiece* const work = piece_of(list, begin, end);
  const auto first = list.nodes.begin() + begin;
  const bool host = std::any_of(first, first + (end - begin), [&](const auto& node) { return crosses_host(node); });
  const auto launch = [&](bool capturing) {
    Env env = env_of(batch, *selection_);
    env.tokens = tokens;
    env.list = list.id;
    env.left = end - begin + env.batch.n_runs * (end - begin);  // no limit
    if (batch.op_times != nullptr) DYNO_CUDA_CHECK(cudaEventRecord(timing_event(0).get(), stream_.get()));
    launched_.clear();
    if (capturing && work->crosses) {
      launch_in_turns(env, list, begin, end, batch, {.capturing = capturing});
    } else {
      launch_nodes(env, list, begin, end, batch, {.capturing = capturing});
    }
  };
  if (work != nullptr && ready(*work, [&] { launch(/*capturing=*/true); })) {
    DYNO_CUDA_CHECK(cudaGraphLaunch(work->graph.get(), stream_.get()));
    work->ran = true;
    if (!host) return;
    last_by_turns_ = work->crosses;
    if (work->crosses) turns_.started(work->receives, /*ahead=*/false);
  } else {
    launch(/*capturing=*/false);
    if (batch.op_times != nullptr) add_op_times(batch);
    if (!host) return;
    last_by_turns_ = false;
  }
  if (!last_by_turns_) DYNO_CUDA_CHECK(cudaEventRecord(host_copies_.get(), stream_.get()));
  copies_host_ = true;
}

// Only a piece that has run as a graph before, because the driver might wait for the device to load anything else. A
// piece that reads nothing from the CPU would write to its memory during the CPU's turn.
bool CudaExecutor::start_ahead(const plan::NodeList& list, int32_t begin, int32_t end, int64_t) {
  const DeviceScope scope(info().ordinal, "decoding", static_cast<int64_t>(micro_batch_.tokens.size()));
  CapturedPiece* const work = piece_of(list, begin, end);
  if (work == nullptr || !work->ran || !work->receives || !copies_host_ || !last_by_turns_) return false;
  DYNO_CUDA_CHECK(cudaGraphLaunch(work->graph.get(), stream_.get()));
  turns_.started(/*waits=*/true, /*ahead=*/true);
  return true;
}

void CudaExecutor::finish_host_turn() {
  if (!turns_.ahead()) return;
  turns_.finish_turns();
  last_by_turns_ = copies_host_ = true;
}

void CudaExecutor::select_rows(std::span<const plan::ValueId> values) {
  const DeviceScope scope(info().ordinal, "decoding", static_cast<int64_t>(micro_batch_.tokens.size()));
  std::vector<plan::ValueId> here;
  for (const plan::ValueId id : values) {
    if (plan_.values[static_cast<size_t>(id)].device == device_) here.push_back(id);
  }
  Env env = env_of(micro_batch_, *selection_);
  select_rows(env, static_cast<int64_t>(micro_batch_.logit_rows.size()), here);
}

void CudaExecutor::end() {
  const DeviceScope scope(info().ordinal, "decoding", static_cast<int64_t>(micro_batch_.tokens.size()));
  download_routing(micro_batch_);
  choices_.send();
  const size_t bytes = micro_batch_.logit_rows.size() * static_cast<size_t>(model_.n_vocab) * sizeof(float);
  if (plan_.logits_device() != device_ || bytes == 0 || micro_batch_.logits == nullptr) return;
  DYNO_CUDA_CHECK(cudaMemcpyAsync(micro_batch_.logits, logits_.data(), bytes, cudaMemcpyDefault, stream_.get()));
}

void CudaExecutor::await_host_copies() {
  if (!copies_host_) return;
  const CudaStep step(info().ordinal, "waiting for values that the CPU needs");
  if (last_by_turns_) {
    turns_.await(stream_.get());
  } else {
    DYNO_CUDA_CHECK(cudaEventSynchronize(host_copies_.get()));
  }
  copies_host_ = false;
}

void CudaExecutor::follow(Backend& other) {
  auto& before = static_cast<CudaExecutor&>(other);  // only GPUs follow each other
  {
    const DeviceScope scope(before.info().ordinal, "decoding");
    DYNO_CUDA_CHECK(cudaEventRecord(before.followed_.get(), before.stream_.get()));
  }
  const DeviceScope scope(info().ordinal, "decoding");
  DYNO_CUDA_CHECK(cudaStreamWaitEvent(stream_.get(), before.followed_.get()));
}

void CudaExecutor::read(plan::ValueId value, size_t begin, std::span<std::byte> out) {
  const DeviceScope scope(info().ordinal, "decoding");
  DYNO_CUDA_CHECK(
      cudaMemcpyAsync(out.data(), memory_of(value) + begin, out.size(), cudaMemcpyDeviceToHost, stream_.get()));
  DYNO_CUDA_CHECK(cudaStreamSynchronize(stream_.get()));
}

void CudaExecutor::copies_follow_launches() {
  const DeviceScope scope(info().ordinal, "bringing weights");
  copies_.follow(stream_.get());
}

void CudaExecutor::bring(model::WeightId weight, const std::byte* from, int64_t matrices,
                         std::span<const MatrixRange> ranges) {
  const DeviceScope scope(info().ordinal, "bringing weights");
  copies_.bring(weight, from, matrices, ranges);
}

void CudaExecutor::bring_own(model::WeightId weight, model::WeightId own, std::span<const MatrixMove> moves) {
  const DeviceScope scope(info().ordinal, "bringing weights");
  copies_.bring_own(weight, weights_.data(own), moves);
}

void CudaExecutor::set_places(int32_t layer, std::span<const int32_t> places) {
  const DeviceScope scope(info().ordinal, "sharing experts");
  DYNO_CUDA_CHECK(cudaMemcpyAsync(shared_places_of(layer), places.data(), places.size_bytes(), cudaMemcpyHostToDevice,
                                  stream_.get()));
}

// After all launches that read the old table, and before later ones.
void CudaExecutor::set_cached_places(int32_t layer, std::span<const int32_t> places) {
  const DeviceScope scope(info().ordinal, "swapping experts");
  DYNO_CUDA_CHECK(
      cudaMemcpyAsync(places_of(layer), places.data(), places.size_bytes(), cudaMemcpyHostToDevice, stream_.get()));
}

void CudaExecutor::fill_place(model::WeightId weight, const std::byte* from, int64_t matrix, model::WeightId own,
                              int64_t place) {
  const DeviceScope scope(info().ordinal, "swapping experts");
  const auto each = [&](model::WeightId id) {
    return plan_.weights[static_cast<size_t>(id)].bytes / static_cast<size_t>(model_.weight(id).batch);
  };
  const std::byte* matrices = from != nullptr ? from : weights_.data(weight);
  copies_.fill(weight, matrices + each(weight) * static_cast<size_t>(matrix), own,
               weights_.memory(own) + each(own) * static_cast<size_t>(place), stream_.get());
}

bool CudaExecutor::has_arrived(model::WeightId own) const {
  const DeviceScope scope(info().ordinal, "swapping experts");
  return copies_.has_filled(own);
}

void CudaExecutor::await_copies(model::WeightId weight) {
  const DeviceScope scope(info().ordinal, "bringing weights");
  copies_.await(weight, stream_.get());
}

int64_t CudaExecutor::most_used_experts() const { return model_.experts_used(); }

// Routing is copied for all layers together. Each layer has `routing_stride` tokens in the host arrays.
void CudaExecutor::upload_routing(const MicroBatch& batch) {
  const int64_t used = most_used_experts();
  const size_t layer_bytes = batch.tokens.size() * static_cast<size_t>(used) * sizeof(int32_t);
  const size_t host_pitch = static_cast<size_t>(batch.routing_stride * used) * sizeof(int32_t);
  const auto layers = static_cast<size_t>(model_.moe_layers());
  const auto fit = [&](DeviceBuffer& buffer) {
    if (buffer.size() >= layers * layer_bytes) return;
    buffer = DeviceBuffer();
    buffer = DeviceBuffer(layers * layer_bytes, "routing");
  };
  if (batch.pinned_routing != nullptr) {
    fit(pinned_routing_);
    DYNO_CUDA_CHECK(cudaMemcpy2DAsync(pinned_routing_.data(), layer_bytes, batch.pinned_routing, host_pitch,
                                      layer_bytes, layers, cudaMemcpyHostToDevice, stream_.get()));
  }
  if (batch.captured_routing != nullptr) fit(captured_routing_);
}

void CudaExecutor::download_routing(const MicroBatch& batch) {
  if (batch.captured_routing == nullptr) return;
  const auto used = static_cast<size_t>(most_used_experts());
  const size_t layer_bytes = batch.tokens.size() * used * sizeof(int32_t);
  for (const plan::Node& node : list_for(batch).nodes) {
    if (node.device != device_) continue;
    const int32_t layer = std::visit(
        [](const auto& o) -> int32_t {
          if constexpr (requires { o.moe_index; }) return o.moe_index;
          return -1;
        },
        node.operands);
    if (layer < 0) continue;
    const auto at = static_cast<size_t>(layer);
    DYNO_CUDA_CHECK(cudaMemcpyAsync(batch.captured_routing + at * static_cast<size_t>(batch.routing_stride) * used,
                                    captured_routing_.data() + at * layer_bytes, layer_bytes, cudaMemcpyDeviceToHost,
                                    stream_.get()));
  }
}

}  // namespace dyno::runtime
