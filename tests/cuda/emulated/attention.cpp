// The CUDA kernels of attention to selected positions as functions that a test calls on the CPU.
#include <cuda_runtime.h>

#include <string>

using std::isfinite;

namespace dyno::ops {
namespace {
thread_local float queries[1 << 14];  // of attention_rows.cu
}
namespace latent {
thread_local __align__(16) uint4 queries[1 << 12];  // of latent.cuh
}
}  // namespace dyno::ops

#include "core/dtype.cpp"
#include "ops/attention/adaptive.cpp"
#include "ops/attention/attention_latent.cu"
#include "ops/attention/attention_rows.cu"

namespace dyno::ops {
void throw_left_out(KernelGroup) { throw std::runtime_error("left out"); }
}  // namespace dyno::ops

using namespace dyno;
using namespace dyno::ops;

extern "C" void run_backwards(int backwards) { emulated::backwards = backwards != 0; }

// numbers: m, heads, dk, dv, sinks, softcap, selected, q_stride, k_row_bytes, slot_positions, runs,
// selected_stride, out_stride. Returns whether memory behind the workspace is untouched, and all counters are zero.
extern "C" int attention(int latent, int splits, const char* type, const int64_t* numbers, const float* q,
                         const void* cache, const float* sinks, float scale, float softcap, const SequenceRun* runs,
                         const int32_t* selected, float* out) {
  const std::string name = type;
  const AttentionDesc desc{.m = numbers[0],
                           .heads = numbers[1],
                           .kv_heads = 1,
                           .dk = numbers[2],
                           .dv = numbers[3],
                           .k_type = name == "f32"    ? DType::f32
                                     : name == "f16"  ? DType::f16
                                     : name == "bf16" ? DType::bf16
                                                      : DType::q8_0,
                           .v_in_k = true,
                           .sinks = numbers[4] != 0,
                           .softcap = numbers[5] != 0,
                           .selected = numbers[6]};
  const size_t bytes = attention_partials_bytes(desc, latent != 0 ? kLatentRows : kCudaRowTile, splits);
  std::vector<std::byte> workspace(bytes + 64, std::byte{0x5a});
  std::vector<int32_t> counters(kStreamCounters);
  CudaStream stream{.workspace = workspace.data(), .workspace_bytes = bytes, .counters = counters.data()};
  AttentionArgs args;
  args.q = q, args.q_stride = numbers[7];
  args.k_cache = static_cast<const std::byte*>(cache), args.k_row_bytes = numbers[8];
  args.slot_positions = numbers[9];
  args.runs = runs, args.n_runs = static_cast<int32_t>(numbers[10]);
  args.sinks = sinks, args.scale = scale, args.softcap = softcap;
  args.selected = selected, args.selected_stride = numbers[11];
  args.out = out, args.out_stride = numbers[12];
  args.settled = true;
  (latent != 0 ? attention_latent_cuda : attention_rows_cuda)(args, desc, splits, stream);
  return std::all_of(workspace.end() - 64, workspace.end(), [](std::byte b) { return b == std::byte{0x5a}; }) &&
         std::all_of(counters.begin(), counters.end(), [](int32_t c) { return c == 0; });
}
