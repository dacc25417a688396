#include "runtime/cuda/weight_copies.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "core/cuda/check.h"
#include "core/error.h"
#include "ops/matmul/cuda/from_x16.h"
#include "ops/matmul/cuda/problem.h"

namespace dyno::runtime {

void WeightCopies::prepare() {
  const size_t bytes = plan_.devices.front().stream_bytes;
  if (memory_.size() != bytes) {
    if (copies_.get() != nullptr) wait();  // a place may still be filled through a staging buffer
    memory_ = {};
    memory_ = DeviceBuffer(bytes, "copies of the CPU's weights");
  }
  const bool fills =
      std::any_of(plan_.weights.begin(), plan_.weights.end(), [](const plan::WeightPlacement& w) { return w.refills; });
  if ((bytes == 0 && !fills) || copies_.get() != nullptr) return;
  copies_ = make_stream();
  repacks_ = make_stream();
  launched_ = make_event();
  for (Stage& stage : stages_) stage = {.filled = make_event(), .free = make_event()};
}

// Staging buffers can be filled at once, but launches may still read the destination of a copy.
void WeightCopies::follow(cudaStream_t launches) {
  DYNO_CUDA_CHECK(cudaEventRecord(launched_.get(), launches));
  DYNO_CUDA_CHECK(cudaStreamWaitEvent(repacks_.get(), launched_.get()));
  const auto as_it_is = [](const plan::WeightPlacement& w) { return w.stream.wanted && w.stream.layout == w.layout; };
  if (std::any_of(plan_.weights.begin(), plan_.weights.end(), as_it_is)) {
    DYNO_CUDA_CHECK(cudaStreamWaitEvent(copies_.get(), launched_.get()));
  }
}

void WeightCopies::bring(model::WeightId weight, const std::byte* from, int64_t matrices,
                         std::span<const MatrixRange> ranges) {
  const plan::WeightPlacement& placed = plan_.weights[static_cast<size_t>(weight)];
  const bool repacked = placed.stream.layout != placed.layout;
  brings_ = true;
  const auto count = static_cast<size_t>(matrices);
  if (repacked) {
    bring_repacked(weight, count, from, ranges, {at(weight), placed.stream.bytes / count});
  } else {
    bring_as_it_is(placed, placed.bytes / count, from, ranges);
  }
  note_copies(weight);
}

void WeightCopies::note_copies(model::WeightId weight) {
  Event& there = there_[weight];
  if (there.get() == nullptr) there = make_event();
  DYNO_CUDA_CHECK(cudaEventRecord(there.get(), stream_of(plan_.weights[static_cast<size_t>(weight)])));
}

void WeightCopies::bring_own(model::WeightId weight, const std::byte* from, std::span<const MatrixMove> moves) {
  const plan::WeightPlacement& placed = plan_.weights[static_cast<size_t>(weight)];
  const size_t each = placed.stream.bytes / static_cast<size_t>(placed.stream.matrices);
  brings_ = true;
  for (const MatrixMove& move : moves) {
    DYNO_CUDA_CHECK(
        cudaMemcpyAsync(at(weight) + each * static_cast<size_t>(move.to), from + each * static_cast<size_t>(move.from),
                        each * static_cast<size_t>(move.count), cudaMemcpyDeviceToDevice, stream_of(placed)));
  }
  note_copies(weight);
}

void WeightCopies::bring_as_it_is(const plan::WeightPlacement& placed, size_t matrix_bytes, const std::byte* from,
                                  std::span<const MatrixRange> ranges) {
  for (const MatrixRange& range : ranges) {
    const size_t at = matrix_bytes * static_cast<size_t>(range.first);
    DYNO_CUDA_CHECK(cudaMemcpyAsync(memory_.data() + placed.stream.offset + at, from + at,
                                    matrix_bytes * static_cast<size_t>(range.count), cudaMemcpyHostToDevice,
                                    copies_.get()));
  }
}

void WeightCopies::bring_repacked(model::WeightId weight, size_t matrices, const std::byte* from,
                                  std::span<const MatrixRange> ranges, const Target& to) {
  const size_t matrix_bytes = plan_.weights[static_cast<size_t>(weight)].bytes / matrices;
  const size_t stage_bytes = plan_.stage_bytes();
  const auto room = static_cast<int64_t>(stage_bytes / matrix_bytes);
  DYNO_CHECK(Error, room > 0, "[stream] a matrix of ", matrix_bytes, " bytes does not fit a stage of ", stage_bytes);
  std::vector<MatrixRange> pieces;
  std::byte* base = nullptr;
  int64_t held = 0;
  const auto close = [&] {
    if (held == 0) return;
    const Stage& stage = stages_[next_];
    DYNO_CUDA_CHECK(cudaEventRecord(stage.filled.get(), copies_.get()));
    DYNO_CUDA_CHECK(cudaStreamWaitEvent(repacks_.get(), stage.filled.get()));
    repack(weight, base, static_cast<int64_t>(matrices), pieces, to);
    DYNO_CUDA_CHECK(cudaEventRecord(stage.free.get(), repacks_.get()));
    next_ = (next_ + 1) % stages_.size();
    pieces.clear();
    held = 0;
  };
  for (const MatrixRange& range : ranges) {
    for (int64_t done = 0; done < range.count;) {
      if (held == 0) {
        DYNO_CUDA_CHECK(cudaStreamWaitEvent(copies_.get(), stages_[next_].free.get()));
        base = memory_.data() + memory_.size() - stage_bytes * (stages_.size() - next_);
      }
      const MatrixRange piece{.first = range.first + done, .count = std::min(range.count - done, room - held)};
      DYNO_CUDA_CHECK(cudaMemcpyAsync(
          base + matrix_bytes * static_cast<size_t>(held), from + matrix_bytes * static_cast<size_t>(piece.first),
          matrix_bytes * static_cast<size_t>(piece.count), cudaMemcpyHostToDevice, copies_.get()));
      pieces.push_back(piece);
      held += piece.count;
      done += piece.count;
      if (held == room) close();
    }
  }
  close();
}

void WeightCopies::repack(model::WeightId weight, const std::byte* stage, int64_t matrices,
                          std::span<const MatrixRange> pieces, const Target& to) {
  const plan::WeightPlacement& placed = plan_.weights[static_cast<size_t>(weight)];
  const model::Weight& w = model_.weight(weight);
  const auto* from = reinterpret_cast<const uint8_t*>(stage);
  auto* memory = reinterpret_cast<uint8_t*>(to.memory);
  const int64_t each = w.batch / matrices;  // a matrix of the router may consist of several adjacent matrices
  if (placed.layout != ops::Layout::x16) {
    const size_t source = placed.bytes / static_cast<size_t>(matrices);
    for (const MatrixRange& piece : pieces) {
      ops::cuda::type_kernels(w.type).repack(from, memory + to.matrix_bytes * static_cast<size_t>(piece.first),
                                             piece.count * each, w.rows, w.cols, repacks_.get());
      DYNO_LAUNCH_CHECK("repack");
      from += source * static_cast<size_t>(piece.count);
    }
    return;
  }
  const size_t source = placed.bytes / static_cast<size_t>(w.batch);
  ops::cuda::X16Matrices some{
      .x16 = from, .out = memory, .n = static_cast<int32_t>(w.rows), .k = static_cast<int32_t>(w.cols)};
  const auto start = [&] {
    if (some.count == 0) return;
    ops::cuda::repack_from_x16(w.type, some, repacks_.get());
    some.x16 += source * static_cast<size_t>(some.count);
    some.count = 0;
  };
  for (const MatrixRange& piece : pieces) {
    for (int64_t i = piece.first * each; i < (piece.first + piece.count) * each; ++i) {
      some.place[some.count++] = static_cast<uint16_t>(i);
      if (some.count == ops::cuda::X16Matrices::kMost) start();
    }
  }
  start();
}

void WeightCopies::await(model::WeightId weight, cudaStream_t launches) const {
  const auto there = there_.find(weight);
  if (there != there_.end()) DYNO_CUDA_CHECK(cudaStreamWaitEvent(launches, there->second.get()));
}

// Uses the streams of bring_own(), which reads places. Their order guarantees that no place changes while it is read.
void WeightCopies::fill(model::WeightId weight, const std::byte* from, model::WeightId own, std::byte* to,
                        cudaStream_t launches) {
  const plan::WeightPlacement &placed = plan_.weights[static_cast<size_t>(weight)],
                              &there = plan_.weights[static_cast<size_t>(own)];
  const auto matrices = static_cast<size_t>(model_.weight(weight).batch);
  const bool repacked = there.layout != placed.layout;
  const cudaStream_t last = repacked ? repacks_.get() : copies_.get();
  DYNO_CUDA_CHECK(cudaEventRecord(launched_.get(), launches));
  DYNO_CUDA_CHECK(cudaStreamWaitEvent(last, launched_.get()));
  if (repacked) {
    const MatrixRange one{.first = 0, .count = 1};
    bring_repacked(weight, matrices, from, {&one, 1},
                   {to, there.bytes / static_cast<size_t>(model_.weight(own).batch)});
  } else {
    DYNO_CUDA_CHECK(cudaMemcpyAsync(to, from, placed.bytes / matrices, cudaMemcpyDefault, last));
  }
  Event& filled = filled_[own];
  if (filled.get() == nullptr) filled = make_event();
  DYNO_CUDA_CHECK(cudaEventRecord(filled.get(), last));
}

bool WeightCopies::has_filled(model::WeightId own) const {
  const auto filled = filled_.find(own);
  return filled == filled_.end() || is_over(filled->second);
}

void WeightCopies::wait() {
  DYNO_CUDA_CHECK(cudaStreamSynchronize(copies_.get()));
  DYNO_CUDA_CHECK(cudaStreamSynchronize(repacks_.get()));
}

void WeightCopies::finish() {
  if (!std::exchange(brings_, false)) return;
  wait();
}

void WeightCopies::close() noexcept {
  if (copies_.get() == nullptr) return;
  DYNO_CUDA_CHECK_NOTHROW(cudaStreamSynchronize(copies_.get()));
  DYNO_CUDA_CHECK_NOTHROW(cudaStreamSynchronize(repacks_.get()));
}

}  // namespace dyno::runtime
