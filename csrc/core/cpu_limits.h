// The cores and the memory that this process may use: affinity and the limits of its control groups (v1 and v2).
#pragma once

#include <cstdint>
#include <string>

namespace dyno {

struct CpuLimits {
  int cores = 1;             // usable: the lower of affinity and quota, the quota rounded down to 1 or more
  int online = 1;            // of the machine
  int affinity = 1;          // that the scheduler allows; a cpuset shows here
  double quota = 0;          // CPUs that the control groups grant; 0 = no limit
  std::string quota_from;    // the file that sets it; empty = no limit
  int64_t memory_bytes = 0;  // the lower of installed memory and limit
  int64_t installed_bytes = 0;
  std::string memory_from;  // the file that sets the limit; empty = installed memory
};

// `root` holds proc/self/cgroup and sys/fs/cgroup: "/" but in tests. A file that is absent or makes no sense limits
// nothing. Every folder from the process's group up to the mount counts; the tightest limit holds.
CpuLimits detect_cpu_limits(const std::string& root = "/");

}  // namespace dyno
