#include "runtime/cuda/choice_counts.h"

#include <cstring>

#include "core/cuda/check.h"

namespace dyno::runtime {

ChoiceCounts::ChoiceCounts(const plan::Plan& plan, cudaStream_t stream) : stream_(stream) {
  if (!plan.load.expert_cache.adaptive) return;
  size_t all = 0;
  for (const std::vector<int32_t>& table : plan.expert_places) {
    begins_.push_back(all);
    all += table.size();
  }
  begins_.push_back(all);
  if (all == 0) return;
  taken_.assign(all, 0);
  counts_ = DeviceBuffer(all * sizeof(uint32_t), "counts of chosen experts");
  DYNO_CUDA_CHECK(cudaMemsetAsync(counts_.data(), 0, counts_.size(), stream));
  for (Copy& copy : copies_) {
    copy.memory = PinnedBuffer(counts_.size(), "counts of chosen experts");
    copy.there = make_event();
    std::memset(copy.memory.data(), 0, counts_.size());
  }
}

void ChoiceCounts::send() {
  if (counts_.size() == 0) return;
  if (under_way_) {
    if (!is_over(copies_[1 - newest_].there)) return;
    newest_ = 1 - newest_;
  }
  Copy& free = copies_[1 - newest_];
  DYNO_CUDA_CHECK(cudaMemcpyAsync(free.memory.data(), counts_.data(), counts_.size(), cudaMemcpyDeviceToHost, stream_));
  DYNO_CUDA_CHECK(cudaEventRecord(free.there.get(), stream_));
  under_way_ = true;
}

std::vector<int64_t> ChoiceCounts::take(int32_t layer) {
  std::vector<int64_t> choices;
  if (counts_.size() == 0) return choices;
  const auto* now = reinterpret_cast<const uint32_t*>(copies_[newest_].memory.data());
  const size_t begin = begins_[static_cast<size_t>(layer)], end = begins_[static_cast<size_t>(layer) + 1];
  choices.reserve(end - begin);
  for (size_t i = begin; i < end; ++i) {
    choices.push_back(now[i] - taken_[i]);  // also correct if the counts start at zero again
    taken_[i] = now[i];
  }
  return choices;
}

}  // namespace dyno::runtime
