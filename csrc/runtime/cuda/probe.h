// The best rates of a GPU, measured: the ceilings that rates are compared with.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>

namespace dyno::runtime {

struct DeviceRates {
  double memory_gbps = 0;          // a large copy within the device, bytes read + written, in 1e9 a second
  double host_to_device_gbps = 0;  // page-locked memory
  double device_to_host_gbps = 0;
  double transfer_us = 0;  // until the host has a row of 8 KiB that the device had
  double f16_tflops = 0;   // cuBLAS, half products summed in f32, random data; 0 in a build without cuBLAS
};

// Takes about half a second and 1 GiB of device memory (less on a small GPU, of which a quarter is taken). Throws
// DeviceError, OutOfMemoryError.
DeviceRates measure_rates(int ordinal);

// Median seconds of `work`, after it has run for long enough to bring the clocks up.
double median_seconds(cudaStream_t stream, const std::function<void()>& work);

// DeviceRates::f16_tflops, by square matrices in the `bytes` at `memory`. Not in a build without cuBLAS.
double product_tflops(std::byte* memory, size_t bytes, cudaStream_t stream);

}  // namespace dyno::runtime
