// The GPUs of this machine. Works in every build: without CUDA, or without a driver, there are none, and why() says so.
#pragma once

#include <string>
#include <vector>

#include "core/device_info.h"

namespace dyno {

// In the order of the CUDA runtime's ordinals, which CUDA_VISIBLE_DEVICES filters.
std::vector<DeviceInfo> detect_cuda();

// Why detect_cuda() is empty; empty when it is not.
std::string no_cuda_reason();

// The GPU `ordinal`. Throws DeviceError that says how many there are, or why there are none.
DeviceInfo cuda_device(int ordinal);

// Free bytes of device memory right now.
size_t cuda_free_bytes(int ordinal);

}  // namespace dyno
