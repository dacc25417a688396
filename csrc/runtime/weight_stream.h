// Copies weights from CPU memory to the main device, layer by layer, while the previous layer computes. It copies only
// the experts that tokens were routed to. For the next layer it predicts the experts that the last u-batch used.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/backend.h"
#include "runtime/expert_places.h"

namespace dyno::runtime {

class WeightStream {
 public:
  // All arguments must outlive it.
  WeightStream(const plan::Plan& plan, const model::ModelDesc& model, ExpertPlaces& places, Backend& cpu, Backend& main)
      : plan_(plan),
        model_(model),
        places_(places),
        cpu_(cpu),
        main_(main),
        present_(plan.weights.size()),
        last_(plan.weights.size()) {}

  // Called before the node of a fetch is launched, with the number of tokens: starts all copies that it needs, and
  // makes launches wait for them.
  void fetch(size_t index, int64_t tokens);
  // Called before the first node of a u-batch, with its list.
  void begin(const plan::NodeList& list) {
    list_ = &list;
    taken_.assign(model_.layers.size(), kUnknown);
  }
  // Whether a node of a streamed list is skipped, because the CPU computes no expert of its layer.
  bool leaves_out(const plan::Node& node) const {
    return node.for_cpu_share && taken_[static_cast<size_t>(node.layer)] == 0;
  }
  // Forgets all copies, because the main device's memory for them was reallocated.
  void forget();
  const StreamCounts& counts() const { return counts_; }

 private:
  const std::vector<plan::Fetch>& fetches() const { return list_->fetches; }
  const plan::StreamedWeight& streamed(model::WeightId id) const {
    return plan_.weights[static_cast<size_t>(id)].stream;
  }
  // Number of a weight's matrices: the number of experts, or one.
  size_t matrices_of(const plan::Fetch& fetch, model::WeightId id) const;
  void take_half(int32_t order);
  // Rows of each expert.
  std::vector<int64_t> routed(const plan::Fetch& fetch, int64_t tokens);
  // The experts of a u-batch. `wanted`: the main device multiplies by them. `expected`: it would do so if none had been
  // copied ahead; these are predicted next time.
  struct Experts {
    std::vector<bool> wanted, expected;
  };
  // The fetch that shares a layer's experts with the CPU, or null.
  const plan::Fetch* sharing(int32_t order) const;
  // The number of candidates that the CPU takes, of `chosen` experts; `rows` are the candidates' rows, ascending.
  int64_t taken(const plan::Fetch& fetch, int64_t tokens, int64_t chosen, const std::vector<int64_t>& rows) const;
  // Gives the CPU the experts with the fewest rows among those that were not copied ahead.
  Experts share(const plan::Fetch& fetch, const std::vector<int64_t>& rows, int64_t tokens);
  std::vector<bool> there(int32_t order, size_t experts) const;
  // Copies the wanted matrices that are not present.
  void bring(const plan::Fetch& fetch, model::WeightId id, const std::vector<bool>& wanted, bool predicted);
  void bring_layer(int32_t order, const Experts* routed);
  void predict_layer(int32_t order, int64_t tokens);

  const plan::Plan& plan_;
  const plan::NodeList* list_ = nullptr;  // of this u-batch
  const model::ModelDesc& model_;
  ExpertPlaces& places_;
  Backend& cpu_;
  Backend& main_;
  std::vector<std::vector<bool>> present_;  // by weight and matrix
  std::vector<std::vector<bool>> last_;     // by weight and matrix: predicted, because the last u-batch used them
  static constexpr int64_t kUnknown = -1;
  std::vector<int64_t> taken_;  // by layer: number of experts that the CPU computes in this u-batch
  int32_t half_[2] = {-1, -1};  // order of the layer whose copies are in each half
  StreamCounts counts_;
};

}  // namespace dyno::runtime
