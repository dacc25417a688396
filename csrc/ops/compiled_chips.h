// The chips that this build has code for. Warpgroup products (wgmma) need code for 90a.
#pragma once

#include <string_view>

#include "core/device_info.h"
#include "core/error.h"
#include "ops/op.h"

namespace dyno::ops {

#if defined(DYNO_HAVE_CUDA)
inline constexpr std::string_view kCompiledArchitectures = DYNO_CUDA_ARCHITECTURES;
#else
inline constexpr std::string_view kCompiledArchitectures = "90a";  // to choose kernels for a described chip
#endif

inline bool has_wgmma(const DeviceInfo& device) {
  return device.compute_capability == 90 && kCompiledArchitectures.find("90a") != std::string_view::npos;
}

inline Support supports_wgmma(const DeviceInfo& device) {
  if (has_wgmma(device)) return Support::yes();
  return Support::no(str_cat("wgmma needs compute capability 9.0 and code for 90a; the device has ",
                             device.compute_capability, ", the build has ", kCompiledArchitectures));
}

}  // namespace dyno::ops
