// Keys and values from latents: two products per head that share the latents.
//
// A block multiplies kRows latents by up to 128 columns of one head's k_b or v_b. Both operands go through shared
// memory in tiles of 64 of the latent's dimensions, as rows of 128 bytes in the 128-byte swizzle (16-byte chunk c of
// row r is at c ^ (r & 7)), so that matrix loads have no bank conflicts. k_b is [lora, nope], so its tile is transposed
// and read by transposing loads. Additional blocks copy the rotary part of the latents to every head.
#include <cuda_runtime.h>

#include "core/cuda/check.h"
#include "core/error.h"
#include "device/convert.cuh"
#include "device/flash.cuh"
#include "ops/mla_expand/kernels_cuda.h"
#include "ops/mla_expand/latents.cuh"

namespace dyno::ops {
namespace {

constexpr int kThreads = 256, kColumns = 128, kDepth = 64, kStages = 3, kRowBytes = 2 * kDepth;
constexpr int kRotaryHeads = 16;  // per copying block

struct ExpandTask {
  const uint8_t* latents;
  int64_t row_bytes;
  const uint16_t *k_b, *v_b;
  int64_t k_pitch, v_pitch;  // f16 values between rows
  uint16_t *keys, *values;
  int m, heads, nope, rope, dv, lora;
  int key_blocks, value_blocks;  // per head
  device::Scalar type;
  bool copied;   // latents are f16 at 16-byte addresses, so they need no conversion
  bool aligned;  // rows of keys and values start at 16-byte addresses
};

__device__ __forceinline__ uint32_t swizzled(int row, int chunk) {
  return row * kRowBytes + ((chunk ^ (row & 7)) << 4);
}

// Loads latents [first_row, + kRows) × [first, + 64) to `stage`; zeros beyond m and lora.
template <int kRows>
__device__ __forceinline__ void load_latents(const ExpandTask& t, uint8_t* stage, int first_row, int first) {
#pragma unroll
  for (int i = 0; i < kRows * 8 / kThreads; ++i) {
    const int index = threadIdx.x + i * kThreads, row = index / 8, chunk = index % 8, at = first + chunk * 8;
    const bool valid = first_row + row < t.m && at < t.lora;
    const uint8_t* from = t.latents + static_cast<int64_t>(valid ? first_row + row : 0) * t.row_bytes;
    if (t.copied) {
      device::copy_async_16(device::shared_address(stage) + swizzled(row, chunk), from + (valid ? at : 0) * 2, valid);
      continue;
    }
    uint32_t words[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float low = valid && at + 2 * w < t.lora ? load_latent(t.type, from, at + 2 * w) : 0.0f;
      const float high = valid && at + 2 * w + 1 < t.lora ? load_latent(t.type, from, at + 2 * w + 1) : 0.0f;
      words[w] = device::pack_half2(low, high);
    }
    *reinterpret_cast<uint4*>(stage + swizzled(row, chunk)) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// k_b: rows [first, + 64) of the latent × columns [first_column, + 128), in two panels of 64 columns.
// v_b: rows [first_column, + 128) × [first, + 64).
template <bool kKeys>
__device__ __forceinline__ void load_weights(const ExpandTask& t, const uint16_t* matrix, uint8_t* stage,
                                             int first_column, int first) {
#pragma unroll
  for (int i = 0; i < kColumns * 8 / kThreads; ++i) {
    const int index = threadIdx.x + i * kThreads;
    if constexpr (kKeys) {
      const int row = index / 16, chunk = index % 16, l = first + row, n = first_column + chunk * 8;
      const bool valid = l < t.lora && n < t.nope;
      const uint16_t* from = matrix + (valid ? l * t.k_pitch + n : 0);
      device::copy_async_16(device::shared_address(stage) + chunk / 8 * kDepth * kRowBytes + swizzled(row, chunk % 8),
                            from, valid);
    } else {
      const int row = index / 8, chunk = index % 8, n = first_column + row, l = first + chunk * 8;
      const bool valid = n < t.dv && l < t.lora;
      const uint16_t* from = matrix + (valid ? n * t.v_pitch + l : 0);
      device::copy_async_16(device::shared_address(stage) + swizzled(row, chunk), from, valid);
    }
  }
}

template <int kRows, bool kKeys>
__device__ void expand_block(const ExpandTask& t, uint8_t* shared, int first_row, int head, int first_column) {
  constexpr int kRowWarps = kRows / 32, kColumnWarps = 8 / kRowWarps, kWarpColumns = kColumns / kColumnWarps;
  constexpr int kLatentBytes = kRows * kRowBytes, kStageBytes = kLatentBytes + kColumns * kRowBytes;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_row = warp % kRowWarps * 32, warp_column = warp / kRowWarps * kWarpColumns;
  const uint16_t* matrix = kKeys ? t.k_b + head * t.lora * t.k_pitch : t.v_b + head * t.dv * t.v_pitch;
  const int tiles = (t.lora + kDepth - 1) / kDepth;
  const auto load = [&](int tile) {
    uint8_t* stage = shared + tile % kStages * kStageBytes;
    load_latents<kRows>(t, stage, first_row, tile * kDepth);
    load_weights<kKeys>(t, matrix, stage + kLatentBytes, first_column, tile * kDepth);
  };
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    if (s < tiles) load(s);
    device::copy_async_commit();
  }

  float sums[2][kWarpColumns / 8][4] = {};
  for (int tile = 0; tile < tiles; ++tile) {
    device::copy_async_wait<kStages - 2>();
    __syncthreads();  // the tile has arrived for all threads, and none reads the previous one
    if (tile + kStages - 1 < tiles) load(tile + kStages - 1);
    device::copy_async_commit();
    const uint32_t stage = device::shared_address(shared) + tile % kStages * kStageBytes;
#pragma unroll
    for (int step = 0; step < kDepth / 16; ++step) {
      uint32_t a[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        device::load_matrix_x4(a[i], stage + swizzled(warp_row + i * 16 + lane % 16, step * 2 + lane / 16));
      }
#pragma unroll
      for (int n = 0; n < kWarpColumns / 8; n += 2) {
        uint32_t b[4];
        const int column = warp_column + n * 8;
        if constexpr (kKeys) {
          const int l = step * 16 + lane / 8 % 2 * 8 + lane % 8, at = column + lane / 16 * 8;
          device::load_matrix_x4_transposed(
              b, stage + kLatentBytes + at / 64 * kDepth * kRowBytes + swizzled(l, at % 64 / 8));
        } else {
          device::load_matrix_x4(
              b, stage + kLatentBytes + swizzled(column + lane / 16 * 8 + lane % 8, step * 2 + lane / 8 % 2));
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          device::mma_f16(sums[i][n], a[i], b[0], b[1]);
          device::mma_f16(sums[i][n + 1], a[i], b[2], b[3]);
        }
      }
    }
  }
  device::copy_async_wait<0>();
  __syncthreads();  // the stages are no longer used

  // Written through shared memory, so that rows are stored in whole runs.
  constexpr int kPitch = kColumns + 8;
  auto* staged = reinterpret_cast<uint16_t*>(shared);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int n = 0; n < kWarpColumns / 8; ++n) {
      const int row = warp_row + i * 16 + lane / 4, column = warp_column + n * 8 + lane % 4 * 2;
      *reinterpret_cast<uint32_t*>(staged + row * kPitch + column) = device::pack_half2(sums[i][n][0], sums[i][n][1]);
      *reinterpret_cast<uint32_t*>(staged + (row + 8) * kPitch + column) =
          device::pack_half2(sums[i][n][2], sums[i][n][3]);
    }
  }
  __syncthreads();  // the block's part is complete
  const int width = kKeys ? t.nope : t.dv, head_width = kKeys ? t.nope + t.rope : t.dv;
  const int columns = min(kColumns, width - first_column), rows = min(kRows, t.m - first_row);
  const int64_t pitch = static_cast<int64_t>(t.heads) * head_width;
  uint16_t* out = (kKeys ? t.keys : t.values) + first_row * pitch + head * head_width + first_column;
  if (t.aligned) {
    for (int i = threadIdx.x; i < rows * (kColumns / 8); i += kThreads) {
      const int row = i / (kColumns / 8), column = i % (kColumns / 8) * 8;
      if (column >= columns) continue;
      *reinterpret_cast<uint4*>(out + row * pitch + column) =
          *reinterpret_cast<const uint4*>(staged + row * kPitch + column);
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
__device__ void copy_rotary(const ExpandTask& t, int first_row, int first_head) {
  const int rows = min(kRows, t.m - first_row), heads = min(kRotaryHeads, t.heads - first_head);
  const int head_width = t.nope + t.rope, wide = t.aligned ? 8 : 1, chunks = t.rope / wide;
  for (int i = threadIdx.x; i < rows * chunks; i += kThreads) {
    const int row = first_row + i / chunks, at = i % chunks * wide;
    const uint8_t* from = t.latents + row * t.row_bytes;
    uint16_t* out = t.keys + (static_cast<int64_t>(row) * t.heads + first_head) * head_width + t.nope + at;
    if (t.aligned) {
      uint32_t words[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        words[w] = device::pack_half2(load_latent(t.type, from, t.lora + at + 2 * w),
                                      load_latent(t.type, from, t.lora + at + 2 * w + 1));
      }
      const uint4 chunk = make_uint4(words[0], words[1], words[2], words[3]);
      for (int h = 0; h < heads; ++h) *reinterpret_cast<uint4*>(out + h * head_width) = chunk;
    } else {
      const auto half = static_cast<uint16_t>(device::pack_half2(load_latent(t.type, from, t.lora + at), 0.0f));
      for (int h = 0; h < heads; ++h) out[h * head_width] = half;
    }
  }
}

template <int kRows>
__global__ void __launch_bounds__(kThreads, 2) expand_kernel(const __grid_constant__ ExpandTask t) {
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
void launch_expand(const ExpandTask& task, CUstream_st* stream) {
  constexpr int kShared = kStages * (kRows + kColumns) * kRowBytes;
  DYNO_CUDA_CHECK(cudaFuncSetAttribute(expand_kernel<kRows>, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared));
  const int jobs = task.heads * (task.key_blocks + task.value_blocks) + (task.heads + kRotaryHeads - 1) / kRotaryHeads;
  const dim3 grid(static_cast<unsigned>((task.m + kRows - 1) / kRows), static_cast<unsigned>(jobs));
  expand_kernel<kRows><<<grid, kThreads, kShared, stream>>>(task);
  DYNO_LAUNCH_CHECK("mla_expand");
}

}  // namespace

void expand_products_cuda(const MlaExpandArgs& args, const MlaExpandDesc& d, const uint16_t* k_b, const uint16_t* v_b,
                          int rows, CudaStream& stream) {
  ExpandTask t{};
  t.latents = reinterpret_cast<const uint8_t*>(args.latents);
  t.row_bytes = args.row_bytes;
  t.k_b = k_b, t.v_b = v_b;
  t.k_pitch = expand_padded(d.nope), t.v_pitch = expand_padded(d.lora);
  t.keys = args.keys, t.values = args.values;
  t.m = static_cast<int>(d.m), t.heads = static_cast<int>(d.heads), t.lora = static_cast<int>(d.lora);
  t.nope = static_cast<int>(d.nope), t.rope = static_cast<int>(d.rope), t.dv = static_cast<int>(d.dv);
  t.key_blocks = (t.nope + kColumns - 1) / kColumns, t.value_blocks = (t.dv + kColumns - 1) / kColumns;
  t.type = latent_scalar(d.cache_type);
  t.copied = d.cache_type == DType::f16 && d.lora % 8 == 0 && args.row_bytes % 16 == 0 && on_16(args.latents);
  t.aligned = d.nope % 8 == 0 && d.rope % 8 == 0 && d.dv % 8 == 0 && on_16(args.keys) && on_16(args.values);
  if (rows == 64) {
    launch_expand<64>(t, stream.handle);
  } else {
    launch_expand<128>(t, stream.handle);
  }
}

}  // namespace dyno::ops
