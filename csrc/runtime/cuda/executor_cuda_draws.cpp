// Generation on the GPU without the host between tokens. The host reads sampled tokens while the next steps run.
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <limits>
#include <utility>

#include "core/cuda/check.h"
#include "core/device_loss.h"
#include "core/error.h"
#include "core/relax.h"
#include "ops/sample/sample.h"
#include "runtime/cuda/executor_cuda.h"
#include "runtime/cuda/input_layout.h"
#include "runtime/row_draws.h"

namespace dyno::runtime {
namespace {

DrawState* state_of(const DeviceBuffer& memory) { return reinterpret_cast<DrawState*>(memory.data()); }

// In the place of a token that no kernel has written yet.
constexpr int32_t kNotDrawn = std::numeric_limits<int32_t>::min();

// Whether `arrived()` becomes true before all work of the stream has ended. A kernel writes what it looks at to host
// memory, where it arrives before the driver reports the end of the kernel, and long before the end of later steps. So
// the loop asks the driver for errors from time to time.
template <typename Arrived>
bool await_written(const Stream& stream, const Arrived& arrived) {
  constexpr int kLooks = 256;
  while (true) {
    for (int i = 0; i < kLooks; ++i) {
      if (arrived()) return true;
      relax();
    }
    const cudaError_t status = cudaStreamQuery(stream.get());
    if (status == cudaErrorNotReady) continue;
    DYNO_CUDA_CHECK(status);
    return arrived();
  }
}

}  // namespace

void CudaExecutor::set_draw_state(const ops::SampleSettings& settings, uint32_t step) {
  Drawing& d = drawing_;
  if (d.state.size() == 0) {
    d.drawn = PinnedBuffer(kDrawnSlots * sizeof(uint64_t), "drawn tokens");
    std::memset(d.drawn.data(), 0, d.drawn.size());
    d.fence = PinnedBuffer(sizeof(int32_t), "drawn tokens");
    for (size_t i = 0; i < d.staged.size(); ++i) {
      d.staged[i] = PinnedBuffer(sizeof(DrawState), "draws");
      d.copied[i] = make_event();
    }
    d.state = DeviceBuffer(sizeof(DrawState), "draws");
  }
  DrawState state;
  state.settings = settings;
  state.step = step;
  // From pageable memory, which the driver has read when the call returns.
  DYNO_CUDA_CHECK(cudaMemcpyAsync(d.state.data(), &state, sizeof(state), cudaMemcpyHostToDevice, stream_.get()));
}

void CudaExecutor::begin_draws(const DrawStart& start) {
  const DeviceScope scope(info().ordinal, "generating");
  fit_logits(static_cast<size_t>(model_.n_vocab) * sizeof(float));
  Drawing& d = drawing_;
  d.at = start;
  d.uploaded = 0;

  const ops::SequenceRun run{0, 1, static_cast<int32_t>(start.position), start.slot};
  upload({.tokens = {&start.token, 1}, .positions = {&run.position, 1}, .runs = {&run, 1}, .logit_rows = {}});
  // Steps of an earlier generation that were not waited for have written their tokens, which must not be taken for
  // tokens of this generation. So its numbers start after all numbers that may have been used.
  d.waited += kDrawnSlots;
  set_draw_state(start.settings, d.waited);
}

// Uploads only the members after `drawn` in DrawState; the device owns the others.
void CudaExecutor::upload_draws(std::span<const Draw> ahead) {
  Drawing& d = drawing_;
  constexpr size_t kFrom = offsetof(DrawState, uniform);
  PinnedBuffer& stage = d.staged[d.next_stage];
  const Event& copied = d.copied[d.next_stage];
  d.next_stage = 1 - d.next_stage;
  DYNO_CUDA_CHECK(cudaEventSynchronize(copied.get()));
  auto& block = *reinterpret_cast<DrawState*>(stage.data());
  const size_t count = std::min<size_t>(ahead.size(), kDrawBlock);
  for (size_t i = 0; i < kDrawBlock; ++i) {
    const Draw draw = i < count ? ahead[i] : Draw{};
    block.uniforms[i] = draw.uniform;
    block.forced[i] = draw.forced;
  }
  block.uniform = block.uniforms[0];
  block.at = 0;
  DYNO_CUDA_CHECK(cudaMemcpyAsync(d.state.data() + kFrom, stage.data() + kFrom, sizeof(DrawState) - kFrom,
                                  cudaMemcpyHostToDevice, stream_.get()));
  DYNO_CUDA_CHECK(cudaEventRecord(copied.get(), stream_.get()));
  d.uploaded = static_cast<int32_t>(count);
}

void CudaExecutor::launch_draw(std::span<const Draw> ahead, const plan::Selection& selection) {
  const DeviceScope scope(info().ordinal, "generating");
  Drawing& d = drawing_;
  if (d.uploaded == 0) upload_draws(ahead);
  --d.uploaded;

  // Kernels read a copy on the device; the host's copy is for launches that depend on the position.
  const ops::SequenceRun run{0, 1, static_cast<int32_t>(d.at.position), d.at.slot};
  constexpr int32_t kRow = 0;
  const MicroBatch batch{
      .tokens = {&d.at.token, 1}, .positions = {&run.position, 1}, .runs = {&run, 1}, .logit_rows = {&kRow, 1}};
  ++d.at.position;
  const bool computed = std::exchange(d.at.computed, false);
  const auto launch_step = [&](bool capturing) {
    if (!computed) launch_all(batch, selection, {.capturing = capturing});
    launch_sampling(batch, selection);
  };

  // Several kernels read runs, and cache rows of earlier tokens, before they wait for the previous launch. This is
  // correct if all work of the last token is complete when the first kernel of this token starts. Graph launches
  // guarantee it: early starts occur only between nodes of one graph, and a stream runs its graphs one after the other.
  const bool fixed = !plan::is_expanded(list_for(batch).id);  // as in run()
  if (graphs_wanted_ && fixed && !computed) {
    Captured& step = d.steps[depth_of(batch)];
    if (ready(step, [&] { launch_step(/*capturing=*/true); })) {
      DYNO_CUDA_CHECK(cudaGraphLaunch(step.graph.get(), stream_.get()));
      return;
    }
  }
  launch_step(/*capturing=*/false);
  // Plain launches do not guarantee it: the first kernel lets the second one start while it still waits itself. A copy
  // is not a kernel, so later work waits for it, and it waits for all earlier work.
  DYNO_CUDA_CHECK(cudaMemcpyAsync(d.fence.data(), &state_of(d.state)->drawn, sizeof(int32_t), cudaMemcpyDeviceToHost,
                                  stream_.get()));
}

void CudaExecutor::fit_row_results(size_t bytes) {
  if (row_results_.size() < bytes) row_results_ = PinnedBuffer(bytes, "draws");
}

// Kernels write the tokens to host memory. A copy would wait for the kernels, and the host for the copy.
void CudaExecutor::draw_rows(const MicroBatch& batch, const plan::Selection& selection) {
  const auto rows = static_cast<int64_t>(batch.row_draws.size());
  const size_t bytes = static_cast<size_t>(rows) * sizeof(int32_t);
  fit_row_results(bytes);  // safe, because each call waits for its tokens
  auto* tokens = reinterpret_cast<int32_t*>(row_results_.data());
  std::fill_n(tokens, rows, kNotDrawn);
  const InputLayout layout(std::ssize(batch.tokens));
  const auto* logits = reinterpret_cast<const float*>(logits_.data());
  const auto* settings = reinterpret_cast<const ops::SampleSettings*>(inputs_.data() + layout.settings);
  const auto* uniforms = reinterpret_cast<const float*>(inputs_.data() + layout.uniforms);
  const bool sorts = sorts_rows(batch.row_draws, model_.n_vocab);
  const int64_t together = rows_drawn_together(plan_, selection, sorts);
  ops::CudaStream stream = context();
  for (int64_t first = 0; first < rows; first += together) {
    const plan::Selection::Launch launch = row_draw(plan_, selection, std::min(together, rows - first));
    const auto& desc = std::get<ops::SampleDesc>(launch.desc);
    const ops::SampleArgs args{.logits = logits + first * model_.n_vocab,
                               .uniform = uniforms + first,
                               .row_settings = settings + first,
                               .finite_only = true,
                               .out = tokens + first};
    if (sorts) {
      ops::launch(launch.config, desc, args, stream);
    } else {
      ops::launch_unsorted(launch.config, desc, args, stream);
    }
  }
  bool copies = false;
  for (int64_t row = 0; row < rows; ++row) {
    float* to = batch.row_draws[static_cast<size_t>(row)].logits;
    if (to == nullptr) continue;
    copies = true;
    DYNO_CUDA_CHECK(cudaMemcpyAsync(to, logits + row * model_.n_vocab,
                                    static_cast<size_t>(model_.n_vocab) * sizeof(float), cudaMemcpyDeviceToHost,
                                    stream_.get()));
  }
  if (copies) {
    finish();
  } else {
    await_rows({tokens, static_cast<size_t>(rows)});
  }
  std::memcpy(batch.drawn, tokens, bytes);
}

void CudaExecutor::await_rows(std::span<int32_t> tokens) {
  check_not_lost(info().ordinal);
  const CudaStep step(info().ordinal, "waiting for sampled tokens");
  size_t there = 0;
  const bool all = await_written(stream_, [&] {
    while (there < tokens.size() && std::atomic_ref(tokens[there]).load(std::memory_order_acquire) != kNotDrawn) {
      ++there;
    }
    return there == tokens.size();
  });
  DYNO_CHECK(DeviceError, all, "[cuda] a step ended with ", there, " of ", tokens.size(), " sampled tokens");
}

int32_t CudaExecutor::wait_draw() {
  const DeviceScope scope(info().ordinal, "generating");
  Drawing& d = drawing_;
  const uint32_t step = d.waited++;
  std::atomic_ref<uint64_t> slot(reinterpret_cast<uint64_t*>(d.drawn.data())[step % kDrawnSlots]);
  uint64_t value = 0;
  const bool arrived = await_written(stream_, [&] {
    value = slot.load(std::memory_order_acquire);
    return value >> 32 == step;
  });
  DYNO_CHECK(DeviceError, arrived, "[cuda] step ", step, " of a generation ended without a token");
  return static_cast<int32_t>(value & 0xffffffffu);
}

}  // namespace dyno::runtime
