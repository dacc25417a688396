#include "core/host_memory.h"

#include <fstream>
#include <limits>
#include <string>

namespace dyno {

std::optional<size_t> host_available_bytes() {
  std::ifstream file("/proc/meminfo");
  std::string name, unit;
  size_t kib = 0;
  while (file >> name >> kib) {
    std::getline(file, unit);
    if (name != "MemAvailable:") continue;
    if (kib > std::numeric_limits<size_t>::max() / 1024) return std::nullopt;
    return kib * 1024;
  }
  return std::nullopt;
}

}  // namespace dyno
