// Measures the best rates of a GPU, to which other rates are compared.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>

namespace dyno::runtime {

struct DeviceRates {
  double memory_gbps = 0;          // a large copy within the device: bytes read + written, in 1e9 per second
  double host_to_device_gbps = 0;  // page-locked memory
  double device_to_host_gbps = 0;
  double transfer_us = 0;  // until a row of 8 KiB from the device has reached the host
  double f16_tflops = 0;   // cuBLAS with f16 inputs and f32 sums on random data; 0 in a build without cuBLAS
};

// Takes about half a second and 1 GiB of device memory (on a small GPU, a quarter of its memory). Throws DeviceError,
// OutOfMemoryError.
DeviceRates measure_rates(int ordinal);

// Median seconds of `work`, after enough repetitions to raise the clocks.
double median_seconds(cudaStream_t stream, const std::function<void()>& work);

// DeviceRates::f16_tflops, with square matrices in `bytes` of memory. Not in a build without cuBLAS.
double product_tflops(std::byte* memory, size_t bytes, cudaStream_t stream);

}  // namespace dyno::runtime
