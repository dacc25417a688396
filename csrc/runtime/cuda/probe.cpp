#include "runtime/cuda/probe.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <functional>
#include <vector>

#include "core/cuda/check.h"
#include "core/error.h"
#include "runtime/cuda/handles.h"

namespace dyno::runtime {

constexpr size_t kLeastBytes = size_t{16} << 20;  // with less, caches and launch times would be measured

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

namespace {

// Seconds on the host, from the call of a small copy until the copy is complete.
double median_turn(cudaStream_t stream, std::byte* host, const std::byte* device) {
  using Clock = std::chrono::steady_clock;
  constexpr size_t kRow = 8 << 10, kSamples = 101;
  std::vector<double> samples;
  while (samples.size() < kSamples) {
    const Clock::time_point begin = Clock::now();
    DYNO_CUDA_CHECK(cudaMemcpyAsync(host, device, kRow, cudaMemcpyDeviceToHost, stream));
    DYNO_CUDA_CHECK(cudaStreamSynchronize(stream));
    samples.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
  }
  std::nth_element(samples.begin(), samples.begin() + kSamples / 2, samples.end());
  return samples[kSamples / 2];
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
  rates.transfer_us = 1e6 * median_turn(stream.get(), host.data(), memory.data());
#ifndef DYNO_CUDA_FORCE_MMQ  // such a build has no cuBLAS
  rates.f16_tflops = product_tflops(memory.data(), bytes, stream.get());
#endif
  return rates;
}

}  // namespace dyno::runtime
