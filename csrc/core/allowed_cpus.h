// The CPUs on which the system lets a thread run.
#pragma once

#include <span>
#include <string>
#include <vector>

namespace dyno {

// CPUs that this thread may run on: ascending numbers, or empty if the system does not report them.
std::vector<int> allowed_cpus();

// Binds the calling thread to these CPUs. Returns the reason if the system refuses, else an empty string.
std::string pin_this_thread(std::span<const int> cpus);

}  // namespace dyno
