#include "runtime/cuda/weights_cuda.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "core/cuda/check.h"
#include "core/error.h"
#include "gguf/recode.h"
#include "ops/matmul/cuda/problem.h"
#include "ops/matmul/layout.h"
#include "runtime/host_buffer.h"
#include "runtime/weights.h"

namespace dyno::runtime {
namespace {

constexpr size_t kAlignment = 256;
size_t aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

constexpr size_t kStageBytes = size_t{64} << 20;

// Copies host memory to the device through two page-locked buffers: all threads fill one while the other is being
// copied.
class Uploader {
 public:
  Uploader(cudaStream_t stream, ThreadPool& pool, int threads) : stream_(stream), pool_(pool), threads_(threads) {
    for (Stage& stage : stages_) {
      stage.memory = PinnedBuffer(kStageBytes, "the upload of weights");
      stage.done = make_event();
    }
  }

  void copy(std::byte* to, const std::byte* from, size_t bytes) {
    for (size_t at = 0; at < bytes; at += kStageBytes) {
      const size_t part = std::min(kStageBytes, bytes - at);
      Stage& stage = stages_[next_];
      next_ = 1 - next_;
      DYNO_CUDA_CHECK(cudaEventSynchronize(stage.done.get()));
      pool_.run(threads_, [&](int thread, int count) {
        const size_t begin = part * static_cast<size_t>(thread) / static_cast<size_t>(count);
        const size_t end = part * static_cast<size_t>(thread + 1) / static_cast<size_t>(count);
        std::memcpy(stage.memory.data() + begin, from + at + begin, end - begin);
      });
      DYNO_CUDA_CHECK(cudaMemcpyAsync(to + at, stage.memory.data(), part, cudaMemcpyHostToDevice, stream_));
      DYNO_CUDA_CHECK(cudaEventRecord(stage.done.get(), stream_));
    }
  }

 private:
  struct Stage {
    PinnedBuffer memory;
    Event done;
  };
  cudaStream_t stream_;
  ThreadPool& pool_;
  int threads_;
  std::array<Stage, 2> stages_;
  size_t next_ = 0;
};

size_t plain_bytes(const model::Weight& w, DType type) {
  return static_cast<size_t>(w.batch) * ops::layout_bytes(type, ops::Layout::plain, w.rows, w.cols);
}

// The rows of `weight`, re-coded from its own type to the type that the device reads.
HostBuffer recoded(const model::Weight& weight, DType type, const std::byte* rows, ThreadPool& pool, int threads) {
  HostBuffer out(plain_bytes(weight, type), "a weight of another type");
  const size_t from = row_bytes(weight.type, weight.cols), to = row_bytes(type, weight.cols);
  pool.run(threads, [&](int thread, int count) {
    const int64_t all = weight.batch * weight.rows, begin = all * thread / count, end = all * (thread + 1) / count;
    recode_rows(weight.type, rows + from * static_cast<size_t>(begin), out.data() + to * static_cast<size_t>(begin),
                end - begin, weight.cols);
  });
  return out;
}

}  // namespace

CudaWeights::CudaWeights(const GgufFile& file, const model::ModelDesc& model, const plan::Plan& plan,
                         plan::DeviceId device, ThreadPool& pool, int threads, std::span<const std::byte* const> lent)
    : data_(model.weights.size()), lent_(lent.begin(), lent.end()) {
  const auto own = [&](const plan::WeightPlacement& weight) { return weight.device == device && !weight.lent; };
  size_t total = 0, widest = 0;
  for (size_t i = 0; i < plan.weights.size(); ++i) {
    if (!own(plan.weights[i])) continue;
    total += aligned(plan.weights[i].bytes);
    if (plan.weights[i].layout != ops::Layout::plain)
      widest = std::max(widest, plain_bytes(model.weights[i], plan.weights[i].type));
  }
  memory_ = DeviceBuffer(total, "weights");
  const DeviceBuffer plain(widest, "a weight before it is repacked");
  const Stream stream = make_stream();
  Uploader uploader(stream.get(), pool, threads);
  size_t offset = 0;
  for (size_t i = 0; i < model.weights.size(); ++i) {
    const model::Weight& weight = model.weights[i];
    const plan::WeightPlacement& placement = plan.weights[i];
    if (!own(placement)) continue;
    std::byte* target = memory_.data() + offset;
    data_[i] = target;
    offset += aligned(placement.bytes);

    HostBuffer transformed;
    const std::byte* source = weight.tensor->data;
    if (weight.transform != model::Transform::none || weight.tensor->type != weight.type || !weight.picks.empty()) {
      transformed = HostBuffer(plain_bytes(weight, weight.type), "a transformed weight");
      fill_weight(file, weight, ops::Layout::plain, transformed.data(), pool, threads);
      source = transformed.data();
    }
    HostBuffer other;
    if (placement.type != weight.type) {
      other = recoded(weight, placement.type, source, pool, threads);
      source = other.data();
    }
    if (placement.layout == ops::Layout::plain) {
      uploader.copy(target, source, placement.bytes);
    } else {
      uploader.copy(plain.data(), source, plain_bytes(weight, placement.type));
      ops::cuda::type_kernels(placement.type)
          .repack(reinterpret_cast<const uint8_t*>(plain.data()), reinterpret_cast<uint8_t*>(target), weight.batch,
                  weight.rows, weight.cols, stream.get());
      DYNO_LAUNCH_CHECK("repack");
    }
    if (weight.picks.empty()) file.advise_drop(weight.tensor->bytes());
  }
  DYNO_CUDA_CHECK(cudaStreamSynchronize(stream.get()));
}

}  // namespace dyno::runtime
