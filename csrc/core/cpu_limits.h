// The cores and the memory that this process may use: affinity, OMP_NUM_THREADS and the limits of its control groups.
#pragma once

#include <cstdint>
#include <string>

namespace dyno {

struct CpuLimits {
  int cores = 1;             // usable: the least of affinity, quota (rounded down to 1 or more) and omp_threads
  int online = 1;            // of the machine
  int affinity = 1;          // that the scheduler allows; a cpuset shows here
  double quota = 0;          // CPUs that the control groups grant; 0 = no limit
  std::string quota_from;    // the file that sets it; empty = no limit
  int omp_threads = 0;       // of the environment variable OMP_NUM_THREADS; 0 = not set, or no number of threads
  std::string omp;           // its text
  int64_t memory_bytes = 0;  // the lower of installed memory and limit
  int64_t installed_bytes = 0;
  std::string memory_from;  // the file that sets the limit; empty = installed memory
};

// `root` holds proc and sys: "/" but in tests. A file that is absent or makes no sense limits
// nothing. Every folder from the process's group up to the mount counts; the tightest limit holds.
CpuLimits detect_cpu_limits(const std::string& root = "/");

}  // namespace dyno
