// Times the CUDA candidates of matrix products of real models and prints JSON: microseconds, GB/s of weights, TFLOP/s,
// and percent of what this device did when it copied memory and when cuBLAS multiplied halves. Weights rotate through
// copies larger than L2; launches replay from a graph; the median of five replays.
//   bench_products decode|few|router|prefill|prompt|dense|all [TOKENS...]
// `few`: the dense products of five models for 9 to 512 tokens; `router`: float32 routers of three.
// `prompt`: the products of five models at u-batches of 128 to 4096, the candidates that compete there; `dense`: those
// of them without experts.
#include <cublas_v2.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "core/cuda/check.h"
#include "core/cuda_devices.h"
#include "ops/matmul/cuda/blas.h"
#include "product_case.h"
#include "timer.h"

namespace {

using namespace dyno;
using testing::ProductCase;
using testing::ProductOptions;
using testing::Timer;

struct Ceilings {
  double copy_gbps = 0, multiply_tflops = 0;
};

Ceilings measure_ceilings(const Timer& timer) {
  Ceilings out;
  {
    const size_t bytes = size_t{2} << 30;
    const testing::GuardedBuffer from(bytes), to(bytes);
    // Not from a graph, where copies may go to the slower copy engines.
    for (int i = 0; i < 5; ++i) {
      float milliseconds = 0;
      DYNO_CUDA_CHECK(cudaEventRecord(timer.start, timer.stream));
      DYNO_CUDA_CHECK(cudaMemcpyAsync(to.data(), from.data(), bytes, cudaMemcpyDeviceToDevice, timer.stream));
      DYNO_CUDA_CHECK(cudaEventRecord(timer.stop, timer.stream));
      DYNO_CUDA_CHECK(cudaStreamSynchronize(timer.stream));
      DYNO_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, timer.start, timer.stop));
      out.copy_gbps = std::max(out.copy_gbps, 2.0 * static_cast<double>(bytes) / milliseconds / 1e6);
    }
  }
  const int n = 8192;
  const std::vector<std::byte> halves = testing::random_weights(DType::f16, n, n, 7);
  const testing::GuardedBuffer a(halves.size()), b(halves.size()), c(size_t{4} * n * n);
  DYNO_CUDA_CHECK(cudaMemcpy(a.data(), halves.data(), halves.size(), cudaMemcpyHostToDevice));
  DYNO_CUDA_CHECK(cudaMemcpy(b.data(), halves.data(), halves.size(), cudaMemcpyHostToDevice));
  cublasHandle_t handle;
  const float one = 1, zero = 0;
  if (cublasCreate(&handle) != CUBLAS_STATUS_SUCCESS ||
      cublasSetStream(handle, timer.stream) != CUBLAS_STATUS_SUCCESS) {
    return out;
  }
  const double us = timer.microseconds(5, [&](int) {
    cublasGemmEx(handle, CUBLAS_OP_T, CUBLAS_OP_N, n, n, n, &one, a.data(), CUDA_R_16F, n, b.data(), CUDA_R_16F, n,
                 &zero, c.data(), CUDA_R_32F, n, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
  });
  cublasDestroy(handle);
  out.multiply_tflops = 2.0 * n * n * n / us / 1e6;
  return out;
}

struct Bench {
  DeviceInfo device = cuda_device(0);
  Timer timer;
  Ceilings ceilings = measure_ceilings(timer);
  ops::CudaStream stream;
  testing::GuardedBuffer workspace{size_t{1} << 30};
  bool first = true, prompt = false, dense = false, few = false;

  ~Bench() { ops::cuda::destroy_blas(stream.blas); }
  Bench() {
    stream.blas = ops::cuda::make_blas();
    stream.handle = timer.stream;
    stream.device = &device;
    stream.workspace = workspace.as<std::byte>();
    stream.workspace_bytes = workspace.bytes();
  }

  bool competes(const std::string& name) const {
    if (few) return name.starts_with("wgmma") && !name.starts_with("wgmma_wide") && name.find("warps=8") == name.npos;
    if (dense)
      return name.starts_with("cublas") || name.starts_with("wgmma_wide") || name.starts_with("wgmma tokens=128");
    return name.starts_with("cublas") || name.starts_with("half_staged") || name.starts_with("wgmma");
  }

  void run(const char* what, const ops::OpDesc& desc, bool residual = false) {
    ProductOptions options{.residual = residual, .reference = false, .routing = testing::Routing::skewed};
    const double bytes = ops::cost(desc).bytes;
    options.copies = static_cast<int>(std::clamp(3e8 / bytes, 1.0, 40.0)) + 1;
    const ProductCase product(desc, options);
    const double flops = ops::cost(desc).flops;
    const int count = flops > 1e11 ? 4 : std::max(options.copies, 20);
    const ops::Config usual = ops::default_config(desc, device);
    for (const ops::Config& config : ops::candidates(desc, device, ops::CandidateSet::compiled)) {
      if ((prompt || few) && config != usual && !competes(ops::describe(ops::family_of(desc), config))) continue;
      const double us = timer.microseconds(count, [&](int i) { product.launch(config, stream, i % options.copies); });
      const double gbps = product.weight_bytes() / us / 1e3, tflops = flops / us / 1e6;
      std::printf(
          "%s\n    {\"what\": \"%s\", \"op\": \"%s\", \"tokens\": %lld, \"config\": \"%s\", \"default\": %s, "
          "\"us\": %.2f, \"weights_gbps\": %.0f, \"percent_of_copy\": %.1f, \"tflops\": %.1f, "
          "\"percent_of_multiply\": %.1f}",
          first ? "" : ",", what, ops::op_key(desc).c_str(), static_cast<long long>(ops::tokens_of(desc)),
          ops::describe(ops::family_of(desc), config).c_str(), config == usual ? "true" : "false", us, gbps,
          100 * gbps / ceilings.copy_gbps, tflops, 100 * tflops / ceilings.multiply_tflops);
      first = false;
    }
  }
};

void bench_decode(Bench& bench) {
  constexpr auto gpu = ops::Layout::gpu;
  for (const DType type : {DType::f16, DType::q4_0, DType::q5_0, DType::q8_0, DType::q2_k, DType::q3_k, DType::q4_k,
                           DType::q6_k, DType::iq4_xs, DType::mxfp4}) {
    bench.run("square", ops::MatmulDesc{.type = type, .layout = gpu, .m = 1, .n = 4096, .k = 4096});
    bench.run("wide", ops::MatmulDesc{.type = type, .layout = gpu, .m = 1, .n = 14336, .k = 4096});
    bench.run("deep", ops::MatmulDesc{.type = type, .layout = gpu, .m = 1, .n = 4096, .k = 14336});
  }
  bench.run("llama-8b ffn", ops::UpGateDesc{.type = DType::q4_k, .layout = gpu, .m = 1, .n = 14336, .k = 4096});
  bench.run("head", ops::MatmulDesc{.type = DType::q6_k, .layout = gpu, .m = 1, .n = 151936, .k = 2048});
  for (const DType type : {DType::q4_0, DType::mxfp4}) {
    bench.run("qwen3moe-30b up_gate",
              ops::MoeUpGateDesc{.type = type, .layout = gpu, .m = 1, .n = 768, .k = 2048, .experts = 128, .used = 8});
    bench.run(
        "qwen3moe-30b down",
        ops::MatmulIdDesc{
            .type = type, .layout = gpu, .m = 1, .n = 2048, .k = 768, .experts = 128, .used = 8, .x_per_slot = true});
  }
}

void bench_prefill(Bench& bench) {
  constexpr auto gpu = ops::Layout::gpu;
  for (const int64_t m : {32, 128, 512, 4096}) {
    for (const DType type : {DType::f16, DType::q4_0, DType::q8_0, DType::q4_k, DType::q6_k}) {
      bench.run("square", ops::MatmulDesc{.type = type, .layout = gpu, .m = m, .n = 4096, .k = 4096});
      if (m >= 512) bench.run("wide", ops::MatmulDesc{.type = type, .layout = gpu, .m = m, .n = 14336, .k = 4096});
    }
    for (const DType type : {DType::q4_0, DType::mxfp4}) {
      bench.run(
          "qwen3moe-30b up_gate",
          ops::MoeUpGateDesc{.type = type, .layout = gpu, .m = m, .n = 768, .k = 2048, .experts = 128, .used = 8});
      bench.run(
          "qwen3moe-30b down",
          ops::MatmulIdDesc{
              .type = type, .layout = gpu, .m = m, .n = 2048, .k = 768, .experts = 128, .used = 8, .x_per_slot = true});
    }
  }
}

void bench_prompt(Bench& bench, bool only_dense, std::vector<int64_t> tokens) {
  constexpr auto gpu = ops::Layout::gpu;
  bench.prompt = true, bench.dense = only_dense;
  // Where models add what came before: the products with 4096 rows.
  const auto dense = [&](const char* what, DType type, int64_t m, int64_t n, int64_t k) {
    bench.run(what, ops::MatmulDesc{.type = type, .layout = gpu, .m = m, .n = n, .k = k}, n == 4096);
  };
  const auto pair = [&](const char* what, DType type, int64_t m, int64_t n, int64_t k) {
    bench.run(what, ops::UpGateDesc{.type = type, .layout = gpu, .m = m, .n = n, .k = k});
  };
  const auto experts = [&](const char* what, DType type, int64_t m, int64_t n, int64_t k, int64_t count, int64_t used) {
    bench.run(what,
              ops::MoeUpGateDesc{.type = type, .layout = gpu, .m = m, .n = n, .k = k, .experts = count, .used = used});
    bench.run(
        what,
        ops::MatmulIdDesc{
            .type = type, .layout = gpu, .m = m, .n = k, .k = n, .experts = count, .used = used, .x_per_slot = true});
  };
  if (tokens.empty()) tokens = {128, 256, 512, 1024, 2048, 4096};
  for (const int64_t m : tokens) {
    pair("llama-8b", DType::q4_k, m, 14336, 4096);
    dense("llama-8b", DType::q4_k, m, 4096, 14336);
    dense("llama-8b", DType::q4_k, m, 4096, 4096);
    dense("llama-8b", DType::q4_k, m, 1024, 4096);
    dense("llama-8b", DType::q6_k, m, 4096, 14336);
    pair("qwen3-8b", DType::q8_0, m, 12288, 4096);
    dense("qwen3-8b", DType::q8_0, m, 4096, 4096);
    dense("qwen3moe-30b", DType::q4_0, m, 4096, 2048);
    if (only_dense) continue;
    experts("qwen3moe-30b", DType::q4_0, m, 768, 2048, 128, 8);
    experts("deepseek2-lite", DType::q4_0, m, 1408, 2048, 64, 6);
    experts("gpt-oss-20b", DType::mxfp4, m, 2880, 2880, 32, 4);
  }
}

void bench_few(Bench& bench, std::vector<int64_t> tokens) {
  constexpr auto gpu = ops::Layout::gpu;
  bench.few = true;
  const auto dense = [&](const char* what, DType type, int64_t m, int64_t n, int64_t k) {
    bench.run(what, ops::MatmulDesc{.type = type, .layout = gpu, .m = m, .n = n, .k = k}, n >= 2048);
  };
  if (tokens.empty()) tokens = {9, 16, 32, 64, 128, 256, 512};
  for (const int64_t m : tokens) {
    dense("llama-8b o", DType::q4_k, m, 4096, 4096);
    dense("llama-8b k", DType::q4_k, m, 1024, 4096);
    bench.run("llama-8b ffn", ops::UpGateDesc{.type = DType::q4_k, .layout = gpu, .m = m, .n = 14336, .k = 4096});
    dense("llama-8b down", DType::q4_k, m, 4096, 14336);
    dense("llama-8b down", DType::q6_k, m, 4096, 14336);
    dense("qwen3-8b o", DType::q8_0, m, 4096, 4096);
    bench.run("qwen3-8b ffn", ops::UpGateDesc{.type = DType::q8_0, .layout = gpu, .m = m, .n = 12288, .k = 4096});
    dense("qwen3-8b down", DType::q8_0, m, 4096, 12288);
    dense("qwen3moe-30b q", DType::q4_0, m, 4096, 2048);
    dense("qwen3moe-30b k", DType::q4_0, m, 512, 2048);
    dense("qwen3moe-30b o", DType::q4_0, m, 2048, 4096);
    bench.run("deepseek2-lite shared",
              ops::UpGateDesc{.type = DType::q4_0, .layout = gpu, .m = m, .n = 2816, .k = 2048});
    dense("gpt-oss-20b o", DType::q8_0, m, 2880, 4096);
    dense("head", DType::q6_k, m, 128256, 4096);
  }
}

void bench_router(Bench& bench, std::vector<int64_t> tokens) {
  if (tokens.empty()) tokens = {8, 16, 32, 64, 128, 512, 4096};
  for (const int64_t m : tokens) {
    bench.run("qwen3moe-30b router", ops::MatmulDesc{.m = m, .n = 128, .k = 2048});
    bench.run("deepseek2-lite router", ops::MatmulDesc{.m = m, .n = 64, .k = 2048});
    bench.run("gpt-oss-20b router", ops::MatmulDesc{.m = m, .n = 32, .k = 2880});
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "all";
  if (mode != "decode" && mode != "few" && mode != "router" && mode != "prefill" && mode != "prompt" &&
      mode != "dense" && mode != "all") {
    std::fprintf(stderr, "bench_products: '%s' is none of decode, few, router, prefill, prompt, dense, all\n",
                 mode.c_str());
    return 2;
  }
  try {
    Bench bench;
    std::printf(
        "{\"device\": \"%s\", \"compute_capability\": %d, \"sm_count\": %d, \"copy_gbps\": %.0f, "
        "\"multiply_f16_8192_tflops\": %.0f,\n  \"rows\": [",
        bench.device.name.c_str(), bench.device.compute_capability, bench.device.sm_count, bench.ceilings.copy_gbps,
        bench.ceilings.multiply_tflops);
    if (mode == "decode" || mode == "all") bench_decode(bench);
    if (mode == "prefill" || mode == "all") bench_prefill(bench);
    std::vector<int64_t> tokens;
    for (int i = 2; i < argc; ++i) tokens.push_back(std::stoll(argv[i]));
    if (mode == "few") bench_few(bench, tokens);
    if (mode == "router") bench_router(bench, tokens);
    if (mode == "prompt" || mode == "dense" || mode == "all") {
      bench_prompt(bench, mode == "dense", tokens);
    }
    std::printf("\n  ]}\n");
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
