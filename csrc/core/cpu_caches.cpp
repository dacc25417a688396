#include "core/cpu_caches.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <string_view>

#include "core/control_groups.h"
#include "core/error.h"

namespace dyno {
namespace {

// "32K", "1M" or a number of bytes; 0 for other text.
int64_t size_of(const std::string& word) {
  const size_t digits = std::min(word.find_first_not_of("0123456789"), word.size());
  const std::optional<int64_t> value = whole_number(std::string_view(word).substr(0, digits));
  const std::string unit = word.substr(digits);
  const int shift = unit == "K" ? 10 : unit == "M" ? 20 : unit == "G" ? 30 : unit.empty() ? 0 : -1;
  if (!value || shift < 0 || *value > (int64_t{1} << 40) >> shift) return 0;
  return *value << shift;
}

// The size of the cache level that the sysconf name `name` describes. The C library asks the processor itself. On an
// AMD EPYC in a virtual machine it reports 320 MiB of level 3, but the kernel reports the 32 MiB that the cores share.
int64_t cache_bytes(const std::string& root, int level, int name, int64_t fallback) {
  const std::filesystem::path folder = std::filesystem::path(root) / "sys/devices/system/cpu/cpu0/cache";
  for (int i = 0; i < 16; ++i) {
    const std::filesystem::path index = folder / str_cat("index", i);
    const std::string found = word_of(index / "level");
    if (found.empty()) break;
    if (found != str_cat(level) || word_of(index / "type") == "Instruction") continue;
    if (const int64_t bytes = size_of(word_of(index / "size")); bytes > 0) return bytes;
  }
  const long value = sysconf(name);
  return value > 0 ? value : fallback;
}

}  // namespace

CpuCaches detect_cpu_caches(const std::string& root) {
  const CpuCaches unknown;
  return {cache_bytes(root, 1, _SC_LEVEL1_DCACHE_SIZE, unknown.l1d_bytes),
          cache_bytes(root, 2, _SC_LEVEL2_CACHE_SIZE, unknown.l2_bytes),
          cache_bytes(root, 3, _SC_LEVEL3_CACHE_SIZE, unknown.l3_bytes)};
}

}  // namespace dyno
