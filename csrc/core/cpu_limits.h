// The cores and the memory that this process may use: affinity, OMP_NUM_THREADS and the limits of its control groups.
#pragma once

#include <cstdint>
#include <string>

namespace dyno {

struct CpuLimits {
  int cores = 1;             // usable: the minimum of affinity, quota (rounded down, at least 1) and omp_threads
  int online = 1;            // CPUs of the machine
  int affinity = 1;          // CPUs in the affinity of this process, which a cpuset restricts
  double quota = 0;          // CPUs that the control groups grant; 0 = no limit
  std::string quota_from;    // the file that sets it; empty = no limit
  int omp_threads = 0;       // from the environment variable OMP_NUM_THREADS; 0 = unset or not a number of threads
  std::string omp;           // the text of OMP_NUM_THREADS
  int64_t memory_bytes = 0;  // the lower of installed memory and the limit
  int64_t installed_bytes = 0;
  std::string memory_from;  // the file that sets the limit; empty = installed memory
};

// `root` is the folder that holds proc and sys: "/", except in tests. A missing or malformed file sets no limit. Limits
// of the process's group and of all its parents up to the mount apply; the lowest one counts.
CpuLimits detect_cpu_limits(const std::string& root = "/");

}  // namespace dyno
