// The GPUs of this machine. The functions exist in every build; without CUDA or a driver the list is empty, and
// no_cuda_reason() says why.
#pragma once

#include <string>
#include <vector>

#include "core/device_info.h"

namespace dyno {

// All GPUs in the order of the CUDA runtime's ordinals, which CUDA_VISIBLE_DEVICES filters.
std::vector<DeviceInfo> detect_cuda();

// The reason that detect_cuda() is empty; an empty string if it is not.
std::string no_cuda_reason();

// The GPU with number `ordinal`. Throws DeviceError if it does not exist; the message has the number of GPUs, or the
// reason that there are none.
DeviceInfo cuda_device(int ordinal);

// Bytes of device memory that are free now.
size_t cuda_free_bytes(int ordinal);

}  // namespace dyno
