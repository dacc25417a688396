// The data caches of this machine's CPU.
#pragma once

#include <cstdint>
#include <string>

namespace dyno {

struct CpuCaches {
  int64_t l1d_bytes = 32 << 10;  // per core
  int64_t l2_bytes = 1 << 20;    // per core
  int64_t l3_bytes = 0;          // shared
};

// Sizes that the kernel reports, or else the C library. `root` is the folder that holds sys.
CpuCaches detect_cpu_caches(const std::string& root = "/");

}  // namespace dyno
