// Memory of the host that a program may still take.
#pragma once

#include <cstddef>
#include <optional>

namespace dyno {

// Bytes that can be allocated without swapping, as the kernel estimates them (MemAvailable of /proc/meminfo, see
// proc(5)); nullopt where the kernel does not tell.
std::optional<size_t> host_available_bytes();

}  // namespace dyno
