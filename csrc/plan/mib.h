// Formats bytes as MiB. Internal to plan/.
#pragma once

#include <iomanip>
#include <sstream>
#include <string>

namespace dyno::plan {

inline std::string mib(size_t bytes) {
  std::ostringstream out;
  out << std::fixed << std::setprecision(1) << static_cast<double>(bytes) / (1 << 20) << " MiB";
  return out.str();
}

}  // namespace dyno::plan
