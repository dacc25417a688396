// The best positions of each token. A block scores tiles of keys for all heads of a token, and keeps the ranks of the
// best positions in a list of the workspace. Whenever the list has twice as many as are selected, it is cut. Ranks are
// appended and kept in the order of positions, so the result needs no sort.
#include <cuda_runtime.h>

#include <algorithm>

#include "core/cuda/launch.h"
#include "device/dependent.cuh"
#include "device/reduce.cuh"
#include "ops/index_select/kernels_cuda.h"
#include "ops/runs.cuh"

namespace dyno::ops {
namespace {

using device::kFullMask;

constexpr int kThreads = 256, kMergeThreads = 1024;
constexpr int kKeys = kIndexTileKeys;  // of a tile
constexpr int kHeads = 64;             // of a tile
constexpr int kDims = 32;              // that are in shared memory at once
constexpr int kPad = 4;                // the transposed stores of a warp then use all banks

// A position with its score as one number, as on the CPU (index_select.cpp).
__device__ __forceinline__ uint64_t ranked(float score, int position) {
  const uint32_t bits = score != score ? 0xffffffffu : __float_as_uint(score + 0.0f);
  const uint32_t order = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return uint64_t{order} << 32 | (0xffffffffu - static_cast<uint32_t>(position));
}
__device__ __forceinline__ int position_of(uint64_t rank) {
  return static_cast<int>(0xffffffffu - static_cast<uint32_t>(rank));
}

// Memory that the threads of a block share while they search lists.
struct Search {
  int bins[256];
  int digit, above, within;
  int counts[kMergeThreads / 32];  // of each warp
};

// The least number that exactly `want` of `n` different ranks reach, n > want. `at(i)`: rank i. It is found by its
// digits, the highest one first.
template <typename At>
__device__ uint64_t least_of_best(Search& s, int n, int want, const At& at) {
  const int lane = threadIdx.x % 32, threads = blockDim.x;
  uint64_t found = 0, known = 0;
  for (int shift = 56; shift >= 0; shift -= 8) {
    for (int i = threadIdx.x; i < 256; i += threads) s.bins[i] = 0;
    __syncthreads();  // bins are zero
    for (int base = 0; base < n; base += threads) {
      const int i = base + static_cast<int>(threadIdx.x);
      const uint64_t rank = i < n ? at(i) : 0;
      const bool counts = i < n && (rank & known) == found;
      const int digit = static_cast<int>(rank >> shift & 255);
      // Most ranks have the same high digits. Lanes with the digit of the first lane count together.
      const int first = __shfl_sync(kFullMask, digit, 0);
      const unsigned together = __ballot_sync(kFullMask, counts && digit == first);
      if (lane == 0 && together != 0) atomicAdd(&s.bins[first], __popc(together));
      if (counts && digit != first) atomicAdd(&s.bins[digit], 1);
    }
    __syncthreads();  // all ranks are counted
    if (threadIdx.x < 32) {
      // Lane 0 has the eight highest bins.
      int sum = 0;
#pragma unroll
      for (int j = 0; j < 8; ++j) sum += s.bins[255 - 8 * lane - j];
      int to = sum;  // of this lane and the previous ones
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const int more = __shfl_up_sync(kFullMask, to, offset);
        if (lane >= offset) to += more;
      }
      if (to >= want && to - sum < want) {
        int above = to - sum, digit = 255 - 8 * lane;
        while (above + s.bins[digit] < want) above += s.bins[digit--];
        s.digit = digit;
        s.above = above;
        s.within = s.bins[digit];
      }
    }
    __syncthreads();  // the digit is known
    found |= static_cast<uint64_t>(s.digit) << shift;
    known |= uint64_t{255} << shift;
    want -= s.above;
    const bool all = s.within == want;
    __syncthreads();  // the digit is read
    if (all) break;
  }
  return found;
}

// Calls put(j, rank) for rank j of those that reach `least`, in their order, and returns their number. put() may write
// over ranks with a number up to the one that it is given.
template <typename At, typename Put>
__device__ int keep_best(Search& s, int n, uint64_t least, const At& at, const Put& put) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, threads = blockDim.x, warps = threads / 32;
  int kept = 0;
  for (int base = 0; base < n; base += threads) {
    const int i = base + static_cast<int>(threadIdx.x);
    const uint64_t rank = i < n ? at(i) : 0;
    const bool keep = i < n && rank >= least;
    const unsigned kept_here = __ballot_sync(kFullMask, keep);
    if (lane == 0) s.counts[warp] = __popc(kept_here);
    __syncthreads();  // the counts are written, and the ranks are read
    int to = kept + __popc(kept_here & ((1u << lane) - 1));
    for (int w = 0; w < warps; ++w) {
      const int count = s.counts[w];
      if (w < warp) to += count;
      kept += count;
    }
    if (keep) put(to, rank);
    __syncthreads();  // the counts are read, and the ranks of these threads are written
  }
  return kept;
}

struct Tile {
  float q[kDims][kHeads + kPad];
  float keys[kDims][kKeys + kPad];
  float sums[kThreads / 32][kKeys];
};

// Copies columns [from, from + kDims) of `count` rows to columns of shared memory. The rest becomes zero. A warp reads
// sectors of 8 elements of four rows.
template <int kRows>
__device__ __forceinline__ void load_columns(float (&to)[kDims][kRows + kPad], const float* rows, int64_t stride,
                                             int count, int from, int dk) {
  static_assert(kThreads == 8 * kDims);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first = warp / 4 * 4 + lane / 8, dim = warp % 4 * 8 + lane % 8;
  const float* of = rows + first * stride + from + dim;
#pragma unroll 8
  for (int row = first; row < kRows; row += 8, of += 8 * stride) {
    to[dim][row] = row < count && from + dim < dk ? *of : 0.0f;
  }
}

// The score of key `threadIdx.x` of a tile with `count` keys, for the first kKeys threads. Sums over dimensions are in
// their order, and no key's sums depend on other keys.
__device__ float tile_score(Tile& tile, const float* q, const float* weights, int heads, int dk, const float* keys,
                            int64_t stride, int count) {
  // This thread's heads are 4 * row to 4 * row + 3, and its keys 4 * column to 4 * column + 3, here and 64 further on.
  const int row = threadIdx.x / 16, column = threadIdx.x % 16, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float total[8] = {};
  for (int first_head = 0; first_head < heads; first_head += kHeads) {
    float sums[4][8] = {};
    for (int from = 0; from < dk; from += kDims) {
      __syncthreads();  // the previous columns are read
      load_columns<kHeads>(tile.q, q + int64_t{first_head} * dk, dk, min(kHeads, heads - first_head), from, dk);
      load_columns<kKeys>(tile.keys, keys, stride, count, from, dk);
      __syncthreads();  // these columns are written
#pragma unroll 4
      for (int d = 0; d < kDims; ++d) {
        const float4 h = *reinterpret_cast<const float4*>(&tile.q[d][4 * row]);
        const float4 a = *reinterpret_cast<const float4*>(&tile.keys[d][4 * column]);
        const float4 b = *reinterpret_cast<const float4*>(&tile.keys[d][64 + 4 * column]);
        const float of_heads[4] = {h.x, h.y, h.z, h.w}, of_keys[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
          for (int j = 0; j < 8; ++j) sums[i][j] += of_heads[i] * of_keys[j];
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int head = first_head + 4 * row + i;
      if (head >= heads) break;
      const float weight = weights[head];
#pragma unroll
      for (int j = 0; j < 8; ++j) total[j] += weight * (sums[i][j] < 0.0f ? 0.0f : sums[i][j]);  // NaN stays NaN
    }
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    total[j] += __shfl_xor_sync(kFullMask, total[j], 16);  // a warp has two rows of heads
    if (lane < 16) tile.sums[warp][j / 4 * 64 + 4 * column + j % 4] = total[j];
  }
  __syncthreads();  // the sums of all warps are written
  float score = 0;
  if (threadIdx.x < kKeys) {
#pragma unroll
    for (int w = 0; w < kThreads / 32; ++w) score += tile.sums[w][threadIdx.x];
  }
  return score;
}

struct Task {
  IndexSelectArgs args;
  int m, heads, dk, selected, splits;
  int64_t capacity;  // of a list
  uint64_t* lists;   // [list][capacity]; with splits, list token * splits + split
  int* counts;       // [list], only with splits
};

// The positions that a token sees, divided into parts of whole tiles. No positions: the token is in no run.
struct Seen {
  int positions = 0, each = 0, parts = 0;
  int64_t first_cell = 0;

  __device__ Seen(const Task& t, int token) {
    const int64_t all = t.args.slot_positions;
    const int64_t cell = cell_of_warp(t.args.runs, t.args.n_runs, all, token, static_cast<int>(threadIdx.x % 32));
    if (cell < 0) return;
    first_cell = cell / all * all;
    positions = static_cast<int>(cell - first_cell) + 1;
    const int tiles = (positions + kKeys - 1) / kKeys, tiles_each = (tiles + t.splits - 1) / t.splits;
    each = tiles_each * kKeys;
    parts = (tiles + tiles_each - 1) / tiles_each;
  }
};

__device__ __forceinline__ void take_all(const Task& t, int seen, int32_t* out) {
  for (int i = threadIdx.x; i < t.selected; i += blockDim.x) out[i] = i < seen ? i : -1;
}

__global__ void __launch_bounds__(kThreads, 2) select_blocks(const __grid_constant__ Task task) {
  __shared__ __align__(16) Tile tile;
  __shared__ Search search;
  device::let_next_start();
  device::wait_for_previous();
  const int split = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t stride = task.args.key_row_bytes / static_cast<int64_t>(sizeof(float));
  for (int token = blockIdx.x; token < task.m; token += gridDim.x) {
    const Seen seen(task, token);
    int32_t* out = task.args.out + token * task.args.out_stride;
    if (seen.positions <= task.selected) {
      if (seen.positions > 0 && split == 0) take_all(task, seen.positions, out);
      continue;
    }
    if (split >= seen.parts) continue;
    const int64_t index = task.splits == 1 ? int64_t{blockIdx.x} : int64_t{token} * task.splits + split;
    uint64_t* list = task.lists + index * task.capacity;
    const auto at = [&](int i) { return list[i]; };
    const float* q = task.args.q + token * task.args.q_stride;
    const float* weights = task.args.weights + token * task.args.weights_stride;
    const float* keys = reinterpret_cast<const float*>(task.args.keys) + seen.first_cell * stride;
    const int end = min((split + 1) * seen.each, seen.positions);
    int held = 0;
    uint64_t least = 0;  // lower ranks are not among the best
    for (int first = split * seen.each; first < end; first += kKeys) {
      const int count = min(kKeys, end - first);
      const float score = tile_score(tile, q, weights, task.heads, task.dk, keys + first * stride, stride, count);
      const int key = static_cast<int>(threadIdx.x);
      const uint64_t rank = key < count ? ranked(score, first + key) : 0;
      const bool keep = key < count && rank >= least;
      const unsigned kept = __ballot_sync(kFullMask, keep);
      if (lane == 0) search.counts[warp] = __popc(kept);
      __syncthreads();  // the counts are written
      int to = held + __popc(kept & ((1u << lane) - 1));
#pragma unroll
      for (int w = 0; w < kKeys / 32; ++w) {
        const int more = search.counts[w];
        if (w < warp) to += more;
        held += more;
      }
      if (keep) list[to] = rank;
      __syncthreads();  // the counts are read, and the ranks are written
      if (held > 2 * task.selected) {
        least = least_of_best(search, held, task.selected, at);
        held = keep_best(search, held, least, at, [&](int j, uint64_t of) { list[j] = of; });
      }
    }
    if (task.splits > 1) {
      if (threadIdx.x == 0) task.counts[index] = held;
      continue;
    }
    if (held > task.selected) least = least_of_best(search, held, task.selected, at);
    keep_best(search, held, held > task.selected ? least : 0, at,
              [&](int j, uint64_t of) { out[j] = position_of(of); });
  }
}

// The best of all parts of a token. Parts follow each other in the order of positions.
__global__ void __launch_bounds__(kMergeThreads) select_merge(const __grid_constant__ Task task) {
  __shared__ Search search;
  __shared__ int begins[kIndexMostSplits + 1];  // of each part in the row of all ranks
  device::let_next_start();
  device::wait_for_previous();
  const int token = blockIdx.x;
  const Seen seen(task, token);
  if (seen.positions <= task.selected) return;
  const int64_t index = int64_t{token} * task.splits;
  if (threadIdx.x == 0) begins[0] = 0;
  if (static_cast<int>(threadIdx.x) < seen.parts) begins[threadIdx.x + 1] = task.counts[index + threadIdx.x];
  __syncthreads();  // the counts are written
  if (threadIdx.x == 0) {
    for (int part = 0; part < seen.parts; ++part) begins[part + 1] += begins[part];
  }
  __syncthreads();  // the begins are written
  const auto at = [&](int i) {
    int low = 0, high = seen.parts;  // the part is in [low, high)
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (begins[middle] <= i ? low : high) = middle;
    }
    return task.lists[(index + low) * task.capacity + (i - begins[low])];
  };
  const int held = begins[seen.parts];
  const uint64_t least = held > task.selected ? least_of_best(search, held, task.selected, at) : 0;
  int32_t* out = task.args.out + token * task.args.out_stride;
  keep_best(search, held, least, at, [&](int j, uint64_t of) { out[j] = position_of(of); });
}

}  // namespace

void index_select_cuda(const IndexSelectArgs& args, const IndexSelectDesc& desc, int splits, CudaStream& stream) {
  const int64_t lists = index_lists(desc, splits), capacity = index_list_capacity(desc);
  Task task{};
  task.args = args;
  task.m = static_cast<int>(desc.m);
  task.heads = static_cast<int>(desc.heads);
  task.dk = static_cast<int>(desc.dk);
  task.selected = static_cast<int>(desc.selected);
  task.splits = splits;
  task.capacity = capacity;
  task.lists = reinterpret_cast<uint64_t*>(stream.workspace);
  task.counts = reinterpret_cast<int*>(task.lists + lists * capacity);
  const dim3 grid(static_cast<unsigned>(lists / splits), static_cast<unsigned>(splits));
  launch_dependent("index_select", select_blocks, grid, kThreads, 0, stream.handle, task);
  if (splits == 1) return;
  launch_dependent("index_select", select_merge, static_cast<unsigned>(desc.m), kMergeThreads, 0, stream.handle, task);
}

}  // namespace dyno::ops
