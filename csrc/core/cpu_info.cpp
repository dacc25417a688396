#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <algorithm>
#include <array>
#include <cstdlib>
#include <fstream>

#include "core/cpu_caches.h"
#include "core/cpu_limits.h"
#include "core/device_info.h"
#include "core/error.h"
#include "core/numa_topology.h"

namespace dyno {
namespace {

constexpr std::array<std::string_view, 3> kIsaNames = {"portable", "avx2", "avx512_vnni"};

// The instruction sets of this binary, best first.
constexpr std::array kCompiled = {
#ifdef DYNO_HAVE_ISA_avx512_vnni
    CpuIsa::avx512_vnni,
#endif
#ifdef DYNO_HAVE_ISA_avx2
    CpuIsa::avx2,
#endif
#ifdef DYNO_HAVE_ISA_portable
    CpuIsa::portable,
#endif
};

#if defined(__x86_64__)
// clang 14 does not know "f16c" in __builtin_cpu_supports. "avx" includes the check that the system saves the
// registers.
bool has_f16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0 && __builtin_cpu_supports("avx");
}
#endif

bool machine_has(CpuIsa isa) {
#if defined(__x86_64__)
  switch (isa) {
    case CpuIsa::portable:
      return true;
    case CpuIsa::avx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c() &&
             __builtin_cpu_supports("bmi2");
    case CpuIsa::avx512_vnni:
      return machine_has(CpuIsa::avx2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
             __builtin_cpu_supports("avx512vnni");
  }
  return false;
#else
  return isa == CpuIsa::portable;
#endif
}

CpuIsa best_isa() {
  CpuIsa cap = CpuIsa::avx512_vnni;
  if (const char* forced = std::getenv("DYNO_CPU_ISA"); forced != nullptr && *forced != '\0') {
    cap = cpu_isa_from_name(forced);
  }
  for (const CpuIsa isa : kCompiled) {
    if (isa <= cap && machine_has(isa)) return isa;
  }
  std::string built;
  for (const CpuIsa isa : kCompiled) built += str_cat(" ", cpu_isa_name(isa));
  throw UnsupportedError(
      str_cat("[cpu] no compiled instruction set runs here: this build holds", built,
              ", but this machine or DYNO_CPU_ISA allows less; unset DYNO_CPU_ISA or build on this machine"));
}

std::string model_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("model name", 0) == 0) {
      const size_t colon = line.find(':');
      if (colon != std::string::npos && colon + 2 <= line.size()) return line.substr(colon + 2);
    }
  }
  return "unknown CPU";
}

std::vector<std::string> features() {
  std::vector<std::string> out;
#if defined(__x86_64__)
#define DYNO_FEATURE(name) \
  if (__builtin_cpu_supports(name)) out.emplace_back(name)
  DYNO_FEATURE("sse4.2");
  DYNO_FEATURE("avx");
  DYNO_FEATURE("avx2");
  DYNO_FEATURE("fma");
  if (has_f16c()) out.emplace_back("f16c");
  DYNO_FEATURE("avx512f");
  DYNO_FEATURE("avx512bw");
  DYNO_FEATURE("avx512dq");
  DYNO_FEATURE("avx512vl");
  DYNO_FEATURE("avx512vbmi");
  DYNO_FEATURE("avx512vnni");
  DYNO_FEATURE("avx512bf16");
#undef DYNO_FEATURE
#endif
  return out;
}

}  // namespace

std::string_view cpu_isa_name(CpuIsa isa) { return kIsaNames[static_cast<size_t>(isa)]; }

CpuIsa cpu_isa_from_name(std::string_view name) {
  const auto it = std::find(kIsaNames.begin(), kIsaNames.end(), name);
  DYNO_CHECK(UnsupportedError, it != kIsaNames.end(), "[cpu] unknown instruction set '", name,
             "'; expected portable, avx2 or avx512_vnni");
  return static_cast<CpuIsa>(it - kIsaNames.begin());
}

std::string device_name(const DeviceInfo& device) {
  if (device.kind == DeviceKind::cuda) return str_cat("cuda:", device.ordinal);
  return device.ordinal == 0 ? "cpu" : str_cat("cpu:", device.ordinal);
}

DeviceInfo detect_cpu() {
  DeviceInfo info;
  info.kind = DeviceKind::cpu;
  info.name = model_name();
  info.isa = best_isa();
  info.cpu_features = features();
  const CpuLimits limits = detect_cpu_limits();
  info.cores = limits.cores;
  info.memory_bytes = limits.memory_bytes;
  info.numa_nodes = static_cast<int>(detect_numa_nodes().size());
  const CpuCaches caches = detect_cpu_caches();
  info.l1d_bytes = caches.l1d_bytes;
  info.l2_bytes = caches.l2_bytes;
  info.l3_bytes = caches.l3_bytes;
  return info;
}

}  // namespace dyno
