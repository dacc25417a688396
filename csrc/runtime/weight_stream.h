// Brings copies of weights from the memory of the CPU to the main device, layer by layer, while the layer before
// computes: only the experts that tokens were routed to, and of the next layer those that it used last.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/backend.h"

namespace dyno::runtime {

class WeightStream {
 public:
  // All arguments must outlive it.
  WeightStream(const plan::Plan& plan, const model::ModelDesc& model, Backend& cpu, Backend& main)
      : plan_(plan), model_(model), cpu_(cpu), main_(main), present_(plan.weights.size()), last_(plan.weights.size()) {}

  // Before the node of a fetch is launched, with so many tokens: what it reads is on its way, and launches wait for it.
  void fetch(size_t index, int64_t tokens);
  // Copies that are there are no longer: the main device's memory for them is new.
  void forget();
  const StreamCounts& counts() const { return counts_; }

 private:
  const std::vector<plan::Fetch>& fetches() const { return plan_.streamed.fetches; }
  const plan::StreamedWeight& streamed(model::WeightId id) const {
    return plan_.weights[static_cast<size_t>(id)].stream;
  }
  // Of a weight: as many as a router chooses among, or one.
  size_t matrices_of(const plan::Fetch& fetch, model::WeightId id) const;
  void take_half(int32_t order);
  std::vector<bool> routed(const plan::Fetch& fetch, int64_t tokens);
  // Copies the wanted matrices that are not there.
  void bring(const plan::Fetch& fetch, model::WeightId id, const std::vector<bool>& wanted, bool predicted);
  void bring_layer(int32_t order, const std::vector<bool>* routed);
  void predict_layer(int32_t order, int64_t tokens);

  const plan::Plan& plan_;
  const model::ModelDesc& model_;
  Backend& cpu_;
  Backend& main_;
  std::vector<std::vector<bool>> present_;  // by weight and matrix
  std::vector<std::vector<bool>> last_;     // likewise: used by the last u-batch that came through
  int32_t half_[2] = {-1, -1};              // order of the layer whose copies lie there
  StreamCounts counts_;
};

}  // namespace dyno::runtime
