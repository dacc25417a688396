// The CUDA kernels of products of few tokens, and the sorting of tokens by expert, as functions that a test calls on
// the CPU.
#define __CUDA_ARCH__ 900  // the ring is for chips that have its copies
#include <cuda_runtime.h>

#include <string>

namespace dyno::ops::cuda {
thread_local __align__(128) uint8_t shared[232448];  // of ring.cuh
thread_local __align__(16) uint8_t raw[232448];      // of stream.cuh
thread_local float walk_sums[58112];                 // of walk.cuh
namespace {
thread_local int32_t counts[1 << 12];  // of group_rows.cu
}
}  // namespace dyno::ops::cuda

#include "ops/matmul/cuda/group_rows.cu"
#include "ops/matmul/cuda/ring.cuh"
#include "ops/matmul/cuda/stream.cuh"
#include "ops/matmul/cuda/walk.cuh"

using namespace dyno;
using namespace dyno::ops::cuda;

extern "C" void run_backwards(int backwards) { emulated::backwards = backwards != 0; }

extern "C" void group_rows(const int32_t* ids, int rows, int matrices, int tile_rows, int n, int32_t* groups,
                           float* y) {
  Problem p;
  p.rows = rows, p.matrices = matrices, p.n = n;
  p.ids = ids, p.groups = groups;
  p.y = y, p.y_stride = n;
  group_rows(p, tile_rows, nullptr);
}

namespace {

SharedPair pair;  // beside a token's experts, if it has rows

enum Kind { stream_kind, ring_kind, walk_kind };

template <DType kType>
void multiply(const Problem& p, int kind, int first, int second) {
  const bool ring = kind == ring_kind;
  if (kind == walk_kind) {
    if constexpr (has_block_codes(kType)) {
      return launch_walk<kType>(p, pair, first, second, 2, nullptr);
    } else {
      throw std::runtime_error("no kernel that walks");
    }
  }
  if (ring && ring_shape(p, kType, first, second).memory.bytes > p.shared_limit) {
    throw std::runtime_error("too long rows");
  }
  if (pair.n > 0) throw std::runtime_error("only walk takes a shared expert's pair");
  if (ring) {
    launch_ring<kType, kType>(p, first, second, 2, nullptr);
  } else {
    stream<kType>(p, first, second, nullptr);
  }
}

// Runs `p` with the weights of a type. Returns an error, or null.
const char* multiply_named(const std::string& name, Problem& p, int kind, int first, int second) {
  static std::string error;
  try {
#define DYNO_EMULATED(t) \
  if (name == #t) return p.type = DType::t, multiply<DType::t>(p, kind, first, second), nullptr;
    DYNO_EMULATED(q4_0)
    DYNO_EMULATED(q4_k)
    DYNO_EMULATED(q5_0)
    DYNO_EMULATED(q5_k)
    DYNO_EMULATED(q6_k)
    DYNO_EMULATED(iq4_nl)
    DYNO_EMULATED(iq4_xs)
    DYNO_EMULATED(q4_16)
    DYNO_EMULATED(q8_0)
    DYNO_EMULATED(mxfp4)
#undef DYNO_EMULATED
    error = name + " has no kernel here";
  } catch (const std::exception& e) {
    error = e.what();
  }
  return error.c_str();
}

}  // namespace

// A product of rows (token, slot) with their experts. numbers: rows, n, k, matrices, x_divisor, activation, and either
// share and blocks of the ring, warps and stripes of the stream or warps and blocks of the walk, rows of the shared
// expert. inputs: x, weights,
// weights of up or null, bias, bias of up, norm, weights of the shared expert's gate and up, byte rows of x or null.
// Returns an error, or null.
extern "C" const char* multiply_by_experts(const char* type, int kind, const int64_t* numbers,
                                           const void* const* inputs, float norm_eps, int64_t w_stride,
                                           const int32_t* ids, float* y, float* shared_y) {
  emulated::shared_memory = ops::cuda::shared;
  Problem p;
  p.rows = static_cast<int32_t>(numbers[0]), p.n = static_cast<int32_t>(numbers[1]);
  p.k = static_cast<int32_t>(numbers[2]), p.matrices = p.last_matrix = static_cast<int32_t>(numbers[3]);
  p.x_divisor = static_cast<int32_t>(numbers[4]);
  p.activation = static_cast<ops::Activation>(numbers[5]);
  p.x = static_cast<const uint8_t*>(inputs[0]), p.x_stride = int64_t{p.k} * 4;
  p.w = static_cast<const uint8_t*>(inputs[1]), p.w_up = static_cast<const uint8_t*>(inputs[2]);
  p.w_stride = w_stride;
  p.bias = static_cast<const float*>(inputs[3]), p.bias_up = static_cast<const float*>(inputs[4]);
  p.normed = norm_eps > 0, p.norm_eps = norm_eps, p.norm = static_cast<const float*>(inputs[5]);
  p.x_bytes = static_cast<const uint8_t*>(inputs[8]);
  p.grouping = Grouping::experts, p.ids = ids;
  p.y = y, p.y_stride = p.n;
  p.shared_limit = sizeof ops::cuda::shared;
  pair = {.w = static_cast<const uint8_t*>(inputs[6]),
          .w_up = static_cast<const uint8_t*>(inputs[7]),
          .y = shared_y,
          .n = static_cast<int32_t>(numbers[8])};
  const char* error = multiply_named(type, p, kind, static_cast<int>(numbers[6]), static_cast<int>(numbers[7]));
  pair = {};
  return error;
}

// A row times up to three matrices by `stream`. numbers: k, warps, stripes, batch, elements between the results of the
// batch, and n of the matrices. inputs: x, norm, residual, weights and biases of the matrices. Returns an error, or
// null.
extern "C" const char* multiply_row(const char* type, const int64_t* numbers, const void* const* inputs, float norm_eps,
                                    float scale, int64_t w_stride, float* const* outputs) {
  emulated::shared_memory = ops::cuda::shared;
  Problem p;
  p.rows = 1, p.k = static_cast<int32_t>(numbers[0]), p.n = static_cast<int32_t>(numbers[5]);
  p.matrices = p.last_matrix = static_cast<int32_t>(numbers[3]);
  p.x = static_cast<const uint8_t*>(inputs[0]), p.x_stride = p.x_batch_stride = int64_t{p.k} * 4;
  p.normed = norm_eps > 0, p.norm_eps = norm_eps, p.norm = static_cast<const float*>(inputs[1]);
  p.residual = static_cast<const float*>(inputs[2]), p.scale = scale;
  p.w = static_cast<const uint8_t*>(inputs[3]), p.bias = static_cast<const float*>(inputs[6]);
  p.w_stride = w_stride;
  p.y = outputs[0], p.y_stride = p.n, p.y_batch_stride = numbers[4];
  p.shared_limit = sizeof ops::cuda::shared;
  for (int i = 0; i < 2; ++i) {
    p.more[i] = {.n = static_cast<int32_t>(numbers[6 + i]),
                 .w = static_cast<const uint8_t*>(inputs[4 + i]),
                 .bias = static_cast<const float*>(inputs[7 + i]),
                 .y = outputs[1 + i],
                 .y_stride = numbers[6 + i]};
  }
  return multiply_named(type, p, stream_kind, static_cast<int>(numbers[1]), static_cast<int>(numbers[2]));
}

// The sum over a token's experts. numbers: tokens, n, k, matrices, used, share and blocks of the ring or warps of the
// stream and 1, k of the shared expert. inputs: x, weights, bias, residual, weights of the slots, x and weights of the
// shared expert. Returns an error, or null.
extern "C" const char* sum_over_experts(const char* type, int kind, const int64_t* numbers, const void* const* inputs,
                                        float scale, int64_t w_stride, const int32_t* ids, float* out) {
  emulated::shared_memory = ops::cuda::shared;
  Problem p;
  p.used = static_cast<int32_t>(numbers[4]);
  p.rows = static_cast<int32_t>(numbers[0]) * p.used, p.n = static_cast<int32_t>(numbers[1]);
  p.k = static_cast<int32_t>(numbers[2]), p.matrices = p.last_matrix = static_cast<int32_t>(numbers[3]);
  p.x = static_cast<const uint8_t*>(inputs[0]), p.x_stride = int64_t{p.k} * 4;
  p.w = static_cast<const uint8_t*>(inputs[1]), p.w_stride = w_stride;
  p.bias = static_cast<const float*>(inputs[2]), p.residual = static_cast<const float*>(inputs[3]);
  p.slot_weights = static_cast<const float*>(inputs[4]);
  p.scale = scale;
  p.grouping = Grouping::summed, p.ids = ids;
  p.y = out, p.y_stride = p.n;
  p.shared_limit = sizeof ops::cuda::shared;
  if (numbers[7] > 0) {
    p.shared = {.w = static_cast<const uint8_t*>(inputs[6]),
                .x = static_cast<const float*>(inputs[5]),
                .k = static_cast<int32_t>(numbers[7])};
  }
  return multiply_named(type, p, kind, static_cast<int>(numbers[5]), static_cast<int>(numbers[6]));
}
