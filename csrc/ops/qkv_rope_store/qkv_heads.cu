// Norm, rotation and store of q, k and v: one warp per head of a token.
#include <cuda_runtime.h>

#include "core/cuda/launch.h"
#include "core/error.h"
#include "device/arithmetic.cuh"
#include "device/dependent.cuh"
#include "device/rope.cuh"
#include "device/store.cuh"
#include "ops/qkv_rope_store/kernels_cuda.h"
#include "ops/runs.cuh"

namespace dyno::ops {
namespace {

using device::Scalar;

struct QkvTask {
  QkvRopeStoreArgs args;
  int heads, kv_heads, dk, dv, n_rot, nope;
  Scalar k_type, v_type;
  int64_t k_head_bytes, v_head_bytes;
  bool neox, q_norm, k_norm, v_norm, latent;
};

// The work of a warp: `width` floats at `from`; [0, normed) are normalised and [rotated, rotated + n_rot) are rotated.
struct Item {
  const float* from;
  const float* weight;  // null: all ones
  int width, normed, rotated;
  bool rotates;
};

__device__ __forceinline__ Item query_item(const QkvTask& t, int64_t token, int head) {
  const float* q = t.args.q + token * t.args.q_stride;
  if (t.latent) return {q + int64_t{head} * (t.nope + t.n_rot) + t.nope, nullptr, t.n_rot, 0, 0, true};
  const bool moves = t.q_norm || t.args.q_out != nullptr;
  const int width = moves ? t.dk : t.n_rot;  // other elements stay where they are
  return {q + int64_t{head} * t.dk, t.args.q_norm, width, t.q_norm ? t.dk : 0, 0, true};
}
__device__ __forceinline__ Item key_item(const QkvTask& t, int64_t token, int head) {
  const int rest = t.latent ? t.dk - t.n_rot : 0;
  return {t.args.k + token * t.args.k_stride + int64_t{head} * t.dk,
          t.args.k_norm,
          t.dk,
          !t.k_norm  ? 0
          : t.latent ? rest
                     : t.dk,
          rest,
          true};
}
__device__ __forceinline__ Item value_item(const QkvTask& t, int64_t token, int head) {
  return {t.args.v + token * t.args.v_stride + int64_t{head} * t.dv, nullptr, t.dv, t.v_norm ? t.dv : 0, 0, false};
}

// kPer: floats per lane of the longest row.
template <int kPer>
__global__ void __launch_bounds__(256) qkv_heads(const __grid_constant__ QkvTask t) {
  extern __shared__ float rows[];  // [warps][32 * kPer]
  device::let_next_start();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t token = blockIdx.x;
  const int index = blockIdx.y * (blockDim.x / 32) + warp;
  const bool is_query = index < t.heads, is_key = !is_query && index < t.heads + t.kv_heads;
  if (index >= t.heads + (t.latent ? 1 : 2) * t.kv_heads) return;
  const int head = is_query ? index : is_key ? index - t.heads : index - t.heads - t.kv_heads;
  const Item item = is_query ? query_item(t, token, head)
                    : is_key ? key_item(t, token, head)
                             : value_item(t, token, head);
  float* row = rows + warp * 32 * kPer;

  // Work that does not depend on earlier launches comes first.
  float weight[kPer];
#pragma unroll
  for (int j = 0; j < kPer; ++j) {
    const int i = lane + 32 * j;
    weight[j] = i < item.normed && item.weight != nullptr ? item.weight[i] : 1.0f;
  }
  // Positions and runs do not depend on launches that are still running.
  const int half = t.n_rot / 2, position = item.rotates ? t.args.positions[token] : 0;
  constexpr int kPairs = (kPer + 1) / 2;  // per lane
  float2 angles[kPairs];
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
    const int pair = lane + 32 * j;
    if (item.rotates && pair < half) angles[j] = device::cos_sin(position, t.args.inv_freq[pair], t.args.mscale);
  }
  const int64_t cell =
      is_query ? -1 : cell_of_warp(t.args.runs, t.args.n_runs, t.args.slot_positions, static_cast<int>(token), lane);
  device::wait_for_previous();

  float x[kPer], squares = 0;
#pragma unroll
  for (int j = 0; j < kPer; ++j) {
    const int i = lane + 32 * j;
    x[j] = i < item.width ? item.from[i] : 0.0f;
    if (i < item.normed) squares += x[j] * x[j];
  }
  float scale = 1.0f;
  if (item.normed > 0) {
    const float mean = device::quotient(device::warp_sum(squares), static_cast<float>(item.normed));
    scale = device::inverse_root(mean + t.args.eps);
  }
#pragma unroll
  for (int j = 0; j < kPer; ++j) {
    const int i = lane + 32 * j;
    if (i < item.normed) x[j] = x[j] * scale * weight[j];
    row[i] = x[j];
  }
  __syncwarp();  // the row is written; the elements of a pair are in different lanes
  if (item.rotates) {
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const int pair = lane + 32 * j;
      if (pair >= half) break;
      const float2 c = angles[j];
      float* first = row + item.rotated + (t.neox ? pair : 2 * pair);
      float* second = t.neox ? first + half : first + 1;
      const float a = *first, b = *second;
      *first = a * c.x - b * c.y;
      *second = a * c.y + b * c.x;
    }
    __syncwarp();  // the pairs are rotated
  }

  if (is_query) {
    float* out = t.args.q_out != nullptr ? t.args.q_out + token * t.args.q_out_stride + int64_t{head} * t.dk
                                         : t.args.q + token * t.args.q_stride + int64_t{head} * t.dk;
    if (t.latent) out += t.dk - t.n_rot;
    for (int i = lane; i < item.width; i += 32) out[i] = row[i];
    return;
  }
  if (cell < 0) return;
  auto* cache = reinterpret_cast<uint8_t*>(is_key ? t.args.k_cache + cell * t.args.k_row_bytes + head * t.k_head_bytes
                                                  : t.args.v_cache + cell * t.args.v_row_bytes + head * t.v_head_bytes);
  const Scalar type = is_key ? t.k_type : t.v_type;
  for (int i = lane; i < item.width; i += 32) device::store_scalar(type, row[i], cache, i, lane);
}

Scalar scalar_of(DType type) {
  switch (type) {
    case DType::f32:
      return Scalar::f32;
    case DType::f16:
      return Scalar::f16;
    case DType::bf16:
      return Scalar::bf16;
    case DType::q8_0:
      return Scalar::q8_0;
    default:
      throw UnsupportedError(str_cat("[qkv_rope_store] no cache of type ", dtype_name(type)));
  }
}

}  // namespace

void qkv_heads_cuda(const QkvRopeStoreArgs& args, const QkvRopeStoreDesc& desc, int warps, CudaStream& stream) {
  const QkvTask task{.args = args,
                     .heads = static_cast<int>(desc.heads),
                     .kv_heads = static_cast<int>(desc.kv_heads),
                     .dk = static_cast<int>(desc.dk),
                     .dv = static_cast<int>(desc.dv),
                     .n_rot = static_cast<int>(desc.n_rot),
                     .nope = static_cast<int>(desc.nope),
                     .k_type = scalar_of(desc.k_type),
                     .v_type = desc.latent ? Scalar::f32 : scalar_of(desc.v_type),
                     .k_head_bytes = static_cast<int64_t>(row_bytes(desc.k_type, desc.dk)),
                     .v_head_bytes = desc.latent ? 0 : static_cast<int64_t>(row_bytes(desc.v_type, desc.dv)),
                     .neox = desc.neox,
                     .q_norm = desc.q_norm,
                     .k_norm = desc.k_norm,
                     .v_norm = desc.v_norm,
                     .latent = desc.latent};
  const int64_t items = desc.heads + (desc.latent ? 1 : 2) * desc.kv_heads;
  const dim3 grid(static_cast<unsigned>(desc.m), static_cast<unsigned>((items + warps - 1) / warps));
  const int64_t widest = desc.latent || desc.dk > desc.dv ? desc.dk : desc.dv;
  const auto start = [&](auto kernel, int per_lane) {
    launch_dependent("qkv_rope_store", kernel, grid, static_cast<unsigned>(32 * warps),
                     static_cast<size_t>(warps * per_lane * 32) * sizeof(float), stream.handle, task);
  };
  if (widest <= 128) {
    start(qkv_heads<4>, 4);
  } else if (widest <= 256) {
    start(qkv_heads<8>, 8);
  } else {
    start(qkv_heads<32>, 32);
  }
}

}  // namespace dyno::ops
