// Norm, router and routing in one launch. The norm is a common factor of a row, so the sum of squares and the products
// are computed in one pass. Blocks write their logits; the last block of a token chooses the experts.
#include <cuda_runtime.h>

#include "core/cuda/launch.h"
#include "core/error.h"
#include "device/arithmetic.cuh"
#include "device/convert.cuh"
#include "device/dependent.cuh"
#include "device/ptx.cuh"
#include "ops/matmul/cuda/row_bytes.cuh"
#include "ops/matmul/gpu_layout.h"
#include "ops/moe_route/route.cuh"
#include "ops/norm_route/kernels_cuda.h"

namespace dyno::ops {
namespace {

using device::Scalar;

struct RouteTask {
  NormRouteArgs args;
  MoeRouteDesc desc;
  int k;
  float* logits;      // [m, experts]
  int32_t* counters;  // [m]
};

__device__ __forceinline__ float4 ones() { return make_float4(1, 1, 1, 1); }
__device__ __forceinline__ float dot(const float4& a, const float4& b) {
  return (a.x * b.x + a.y * b.y) + (a.z * b.z + a.w * b.w);
}
__device__ __forceinline__ float4 product(const float4& a, const float4& b) {
  return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w);
}

// Elements [4·quad, 4·quad + 4) of a row of k, with zeros beyond. kVector: k is a multiple of 4 and rows are aligned.
template <Scalar kType, bool kVector>
__device__ __forceinline__ float4 load_quad(const uint8_t* row, int quad, int k) {
  const int i = 4 * quad;
  if constexpr (!kVector) {
    float v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = i + j < k ? device::load_scalar<kType>(row, i + j) : 0.0f;
    return make_float4(v[0], v[1], v[2], v[3]);
  } else {
    static_assert(kType == Scalar::f32);
    return reinterpret_cast<const float4*>(row)[quad];
  }
}

// Writes this block's part of the normalised row.
__device__ __forceinline__ void store_normed(const RouteTask& t, int token, const float* x, float scale) {
  if (t.args.normed == nullptr) return;
  const int begin = static_cast<int>(int64_t{t.k} * blockIdx.x / gridDim.x);
  const int end = static_cast<int>(int64_t{t.k} * (blockIdx.x + 1) / gridDim.x);
  float* out = t.args.normed + token * t.args.normed_stride;
  for (int i = begin + static_cast<int>(threadIdx.x); i < end; i += static_cast<int>(blockDim.x)) {
    out[i] = x[i] * scale * (t.args.norm == nullptr ? 1.0f : t.args.norm[i]);
  }
}

// Writes this block's units of the byte row. All threads call it.
__device__ __forceinline__ void store_bytes(const RouteTask& t, int token, const float* x, float scale) {
  if (t.args.bytes == nullptr) return;
  const int units = static_cast<int>(byte_row_units(t.k));
  auto* row = static_cast<uint8_t*>(t.args.bytes) + token * byte_row_bytes(t.k);
  const int warps = static_cast<int>(blockDim.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  for (int unit = blockIdx.x * warps + threadIdx.x / 32; unit < units; unit += gridDim.x * warps) {
    float value[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int i = unit * kByteUnit + lane * 4 + j;
      value[j] = i < t.k ? x[i] * scale * (t.args.norm == nullptr ? 1.0f : t.args.norm[i]) : 0.0f;
    }
    cuda::store_byte_unit(row, units, unit, make_float4(value[0], value[1], value[2], value[3]), lane);
  }
}

// Called by the first warp, whose lane r < count has the logit of expert first + r.
template <int kPerLane>
__device__ __forceinline__ void finish_token(const RouteTask& t, int token, int first, int count, float logit,
                                             float* shared) {
  const int lane = threadIdx.x, experts = static_cast<int>(t.desc.experts);
  float* logits = t.logits + int64_t{token} * experts;
  if (lane < count) {
    if (t.args.bias != nullptr) logit += t.args.bias[first + lane];
    logits[first + lane] = logit;
  }
  __threadfence();  // the logits are visible to the block that counts last
  __syncwarp();     // … and so are the logits of all lanes
  int before = 0;
  if (lane == 0) {
    before = atomicAdd(t.counters + token, 1);
    if (before == static_cast<int>(gridDim.x) - 1) t.counters[token] = 0;  // for the next launch
  }
  if (__shfl_sync(device::kFullMask, before, 0) != static_cast<int>(gridDim.x) - 1) return;
  __threadfence();  // the logits of other blocks are read after their counts
  float all[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int id = lane + 32 * i;
    all[i] = id < experts ? __ldcg(logits + id) : route::never();
  }
  route::route_token(t.args.route, t.desc, token, all, shared);
}

// Sums `kCount` values per thread over the block, in a fixed order; afterwards all threads may read sums[warp][i].
template <int kCount>
__device__ __forceinline__ void sum_warps(const float (&values)[kCount], float (*sums)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float v = device::warp_sum(values[i]);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32][i] = v;
  }
  __syncthreads();  // all warps' sums are written
}

constexpr int kMaxWarps = 16;

template <Scalar kType, bool kVector, int kRows, int kPerLane>
__global__ void __launch_bounds__(32 * kMaxWarps) norm_route_rows(const __grid_constant__ RouteTask t) {
  extern __shared__ float shared[];
  __shared__ float sums[kMaxWarps][kRows + 1];
  device::let_next_start();
  const int threads = blockDim.x, token = blockIdx.y, first = blockIdx.x * kRows;
  const int count = min(kRows, static_cast<int>(t.desc.experts) - first);
  constexpr int kElementBytes = kType == Scalar::f32 ? 4 : 2;
  const uint8_t* w[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    w[r] = static_cast<const uint8_t*>(t.args.w) + int64_t{first + min(r, count - 1)} * t.k * kElementBytes;
  }
  const auto* x = reinterpret_cast<const uint8_t*>(t.args.x + token * t.args.x_stride);
  const auto* norm = reinterpret_cast<const uint8_t*>(t.args.norm);
  const int quads = (t.k + 3) / 4;

  // Weights are loaded ahead; the loads of the first step do not wait for earlier launches.
  constexpr int kAhead = kRows == 1 ? 4 : 2;
  float4 rows[kAhead][kRows], gain[kAhead];
  const auto load = [&](int base) {
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const int quad = base + u * threads + static_cast<int>(threadIdx.x);
      if (quad >= quads) break;
      gain[u] = norm == nullptr ? ones() : load_quad<Scalar::f32, kVector>(norm, quad, t.k);
#pragma unroll
      for (int r = 0; r < kRows; ++r) rows[u][r] = load_quad<kType, kVector>(w[r], quad, t.k);
    }
  };
  load(0);
  device::wait_for_previous();

  float values[kRows + 1] = {};
  for (int base = 0; base < quads; base += kAhead * threads) {
    if (base > 0) load(base);
    float4 in[kAhead];
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const int quad = base + u * threads + static_cast<int>(threadIdx.x);
      if (quad >= quads) break;
      in[u] = load_quad<Scalar::f32, kVector>(x, quad, t.k);
    }
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const int quad = base + u * threads + static_cast<int>(threadIdx.x);
      if (quad >= quads) break;
      values[kRows] += dot(in[u], in[u]);
      const float4 scaled = product(in[u], gain[u]);
#pragma unroll
      for (int r = 0; r < kRows; ++r) values[r] += dot(scaled, rows[u][r]);
    }
  }
  sum_warps<kRows + 1>(values, sums);
  float squares = 0, logit = 0;
  const int mine = min(static_cast<int>(threadIdx.x), kRows - 1);
  for (int i = 0; i < threads / 32; ++i) {
    squares += sums[i][kRows];
    logit += sums[i][mine];
  }
  const float scale = device::inverse_root(device::quotient(squares, static_cast<float>(t.k)) + t.args.eps);
  store_normed(t, token, t.args.x + token * t.args.x_stride, scale);
  store_bytes(t, token, t.args.x + token * t.args.x_stride, scale);
  if (threadIdx.x < 32) finish_token<kPerLane>(t, token, first, count, logit * scale, shared);
}

// Two adjacent elements of w as floats.
template <bool kBf16>
__device__ __forceinline__ float2 pair_of(uint32_t raw) {
  if constexpr (kBf16) return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&raw));
  return __half22float2(device::as_half2(raw));
}

// A stripe of 16 rows: lane 4·g + t has rows g and g + 8 of two pairs of k in every 16 (ops/matmul/gpu_layout.h).
template <bool kBf16, int kPerLane>
__global__ void __launch_bounds__(32 * kMaxWarps) norm_route_stripe(const __grid_constant__ RouteTask t) {
  extern __shared__ float shared[];
  __shared__ float sums[kMaxWarps][kGpuRows + 1];
  device::let_next_start();
  device::wait_for_previous();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int token = blockIdx.y, first = blockIdx.x * kGpuRows;
  const float* x = t.args.x + token * t.args.x_stride;
  const int steps = (t.k + 15) / 16;  // 512 bytes each; the padding of the last tile is never read
  const auto* w = static_cast<const uint8_t*>(t.args.w) +
                  blockIdx.x * gpu_stripe_bytes(kBf16 ? DType::bf16 : DType::f16, t.k) + lane * 16;
  const auto scaled = [&](int i) {
    if (i >= t.k) return make_float2(0, 0);
    return make_float2(x[i] * (t.args.norm == nullptr ? 1.0f : t.args.norm[i]),
                       x[i + 1] * (t.args.norm == nullptr ? 1.0f : t.args.norm[i + 1]));
  };
  float low = 0, high = 0, squares = 0;  // rows g and g + 8
#pragma unroll 4
  for (int step = warp; step < steps; step += warps) {
    const uint4 raw = device::load_stream_16(w + int64_t{step} * 512);
    const int i = 16 * step + 2 * (lane % 4);
    const float2 a = scaled(i), b = scaled(i + 8);
    const float2 w0 = pair_of<kBf16>(raw.x), w1 = pair_of<kBf16>(raw.y);
    const float2 w2 = pair_of<kBf16>(raw.z), w3 = pair_of<kBf16>(raw.w);
    low += (a.x * w0.x + a.y * w0.y) + (b.x * w2.x + b.y * w2.y);
    high += (a.x * w1.x + a.y * w1.y) + (b.x * w3.x + b.y * w3.y);
  }
  for (int i = threadIdx.x; i < t.k; i += static_cast<int>(blockDim.x)) squares += x[i] * x[i];
  squares = device::warp_sum(squares);
#pragma unroll
  for (int offset = 1; offset < 4; offset *= 2) {
    low += __shfl_xor_sync(device::kFullMask, low, offset);
    high += __shfl_xor_sync(device::kFullMask, high, offset);
  }
  if (lane % 4 == 0) sums[warp][lane / 4] = low, sums[warp][lane / 4 + 8] = high;
  if (lane == 0) sums[warp][kGpuRows] = squares;
  __syncthreads();  // all warps' sums are written
  float total = 0, logit = 0;
  for (int i = 0; i < warps; ++i) {
    total += sums[i][kGpuRows];
    logit += sums[i][min(static_cast<int>(threadIdx.x), kGpuRows - 1)];
  }
  const float scale = device::inverse_root(device::quotient(total, static_cast<float>(t.k)) + t.args.eps);
  store_normed(t, token, x, scale);
  store_bytes(t, token, x, scale);
  const int count = min(kGpuRows, static_cast<int>(t.desc.experts) - first);
  if (threadIdx.x < 32) finish_token<kPerLane>(t, token, first, count, logit * scale, shared);
}

RouteTask task_of(const NormRouteArgs& args, const NormRouteDesc& desc, CudaStream& stream) {
  const size_t bytes = static_cast<size_t>(desc.m * desc.experts) * sizeof(float);
  DYNO_CHECK(DeviceError, stream.workspace_bytes >= bytes, "[norm_route] a workspace of ", stream.workspace_bytes,
             " bytes, ", bytes, " are needed");
  return {args, desc.route(), static_cast<int>(desc.k), reinterpret_cast<float*>(stream.workspace), stream.counters};
}

void start(void (*kernel)(RouteTask), const RouteTask& task, const NormRouteDesc& desc, int rows, int warps,
           CudaStream& stream) {
  const dim3 grid(static_cast<unsigned>((desc.experts + rows - 1) / rows), static_cast<unsigned>(desc.m));
  launch_dependent("norm_route", kernel, grid, static_cast<unsigned>(32 * warps),
                   static_cast<size_t>(route::shared_floats(task.desc)) * sizeof(float), stream.handle, task);
}

// Registers for the experts of a token: the smallest instance that is large enough.
template <typename Pick>
auto by_experts(int64_t experts, const Pick& pick) {
  if (experts <= 128) return pick.template operator()<4>();
  if (experts <= 256) return pick.template operator()<8>();
  return pick.template operator()<32>();
}

template <Scalar kType, bool kVector>
void start_rows(const RouteTask& task, const NormRouteDesc& desc, int rows, int warps, CudaStream& stream) {
  const auto kernel = by_experts(desc.experts, [&]<int kPerLane>() {
    return rows == 1 ? norm_route_rows<kType, kVector, 1, kPerLane> : norm_route_rows<kType, kVector, 4, kPerLane>;
  });
  start(kernel, task, desc, rows, warps, stream);
}

template <Scalar kType>
void start_type(const RouteTask& task, const NormRouteDesc& desc, int rows, int warps, CudaStream& stream) {
  const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  const bool vector = desc.k % 4 == 0 && task.args.x_stride % 4 == 0 && aligned(task.args.x) &&
                      aligned(task.args.norm) && aligned(task.args.w);
  // Only f32 has a vector version, because other types usually have layout gpu.
  if constexpr (kType == Scalar::f32) {
    if (vector) return start_rows<kType, true>(task, desc, rows, warps, stream);
  }
  start_rows<kType, false>(task, desc, rows, warps, stream);
}

}  // namespace

void norm_route_rows_cuda(const NormRouteArgs& args, const NormRouteDesc& desc, int rows, int warps,
                          CudaStream& stream) {
  const RouteTask task = task_of(args, desc, stream);
  switch (desc.type) {
    case DType::f32:
      return start_type<Scalar::f32>(task, desc, rows, warps, stream);
    case DType::f16:
      return start_type<Scalar::f16>(task, desc, rows, warps, stream);
    case DType::bf16:
      return start_type<Scalar::bf16>(task, desc, rows, warps, stream);
    default:
      throw UnsupportedError(str_cat("[norm_route] no kernels for a router of type ", dtype_name(desc.type)));
  }
}

void norm_route_stripe_cuda(const NormRouteArgs& args, const NormRouteDesc& desc, int warps, CudaStream& stream) {
  const RouteTask task = task_of(args, desc, stream);
  const bool bf16 = desc.type == DType::bf16;
  const auto kernel = by_experts(desc.experts, [&]<int kPerLane>() {
    return bf16 ? norm_route_stripe<true, kPerLane> : norm_route_stripe<false, kPerLane>;
  });
  start(kernel, task, desc, kGpuRows, warps, stream);
}

}  // namespace dyno::ops
