// Times the CUDA candidates of attention and of mla_expand on shapes of real models and prints JSON: microseconds and
// TFLOP/s, counting the pairs of queries and keys that see each other. Launches replay from a graph; the median of five
// replays. Caches and queries are random.
//   bench_attention [part of a name]
#include <cstdio>
#include <random>
#include <string>

#include "core/cuda_devices.h"
#include "ops/attention/attention.h"
#include "ops/matmul/layout.h"
#include "ops/mla_expand/mla_expand.h"
#include "product_case.h"
#include "timer.h"

namespace {

using namespace dyno;
using testing::GuardedBuffer;

struct Shape {
  const char* name;
  ops::AttentionDesc desc;
  int64_t depth;  // positions before the tokens
  int32_t window = 0;
};

struct Bench {
  DeviceInfo device = cuda_device(0);
  testing::Timer timer;
  ops::CudaStream stream;
  GuardedBuffer workspace{size_t{1} << 30};
  GuardedBuffer counters{ops::kStreamCounters * sizeof(int32_t)};
  bool first = true;

  Bench() {
    DYNO_CUDA_CHECK(cudaMemset(counters.data(), 0, counters.bytes()));
    stream.handle = timer.stream;
    stream.device = &device;
    stream.workspace = workspace.as<std::byte>();
    stream.workspace_bytes = workspace.bytes();
    stream.counters = counters.as<int32_t>();
  }

  void print(const char* what, const ops::OpDesc& desc, int64_t depth, const ops::Config& config, double flops,
             double us) {
    const bool usual = config == ops::default_config(desc, device);
    std::printf(
        "%s\n    {\"what\": \"%s\", \"op\": \"%s\", \"tokens\": %lld, \"depth\": %lld, \"config\": \"%s\", "
        "\"default\": %s, \"us\": %.2f, \"tflops\": %.1f}",
        first ? "" : ",", what, ops::op_key(desc).c_str(), static_cast<long long>(ops::tokens_of(desc)),
        static_cast<long long>(depth), ops::describe(ops::family_of(desc), config).c_str(), usual ? "true" : "false",
        us, flops / us / 1e6);
    first = false;
  }

  // Random values in the cache's type: f16 bits of random bytes are ordinary numbers when their exponents are.
  static void fill(const GuardedBuffer& buffer, DType type, int64_t elements, uint64_t seed) {
    const auto bytes = testing::random_weights(type, 1, elements, seed);
    DYNO_CUDA_CHECK(cudaMemcpy(buffer.data(), bytes.data(), bytes.size(), cudaMemcpyHostToDevice));
  }

  void run(const Shape& shape) {
    const ops::AttentionDesc& d = shape.desc;
    const int64_t positions = shape.depth + d.m;
    const GuardedBuffer q(static_cast<size_t>(d.m * d.heads * d.dk) * 4);
    const GuardedBuffer out(static_cast<size_t>(d.m * d.heads * d.dv) * 4);
    const GuardedBuffer keys(row_bytes(d.k_type, positions * d.kv_heads * d.dk));
    const GuardedBuffer values(row_bytes(d.v_type, positions * d.kv_heads * d.dv));
    const GuardedBuffer runs(sizeof(ops::SequenceRun)), sinks(static_cast<size_t>(d.heads) * 4);
    fill(q, DType::f32, d.m * d.heads * d.dk, 1);
    fill(keys, d.k_type, positions * d.kv_heads * d.dk, 2);
    fill(values, d.v_type, positions * d.kv_heads * d.dv, 3);
    fill(sinks, DType::f32, d.heads, 4);
    const ops::SequenceRun run{0, static_cast<int32_t>(d.m), static_cast<int32_t>(shape.depth), 0};
    DYNO_CUDA_CHECK(cudaMemcpy(runs.data(), &run, sizeof(run), cudaMemcpyHostToDevice));
    ops::AttentionArgs a;
    a.q = q.as<float>(), a.q_stride = d.heads * d.dk;
    a.k_cache = keys.as<std::byte>(), a.v_cache = values.as<std::byte>();
    a.k_row_bytes = static_cast<int64_t>(row_bytes(d.k_type, d.kv_heads * d.dk));
    a.v_row_bytes = static_cast<int64_t>(row_bytes(d.v_type, d.kv_heads * d.dv));
    a.slot_positions = positions;
    a.runs = runs.as<ops::SequenceRun>(), a.n_runs = 1;
    a.sinks = d.sinks ? sinks.as<float>() : nullptr;
    a.scale = 0.1f, a.window = shape.window, a.softcap = 30.0f;
    a.out = out.as<float>(), a.out_stride = d.heads * d.dv;
    double pairs = 0;
    for (int64_t i = 0; i < d.m; ++i) {
      const int64_t seen = shape.depth + i + 1;
      pairs += static_cast<double>(d.windowed ? std::min<int64_t>(seen, shape.window) : seen);
    }
    const double flops = pairs * static_cast<double>(d.heads * (d.dk + d.dv)) * 2;
    for (const ops::Config& config : ops::candidates(d, device, ops::CandidateSet::compiled)) {
      const std::string name = ops::describe(ops::Family::attention, config);
      if (name.starts_with("rows") || ops::scratch_bytes(d, config) > stream.workspace_bytes) continue;
      print(shape.name, d, shape.depth, config, flops,
            timer.microseconds(5, [&](int) { ops::launch(config, d, a, stream); }));
    }
  }

  void run(const char* what, const ops::MlaExpandDesc& d) {
    const GuardedBuffer latents(row_bytes(d.cache_type, d.m * (d.lora + d.rope)));
    const auto k_stride = static_cast<int64_t>(ops::layout_bytes(d.k_type, d.k_layout, d.lora, d.nope));
    const auto v_stride = static_cast<int64_t>(ops::layout_bytes(d.v_type, d.v_layout, d.dv, d.lora));
    const GuardedBuffer k_b(static_cast<size_t>(d.heads * k_stride)), v_b(static_cast<size_t>(d.heads * v_stride));
    const DType out_type = ops::expanded_type(d.cache_type);
    const GuardedBuffer keys(row_bytes(out_type, d.m * d.heads * (d.nope + d.rope)));
    const GuardedBuffer values(row_bytes(out_type, d.m * d.heads * d.dv));
    fill(latents, d.cache_type, d.m * (d.lora + d.rope), 5);
    // Any bytes from 0x20 to 0x3f are ordinary weights in every layout.
    std::mt19937 random(6);
    for (const GuardedBuffer* b : {&k_b, &v_b}) {
      std::vector<uint8_t> bytes(b->bytes());
      for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(0x20 | (random() & 0x1f));
      DYNO_CUDA_CHECK(cudaMemcpy(b->data(), bytes.data(), bytes.size(), cudaMemcpyHostToDevice));
    }
    const ops::MlaExpandArgs a{.latents = latents.as<std::byte>(),
                               .row_bytes = static_cast<int64_t>(row_bytes(d.cache_type, d.lora + d.rope)),
                               .k_b = k_b.data(),
                               .k_b_stride_bytes = k_stride,
                               .v_b = v_b.data(),
                               .v_b_stride_bytes = v_stride,
                               .keys = keys.as<uint16_t>(),
                               .values = values.as<uint16_t>()};
    for (const ops::Config& config : ops::candidates(d, device, ops::CandidateSet::compiled)) {
      print(what, d, 0, config, ops::cost(d).flops,
            timer.microseconds(5, [&](int) { ops::launch(config, d, a, stream); }));
    }
  }
};

constexpr ops::AttentionDesc heads(int64_t m, int64_t n, int64_t kv, int64_t dk, int64_t dv, DType type = DType::f16) {
  return {.m = m, .heads = n, .kv_heads = kv, .dk = dk, .dv = dv, .k_type = type, .v_type = type};
}

}  // namespace

int main(int argc, char** argv) {
  const std::string only = argc > 1 ? argv[1] : "";
  try {
    Bench bench;
    std::printf("{\"device\": \"%s\", \"compute_capability\": %d, \"sm_count\": %d,\n  \"rows\": [",
                bench.device.name.c_str(), bench.device.compute_capability, bench.device.sm_count);
    ops::AttentionDesc gpt_oss = heads(4096, 64, 8, 64, 64);
    gpt_oss.sinks = true;
    ops::AttentionDesc gpt_oss_window = gpt_oss;
    gpt_oss_window.windowed = true;
    ops::AttentionDesc gemma = heads(4096, 8, 4, 256, 256);
    gemma.windowed = true;
    const auto paired = [](ops::AttentionDesc d) {
      d.paired = true;
      return d;
    };
    const Shape shapes[] = {
        {"32 heads of 128", heads(4096, 32, 32, 128, 128), 0},
        {"qwen3moe-30b", heads(4096, 32, 4, 128, 128), 0},
        {"qwen3moe-30b", heads(512, 32, 4, 128, 128), 3584},
        {"qwen3moe-30b", heads(128, 32, 4, 128, 128), 3968},
        {"llama-8b bf16", heads(4096, 32, 8, 128, 128, DType::bf16), 0},
        {"llama-8b q8_0", heads(4096, 32, 8, 128, 128, DType::q8_0), 0},
        {"heads of 64", heads(4096, 32, 8, 64, 64), 0},
        {"gpt-oss-20b", gpt_oss, 0},
        {"gpt-oss-20b window", gpt_oss_window, 0, 128},
        {"gemma3 global", heads(4096, 8, 4, 256, 256), 0},
        {"gemma3 window", gemma, 0, 1024},
        {"deepseek2-lite expanded", heads(4096, 16, 16, 192, 128), 0},
        {"deepseek2-lite expanded", heads(512, 16, 16, 192, 128), 3584},
        {"deepseek2-lite expanded", heads(128, 16, 16, 192, 128), 3968},
        {"deepseek2-lite expanded f32", heads(4096, 16, 16, 192, 128, DType::f32), 0},
        {"deepseek2-lite expanded f32", heads(512, 16, 16, 192, 128, DType::f32), 3584},
        {"deepseek2-lite expanded f32", heads(128, 16, 16, 192, 128, DType::f32), 3968},
        {"deepseek2-lite expanded pairs", paired(heads(4096, 16, 16, 192, 128, DType::f32)), 0},
        {"deepseek2-lite expanded pairs", paired(heads(512, 16, 16, 192, 128, DType::f32)), 3584},
    };
    for (const Shape& shape : shapes) {
      if (std::string(shape.name).find(only) != std::string::npos) bench.run(shape);
    }
    for (const int64_t m : {128, 1024, 4096}) {
      for (const DType cache : {DType::f16, DType::f32}) {
        const char* name = "deepseek2-lite expansion";
        if (std::string(name).find(only) == std::string::npos) continue;
        bench.run(name, ops::MlaExpandDesc{.k_type = DType::q4_0,
                                           .v_type = DType::q4_0,
                                           .m = m,
                                           .heads = 16,
                                           .nope = 128,
                                           .rope = 64,
                                           .dv = 128,
                                           .lora = 512,
                                           .cache_type = cache,
                                           .k_layout = ops::Layout::gpu,
                                           .v_layout = ops::Layout::gpu});
      }
    }
    std::printf("\n  ]}\n");
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
