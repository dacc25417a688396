// Attention in f32 for every head size and cache type. A block has kCudaRowTile query rows and processes the keys in
// chunks. For scores, a warp takes a key and its lanes the dimensions. For values, a thread takes a dimension of all
// rows; if heads are narrower than the block, groups of threads share the keys.
#include <cuda_runtime.h>

#include "core/cuda/launch.h"
#include "core/error.h"
#include "device/dependent.cuh"
#include "ops/attention/tile.cuh"
#include "ops/kernel_groups.h"

namespace dyno::ops {
namespace {

using device::Scalar;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kRows = kCudaRowTile;
constexpr int kChunk = 64;
static_assert(kRows == kWarps, "a warp brings one row's softmax up to date");

// Sums kRows values over the warp. Lane 4·r' gets row r, whose three bits are the bits of r' in reverse order.
__device__ __forceinline__ float sum_rows(float (&v)[kRows], int lane) {
#pragma unroll
  for (int width = kRows / 2, offset = 16; width >= 1; width /= 2, offset /= 2) {
    const bool upper = (lane & offset) != 0;
#pragma unroll
    for (int i = 0; i < width; ++i) {
      const float send = upper ? v[i] : v[i + width];
      const float keep = upper ? v[i + width] : v[i];
      v[i] = keep + __shfl_xor_sync(device::kFullMask, send, offset);
    }
  }
  float sum = v[0];
  sum += __shfl_xor_sync(device::kFullMask, sum, 2);
  return sum + __shfl_xor_sync(device::kFullMask, sum, 1);
}
__device__ __forceinline__ int summed_row(int lane) {
  return ((lane >> 4) & 1) * 4 + ((lane >> 3) & 1) * 2 + ((lane >> 2) & 1);
}

// kDims: dimensions of the value per thread. kSelected: each token reads the positions of its list.
template <Scalar kKey, Scalar kValue, int kDims, bool kSelected = false>
__global__ void __launch_bounds__(kThreads) attention_rows(CudaAttention task) {
  device::let_next_start();
  device::wait_for_previous();
  extern __shared__ float queries[];  // [kRows][dk]
  __shared__ float scores[kRows][kChunk];
  __shared__ float best[kRows], total[kRows], shrink[kRows];
  __shared__ float partial[kThreads];
  const int kv_head = blockIdx.y, split = blockIdx.z, dk = task.dk, dv = task.dv;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const CudaTile tile = find_tile_of<kSelected>(task, blockIdx.x, kRows);
  if (tile.empty()) return;
  const KeyRange range = split_keys(task, tile, split, kChunk);
  if (split >= range.active) return;

  const float scale = task.query_scale();
  for (int i = threadIdx.x; i < kRows * dk; i += kThreads) {
    const int row = i / dk;
    queries[i] = row < tile.rows() ? query_row(task, tile, tile.row_begin + row, kv_head)[i % dk] * scale : 0.0f;
  }
  if (threadIdx.x < kRows) {
    best[threadIdx.x] = minus_infinity();
    total[threadIdx.x] = 0.0f;
  }

  // `groups` threads of the same dimension share the keys.
  int width = kThreads;
  if constexpr (kDims == 1) {
    for (width = 32; width < dv; width *= 2) {
    }
  }
  const int group = threadIdx.x / width, groups = kThreads / width, dim = threadIdx.x % width;
  float sums[kRows][kDims] = {};

  const int begin = range.begin, end = range.end;
  const uint8_t* key_base = key_rows(task, tile.run, kv_head);
  const uint8_t* value_base = value_rows(task, tile.run, kv_head);
  const int64_t value_stride = task.v_in_k ? task.args.k_row_bytes : task.args.v_row_bytes;
  const KeyRows<kSelected> rows(task, tile);

  for (int first = begin; first < end; first += kChunk) {
    const int count = min(kChunk, end - first);
    __syncthreads();  // queries are written; the scores of the last chunk are no longer needed
    for (int j = warp; j < count; j += kWarps) {
      const uint8_t* key = key_base + rows[first + j] * task.args.k_row_bytes;
      float dot[kRows] = {};
      for (int d = lane; d < dk; d += 32) {
        const float k = device::load_scalar<kKey>(key, d);
#pragma unroll
        for (int r = 0; r < kRows; ++r) dot[r] += k * queries[r * dk + d];
      }
      float score = sum_rows(dot, lane);
      const int row = summed_row(lane);
      if (task.softcap) score = task.args.softcap * tanhf(score);
      if (lane % 4 == 0) {
        const bool seen = row < tile.rows() && sees(task, tile, tile.row_begin + row, first + j);
        scores[row][j] = seen ? score : minus_infinity();
      }
    }
    __syncthreads();  // the chunk's scores are written
    {
      const float a = lane < count ? scores[warp][lane] : minus_infinity();
      const float b = lane + 32 < count ? scores[warp][lane + 32] : minus_infinity();
      const float old = best[warp], top = fmaxf(old, device::warp_max(fmaxf(a, b)));
      const float base = top == minus_infinity() ? 0.0f : top;  // no key was read yet: all weights are e^-inf = 0
      const float wa = expf(a - base), wb = expf(b - base);
      const float sum = device::warp_sum(wa + wb);
      __syncwarp();  // all lanes have read the row's maximum
      scores[warp][lane] = wa;
      scores[warp][lane + 32] = wb;
      if (lane == 0) {
        const float factor = expf(old - base);
        best[warp] = top;
        shrink[warp] = factor;
        total[warp] = total[warp] * factor + sum;
      }
    }
    __syncthreads();  // weights and factors are written
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < kDims; ++i) sums[r][i] *= shrink[r];
    }
    for (int j = group; j < count; j += groups) {
      const uint8_t* value = value_base + rows[first + j] * value_stride;
#pragma unroll
      for (int i = 0; i < kDims; ++i) {
        const int d = dim + i * kThreads;
        const float v = d < dv ? device::load_scalar<kValue>(value, d) : 0.0f;
#pragma unroll
        for (int r = 0; r < kRows; ++r) sums[r][i] += scores[r][j] * v;
      }
    }
  }
  __syncthreads();  // best and total are final

  const bool whole = range.active == 1;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r >= tile.rows()) break;
    float* out = whole ? output_row(task, tile, tile.row_begin + r, kv_head)
                       : partial_row(task, blockIdx.x, kRows, kv_head, split, r) + 2;
    const float factor = whole ? output_factor(task, tile.row_begin + r, kv_head, best[r], total[r]) : 1.0f;
#pragma unroll
    for (int i = 0; i < kDims; ++i) {
      float sum = sums[r][i];
      if (kDims == 1 && groups > 1) {
        partial[threadIdx.x] = sum;
        __syncthreads();  // all groups' sums are written
        sum = 0;
        for (int g = 0; g < groups; ++g) sum += partial[g * width + dim];
        __syncthreads();  // … and read
      }
      const int d = dim + i * kThreads;
      if (group == 0 && d < dv) out[d] = sum * factor;
    }
    if (!whole && threadIdx.x == 0) {
      out[-2] = best[r];
      out[-1] = total[r];
    }
  }
  if (!whole) combine_partials(task, tile, blockIdx.x, kRows, kv_head, range.active);
}

template <Scalar kKey, Scalar kValue>
auto kernel_for(const CudaAttention& task) -> void (*)(CudaAttention) {
  static_assert(kRowsNarrow == kThreads);
  if (task.selected > 0) {
    if constexpr (kKey == kValue && group_built(KernelGroup::latent)) {
      return task.dv <= kThreads       ? attention_rows<kKey, kKey, 1, true>
             : task.dv <= 2 * kThreads ? attention_rows<kKey, kKey, 2, true>
                                       : attention_rows<kKey, kKey, 4, true>;
    }
    throw_left_out(KernelGroup::latent);
  }
  if (task.dv <= kThreads) return attention_rows<kKey, kValue, 1>;
  constexpr bool kLatent = kKey == kValue && group_built(KernelGroup::latent);
  if constexpr (kLatent || group_built(KernelGroup::heads_512)) {
    return task.dv <= 2 * kThreads ? attention_rows<kKey, kValue, 2> : attention_rows<kKey, kValue, 4>;
  }
  throw_left_out(task.v_in_k ? KernelGroup::latent : KernelGroup::heads_512);
}

template <Scalar kKey, Scalar kValue>
void launch_types(const CudaAttention& task, const dim3& grid, CudaStream& stream) {
  const auto kernel = kernel_for<kKey, kValue>(task);
  const size_t shared = static_cast<size_t>(kRows * task.dk) * sizeof(float);
  launch_dependent("attention", kernel, grid, kThreads, shared, stream.handle, task);
}

template <Scalar kKey>
void launch_key(DType v_type, const CudaAttention& task, const dim3& grid, CudaStream& stream) {
  if (task.v_in_k) return launch_types<kKey, kKey>(task, grid, stream);
  switch (v_type) {
    case DType::f32:
      return launch_types<kKey, Scalar::f32>(task, grid, stream);
    case DType::f16:
      return launch_types<kKey, Scalar::f16>(task, grid, stream);
    case DType::bf16:
      return launch_types<kKey, Scalar::bf16>(task, grid, stream);
    case DType::q8_0:
      return launch_types<kKey, Scalar::q8_0>(task, grid, stream);
    default:
      throw UnsupportedError(str_cat("[attention] no cache of type ", dtype_name(v_type)));
  }
}

}  // namespace

CudaAttention make_cuda_attention(const AttentionArgs& args, const AttentionDesc& desc, int splits,
                                  CudaStream& stream) {
  CudaAttention task{};
  task.args = args;
  task.tokens = static_cast<int>(desc.m);
  task.group = static_cast<int>(desc.heads / desc.kv_heads);
  task.heads = static_cast<int>(desc.heads);
  task.kv_heads = static_cast<int>(desc.kv_heads);
  task.dk = static_cast<int>(desc.dk);
  task.dv = static_cast<int>(desc.dv);
  task.k_head_bytes = static_cast<int64_t>(row_bytes(desc.k_type, desc.dk));
  task.v_head_bytes = desc.v_in_k ? 0 : static_cast<int64_t>(row_bytes(desc.v_type, desc.dv));
  task.v_in_k = desc.v_in_k;
  task.sinks = desc.sinks;
  task.windowed = desc.windowed;
  task.softcap = desc.softcap;
  task.splits = splits;
  task.partials = reinterpret_cast<float*>(stream.workspace);
  task.counters = stream.counters;
  task.selected = static_cast<int>(desc.selected);
  return task;
}

void attention_rows_cuda(const AttentionArgs& args, const AttentionDesc& desc, int splits, CudaStream& stream) {
  const CudaAttention task = make_cuda_attention(args, desc, splits, stream);
  const AttentionTiles tiles{kRows, task.group};
  const int64_t runs = desc.selected > 0 ? desc.m : args.n_runs;  // rows of each token have their own tiles
  const dim3 grid(static_cast<unsigned>(tiles.bound(desc.m, runs)), static_cast<unsigned>(desc.kv_heads),
                  static_cast<unsigned>(splits));
  switch (desc.k_type) {
    case DType::f32:
      return launch_key<Scalar::f32>(desc.v_type, task, grid, stream);
    case DType::f16:
      return launch_key<Scalar::f16>(desc.v_type, task, grid, stream);
    case DType::bf16:
      return launch_key<Scalar::bf16>(desc.v_type, task, grid, stream);
    case DType::q8_0:
      return launch_key<Scalar::q8_0>(desc.v_type, task, grid, stream);
    default:
      throw UnsupportedError(str_cat("[attention] no cache of type ", dtype_name(desc.k_type)));
  }
}

}  // namespace dyno::ops
