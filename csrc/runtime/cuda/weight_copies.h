// Copies of CPU weights on a GPU: for the streamed list, and for an adaptive expert cache. They have their own stream.
// If kernels read another layout, copies first go to one of two staging buffers and are repacked from there on a third
// stream: while one buffer is repacked, the link fills the other.
#pragma once

#include <array>
#include <map>
#include <span>

#include "plan/plan.h"
#include "runtime/backend.h"
#include "runtime/cuda/handles.h"

namespace dyno::runtime {

class WeightCopies {
 public:
  // Both must outlive it.
  WeightCopies(const plan::Plan& plan, const model::ModelDesc& model) : plan_(plan), model_(model) {}

  // Allocates the memory that the plan has for copies. No copy may be running.
  void prepare();
  std::byte* at(model::WeightId weight) const {
    return memory_.data() + plan_.weights[static_cast<size_t>(weight)].stream.offset;
  }
  // As in Backend; `launches` is the stream of launches.
  void follow(cudaStream_t launches);
  void bring(model::WeightId weight, const std::byte* from, int64_t matrices, std::span<const MatrixRange> ranges);
  // `from`: on this device, in the layout of the copies.
  void bring_own(model::WeightId weight, const std::byte* from, std::span<const MatrixMove> moves);
  void await(model::WeightId weight, cudaStream_t launches) const;
  // Copies a matrix of a weight at `from` to `to`, a place in the weight `own` of this device, after all launches so
  // far.
  void fill(model::WeightId weight, const std::byte* from, model::WeightId own, std::byte* to, cudaStream_t launches);
  // Whether the last fill() of `own` is complete.
  bool has_filled(model::WeightId own) const;
  // Waits for the copies that launches wait for. Copies that fill places may continue.
  void finish();
  // Waits for all copies, and writes errors to stderr.
  void close() noexcept;

 private:
  struct Stage {
    Event filled, free;
  };
  void bring_as_it_is(const plan::WeightPlacement& placed, size_t matrix_bytes, const std::byte* from,
                      std::span<const MatrixRange> ranges);
  // The destination of matrices, and their size.
  struct Target {
    std::byte* memory = nullptr;
    size_t matrix_bytes = 0;
  };
  void bring_repacked(model::WeightId weight, size_t matrices, const std::byte* from,
                      std::span<const MatrixRange> ranges, const Target& to);
  // The stream of this weight's copies.
  cudaStream_t stream_of(const plan::WeightPlacement& placed) const {
    return placed.stream.layout != placed.layout ? repacks_.get() : copies_.get();
  }
  void wait();
  // Lets launches that await the weight continue after the current work of its stream.
  void note_copies(model::WeightId weight);
  // Repacks one full staging buffer: a part of each range, `count` matrices in total.
  void repack(model::WeightId weight, const std::byte* stage, int64_t matrices, std::span<const MatrixRange> pieces,
              const Target& to);

  const plan::Plan& plan_;
  const model::ModelDesc& model_;
  DeviceBuffer memory_;
  Stream copies_, repacks_;
  Event launched_;
  std::array<Stage, plan::kStages> stages_;
  size_t next_ = 0;
  std::map<model::WeightId, Event> there_, filled_;
  bool brings_ = false;  // whether copies were started since finish()
};

}  // namespace dyno::runtime
