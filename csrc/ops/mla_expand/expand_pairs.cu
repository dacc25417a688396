// Keys and values in f32 from f32 latents: as expand_products.cu, with f16 pairs (half_pairs.cuh) for latents and
// weights.
//
// A row of 128 bytes in shared memory has 32 of the latent's dimensions: their high parts, then the rests. k_b is
// transposed, with 32 rows of high parts before 32 rows of rests. Latents are split in registers before their products.
// Tensor cores truncate what a sum cannot hold, so the sums of a tile of 32 dimensions are added to the rest by float32
// additions.
#include <cuda_runtime.h>

#include "core/cuda/check.h"
#include "core/error.h"
#include "device/flash.cuh"
#include "device/half_pairs.cuh"
#include "ops/mla_expand/kernels_cuda.h"
#include "ops/mla_expand/latents.cuh"

namespace dyno::ops {
namespace {

constexpr int kThreads = 256, kColumns = 128, kDepth = 32, kSteps = kDepth / 16, kRowBytes = 128;
constexpr int kRotaryHeads = 16;  // per copying block
constexpr int kRestChunks = 4, kRestRows = kDepth;

struct PairsTask {
  const uint8_t* latents;
  int64_t row_bytes;
  PairedWeights k_b, v_b;
  float *keys, *values;
  int m, heads, nope, rope, dv, lora;
  int key_blocks, value_blocks;  // per head
  bool wide;                     // latents consist of whole groups of eight at 16-byte addresses
  bool aligned;                  // groups of four keys and values are aligned to 16 bytes
  bool paired;                   // keys and values are written as f16 pairs
};

__device__ __forceinline__ uint32_t swizzled(int row, int chunk) {
  return row * kRowBytes + ((chunk ^ (row & 7)) << 4);
}

// A thread's part of a tile of latents during its transfer to shared memory.
template <int kRows>
struct LatentPart {
  static constexpr int kCount = kRows * (kDepth / 8) / kThreads;
  float v[kCount][8];

  // Latents [first_row, + kRows) × [first, + 32); zeros beyond m and lora.
  __device__ __forceinline__ void load(const PairsTask& t, int first_row, int first) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int index = threadIdx.x + i * kThreads, row = first_row + index / 4, at = first + index % 4 * 8;
      const auto* from = reinterpret_cast<const float*>(t.latents + (row < t.m ? row : 0) * t.row_bytes);
      if (t.wide) {
        device::load_eight(v[i], from + at, row < t.m && at < t.lora);
      } else {
#pragma unroll
        for (int e = 0; e < 8; ++e) v[i][e] = row < t.m && at + e < t.lora ? from[at + e] : 0.0f;
      }
    }
  }
  __device__ __forceinline__ void store(uint8_t* stage) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int index = threadIdx.x + i * kThreads, row = index / 4, chunk = index % 4;
      uint4 high, rest;
      device::split_eight(v[i], device::kRestScale, high, rest);
      *reinterpret_cast<uint4*>(stage + swizzled(row, chunk)) = high;
      *reinterpret_cast<uint4*>(stage + swizzled(row, chunk + kRestChunks)) = rest;
    }
  }
};

// k_b: rows [first, + 32) of the latent × columns [first_column, + 128), in two panels of 64 columns.
// v_b: rows [first_column, + 128) × [first, + 32).
template <bool kKeys>
__device__ __forceinline__ void load_weights(const PairsTask& t, int head, uint8_t* stage, int first_column,
                                             int first) {
  const PairedWeights& w = kKeys ? t.k_b : t.v_b;
  const int64_t matrix = int64_t{head} * (kKeys ? t.lora : t.dv) * w.pitch;
#pragma unroll
  for (int i = 0; i < kColumns * 8 / kThreads; ++i) {
    const int index = threadIdx.x + i * kThreads;
    if constexpr (kKeys) {
      const int row = index / 16, chunk = index % 16, l = first + row % kRestRows, n = first_column + chunk * 8;
      const bool valid = l < t.lora && n < t.nope;
      const uint16_t* from = (row < kRestRows ? w.halves : w.rests) + matrix + (valid ? l * w.pitch + n : 0);
      device::copy_async_16(
          device::shared_address(stage) + chunk / 8 * 2 * kDepth * kRowBytes + swizzled(row, chunk % 8), from, valid);
    } else {
      const int row = index / 8, chunk = index % 8, n = first_column + row, l = first + chunk % kRestChunks * 8;
      const bool valid = n < t.dv && l < t.lora;
      const uint16_t* from = (chunk < kRestChunks ? w.halves : w.rests) + matrix + (valid ? n * w.pitch + l : 0);
      device::copy_async_16(device::shared_address(stage) + swizzled(row, chunk), from, valid);
    }
  }
}

template <int kRows, bool kKeys>
__device__ void expand_block(const PairsTask& t, uint8_t* shared, int first_row, int head, int first_column) {
  constexpr int kRowWarps = kRows / 32, kColumnWarps = 8 / kRowWarps, kWarpColumns = kColumns / kColumnWarps;
  constexpr int kStages = expand_pairs_stages(kRows), kLatentBytes = kRows * kRowBytes,
                kStageBytes = kLatentBytes + kColumns * kRowBytes;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_row = warp % kRowWarps * 32, warp_column = warp / kRowWarps * kWarpColumns;
  const int tiles = (t.lora + kDepth - 1) / kDepth;
  const auto stage_of = [&](int tile) { return shared + tile % kStages * kStageBytes; };
  LatentPart<kRows> part;
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    if (s < tiles) {
      load_weights<kKeys>(t, head, stage_of(s) + kLatentBytes, first_column, s * kDepth);
      part.load(t, first_row, s * kDepth);
      part.store(stage_of(s));
    }
    device::copy_async_commit();
  }

  float sums[2][kWarpColumns / 8][4] = {};
  for (int tile = 0; tile < tiles; ++tile) {
    device::copy_async_wait<kStages - 2>();
    __syncthreads();  // the tile has arrived for all threads, and none reads the previous one
    const int next = tile + kStages - 1;
    if (next < tiles) {
      load_weights<kKeys>(t, head, stage_of(next) + kLatentBytes, first_column, next * kDepth);
      part.load(t, first_row, next * kDepth);
    }
    device::copy_async_commit();
    const uint32_t stage = device::shared_address(stage_of(tile)), weights = stage + kLatentBytes;
    uint32_t a[kSteps][2][4], a_rest[kSteps][2][4];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = warp_row + i * 16 + lane % 16, chunk = step * 2 + lane / 16;
        device::load_matrix_x4(a[step][i], stage + swizzled(row, chunk));
        device::load_matrix_x4(a_rest[step][i], stage + swizzled(row, chunk + kRestChunks));
      }
    }
#pragma unroll
    for (int n = 0; n < kWarpColumns / 8; n += 2) {
      const int column = warp_column + n * 8;
      uint32_t b[kSteps][4];
      float fresh[2][2][4] = {};
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        uint32_t b_rest[4];
        if constexpr (kKeys) {
          const int l = step * 16 + lane / 8 % 2 * 8 + lane % 8, at = column + lane / 16 * 8;
          const uint32_t panel = weights + at / 64 * 2 * kDepth * kRowBytes;
          device::load_matrix_x4_transposed(b[step], panel + swizzled(l, at % 64 / 8));
          device::load_matrix_x4_transposed(b_rest, panel + swizzled(l + kRestRows, at % 64 / 8));
        } else {
          const int row = column + lane / 16 * 8 + lane % 8, chunk = step * 2 + lane / 8 % 2;
          device::load_matrix_x4(b[step], weights + swizzled(row, chunk));
          device::load_matrix_x4(b_rest, weights + swizzled(row, chunk + kRestChunks));
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          device::mma_f16(fresh[i][0], a[step][i], b_rest[0], b_rest[1]);
          device::mma_f16(fresh[i][1], a[step][i], b_rest[2], b_rest[3]);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          device::mma_f16(fresh[i][0], a_rest[step][i], b[step][0], b[step][1]);
          device::mma_f16(fresh[i][1], a_rest[step][i], b[step][2], b[step][3]);
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          fresh[i][0][j] /= device::kRestScale;
          fresh[i][1][j] /= device::kRestScale;
        }
      }
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          device::mma_f16(fresh[i][0], a[step][i], b[step][0], b[step][1]);
          device::mma_f16(fresh[i][1], a[step][i], b[step][2], b[step][3]);
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          sums[i][n][j] += fresh[i][0][j];
          sums[i][n + 1][j] += fresh[i][1][j];
        }
      }
    }
    if (next < tiles) part.store(stage_of(next));  // since the last barrier, no thread reads that stage
  }
  device::copy_async_wait<0>();
  __syncthreads();  // the stages are no longer used

  // Written through shared memory, so that rows are stored in whole runs.
  constexpr int kPitch = kColumns + 4;
  static_assert(kRows * kPitch * 4 <= kStages * kStageBytes);
  auto* staged = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int n = 0; n < kWarpColumns / 8; ++n) {
      const int row = warp_row + i * 16 + lane / 4, column = warp_column + n * 8 + lane % 4 * 2;
      *reinterpret_cast<float2*>(staged + row * kPitch + column) = make_float2(sums[i][n][0], sums[i][n][1]);
      *reinterpret_cast<float2*>(staged + (row + 8) * kPitch + column) = make_float2(sums[i][n][2], sums[i][n][3]);
    }
  }
  __syncthreads();  // the block's part is complete
  const int width = kKeys ? t.nope : t.dv, head_width = kKeys ? t.nope + t.rope : t.dv;
  const int columns = min(kColumns, width - first_column), rows = min(kRows, t.m - first_row);
  const int64_t pitch = static_cast<int64_t>(t.heads) * head_width;
  float* out = (kKeys ? t.keys : t.values) + first_row * pitch + head * head_width;
  if (t.paired) {
    for (int i = threadIdx.x; i < rows * (kColumns / 8); i += kThreads) {
      const int row = i / (kColumns / 8), column = i % (kColumns / 8) * 8;
      if (column >= columns) continue;
      float v[8];
      device::load_eight(v, staged + row * kPitch + column, true);
      uint4 high, rest;
      device::split_eight(v, device::kRestScale, high, rest);
      auto* halves = reinterpret_cast<uint16_t*>(out + row * pitch) + first_column + column;
      *reinterpret_cast<uint4*>(halves) = high;
      *reinterpret_cast<uint4*>(halves + head_width) = rest;
    }
    return;
  }
  out += first_column;
  if (t.aligned) {
    for (int i = threadIdx.x; i < rows * (kColumns / 4); i += kThreads) {
      const int row = i / (kColumns / 4), column = i % (kColumns / 4) * 4;
      if (column >= columns) continue;
      *reinterpret_cast<float4*>(out + row * pitch + column) =
          *reinterpret_cast<const float4*>(staged + row * kPitch + column);
    }
  } else {
    for (int i = threadIdx.x; i < rows * kColumns; i += kThreads) {
      const int row = i / kColumns, column = i % kColumns;
      if (column < columns) out[row * pitch + column] = staged[row * kPitch + column];
    }
  }
}

// Copies the rotary part of kRows latents to kRotaryHeads heads.
template <int kRows>
__device__ void copy_rotary(const PairsTask& t, int first_row, int first_head) {
  const int rows = min(kRows, t.m - first_row), heads = min(kRotaryHeads, t.heads - first_head);
  const int head_width = t.nope + t.rope;
  for (int i = threadIdx.x; i < rows * t.rope; i += kThreads) {
    const int row = first_row + i / t.rope, at = i % t.rope;
    const float value = reinterpret_cast<const float*>(t.latents + row * t.row_bytes)[t.lora + at];
    float* out = t.keys + (static_cast<int64_t>(row) * t.heads + first_head) * head_width;
    if (t.paired) {
      uint32_t rest;
      const uint32_t high = device::split_pair(value, 0.0f, device::kRestScale, rest);
      auto* halves = reinterpret_cast<uint16_t*>(out) + t.nope + at;
      for (int h = 0; h < heads; ++h) {
        halves[2 * h * head_width] = static_cast<uint16_t>(high);
        halves[2 * h * head_width + head_width] = static_cast<uint16_t>(rest);
      }
      continue;
    }
    out += t.nope + at;
    for (int h = 0; h < heads; ++h) out[h * head_width] = value;
  }
}

template <int kRows>
__global__ void __launch_bounds__(kThreads, 1) expand_pairs_kernel(const __grid_constant__ PairsTask t) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const int first_row = blockIdx.x * kRows;
  int job = blockIdx.y;
  if (job < t.heads * t.key_blocks) {
    return expand_block<kRows, true>(t, shared, first_row, job / t.key_blocks, job % t.key_blocks * kColumns);
  }
  job -= t.heads * t.key_blocks;
  if (job < t.heads * t.value_blocks) {
    return expand_block<kRows, false>(t, shared, first_row, job / t.value_blocks, job % t.value_blocks * kColumns);
  }
  copy_rotary<kRows>(t, first_row, (job - t.heads * t.value_blocks) * kRotaryHeads);
}

template <int kRows>
void launch_pairs(const PairsTask& task, CUstream_st* stream) {
  constexpr auto kShared = static_cast<int>(expand_pairs_shared_bytes(kRows));
  static_assert(kShared == expand_pairs_stages(kRows) * (kRows + kColumns) * kRowBytes);
  DYNO_CUDA_CHECK(
      cudaFuncSetAttribute(expand_pairs_kernel<kRows>, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared));
  const int jobs = task.heads * (task.key_blocks + task.value_blocks) + (task.heads + kRotaryHeads - 1) / kRotaryHeads;
  const dim3 grid(static_cast<unsigned>((task.m + kRows - 1) / kRows), static_cast<unsigned>(jobs));
  expand_pairs_kernel<kRows><<<grid, kThreads, kShared, stream>>>(task);
  DYNO_LAUNCH_CHECK("mla_expand");
}

}  // namespace

void expand_pairs_cuda(const MlaExpandArgs& args, const MlaExpandDesc& d, const PairedWeights& k_b,
                       const PairedWeights& v_b, int rows, CudaStream& stream) {
  PairsTask t{};
  t.latents = reinterpret_cast<const uint8_t*>(args.latents);
  t.row_bytes = args.row_bytes;
  t.k_b = k_b, t.v_b = v_b;
  t.keys = expanded_floats(args.keys), t.values = expanded_floats(args.values);
  t.m = static_cast<int>(d.m), t.heads = static_cast<int>(d.heads), t.lora = static_cast<int>(d.lora);
  t.nope = static_cast<int>(d.nope), t.rope = static_cast<int>(d.rope), t.dv = static_cast<int>(d.dv);
  t.key_blocks = (t.nope + kColumns - 1) / kColumns, t.value_blocks = (t.dv + kColumns - 1) / kColumns;
  t.wide = d.lora % 8 == 0 && args.row_bytes % 16 == 0 && on_16(args.latents);
  t.aligned = d.nope % 4 == 0 && d.rope % 4 == 0 && d.dv % 4 == 0 && on_16(args.keys) && on_16(args.values);
  t.paired = d.paired;
  DYNO_CHECK(DeviceError, !d.paired || (on_16(args.keys) && on_16(args.values)),
             "[mla_expand] pairs of keys and values are not aligned to 16 bytes");
  if (rows == 64) {
    launch_pairs<64>(t, stream.handle);
  } else {
    launch_pairs<128>(t, stream.handle);
  }
}

}  // namespace dyno::ops
