// dyno._core.DeviceArray: float rows in the memory of the device that computed them, for anything that takes DLPack.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <memory>

#include "core/device_info.h"

namespace dyno {

// A reader need not wait for a stream: the array is made after everything that writes to it has ended.
struct DeviceArray {
  std::shared_ptr<float[]> data;  // each capsule of __dlpack__ is an owner too
  size_t rows = 0;
  size_t columns = 0;
  DeviceKind kind = DeviceKind::cpu;
  int ordinal = 0;
};

void bind_device_array(nanobind::module_& m);

}  // namespace dyno
