// CUDA kernels of index_select.
#pragma once

#include <algorithm>

#include "ops/cuda_stream.h"
#include "ops/index_select/index_select.h"

namespace dyno::ops {

inline constexpr int kIndexTileKeys = 128;
inline constexpr int kIndexMostSplits = 132;

// Ranks of positions that a list in the workspace can hold, see select_blocks.cu.
inline int64_t index_list_capacity(const IndexSelectDesc& d) { return 2 * d.selected + kIndexTileKeys; }
// Upper bound of the lists of a launch: enough blocks for any chip, and not more than 32 MiB, except for one list.
inline int64_t index_most_lists(const IndexSelectDesc& d) {
  constexpr int64_t kMostLists = 512, kMostRanks = int64_t{1} << 22;
  return std::clamp<int64_t>(kMostRanks / index_list_capacity(d), 1, kMostLists);
}
// Without splits, a block computes several tokens one after the other, if there are more tokens than lists.
inline int64_t index_lists(const IndexSelectDesc& d, int splits) {
  return splits == 1 ? std::min(d.m, index_most_lists(d)) : d.m * splits;
}

// Bytes of workspace: the lists, then the number of ranks in each.
inline size_t index_scratch_bytes(const IndexSelectDesc& d, int splits) {
  const auto lists = static_cast<size_t>(index_lists(d, splits));
  return lists * (static_cast<size_t>(index_list_capacity(d)) * sizeof(uint64_t) + sizeof(int32_t));
}

void index_select_cuda(const IndexSelectArgs& args, const IndexSelectDesc& desc, int splits, CudaStream& stream);

}  // namespace dyno::ops
