// Direct attention over q8_0 caches, alone and with norm, rotation and store, as functions that a test calls on the
// CPU.
#include <cuda_runtime.h>

#include <string>

using std::isfinite;

namespace dyno::ops {
namespace {
thread_local float queries[1 << 14];  // of attention_rows.cu
}
namespace direct {
thread_local __align__(16) float merged[1 << 16];
}
}  // namespace dyno::ops

#include "core/dtype.cpp"
#include "ops/attention/adaptive.cpp"
#include "ops/attention/attention_direct.cu"
#include "ops/attention/attention_rows.cu"
#include "ops/attention/direct_launch.cuh"

namespace dyno::ops {

void throw_left_out(KernelGroup) { throw std::runtime_error("left out"); }
bool steps_attention_takes(const DirectTask&) { return false; }
void steps_attention(const DirectTask&, bool, int64_t, CUstream_st*) {}

namespace {

bool staged = false;  // whether rows of the last launch passed through shared memory

template <int kHead, bool kFused>
void launch_q8_0(const DirectTask& task, device::Scalar keys, device::Scalar values, int rows, const dim3& grid) {
  using device::Scalar;
  using direct::launch_types;
  staged = task.staged;
  if (keys == values) return launch_types<kHead, kFused, Scalar::q8_0>(task, rows, grid, nullptr);
  if constexpr (!kFused && kHead <= kDirectMaxMixedHead) {
    if (keys == Scalar::q8_0) return launch_types<kHead, false, Scalar::q8_0, Scalar::f16>(task, rows, grid, nullptr);
    return launch_types<kHead, false, Scalar::f16, Scalar::q8_0>(task, rows, grid, nullptr);
  }
}

// A chip, memory behind which a launch must not write, and the cache that it may read.
struct Bench {
  DeviceInfo device{.kind = DeviceKind::cuda};
  std::vector<std::byte> workspace;
  std::vector<int32_t> counters = std::vector<int32_t>(kStreamCounters);
  CudaStream stream;
  Bench(const AttentionDesc& desc, const AttentionArgs& args, int rows, int splits, int capability, int64_t shared,
        int64_t positions) {
    device.compute_capability = capability, device.shared_per_block_bytes = shared;
    const size_t bytes = attention_partials_bytes(desc, rows, splits);
    workspace.assign(bytes + 64, std::byte{0x5a});
    stream = {.device = &device, .workspace = workspace.data(), .workspace_bytes = bytes, .counters = counters.data()};
    emulated::shared_memory = reinterpret_cast<uint8_t*>(direct::merged);
    emulated::fault = nullptr;
    emulated::readable.clear();
    std::fill(std::begin(direct::merged), std::end(direct::merged), std::nanf(""));
    const auto add = [&](const std::byte* cache, int64_t row) {
      const auto* first = reinterpret_cast<const uint8_t*>(cache);
      emulated::readable.emplace_back(first, first + positions * row);
    };
    add(args.k_cache, args.k_row_bytes);
    if (!desc.v_in_k) add(args.v_cache, args.v_row_bytes);
  }
  const char* fault() const {
    if (emulated::fault != nullptr) return emulated::fault;
    if (!std::all_of(workspace.end() - 64, workspace.end(), [](std::byte b) { return b == std::byte{0x5a}; })) {
      return "memory behind the workspace was written";
    }
    const bool zero = std::all_of(counters.begin(), counters.end(), [](int32_t c) { return c == 0; });
    return zero ? nullptr : "a counter is not zero";
  }
};

DType type_of(const char* name) { return std::string(name) == "q8_0" ? DType::q8_0 : DType::f16; }

}  // namespace

#define DYNO_DIRECT(head, fused)                                                                                       \
  void direct_attention_##head##_##fused(const DirectTask& task, device::Scalar keys, device::Scalar values, int rows, \
                                         const dim3& grid, CUstream_st*) {                                             \
    launch_q8_0<head, fused>(task, keys, values, rows, grid);                                                          \
  }
DYNO_DIRECT(64, false)
DYNO_DIRECT(64, true)
DYNO_DIRECT(128, false)
DYNO_DIRECT(128, true)
DYNO_DIRECT(256, false)
DYNO_DIRECT(256, true)
DYNO_DIRECT(512, false)

}  // namespace dyno::ops

using namespace dyno;
using namespace dyno::ops;

extern "C" void run_backwards(int backwards) { emulated::backwards = backwards != 0; }
extern "C" int was_staged() { return staged; }

// chip: rows and splits of the configuration, compute capability, shared memory of a block. numbers: m, heads,
// kv_heads, dk, dv, sinks, windowed, softcap, q_stride, k_row_bytes, v_row_bytes, slot_positions, slots, runs, settled,
// out_stride, window. Returns what went wrong, or null.
extern "C" const char* attention(const int64_t* chip, const char* k_type, const char* v_type, const int64_t* numbers,
                                 void* const* pointers, float scale, float softcap, const SequenceRun* runs) {
  const AttentionDesc desc{.m = numbers[0],
                           .heads = numbers[1],
                           .kv_heads = numbers[2],
                           .dk = numbers[3],
                           .dv = numbers[4],
                           .k_type = type_of(k_type),
                           .v_type = type_of(v_type),
                           .sinks = numbers[5] != 0,
                           .windowed = numbers[6] != 0,
                           .softcap = numbers[7] != 0};
  AttentionArgs args;
  args.q = static_cast<const float*>(pointers[0]), args.q_stride = numbers[8];
  args.k_cache = static_cast<const std::byte*>(pointers[1]), args.k_row_bytes = numbers[9];
  args.v_cache = static_cast<const std::byte*>(pointers[2]), args.v_row_bytes = numbers[10];
  args.sinks = static_cast<const float*>(pointers[3]);
  args.out = static_cast<float*>(pointers[4]), args.out_stride = numbers[15];
  args.slot_positions = numbers[11];
  args.runs = runs, args.n_runs = static_cast<int32_t>(numbers[13]);
  args.settled = numbers[14] != 0;
  args.scale = scale, args.softcap = softcap, args.window = static_cast<int32_t>(numbers[16]);
  const int rows = static_cast<int>(chip[0]), splits = static_cast<int>(chip[1]);
  Bench bench(desc, args, rows, splits, static_cast<int>(chip[2]), chip[3], numbers[11] * numbers[12]);
  attention_direct_cuda(args, desc, rows, splits, bench.stream);
  return bench.fault();
}

// The same with norm, rotation and store. numbers: as above, then k_stride, v_stride, n_rot, neox, v_norm. pointers: as
// above, then k, v, q_norm, k_norm, inv_freq.
extern "C" const char* rope_attention(const int64_t* chip, const int64_t* numbers, void* const* pointers, float scale,
                                      float softcap, float eps, float mscale, const SequenceRun* runs) {
  const RopeAttentionDesc desc{.m = numbers[0],
                               .heads = numbers[1],
                               .kv_heads = numbers[2],
                               .dk = numbers[3],
                               .dv = numbers[4],
                               .n_rot = numbers[19],
                               .k_type = DType::q8_0,
                               .v_type = DType::q8_0,
                               .neox = numbers[20] != 0,
                               .q_norm = pointers[7] != nullptr,
                               .k_norm = pointers[8] != nullptr,
                               .sinks = numbers[5] != 0,
                               .windowed = numbers[6] != 0,
                               .softcap = numbers[7] != 0,
                               .v_norm = numbers[21] != 0};
  RopeAttentionArgs args;
  args.q = static_cast<const float*>(pointers[0]), args.q_stride = numbers[8];
  args.k_cache = static_cast<std::byte*>(pointers[1]), args.k_row_bytes = numbers[9];
  args.v_cache = static_cast<std::byte*>(pointers[2]), args.v_row_bytes = numbers[10];
  args.sinks = static_cast<const float*>(pointers[3]);
  args.out = static_cast<float*>(pointers[4]), args.out_stride = numbers[15];
  args.k = static_cast<const float*>(pointers[5]), args.k_stride = numbers[17];
  args.v = static_cast<const float*>(pointers[6]), args.v_stride = numbers[18];
  args.q_norm = static_cast<const float*>(pointers[7]), args.k_norm = static_cast<const float*>(pointers[8]);
  args.inv_freq = static_cast<const float*>(pointers[9]), args.eps = eps, args.mscale = mscale;
  args.slot_positions = numbers[11];
  args.runs = runs, args.n_runs = static_cast<int32_t>(numbers[13]);
  args.settled = numbers[14] != 0;
  args.scale = scale, args.softcap = softcap, args.window = static_cast<int32_t>(numbers[16]);
  const int rows = static_cast<int>(chip[0]), splits = static_cast<int>(chip[1]);
  Bench bench(desc.attention(), args.attention(), rows, splits, static_cast<int>(chip[2]), chip[3],
              numbers[11] * numbers[12]);
  rope_attention_direct_cuda(args, desc, rows, splits, bench.stream);
  return bench.fault();
}
