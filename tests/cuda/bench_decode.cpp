// Times the CUDA candidates of what surrounds the products of a decoded token and prints JSON: attention at several
// depths with the percent of what this device did when it copied memory, qkv_rope_store, both in one (rope_attention)
// and norm_route. Inputs rotate
// through copies larger than L2; launches replay from a graph; the median of five replays
// (one launch where it takes over a millisecond).
//   bench_decode [substring of an op key]
#include <algorithm>
#include <cstdio>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "core/cuda/check.h"
#include "core/cuda_devices.h"
#include "gguf/dequantize.h"
#include "ops/attention/attention.h"
#include "ops/matmul/layout.h"
#include "ops/norm_route/norm_route.h"
#include "ops/qkv_rope_store/qkv_rope_store.h"
#include "ops/registry.h"
#include "ops/rope_attention/rope_attention.h"
#include "product_case.h"

namespace {

using namespace dyno;
using testing::GuardedBuffer;

// `bytes` of a random pattern that is a finite value of `type` everywhere.
GuardedBuffer random_memory(DType type, size_t bytes) {
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  constexpr int64_t kElements = 1 << 16;
  std::vector<float> values(kElements);
  for (float& v : values) v = normal(random);
  std::vector<std::byte> pattern(row_bytes(type, kElements));
  quantize_row(type, values.data(), pattern.data(), kElements);
  GuardedBuffer out(bytes);
  for (size_t at = 0; at < bytes; at += pattern.size()) {
    DYNO_CUDA_CHECK(cudaMemcpy(out.as<std::byte>() + at, pattern.data(), std::min(pattern.size(), bytes - at),
                               cudaMemcpyHostToDevice));
  }
  return out;
}
template <typename T>
GuardedBuffer on_device(const std::vector<T>& values) {
  GuardedBuffer out(values.size() * sizeof(T));
  DYNO_CUDA_CHECK(cudaMemcpy(out.data(), values.data(), out.bytes(), cudaMemcpyHostToDevice));
  return out;
}
GuardedBuffer floats(int64_t count) { return random_memory(DType::f32, static_cast<size_t>(count) * sizeof(float)); }

struct Bench {
  DeviceInfo device = cuda_device(0);
  cudaStream_t handle = nullptr;
  cudaEvent_t start = nullptr, stop = nullptr;
  GuardedBuffer workspace{size_t{256} << 20}, counters{ops::kStreamCounters * sizeof(int32_t)};
  ops::CudaStream stream;
  double copy_gbps = 0;
  std::string wanted;
  bool first = true;

  Bench() {
    DYNO_CUDA_CHECK(cudaStreamCreate(&handle));
    DYNO_CUDA_CHECK(cudaEventCreate(&start));
    DYNO_CUDA_CHECK(cudaEventCreate(&stop));
    counters.fill(0);
    stream = {.handle = handle,
              .device = &device,
              .workspace = workspace.as<std::byte>(),
              .workspace_bytes = workspace.bytes(),
              .counters = counters.as<int32_t>()};
    const size_t bytes = size_t{2} << 30;
    const GuardedBuffer from(bytes), to(bytes);
    for (int i = 0; i < 5; ++i) {
      const double ms = elapsed(
          [&] { DYNO_CUDA_CHECK(cudaMemcpyAsync(to.data(), from.data(), bytes, cudaMemcpyDeviceToDevice, handle)); });
      copy_gbps = std::max(copy_gbps, 2.0 * static_cast<double>(bytes) / ms / 1e6);
    }
  }

  double elapsed(const std::function<void()>& body) const {
    float milliseconds = 0;
    DYNO_CUDA_CHECK(cudaEventRecord(start, handle));
    body();
    DYNO_CUDA_CHECK(cudaEventRecord(stop, handle));
    DYNO_CUDA_CHECK(cudaStreamSynchronize(handle));
    DYNO_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, start, stop));
    return milliseconds;
  }
  double microseconds(const std::function<void(int)>& body) const {
    body(0);
    const double once = elapsed([&] { body(0); });
    if (once > 1.0) return once * 1000.0;  // far from anything that would be chosen
    constexpr int kLaunches = 48;
    cudaGraph_t graph;
    cudaGraphExec_t replay;
    DYNO_CUDA_CHECK(cudaStreamBeginCapture(handle, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < kLaunches; ++i) body(i);
    DYNO_CUDA_CHECK(cudaStreamEndCapture(handle, &graph));
    DYNO_CUDA_CHECK(cudaGraphInstantiate(&replay, graph, 0));
    std::vector<double> times;
    for (int i = 0; i < 8; ++i) {
      const double ms = elapsed([&] { DYNO_CUDA_CHECK(cudaGraphLaunch(replay, handle)); });
      if (i >= 3) times.push_back(ms);
    }
    DYNO_CUDA_CHECK(cudaGraphExecDestroy(replay));
    DYNO_CUDA_CHECK(cudaGraphDestroy(graph));
    std::sort(times.begin(), times.end());
    return times[times.size() / 2] * 1000.0 / kLaunches;
  }

  template <typename Desc>
  void run(const char* model, const Desc& desc, int64_t depth, double bytes,
           const std::function<void(const ops::Config&, int)>& launch) {
    const std::string key = ops::op_key(desc);
    if (!wanted.empty() && key.find(wanted) == std::string::npos) return;
    const ops::Config usual = ops::default_config(desc, device);
    for (const ops::Config& config : ops::candidates(desc, device, ops::CandidateSet::compiled)) {
      if (ops::scratch_bytes(desc, config) > stream.workspace_bytes) continue;
      const double us = microseconds([&](int i) { launch(config, i); });
      const double gbps = bytes / us / 1e3;
      std::printf(
          "%s\n    {\"model\": \"%s\", \"op\": \"%s\", \"tokens\": %lld, \"depth\": %lld, \"config\": \"%s\", "
          "\"default\": %s, \"us\": %.2f, \"gbps\": %.0f, \"percent_of_copy\": %.1f}",
          first ? "" : ",", model, key.c_str(), static_cast<long long>(desc.m), static_cast<long long>(depth),
          ops::describe(ops::family_of(desc), config).c_str(), config == usual ? "true" : "false", us, gbps,
          100 * gbps / copy_gbps);
      std::fflush(stdout);
      first = false;
    }
  }

  void attention(const char* model, ops::AttentionDesc desc, int64_t depth, int window = 0) {
    const ops::SequenceRun run{0, static_cast<int32_t>(desc.m), static_cast<int32_t>(depth), 0};
    const GuardedBuffer runs = on_device(std::vector<ops::SequenceRun>{run});
    const auto k_row = static_cast<int64_t>(row_bytes(desc.k_type, desc.kv_heads * desc.dk));
    const auto v_row = desc.v_in_k ? 0 : static_cast<int64_t>(row_bytes(desc.v_type, desc.kv_heads * desc.dv));
    const int64_t cells = depth + desc.m;
    const int64_t seen = window > 0 ? std::min<int64_t>(cells, window) : cells;
    const int copies = static_cast<int>(std::clamp<int64_t>((int64_t{200} << 20) / ((k_row + v_row) * cells), 1, 48));
    std::vector<GuardedBuffer> keys, values;
    for (int i = 0; i < copies; ++i) {
      keys.push_back(random_memory(desc.k_type, static_cast<size_t>(k_row * cells)));
      values.push_back(random_memory(desc.v_type, static_cast<size_t>(std::max<int64_t>(v_row, 4) * cells)));
    }
    const GuardedBuffer q = floats(desc.m * desc.heads * desc.dk), out = floats(desc.m * desc.heads * desc.dv);
    const GuardedBuffer sinks = floats(desc.heads);
    const double bytes = static_cast<double>((k_row + v_row) * seen);
    this->run(model, desc, depth, bytes, [&](const ops::Config& config, int i) {
      ops::launch(config, desc,
                  ops::AttentionArgs{.q = q.as<float>(),
                                     .q_stride = desc.heads * desc.dk,
                                     .k_cache = keys[static_cast<size_t>(i % copies)].as<std::byte>(),
                                     .v_cache = values[static_cast<size_t>(i % copies)].as<std::byte>(),
                                     .k_row_bytes = k_row,
                                     .v_row_bytes = v_row,
                                     .slot_positions = cells,
                                     .runs = runs.as<ops::SequenceRun>(),
                                     .n_runs = 1,
                                     .sinks = desc.sinks ? sinks.as<float>() : nullptr,
                                     .scale = 0.1f,
                                     .window = window,
                                     .settled = true,
                                     .out = out.as<float>(),
                                     .out_stride = desc.heads * desc.dv},
                  stream);
    });
  }

  void qkv(const char* model, const ops::QkvRopeStoreDesc& desc) {
    const ops::SequenceRun run{0, static_cast<int32_t>(desc.m), 100, 0};
    const GuardedBuffer runs = on_device(std::vector<ops::SequenceRun>{run});
    const GuardedBuffer positions = on_device(std::vector<int32_t>(static_cast<size_t>(desc.m), 100));
    const GuardedBuffer q = floats(desc.m * desc.heads * (desc.dk + desc.nope)),
                        k = floats(desc.m * desc.kv_heads * desc.dk);
    const GuardedBuffer v = floats(desc.m * desc.kv_heads * desc.dv), out = floats(desc.m * desc.heads * desc.dk);
    const GuardedBuffer norms = floats(1024), frequencies = floats(desc.n_rot), cache = floats(1 << 20);
    const int64_t row = desc.kv_heads * std::max(desc.dk, desc.dv) * 4;
    this->run(model, desc, 0, ops::cost(desc).bytes, [&](const ops::Config& config, int) {
      ops::launch(config, desc,
                  ops::QkvRopeStoreArgs{.q = q.as<float>(),
                                        .q_stride = desc.heads * (desc.latent ? desc.nope + desc.n_rot : desc.dk),
                                        .q_out = out.as<float>(),
                                        .q_out_stride = desc.heads * desc.dk,
                                        .k = k.as<float>(),
                                        .k_stride = desc.kv_heads * desc.dk,
                                        .v = v.as<float>(),
                                        .v_stride = desc.kv_heads * desc.dv,
                                        .q_norm = norms.as<float>(),
                                        .k_norm = norms.as<float>(),
                                        .eps = 1e-6f,
                                        .positions = positions.as<int32_t>(),
                                        .inv_freq = frequencies.as<float>(),
                                        .k_cache = cache.as<std::byte>(),
                                        .v_cache = cache.as<std::byte>(),
                                        .k_row_bytes = row,
                                        .v_row_bytes = row,
                                        .slot_positions = 128,
                                        .runs = runs.as<ops::SequenceRun>(),
                                        .n_runs = 1},
                  stream);
    });
  }

  void rope_attention(const char* model, const ops::RopeAttentionDesc& desc, int64_t depth, int window = 0) {
    const ops::SequenceRun run{0, static_cast<int32_t>(desc.m), static_cast<int32_t>(depth), 0};
    const GuardedBuffer runs = on_device(std::vector<ops::SequenceRun>{run});
    const auto k_row = static_cast<int64_t>(row_bytes(desc.k_type, desc.kv_heads * desc.dk));
    const auto v_row = desc.latent ? 0 : static_cast<int64_t>(row_bytes(desc.v_type, desc.kv_heads * desc.dv));
    const int64_t cells = depth + desc.m;
    const int64_t seen = window > 0 ? std::min<int64_t>(cells, window) : cells;
    const int copies = static_cast<int>(std::clamp<int64_t>((int64_t{200} << 20) / ((k_row + v_row) * cells), 1, 48));
    std::vector<GuardedBuffer> keys, values;
    for (int i = 0; i < copies; ++i) {
      keys.push_back(random_memory(desc.k_type, static_cast<size_t>(k_row * cells)));
      values.push_back(random_memory(desc.v_type, static_cast<size_t>(std::max<int64_t>(v_row, 4) * cells)));
    }
    const int64_t rotary_row = desc.heads * (desc.nope + desc.n_rot);
    const GuardedBuffer q = floats(desc.m * desc.heads * desc.dk), rotary = floats(desc.m * rotary_row),
                        k = floats(desc.m * desc.kv_heads * desc.dk), v = floats(desc.m * desc.kv_heads * desc.dv),
                        out = floats(desc.m * desc.heads * desc.dv);
    const GuardedBuffer norms = floats(1024), frequencies = floats(desc.n_rot), sinks = floats(desc.heads);
    this->run(model, desc, depth, static_cast<double>((k_row + v_row) * seen), [&](const ops::Config& config, int i) {
      ops::launch(config, desc,
                  ops::RopeAttentionArgs{.q = q.as<float>(),
                                         .q_stride = desc.heads * desc.dk,
                                         .q_rotary = rotary.as<float>(),
                                         .q_rotary_stride = rotary_row,
                                         .k = k.as<float>(),
                                         .k_stride = desc.kv_heads * desc.dk,
                                         .v = v.as<float>(),
                                         .v_stride = desc.kv_heads * desc.dv,
                                         .q_norm = norms.as<float>(),
                                         .k_norm = norms.as<float>(),
                                         .eps = 1e-6f,
                                         .inv_freq = frequencies.as<float>(),
                                         .k_cache = keys[static_cast<size_t>(i % copies)].as<std::byte>(),
                                         .v_cache = values[static_cast<size_t>(i % copies)].as<std::byte>(),
                                         .k_row_bytes = k_row,
                                         .v_row_bytes = v_row,
                                         .slot_positions = cells,
                                         .runs = runs.as<ops::SequenceRun>(),
                                         .n_runs = 1,
                                         .sinks = desc.sinks ? sinks.as<float>() : nullptr,
                                         .scale = 0.1f,
                                         .window = window,
                                         .settled = true,
                                         .out = out.as<float>(),
                                         .out_stride = desc.heads * desc.dv},
                  stream);
    });
  }

  void route(const char* model, const ops::NormRouteDesc& desc) {
    constexpr int kCopies = 48;
    const size_t bytes = ops::layout_bytes(desc.type, desc.layout, desc.experts, desc.k);
    const GuardedBuffer w = random_memory(desc.type, bytes * kCopies);
    const GuardedBuffer x = floats(desc.m * desc.k), norm = floats(desc.k), normed = floats(desc.m * desc.k);
    const GuardedBuffer ids = floats(desc.m * desc.used), weights = floats(desc.m * desc.used);
    this->run(model, desc, 0, ops::cost(desc).bytes, [&](const ops::Config& config, int i) {
      ops::launch(config, desc,
                  ops::NormRouteArgs{.x = x.as<float>(),
                                     .x_stride = desc.k,
                                     .norm = norm.as<float>(),
                                     .eps = 1e-6f,
                                     .w = w.as<std::byte>() + static_cast<size_t>(i % kCopies) * bytes,
                                     .normed = normed.as<float>(),
                                     .normed_stride = desc.k,
                                     .route = {.ids = ids.as<int32_t>(), .weights = weights.as<float>()}},
                  stream);
    });
  }
};

void all(Bench& bench) {
  using ops::Gating;
  bench.qkv(
      "qwen3moe-30b-a3b",
      {.heads = 32, .kv_heads = 4, .dk = 128, .dv = 128, .n_rot = 128, .neox = true, .q_norm = true, .k_norm = true});
  bench.qkv("deepseek2-lite",
            {.heads = 16, .dk = 576, .dv = 512, .n_rot = 64, .nope = 128, .k_norm = true, .latent = true});
  bench.route("qwen3moe-30b-a3b", {.k = 2048, .experts = 128, .used = 8, .normalize = true});
  bench.route("qwen3moe-30b-a3b",
              {.type = DType::f16, .layout = ops::Layout::gpu, .k = 2048, .experts = 128, .used = 8});
  bench.route("deepseek2-lite", {.k = 2048, .experts = 64, .used = 6});
  bench.route("gpt-oss-20b", {.k = 2880, .experts = 32, .used = 4, .gating = Gating::softmax_selected});
  for (const int64_t depth : {0, 100, 4096, 32768}) {
    const bool neox = true, norms = true;
    const auto heads = [&](int64_t kv_heads, bool normed) -> ops::RopeAttentionDesc {
      return {.heads = 32,
              .kv_heads = kv_heads,
              .dk = 128,
              .dv = 128,
              .n_rot = 128,
              .neox = neox,
              .q_norm = normed,
              .k_norm = normed};
    };
    bench.rope_attention("qwen3moe-30b-a3b", heads(4, norms), depth);
    bench.rope_attention("llama-8b", heads(8, !norms), depth);
    bench.rope_attention("gpt-oss-20b",
                         {.heads = 64, .kv_heads = 8, .dk = 64, .dv = 64, .n_rot = 64, .neox = neox, .sinks = true},
                         depth);
    for (const DType type : {DType::f16, DType::f32}) {
      ops::RopeAttentionDesc latents{.heads = 16, .dk = 576, .dv = 512, .n_rot = 64, .nope = 128, .k_norm = norms};
      latents.k_type = latents.v_type = type;
      latents.latent = true;
      bench.rope_attention("deepseek2-lite", latents, depth);
    }
  }
  for (const int64_t depth : {0, 100, 4096, 32768}) {
    bench.attention("qwen3moe-30b-a3b", {.heads = 32, .kv_heads = 4, .dk = 128, .dv = 128}, depth);
    bench.attention("llama-8b", {.heads = 32, .kv_heads = 8, .dk = 128, .dv = 128}, depth);
    bench.attention("gpt-oss-20b", {.heads = 64, .kv_heads = 8, .dk = 64, .dv = 64, .sinks = true}, depth);
    bench.attention("gpt-oss-20b", {.heads = 64, .kv_heads = 8, .dk = 64, .dv = 64, .sinks = true, .windowed = true},
                    depth, 128);
    bench.attention("llama-8b",
                    {.heads = 32, .kv_heads = 8, .dk = 128, .dv = 128, .k_type = DType::q8_0, .v_type = DType::q8_0},
                    depth);
    for (const DType type : {DType::f16, DType::f32}) {
      bench.attention("deepseek2-lite",
                      {.heads = 16, .dk = 576, .dv = 512, .k_type = type, .v_type = type, .v_in_k = true}, depth);
    }
  }
  for (const int64_t tokens : {4, 8, 16, 31}) {  // from 32 on latents are expanded
    for (const int64_t depth : {100, 4096}) {
      bench.attention(
          "deepseek2-lite",
          {.m = tokens, .heads = 16, .dk = 576, .dv = 512, .k_type = DType::f32, .v_type = DType::f32, .v_in_k = true},
          depth);
    }
  }
  bench.attention("gemma3", {.heads = 8, .kv_heads = 4, .dk = 256, .dv = 256}, 4096);
  for (const DType type : {DType::f16, DType::f32}) {
    bench.attention("deepseek3", {.heads = 128, .dk = 576, .dv = 512, .k_type = type, .v_type = type, .v_in_k = true},
                    4096);
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    Bench bench;
    if (argc > 1) bench.wanted = argv[1];
    std::printf(
        "{\"device\": \"%s\", \"compute_capability\": %d, \"sm_count\": %d, \"copy_gbps\": %.0f,\n  \"rows\": [",
        bench.device.name.c_str(), bench.device.compute_capability, bench.device.sm_count, bench.copy_gbps);
    all(bench);
    std::printf("\n  ]}\n");
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
