#include "core/cpu_limits.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <limits>

#include "core/allowed_cpus.h"
#include "core/control_groups.h"

namespace dyno {
namespace {

namespace fs = std::filesystem;

std::optional<int64_t> positive(std::string_view text) {
  const auto value = whole_number(text);
  return value && *value > 0 ? value : std::nullopt;
}

void take_quota(CpuLimits& limits, const fs::path& file, const std::string& quota, const std::string& period) {
  const auto q = positive(quota), p = positive(period);
  if (!q || !p) return;
  const double cpus = static_cast<double>(*q) / static_cast<double>(*p);
  if (limits.quota == 0 || cpus < limits.quota) {
    limits.quota = cpus;
    limits.quota_from = file.string();
  }
}

void take_memory(CpuLimits& limits, const fs::path& file) {
  // Version 1 writes "no limit" as a number near 2^63, which is more than any installed memory.
  const auto bytes = positive(word_of(file));
  if (!bytes || *bytes >= limits.memory_bytes) return;
  limits.memory_bytes = *bytes;
  limits.memory_from = file.string();
}

// OMP_NUM_THREADS is a list. Its first number is for the outermost level, which is the threads of this process.
void take_omp(CpuLimits& limits, const char* text) {
  if (text == nullptr) return;
  limits.omp = text;
  std::string_view first = limits.omp;
  first = first.substr(0, first.find(','));
  const size_t begin = first.find_first_not_of(" \t"), end = first.find_last_not_of(" \t");
  if (begin == std::string_view::npos) return;
  const auto threads = positive(first.substr(begin, end - begin + 1));
  limits.omp_threads = static_cast<int>(std::min<int64_t>(threads.value_or(0), std::numeric_limits<int>::max()));
}

}  // namespace

CpuLimits detect_cpu_limits(const std::string& root) {
  CpuLimits limits;
  limits.online = static_cast<int>(std::max(1L, sysconf(_SC_NPROCESSORS_ONLN)));
  const auto allowed = static_cast<int>(allowed_cpus().size());
  limits.affinity = allowed > 0 ? allowed : limits.online;
  limits.installed_bytes = static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  limits.memory_bytes = limits.installed_bytes;
  take_omp(limits, std::getenv("OMP_NUM_THREADS"));
  for (const ControlGroup& group : control_groups(root)) {
    const fs::path quota = group.folder / (group.unified ? "cpu.max" : "cpu.cfs_quota_us");
    const std::string period = group.unified ? word_of(quota, 1) : word_of(group.folder / "cpu.cfs_period_us");
    if (group.cpu) take_quota(limits, quota, word_of(quota), period);
    if (group.memory) take_memory(limits, group.folder / (group.unified ? "memory.max" : "memory.limit_in_bytes"));
  }
  limits.cores = limits.affinity;
  // Rounded down, because with 1.5 CPUs a second thread is stopped for half of each period while the first one waits
  // for it.
  if (limits.quota > 0 && limits.quota < limits.cores) limits.cores = std::max(1, static_cast<int>(limits.quota));
  if (limits.omp_threads > 0) limits.cores = std::min(limits.cores, limits.omp_threads);
  return limits;
}

}  // namespace dyno
