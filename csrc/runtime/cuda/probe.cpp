#include "runtime/cuda/probe.h"

#include <cublas_v2.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <random>
#include <vector>

#include "core/cuda/check.h"
#include "core/error.h"
#include "runtime/cuda/handles.h"

namespace dyno::runtime {
namespace {

constexpr size_t kLeastBytes = size_t{16} << 20;  // below, caches and launches would be measured

void cublas_check(cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  check_device_answers(what, __FILE__, __LINE__);
  throw DeviceError(str_cat("[probe] ", what, ": ", cublasGetStatusString(status)));
}

struct Blas {
  Blas() { cublas_check(cublasCreate(&handle), "cublasCreate"); }
  ~Blas() { cublasDestroy(handle); }
  Blas(const Blas&) = delete;
  Blas& operator=(const Blas&) = delete;
  cublasHandle_t handle = nullptr;
};

// Median seconds of `work`, after it has run for long enough to bring the clocks up.
double median_seconds(cudaStream_t stream, const std::function<void()>& work) {
  constexpr int kWarm = 4, kSamples = 7;
  const Event begin = make_timing_event(), end = make_timing_event();
  std::vector<double> samples;
  for (int i = 0; i < kWarm + kSamples; ++i) {
    DYNO_CUDA_CHECK(cudaEventRecord(begin.get(), stream));
    work();
    DYNO_CUDA_CHECK(cudaEventRecord(end.get(), stream));
    DYNO_CUDA_CHECK(cudaEventSynchronize(end.get()));
    float milliseconds = 0;
    DYNO_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, begin.get(), end.get()));
    if (i >= kWarm) samples.push_back(static_cast<double>(milliseconds) * 1e-3);
  }
  std::nth_element(samples.begin(), samples.begin() + kSamples / 2, samples.end());
  return samples[kSamples / 2];
}

// Random halves between -1 and 1: on zeros a product runs faster than on data.
void fill_halves(std::byte* target, size_t bytes, cudaStream_t stream) {
  std::vector<uint16_t> pool(std::min<size_t>(bytes / 2, size_t{1} << 20));
  std::mt19937 random(1);
  for (uint16_t& half : pool) half = static_cast<uint16_t>((random() & 0x83ff) | (0x3000 + (random() % 3) * 0x400));
  for (size_t at = 0; at < bytes; at += pool.size() * 2) {
    DYNO_CUDA_CHECK(cudaMemcpyAsync(target + at, pool.data(), std::min(pool.size() * 2, bytes - at),
                                    cudaMemcpyHostToDevice, stream));
  }
  DYNO_CUDA_CHECK(cudaStreamSynchronize(stream));
}

double product_tflops(std::byte* memory, size_t bytes, cudaStream_t stream) {
  int n = 8192;
  while (n > 512 && size_t{3} * 2 * static_cast<size_t>(n) * static_cast<size_t>(n) > bytes) n /= 2;
  const size_t matrix = 2 * static_cast<size_t>(n) * static_cast<size_t>(n);
  fill_halves(memory, 2 * matrix, stream);
  const Blas blas;
  cublas_check(cublasSetStream(blas.handle, stream), "cublasSetStream");
  const float one = 1.0f, zero = 0.0f;
  const double seconds = median_seconds(stream, [&] {
    cublas_check(
        cublasGemmEx(blas.handle, CUBLAS_OP_T, CUBLAS_OP_N, n, n, n, &one, memory, CUDA_R_16F, n, memory + matrix,
                     CUDA_R_16F, n, &zero, memory + 2 * matrix, CUDA_R_16F, n, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
        "cublasGemmEx");
  });
  return 2.0 * n * n * n / seconds / 1e12;
}

}  // namespace

DeviceRates measure_rates(int ordinal) {
  const DeviceScope scope(ordinal, "measuring what the device does at best");
  size_t free = 0, total = 0;
  DYNO_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  const size_t bytes = std::min(size_t{1} << 30, free / 4) / 512 * 512;
  DYNO_CHECK(OutOfMemoryError, bytes >= kLeastBytes, "[probe] device cuda:", ordinal, " has ", free >> 20,
             " MiB of memory free; rates are measured with ", 4 * (kLeastBytes >> 20), " MiB or more");
  const DeviceBuffer memory(bytes, "the probe");
  const Stream stream = make_stream();
  DeviceRates rates;
  const size_t half = bytes / 2;
  rates.memory_gbps = 2e-9 * static_cast<double>(half) / median_seconds(stream.get(), [&] {
                        DYNO_CUDA_CHECK(cudaMemcpyAsync(memory.data() + half, memory.data(), half,
                                                        cudaMemcpyDeviceToDevice, stream.get()));
                      });
  const PinnedBuffer host(std::min(bytes, size_t{128} << 20), "the probe");
  const double moved = 1e-9 * static_cast<double>(host.size());
  rates.host_to_device_gbps =
      moved / median_seconds(stream.get(), [&] {
        DYNO_CUDA_CHECK(cudaMemcpyAsync(memory.data(), host.data(), host.size(), cudaMemcpyHostToDevice, stream.get()));
      });
  rates.device_to_host_gbps =
      moved / median_seconds(stream.get(), [&] {
        DYNO_CUDA_CHECK(cudaMemcpyAsync(host.data(), memory.data(), host.size(), cudaMemcpyDeviceToHost, stream.get()));
      });
  rates.f16_tflops = product_tflops(memory.data(), bytes, stream.get());
  return rates;
}

}  // namespace dyno::runtime
