// Copies of the CPU's weights on a GPU: for the streamed list, and for an expert cache that adapts. They cross on a
// stream of their own. Those that kernels read in another layout than they lie in come to one of two stages first, and
// are repacked from there on a third stream: while one stage is repacked, the link fills the other.
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

  // Takes the memory that the plan has for them. No copy is under way.
  void prepare();
  std::byte* at(model::WeightId weight) const {
    return memory_.data() + plan_.weights[static_cast<size_t>(weight)].stream.offset;
  }
  // As Backend's; `launches` is the stream of the launches.
  void follow(cudaStream_t launches);
  void bring(model::WeightId weight, const std::byte* from, int64_t matrices, std::span<const MatrixRange> ranges);
  // `from`: of this device, in the layout of the copies.
  void bring_own(model::WeightId weight, const std::byte* from, std::span<const MatrixMove> moves);
  void await(model::WeightId weight, cudaStream_t launches) const;
  // A matrix of a weight, at `from`, becomes one of the weight `own` of this device, at `to`, when all launches so far
  // are over.
  void fill(model::WeightId weight, const std::byte* from, model::WeightId own, std::byte* to, cudaStream_t launches);
  // Whether it has, the last one of `own`.
  bool has_filled(model::WeightId own) const;
  // Waits for the copies that launches wait for. What only fills a place may go on.
  void finish();
  // Waits for all, and tells of errors on stderr.
  void close() noexcept;

 private:
  struct Stage {
    Event filled, free;
  };
  void bring_as_it_is(const plan::WeightPlacement& placed, size_t matrix_bytes, const std::byte* from,
                      std::span<const MatrixRange> ranges);
  // Where matrices go, of so many bytes each.
  struct Target {
    std::byte* memory = nullptr;
    size_t matrix_bytes = 0;
  };
  void bring_repacked(model::WeightId weight, size_t matrices, const std::byte* from,
                      std::span<const MatrixRange> ranges, const Target& to);
  // On which these copies of a weight are made.
  cudaStream_t stream_of(const plan::WeightPlacement& placed) const {
    return placed.stream.layout != placed.layout ? repacks_.get() : copies_.get();
  }
  void wait();
  // Launches that wait for the weight go on behind what its stream has to do now.
  void note_copies(model::WeightId weight);
  // One stage full: such a piece of each range, `count` matrices together.
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
  bool brings_ = false;  // since finish()
};

}  // namespace dyno::runtime
