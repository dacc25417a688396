// Keys and values from latents on Hopper: as expand_products.cu and expand_pairs.cu, by wgmma, with one warpgroup that
// only loads and two that only compute.
//
// A block multiplies 128 latents by up to 128 columns of one head's k_b or v_b, in tiles of 64 of the latent's
// dimensions. For an f32 cache all numbers are f16 pairs (half_pairs.cuh): latents are split on their way to shared
// memory, and the small products of a sum have accumulators of their own.
#include <cuda_runtime.h>

#include "core/cuda/check.h"
#include "core/cuda/launch.h"
#include "core/error.h"
#include "device/half_pairs.cuh"
#include "device/mbarrier.cuh"
#include "device/wgmma_flash.cuh"
#include "ops/attention/flash_load.cuh"
#include "ops/mla_expand/kernels_cuda.h"
#include "ops/mla_expand/latents.cuh"

namespace dyno::ops {
namespace {

constexpr int kExpandRows = 128, kExpandColumns = 128, kExpandDepth = 64, kExpandThreads = 384;
constexpr int kCopiedHeads = 16;  // per block that copies rotary parts

enum class Rows { halves, floats, pairs };  // of keys and values

struct ExpandWgmmaTask {
  const uint8_t* latents;
  int64_t row_bytes;
  PairedWeights k_b, v_b;
  uint16_t *keys, *values;
  int m, heads, nope, rope, dv, lora;
  int key_blocks, value_blocks;  // per head
  device::Scalar type;           // of the latents
  Rows rows;
  bool wide;     // latents start at 16-byte addresses and have a multiple of eight dimensions
  bool aligned;  // keys and values start at 16-byte addresses and have multiples of eight numbers
};

template <bool kPairs>
struct ExpandWgmma {
  static constexpr int kPlanes = kPairs ? 2 : 1, kStages = kPairs ? 3 : 4;
  // A stage: planes of latents, then planes of weights.
  static constexpr uint32_t kPlane = kExpandRows * kExpandDepth * 2, kStageBytes = 2 * kPlanes * kPlane;
  static constexpr uint32_t kBarriersAt = kStages * kStageBytes;
  static constexpr uint32_t kSharedBytes = kBarriersAt + 2 * kStages * 8 + 1024;  // and padding to align the start
  static constexpr int kStagedPitch = kExpandColumns + 8;                         // of results, in f16 values
  static_assert(kSharedBytes <= kExpandWgmmaShared && kRestFactor == device::kRestScale);
  static_assert(kPlanes * kExpandRows * kStagedPitch * 2 <= kBarriersAt && kExpandColumns == kExpandRows);
};

#ifdef DYNO_DEVICE_WGMMA

// A loading thread's part of a tile of f32 latents: four numbers of every eighth row.
struct TilePart {
  static constexpr int kRowStep = 8, kCount = kExpandRows / kRowStep;
  float v[kCount][4];

  // Latents [first_row, + 128) x [first, + 64); zeros beyond m and lora.
  __device__ __forceinline__ void load(const ExpandWgmmaTask& t, int first_row, int first) {
    const int thread = threadIdx.x % 128, row0 = first_row + thread / 16, at = first + thread % 16 * 4;
    const uint8_t* next = t.latents + row0 * t.row_bytes + int64_t{at} * 4;
#pragma unroll
    for (int i = 0; i < kCount; ++i, next += kRowStep * t.row_bytes) {
      const int row = row0 + kRowStep * i;
      const auto* from = reinterpret_cast<const float*>(next);
      if (t.wide) {
        const float4 zeros = make_float4(0, 0, 0, 0);
        const float4 four = row < t.m && at < t.lora ? *reinterpret_cast<const float4*>(from) : zeros;
        v[i][0] = four.x, v[i][1] = four.y, v[i][2] = four.z, v[i][3] = four.w;
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) v[i][e] = row < t.m && at + e < t.lora ? from[e] : 0.0f;
      }
    }
  }
  // Writes the high parts to `to`, and the rests `rests` bytes behind them.
  __device__ __forceinline__ void store(uint32_t to, uint32_t rests) const {
    const int thread = threadIdx.x % 128, row0 = thread / 16, chunk = thread % 16 / 2;
    to += row0 * 128 + ((chunk ^ row0) << 4) + thread % 2 * 8;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      uint32_t rest[2];
      const uint32_t low = device::split_pair(v[i][0], v[i][1], device::kRestScale, rest[0]);
      const uint32_t high = device::split_pair(v[i][2], v[i][3], device::kRestScale, rest[1]);
      asm volatile("st.shared.v2.u32 [%0], {%1,%2};\n" ::"r"(to + i * 1024), "r"(low), "r"(high) : "memory");
      asm volatile("st.shared.v2.u32 [%0], {%1,%2};\n" ::"r"(to + rests + i * 1024), "r"(rest[0]), "r"(rest[1])
                   : "memory");
    }
  }
};

// Loads a plane of weights. k_b: rows [first, + 64) of the latent x columns [first_column, + 128), in two panels of 64
// columns. v_b: rows [first_column, + 128) x [first, + 64).
template <bool kKeys>
__device__ __forceinline__ void load_plane(const ExpandWgmmaTask& t, const uint16_t* matrix, int64_t pitch, uint32_t to,
                                           int first_column, int first) {
  const int thread = threadIdx.x % 128, row0 = kKeys ? thread / 16 : thread / 8,
            chunk = kKeys ? thread % 16 : thread % 8;
  constexpr int kStep = kKeys ? 8 : 16;  // rows between those of a thread
  const int column = (kKeys ? first_column : first) + chunk * 8, row = (kKeys ? first : first_column) + row0;
  const int rows = kKeys ? t.lora : t.dv;
  const bool inside = column < (kKeys ? t.nope : t.lora);
  const uint16_t* from = matrix + row * pitch + column;
  to += (kKeys ? chunk / 8 * (kExpandDepth * 128) : 0) + row0 * 128 + ((chunk % 8 ^ (row0 & 7)) << 4);
#pragma unroll
  for (int i = 0; i < kExpandColumns * 8 / 128; ++i, from += kStep * pitch) {
    const bool valid = inside && row + i * kStep < rows;
    device::copy_async_16(to + i * kStep * 128, valid ? from : matrix, valid);
  }
}

template <bool kPairs, bool kKeys>
__device__ void expand_block(const ExpandWgmmaTask& t, uint8_t* shared, int first_row, int head, int first_column) {
  using Shape = ExpandWgmma<kPairs>;
  const uint32_t base = device::shared_address(shared);
  const int tiles = (t.lora + kExpandDepth - 1) / kExpandDepth, group = threadIdx.x / 128 - 1;
  const auto stage_of = [&](int tile) { return base + tile % Shape::kStages * Shape::kStageBytes; };
  const auto full = [&](int tile) { return base + Shape::kBarriersAt + tile % Shape::kStages * 16; };
  const auto empty = [&](int tile) { return full(tile) + 8; };
  const auto parity = [&](int tile) { return tile / Shape::kStages & 1; };
  if (threadIdx.x < 2 * Shape::kStages) {
    // At full barriers, loading threads arrive for weights and for latents; at empty ones, a lane of each other warp.
    device::barrier_init(base + Shape::kBarriersAt + threadIdx.x * 8, threadIdx.x % 2 == 0 ? 256 : 8);
  }
  __syncthreads();  // barriers are initialised

  if (group < 0) {
    device::fewer_registers<104>();
    const PairedWeights& w = kKeys ? t.k_b : t.v_b;
    const int64_t matrix = int64_t{head} * (kKeys ? t.lora : t.dv) * w.pitch;
    const auto load_weights = [&](int tile) {
      const uint32_t to = stage_of(tile) + Shape::kStageBytes / 2;
      device::barrier_wait(empty(tile), parity(tile) ^ 1);
      load_plane<kKeys>(t, w.halves + matrix, w.pitch, to, first_column, tile * kExpandDepth);
      if constexpr (kPairs) {
        load_plane<kKeys>(t, w.rests + matrix, w.pitch, to + Shape::kPlane, first_column, tile * kExpandDepth);
      }
      device::barrier_arrive_copied(full(tile));
    };
    if constexpr (kPairs) {
      TilePart part;  // of the next tile, so that its loads are in flight during the copies of weights
      part.load(t, first_row, 0);
      for (int tile = 0; tile < tiles; ++tile) {
        load_weights(tile);
        part.store(stage_of(tile), Shape::kPlane);
        device::fence_async_shared();
        device::barrier_arrive(full(tile));
        if (tile + 1 < tiles) part.load(t, first_row, (tile + 1) * kExpandDepth);
      }
    } else {
      const int64_t tile_bytes = t.type == device::Scalar::q8_0 ? kExpandDepth / 32 * 34 : kExpandDepth * 2;
      const uint8_t* rows = t.latents + first_row * t.row_bytes;
      for (int tile = 0; tile < tiles; ++tile) {
        load_weights(tile);
        load_panels<kExpandDepth, false, kExpandRows>(stage_of(tile), rows + tile * tile_bytes, t.row_bytes,
                                                      static_cast<int>(t.type), t.wide, t.lora - tile * kExpandDepth,
                                                      t.m - first_row, full(tile));
      }
    }
    device::copy_async_wait<0>();
    return;
  }

  device::more_registers<200>();
  float sums[64], small[64];  // small: products with a rest
  for (int tile = 0; tile < tiles; ++tile) {
    device::barrier_wait(full(tile), parity(tile));
    device::fence_async_shared();
    const uint32_t latents = stage_of(tile) + group * 64 * 128, weights = stage_of(tile) + Shape::kStageBytes / 2;
    const auto multiply = [&](float(&d)[64], uint32_t a, uint32_t b, int step, int add) {
      const uint64_t left = device::wgmma_descriptor(a + step * 32);
      if constexpr (kKeys) {
        const uint64_t right = device::wgmma_descriptor_transposed(b + step * 2048, kExpandDepth * 128);
        device::wgmma_columns(d, left, right, add);
      } else {
        device::wgmma_scores<false>(d, left, device::wgmma_descriptor(b + step * 32), add);
      }
    };
    device::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kExpandDepth / 16; ++step) {
      const int add = tile > 0 || step > 0;
      multiply(sums, latents, weights, step, add);
      if constexpr (kPairs) {
        multiply(small, latents, weights + Shape::kPlane, step, add);
        multiply(small, latents + Shape::kPlane, weights, step, 1);
      }
    }
    device::wgmma_commit();
    device::wgmma_wait<1>();  // the previous tile's products have read their stage
    if (tile > 0 && threadIdx.x % 32 == 0) device::barrier_arrive(empty(tile - 1));
  }
  device::wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < 64; ++i) asm volatile("" : "+f"(sums[i])::"memory");
  if constexpr (kPairs) {
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      asm volatile("" : "+f"(small[i])::"memory");
      sums[i] += small[i] * (1.0f / device::kRestScale);
    }
  }

  const int width = kKeys ? t.nope : t.dv, head_width = kKeys ? t.nope + t.rope : t.dv;
  const int columns = min(kExpandColumns, width - first_column), rows = min(kExpandRows, t.m - first_row);
  const int row0 = group * 64 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
  const int64_t pitch = int64_t{t.heads} * head_width;  // in numbers
  uint16_t* out = kKeys ? t.keys : t.values;
  if (t.rows == Rows::floats) {
    float* floats = reinterpret_cast<float*>(out) + first_row * pitch + head * head_width + first_column;
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      const int row = row0 + i / 2 % 2 * 8, column = i / 4 * 8 + quad * 2 + i % 2;
      if (row < rows && column < columns) floats[row * pitch + column] = sums[i];
    }
    return;
  }
  // Written through shared memory, so that rows are stored in whole runs.
  device::named_sync(1, 256);  // the stages are no longer read
  auto* staged = reinterpret_cast<uint16_t*>(shared);
  constexpr int kStagedPlane = kExpandRows * Shape::kStagedPitch;
#pragma unroll
  for (int i = 0; i < 64; i += 2) {
    const int at = (row0 + i / 2 % 2 * 8) * Shape::kStagedPitch + i / 4 * 8 + quad * 2;
    if constexpr (kPairs) {
      uint32_t rest;
      const uint32_t high = device::split_pair(sums[i], sums[i + 1], device::kRestScale, rest);
      *reinterpret_cast<uint32_t*>(staged + at) = high;
      *reinterpret_cast<uint32_t*>(staged + kStagedPlane + at) = rest;
    } else {
      *reinterpret_cast<uint32_t*>(staged + at) = device::pack_half2(sums[i], sums[i + 1]);
    }
  }
  device::named_sync(1, 256);  // the block's part is complete
  const int thread = threadIdx.x - 128;
#pragma unroll
  for (int plane = 0; plane < Shape::kPlanes; ++plane) {
    uint16_t* to = out + (first_row * pitch + head * head_width) * Shape::kPlanes + plane * head_width + first_column;
    const uint16_t* from = staged + plane * kStagedPlane;
    if (t.aligned) {
      for (int i = thread; i < rows * (kExpandColumns / 8); i += 256) {
        const int row = i / (kExpandColumns / 8), column = i % (kExpandColumns / 8) * 8;
        if (column >= columns) continue;
        *reinterpret_cast<uint4*>(to + row * pitch * Shape::kPlanes + column) =
            *reinterpret_cast<const uint4*>(from + row * Shape::kStagedPitch + column);
      }
    } else {
      for (int i = thread; i < rows * kExpandColumns; i += 256) {
        const int row = i / kExpandColumns, column = i % kExpandColumns;
        if (column < columns) to[row * pitch * Shape::kPlanes + column] = from[row * Shape::kStagedPitch + column];
      }
    }
  }
}

// Copies the rotary part of 128 latents to kCopiedHeads heads.
__device__ void copy_rotary_parts(const ExpandWgmmaTask& t, int first_row, int first_head) {
  const int rows = min(kExpandRows, t.m - first_row), heads = min(kCopiedHeads, t.heads - first_head);
  const int head_width = t.nope + t.rope, wide = t.aligned ? 8 : 1, chunks = t.rope / wide;
  for (int i = threadIdx.x; i < rows * chunks; i += kExpandThreads) {
    const int row = first_row + i / chunks, at = i % chunks * wide;
    const uint8_t* from = t.latents + row * t.row_bytes;
    const int64_t number = (int64_t{row} * t.heads + first_head) * head_width;  // of the first head's first number
    if (t.rows == Rows::floats || !t.aligned) {
      for (int e = 0; e < wide; ++e) {
        const float value = load_latent(t.type, from, t.lora + at + e);
        const auto half = static_cast<uint16_t>(device::pack_half2(value, 0.0f));
        for (int h = 0; h < heads; ++h) {
          const int64_t to = number + h * head_width + t.nope + at + e;
          if (t.rows == Rows::floats) {
            reinterpret_cast<float*>(t.keys)[to] = value;
          } else {
            t.keys[to] = half;
          }
        }
      }
      continue;
    }
    float v[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) v[e] = load_latent(t.type, from, t.lora + at + e);
    uint4 high, rest;
    device::split_eight(v, device::kRestScale, high, rest);
    const int planes = t.rows == Rows::pairs ? 2 : 1;
    for (int h = 0; h < heads; ++h) {
      uint16_t* to = t.keys + (number + h * head_width) * planes + t.nope + at;
      *reinterpret_cast<uint4*>(to) = high;
      if (planes == 2) *reinterpret_cast<uint4*>(to + head_width) = rest;
    }
  }
}

#endif  // DYNO_DEVICE_WGMMA

template <bool kPairs>
__global__ void __launch_bounds__(kExpandThreads, 1) expand_wgmma_kernel(const __grid_constant__ ExpandWgmmaTask t) {
#ifdef DYNO_DEVICE_WGMMA
  extern __shared__ uint8_t shared_raw[];
  uint8_t* shared = shared_raw + (1024 - device::shared_address(shared_raw) % 1024) % 1024;
  const int first_row = blockIdx.x * kExpandRows;
  int job = blockIdx.y;
  if (job < t.heads * t.key_blocks) {
    return expand_block<kPairs, true>(t, shared, first_row, job / t.key_blocks, job % t.key_blocks * kExpandColumns);
  }
  job -= t.heads * t.key_blocks;
  if (job < t.heads * t.value_blocks) {
    return expand_block<kPairs, false>(t, shared, first_row, job / t.value_blocks,
                                       job % t.value_blocks * kExpandColumns);
  }
  copy_rotary_parts(t, first_row, (job - t.heads * t.value_blocks) * kCopiedHeads);
#endif
}

template <bool kPairs>
void launch_expand_wgmma(const ExpandWgmmaTask& task, CUstream_st* stream) {
  constexpr auto kShared = static_cast<int>(ExpandWgmma<kPairs>::kSharedBytes);
  const auto kernel = expand_wgmma_kernel<kPairs>;
  DYNO_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared));
  const int jobs = task.heads * (task.key_blocks + task.value_blocks) + (task.heads + kCopiedHeads - 1) / kCopiedHeads;
  const dim3 grid(static_cast<unsigned>((task.m + kExpandRows - 1) / kExpandRows), static_cast<unsigned>(jobs));
  kernel<<<grid, kExpandThreads, kShared, stream>>>(task);
  DYNO_LAUNCH_CHECK("mla_expand");
}

}  // namespace

void expand_wgmma_cuda(const MlaExpandArgs& args, const MlaExpandDesc& d, const PairedWeights& k_b,
                       const PairedWeights& v_b, CudaStream& stream) {
  ExpandWgmmaTask t{};
  t.latents = reinterpret_cast<const uint8_t*>(args.latents);
  t.row_bytes = args.row_bytes;
  t.k_b = k_b, t.v_b = v_b;
  t.keys = args.keys, t.values = args.values;
  t.m = static_cast<int>(d.m), t.heads = static_cast<int>(d.heads), t.lora = static_cast<int>(d.lora);
  t.nope = static_cast<int>(d.nope), t.rope = static_cast<int>(d.rope), t.dv = static_cast<int>(d.dv);
  t.key_blocks = (t.nope + kExpandColumns - 1) / kExpandColumns;
  t.value_blocks = (t.dv + kExpandColumns - 1) / kExpandColumns;
  t.type = latent_scalar(d.cache_type);
  t.rows = d.paired ? Rows::pairs : d.cache_type == DType::f32 ? Rows::floats : Rows::halves;
  t.wide = d.lora % 8 == 0 && args.row_bytes % 16 == 0 && on_16(args.latents);
  t.aligned = d.nope % 8 == 0 && d.rope % 8 == 0 && d.dv % 8 == 0 && on_16(args.keys) && on_16(args.values);
  DYNO_CHECK(DeviceError, !d.paired || t.aligned, "[mla_expand] pairs of keys and values are not aligned to 16 bytes");
  if (d.cache_type == DType::f32) {
    launch_expand_wgmma<true>(t, stream.handle);
  } else {
    launch_expand_wgmma<false>(t, stream.handle);
  }
}

}  // namespace dyno::ops
