// Loads of flash attention from a batch and its cache to the swizzled panels of wgmma.
#pragma once

#include <cuda_runtime.h>

#include "device/flash.cuh"
#include "device/mbarrier.cuh"
#include "ops/attention/flash_task.cuh"

namespace dyno::ops {

// 8 elements of a cache row of any type, from `column` on; zeros from `width` on.
template <bool kBf16>
__device__ __forceinline__ uint4 convert_chunk(const uint8_t* row, int type, int column, int width) {
  const auto scalar = static_cast<device::Scalar>(type);
  float v[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int at = column + i;
    v[i] = at >= width                      ? 0.0f
           : scalar == device::Scalar::q8_0 ? device::load_scalar<device::Scalar::q8_0>(row, at)
           : scalar == device::Scalar::bf16 ? device::load_scalar<device::Scalar::bf16>(row, at)
                                            : device::load_scalar<device::Scalar::f16>(row, at);
  }
  return make_uint4(device::pack2_finite<kBf16>(v[0], v[1]), device::pack2_finite<kBf16>(v[2], v[3]),
                    device::pack2_finite<kBf16>(v[4], v[5]), device::pack2_finite<kBf16>(v[6], v[7]));
}

__device__ __forceinline__ void store_shared_16(uint32_t to, const uint4& v) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};\n" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

__device__ __forceinline__ void store_shared_4(uint32_t to, uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;\n" ::"r"(to), "r"(v) : "memory");
}

// 8 elements of a q8_0 block: the scale and four pairs of signed bytes, as loaded and as f16. A code plus 128 in the
// mantissa of 1024 becomes an exact integer by one subtraction, so only the product with the scale rounds.
struct Q8Chunk {
  uint16_t scale, pairs[4];

  __device__ __forceinline__ void load(const uint8_t* row, int column) {
    const uint8_t* block = row + column / 32 * 34;
    scale = *reinterpret_cast<const uint16_t*>(block);
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = *reinterpret_cast<const uint16_t*>(block + 2 + column % 32 + 2 * i);
  }
  __device__ __forceinline__ uint4 halves() const {
    const __half2 d = __half2half2(__ushort_as_half(scale));
    uint32_t out[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t code = __byte_perm(pairs[i] ^ 0x8080u, 0x64646464u, 0x4140);
      out[i] = device::as_bits(__hmul2(__hsub2(device::as_half2(code), device::as_half2(0x64806480u)), d));
    }
    return make_uint4(out[0], out[1], out[2], out[3]);
  }
};

// Called by 128 threads: loads kRows cache rows from `rows` on to the panels at `to`; zeros from row `count` and column
// `width` on. Every thread arrives at `full` when its part is complete.
template <int kColumns, bool kBf16, int kRows>
__device__ __forceinline__ void load_panels(uint32_t to, const uint8_t* rows, int64_t stride, int type, bool aligned,
                                            int width, int count, uint32_t full) {
  const int thread = threadIdx.x % 128, chunk = thread % 8, row0 = thread / 8;
  to += row0 * 128 + ((chunk ^ (row0 & 7)) << 4);
  rows += row0 * stride;
  const bool same = static_cast<device::Scalar>(type) == (kBf16 ? device::Scalar::bf16 : device::Scalar::f16);
  if (!kBf16 && static_cast<device::Scalar>(type) == device::Scalar::q8_0) {
    constexpr int kBatch = kRows / 16 < 4 ? kRows / 16 : 4;
    for (int panel = 0; panel < kColumns / 64; ++panel) {
      const int column = panel * 64 + chunk * 8;
      for (int first = 0; first < kRows / 16; first += kBatch) {
        Q8Chunk chunks[kBatch];
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          const int i = first + b;
          chunks[b] = {};
          if (row0 + 16 * i < count && column < width) chunks[b].load(rows + 16 * i * stride, column);
        }
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          store_shared_16(to + panel * kRows * 128 + (first + b) * 2048, chunks[b].halves());
        }
      }
    }
    asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
    device::barrier_arrive(full);
    return;
  }
  if (!same || !aligned) {
    for (int panel = 0; panel < kColumns / 64; ++panel) {
      for (int i = 0; i < kRows / 16; ++i) {
        uint4 v = make_uint4(0, 0, 0, 0);
        if (row0 + 16 * i < count)
          v = convert_chunk<kBf16>(rows + 16 * i * stride, type, panel * 64 + chunk * 8, width);
        store_shared_16(to + panel * kRows * 128 + i * 2048, v);
      }
    }
    asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
    device::barrier_arrive(full);
    return;
  }
#pragma unroll
  for (int panel = 0; panel < kColumns / 64; ++panel) {
    const int column = panel * 64 + chunk * 8;
    const bool inside = column < width;
    const uint8_t* from = rows + (inside ? column : 0) * 2;
#pragma unroll
    for (int i = 0; i < kRows / 16; ++i) {
      const bool valid = inside && row0 + 16 * i < count;
      device::copy_async_16(to + panel * kRows * 128 + i * 2048, from, valid);
      if (row0 + 16 * (i + 1) < count) from += 16 * stride;
    }
  }
  device::barrier_arrive_copied(full);
}

// Called by 256 threads: loads the tile's queries to panels of kRows rows, scaled so that scores are in units of log2.
template <int kColumns, bool kBf16, int kRows>
__device__ __forceinline__ void load_queries(const CudaAttention& t, const CudaTile& tile, int kv_head, uint32_t to,
                                             int thread) {
  const float scale = t.query_scale() * (t.softcap ? 1.0f : kLog2E);
  const bool wide = (reinterpret_cast<uintptr_t>(t.args.q) | static_cast<uint64_t>(t.args.q_stride * 4) |
                     static_cast<uint64_t>(t.dk * 4)) %
                        16 ==
                    0;
  constexpr int kChunks = kColumns / 8, kCount = kRows * kChunks / 256, kBatch = kCount % 4 == 0 ? 4 : 2;
  static_assert(kCount % kBatch == 0);
  for (int first = 0; first < kCount; first += kBatch) {
    // All loads of a batch are issued before the first value is used.
    float v[kBatch][8];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int i = thread + (first + b) * 256, row = i / kChunks, column = i % kChunks * 8;
#pragma unroll
      for (int e = 0; e < 8; ++e) v[b][e] = 0;
      if (row >= tile.rows() || column >= t.dk) continue;
      const float* from = query_row(t, tile, tile.row_begin + row, kv_head) + column;
      if (wide && column + 8 <= t.dk) {
        const float4 low = reinterpret_cast<const float4*>(from)[0], high = reinterpret_cast<const float4*>(from)[1];
        v[b][0] = low.x, v[b][1] = low.y, v[b][2] = low.z, v[b][3] = low.w;
        v[b][4] = high.x, v[b][5] = high.y, v[b][6] = high.z, v[b][7] = high.w;
      } else {
#pragma unroll
        for (int e = 0; e < 8; ++e) v[b][e] = column + e < t.dk ? from[e] : 0.0f;
      }
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int i = thread + (first + b) * 256, row = i / kChunks, chunk = i % kChunks;
      uint32_t words[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) words[w] = device::pack2_finite<kBf16>(v[b][2 * w] * scale, v[b][2 * w + 1] * scale);
      store_shared_16(to + chunk / 8 * kRows * 128 + row * 128 + ((chunk % 8 ^ (row & 7)) << 4),
                      make_uint4(words[0], words[1], words[2], words[3]));
    }
  }
}

}  // namespace dyno::ops
