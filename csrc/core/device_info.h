// Properties of a device: the input of candidates(), supports() and default_config(). A plain value, so that the
// kernels for any device can be chosen and tested on any machine.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace dyno {

enum class DeviceKind : uint8_t { cpu, cuda };

// Instruction sets that kernels are compiled for, in ascending order; each includes the ones before it.
enum class CpuIsa : uint8_t {
  portable,     // no more than the ABI's baseline
  avx2,         // AVX2 + FMA + F16C
  avx512_vnni,  // AVX-512 F/BW/DQ/VL + VNNI
};

std::string_view cpu_isa_name(CpuIsa isa);
// Throws UnsupportedError that lists the valid names.
CpuIsa cpu_isa_from_name(std::string_view name);

struct DeviceInfo {
  DeviceKind kind = DeviceKind::cpu;
  std::string name;          // marketing name, a label only
  int64_t memory_bytes = 0;  // total, not free
  // cuda: number in the CUDA runtime. cpu: 0, or the number of a virtual device, which has separate memory within the
  // same process and machine.
  int ordinal = 0;

  // cpu
  CpuIsa isa = CpuIsa::portable;          // the best set that the machine, the build and DYNO_CPU_ISA allow
  std::vector<std::string> cpu_features;  // "avx2", "avx512_vnni", … as detected
  int cores = 1;                          // usable: the lower of affinity and quota
  int numa_nodes = 1;                     // nodes whose memory and cores this process may use
  int64_t l1d_bytes = 32 << 10;           // per core
  int64_t l2_bytes = 1 << 20;             // per core
  int64_t l3_bytes = 0;                   // shared

  // cuda
  int compute_capability = 0;  // 90 = 9.0
  int sm_count = 0;
  int64_t shared_per_block_bytes = 0;
  // Whether the driver has virtual memory management, which maps memory into parts of reserved address ranges.
  bool maps_memory = true;
  std::string pci_bus_id;  // "0000:1b:00.0": the name of the GPU in the driver's tools
};

// cpu, cpu:N (a virtual device) or cuda:N.
std::string device_name(const DeviceInfo& device);

// The CPU of this machine. The environment variable DYNO_CPU_ISA limits `isa` (for tests).
DeviceInfo detect_cpu();

}  // namespace dyno
