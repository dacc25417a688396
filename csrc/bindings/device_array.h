// dyno._core.DeviceArray: float rows in the memory of the device that computed them, for libraries with DLPack.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <memory>

#include "core/device_info.h"

namespace dyno {

// Readers need not wait for a stream, because the array is created after all writes to it have completed.
struct DeviceArray {
  std::shared_ptr<float[]> data;  // shared with every capsule of __dlpack__
  size_t rows = 0;
  size_t columns = 0;
  DeviceKind kind = DeviceKind::cpu;
  int ordinal = 0;
};

void bind_device_array(nanobind::module_& m);

}  // namespace dyno
