// The CPUs on which the system lets a thread run.
#pragma once

#include <span>
#include <string>
#include <vector>

namespace dyno {

// Numbers of the CPUs that this thread may run on, ascending; nothing if the system does not tell.
std::vector<int> allowed_cpus();

// Keeps the calling thread on these CPUs. Empty, or why the system refused.
std::string pin_this_thread(std::span<const int> cpus);

}  // namespace dyno
