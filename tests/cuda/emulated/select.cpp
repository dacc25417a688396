// The CUDA kernels of index_select and norm as functions that a test calls on the CPU.
#include <cuda_runtime.h>

#include "ops/index_select/select_blocks.cu"
#include "ops/norm/norm_rows.cu"

using namespace dyno::ops;

extern "C" void run_backwards(int backwards) { emulated::backwards = backwards != 0; }

// numbers: m, heads, dk, selected, q_stride, weights_stride, slot_positions, runs, out_stride. Returns whether memory
// behind the workspace is untouched.
extern "C" int index_select(int splits, const int64_t* numbers, const float* q, const float* weights, const float* keys,
                            const SequenceRun* runs, int32_t* out) {
  const IndexSelectDesc desc{.m = numbers[0], .heads = numbers[1], .dk = numbers[2], .selected = numbers[3]};
  const size_t bytes = index_scratch_bytes(desc, splits);
  std::vector<std::byte> workspace(bytes + 64, std::byte{0x5a});
  CudaStream stream{.workspace = workspace.data(), .workspace_bytes = bytes};
  index_select_cuda({.q = q,
                     .q_stride = numbers[4],
                     .weights = weights,
                     .weights_stride = numbers[5],
                     .keys = reinterpret_cast<const std::byte*>(keys),
                     .key_row_bytes = desc.dk * static_cast<int64_t>(sizeof(float)),
                     .slot_positions = numbers[6],
                     .runs = runs,
                     .n_runs = static_cast<int32_t>(numbers[7]),
                     .out = out,
                     .out_stride = numbers[8]},
                    desc, splits, stream);
  return std::all_of(workspace.end() - 64, workspace.end(), [](std::byte b) { return b == std::byte{0x5a}; });
}

// numbers: m, n, rows_per_token, add, centred, x_stride, out_stride, weight_stride. inputs: x, weight, residual, bias.
extern "C" void norm(int threads, const int64_t* numbers, const float* const* inputs, float eps, float scale,
                     float* out) {
  const NormDesc desc{.m = numbers[0],
                      .n = numbers[1],
                      .rows_per_token = numbers[2],
                      .add = numbers[3] != 0,
                      .centred = numbers[4] != 0};
  NormArgs args;
  args.x = inputs[0], args.weight = inputs[1], args.residual = inputs[2], args.bias = inputs[3];
  args.x_stride = numbers[5], args.out_stride = numbers[6], args.weight_stride = numbers[7];
  args.eps = eps, args.scale = scale;
  args.out = out;
  CudaStream stream{};
  norm_rows_cuda(args, desc, threads, stream);
}
