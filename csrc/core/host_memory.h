// Memory that this process may still take on the host.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

namespace dyno {

// Bytes: the system's available memory, or less where a memory limit of cgroup v1 or v2 leaves less. Page cache counts
// as free. Nothing where the system tells neither. `root` goes before every path that is read: a made-up tree for
// tests.
std::optional<size_t> available_host_bytes(const std::string& root = "");

}  // namespace dyno
