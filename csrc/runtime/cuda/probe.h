// What a GPU does at best, measured: the ceilings that rates are compared with.
#pragma once

namespace dyno::runtime {

struct DeviceRates {
  double memory_gbps = 0;          // a large copy within the device, bytes read + written, in 1e9 a second
  double host_to_device_gbps = 0;  // page-locked memory
  double device_to_host_gbps = 0;
  double f16_tflops = 0;  // cuBLAS, half products summed in f32, random data
};

// Takes about half a second and 1 GiB of device memory (less on a small GPU, of which a quarter is taken). Throws
// DeviceError, OutOfMemoryError.
DeviceRates measure_rates(int ordinal);

}  // namespace dyno::runtime
