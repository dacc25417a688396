// Host memory that this process may still allocate.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

namespace dyno {

// Bytes: the minimum of the system's available memory and the room under the memory limits of cgroup v1 or v2. Page
// cache counts as free. Empty if the system reports neither. `root` is a prefix of every path that is read, for tests.
std::optional<size_t> available_host_bytes(const std::string& root = "");

}  // namespace dyno
