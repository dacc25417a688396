// dyno._core.build_info and cpu_info: properties of the build and of the machine.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <initializer_list>
#include <string>
#include <utility>

#include "bindings/convert.h"
#include "bindings/cuda_launch.h"
#include "bindings/gil_release.h"
#include "bindings/ops_convert.h"
#include "build_info.h"
#include "core/cpu_caches.h"
#include "core/cpu_distance.h"
#include "core/cpu_limits.h"
#include "core/cuda_devices.h"
#include "core/device_info.h"
#include "core/device_loss.h"
#include "core/error.h"
#include "core/host_memory.h"
#include "core/numa_memory.h"
#include "core/numa_topology.h"
#include "ops/instances.h"
#ifdef DYNO_HAVE_CUDA
#include "runtime/cuda/probe.h"
#endif

namespace nb = nanobind;
using namespace nb::literals;

namespace dyno {
namespace {

nb::list split_list(const std::string& text) {
  nb::list out;
  size_t begin = 0;
  while (begin <= text.size()) {
    const size_t end = std::min(text.find(';', begin), text.size());
    if (end > begin) out.append(nb::str(text.substr(begin, end - begin).c_str()));
    begin = end + 1;
  }
  return out;
}

nb::dict build_info() {
  nb::dict d;
  d["version"] = DYNO_VERSION;
  d["ops_revision"] = DYNO_OPS_REVISION;
  d["compiler"] = DYNO_COMPILER;
  d["build_type"] = DYNO_BUILD_TYPE;
  nb::dict switches;
  for (const auto& [name, value] : std::initializer_list<std::pair<const char*, const char*>>{DYNO_SWITCHES}) {
    switches[name] = value;
  }
  d["switches"] = switches;
  d["isas"] = split_list(DYNO_ISAS);
#ifdef DYNO_HAVE_CUDA
  d["cuda_types"] = ops::types_compiled();
  d["cuda_groups"] = ops::groups_compiled();
#else
  d["cuda_types"] = nb::list();
  d["cuda_groups"] = nb::list();
#endif
  d["cuda_types_of"] = ops::kBuiltFor;
  d["cuda_groups_of"] = ops::kGroupsFor;
  return d;
}

nb::dict cpu_limits(const std::string& root) {
  const CpuLimits limits = detect_cpu_limits(root);
  nb::dict d;
  d["cores"] = limits.cores;
  d["online"] = limits.online;
  d["affinity"] = limits.affinity;
  d["quota"] = limits.quota;
  d["quota_from"] = limits.quota_from;
  d["omp_threads"] = limits.omp_threads;
  d["omp"] = limits.omp;
  d["memory_bytes"] = limits.memory_bytes;
  d["installed_bytes"] = limits.installed_bytes;
  d["memory_from"] = limits.memory_from;
  return d;
}

nb::dict cpu_distances() {
  const CpuDistances found = [] {
    const GilRelease others_run;
    return measure_cpu_distances();
  }();
  nb::dict d;
  d["pairs"] = found.pairs;
  d["median_ns"] = found.median_ns;
  d["farthest_ns"] = found.farthest_ns;
  d["farthest"] = nb::make_tuple(found.farthest.first, found.farthest.second);
  d["unknown"] = found.unknown;
  return d;
}

nb::list numa_nodes(const std::string& root) {
  nb::list all;
  for (const NumaNode& node : detect_numa_nodes(root)) {
    nb::dict d;
    d["number"] = node.number;
    d["cpus"] = node.cpus;
    d["memory_bytes"] = node.memory_bytes;
    all.append(d);
  }
  return all;
}

nb::dict measured_rates(std::string_view name) {
  const DeviceInfo device = device_from_name(name, "auto");
  DYNO_CHECK(DeviceError, device.kind == DeviceKind::cuda, "[probe] device is '", name, "'; expected a GPU (cuda:N)");
  nb::dict d;
#ifdef DYNO_HAVE_CUDA
  runtime::DeviceRates rates;
  {
    const GilRelease unlocked;
    rates = runtime::measure_rates(device.ordinal);
  }
  d["memory_gbps"] = rates.memory_gbps;
  d["host_to_device_gbps"] = rates.host_to_device_gbps;
  d["device_to_host_gbps"] = rates.device_to_host_gbps;
  d["transfer_us"] = rates.transfer_us;
  if (rates.f16_tflops > 0) d["f16_tflops"] = rates.f16_tflops;
#endif
  return d;
}

}  // namespace

nb::dict device_dict(const DeviceInfo& info) {
  nb::dict d;
  d["kind"] = info.kind == DeviceKind::cpu ? "cpu" : "cuda";
  d["name"] = info.name;
  d["memory_bytes"] = info.memory_bytes;
  if (info.kind == DeviceKind::cpu) {
    d["isa"] = std::string(cpu_isa_name(info.isa));
    d["features"] = info.cpu_features;
    d["cores"] = info.cores;
    d["numa_nodes"] = info.numa_nodes;
    d["l1d_bytes"] = info.l1d_bytes;
    d["l2_bytes"] = info.l2_bytes;
    d["l3_bytes"] = info.l3_bytes;
  } else {
    d["l2_bytes"] = info.l2_bytes;
    d["compute_capability"] = info.compute_capability;
    d["sm_count"] = info.sm_count;
    d["shared_per_block_bytes"] = info.shared_per_block_bytes;
    d["maps_memory"] = info.maps_memory;
    d["pci_bus_id"] = info.pci_bus_id;
  }
  return d;
}

void bind_info(nb::module_& m) {
  m.def(
      "build_info", &build_info, nb::sig("def build_info() -> dict[str, typing.Any]"),
      "Version, compiler, every build switch, and what kernels were compiled for: instruction sets of CPUs, and weight "
      "types of GPUs with the profile that left out other types ('' if none did).");
  m.def(
      "cpu_info", [] { return device_dict(detect_cpu()); }, nb::sig("def cpu_info() -> dict[str, typing.Any]"),
      "The CPU this process runs on: name, isa (the best usable set), features, cores, cache sizes, memory.");
  m.def("gpu_free_bytes", &cuda_free_bytes, "number"_a,
        "Bytes of a GPU's memory that nobody has taken. Asking starts CUDA on it, which takes some itself. number: of "
        "cuda:N. Raises DeviceError without such a GPU, DeviceLostError if this process has lost it.");
  m.def("available_host_bytes", &available_host_bytes, "root"_a = "",
        "Bytes of memory that this process may still take: the system's available memory, or less where a memory limit "
        "of cgroup v1 or v2 leaves less. None where the system tells neither. root: a folder to read /proc and /sys "
        "below, for tests.");
  m.def(
      "cpu_caches",
      [](const std::string& root) {
        const CpuCaches caches = detect_cpu_caches(root);
        return nb::make_tuple(caches.l1d_bytes, caches.l2_bytes, caches.l3_bytes);
      },
      "root"_a = "/", nb::sig("def cpu_caches(root: str = '/') -> tuple[int, int, int]"),
      "Bytes of the first and second data cache of a core, and of the third. root: a folder that holds sys in place of "
      "the machine's.");
  m.def("numa_nodes", &numa_nodes, "root"_a = "",
        nb::sig("def numa_nodes(root: str = '') -> list[dict[str, typing.Any]]"),
        "The NUMA nodes whose memory and cores this process may use: `number`, `cpus` and `memory_bytes`. root: a "
        "folder that holds sys and proc in place of the machine's, for tests.");
  m.def(
      "numa_of_thread",
      [](int thread, int threads, const std::string& root) {
        return node_of_thread(detect_numa_nodes(root), thread, threads);
      },
      "thread"_a, "threads"_a, "root"_a = "",
      "The place in numa_nodes() of the node on which a thread of so many works.");
  m.def(
      "place_pages",
      [](nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> memory, bool interleave,
         const std::vector<int>& nodes) {
        return place_pages({reinterpret_cast<std::byte*>(memory.data()), memory.size()},
                           interleave ? PagePolicy::interleave : PagePolicy::prefer, nodes);
      },
      "memory"_a, "interleave"_a, "nodes"_a,
      nb::sig("def place_pages(memory: numpy.typing.NDArray[numpy.uint8], interleave: bool, nodes: "
              "collections.abc.Sequence[int]) -> str"),
      "Asks the system to put pages of an array that nobody has touched on NUMA nodes: by turns, or on the first one "
      "alone. Why it refused; empty if it did not. For tests.");
  m.def(
      "nodes_of_pages",
      [](nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> memory) {
        return nodes_of_pages({reinterpret_cast<const std::byte*>(memory.data()), memory.size()});
      },
      "memory"_a, nb::sig("def nodes_of_pages(memory: numpy.typing.NDArray[numpy.uint8]) -> list[int]"),
      "The NUMA node of each page of an array, -1 for pages that are not resident.");
  m.def("cpu_limits", &cpu_limits, "root"_a = "/", nb::sig("def cpu_limits(root: str = '/') -> dict[str, typing.Any]"),
        "The cores and bytes of memory that this process may use, and what limits them: affinity, the files of control "
        "groups, OMP_NUM_THREADS (`omp` is its text). `root` holds proc and sys. A quota or omp_threads of 0 is no "
        "limit.");
  m.def("ring_of_pairs", &ring_of_pairs, "cpus"_a, "most"_a,
        nb::sig("def ring_of_pairs(cpus: collections.abc.Sequence[int], most: int) -> list[tuple[int, int]]"),
        "The pairs of neighbours that cpu_distances() measures. For tests.");
  m.def("cpu_distances", &cpu_distances, nb::sig("def cpu_distances() -> dict[str, typing.Any]"),
        "How far the CPUs of this thread are from each other: `median_ns` and `farthest_ns` of a cache line's way "
        "there and back, over `pairs` pairs of neighbours (at most 16), and the numbers of the farthest pair. Takes "
        "about a millisecond, or a tenth of a second where a CPU is busy; `pairs` is then 0, and `unknown` says why.");
  m.def(
      "devices",
      [] {
        nb::list all;
        all.append(device_dict(detect_cpu()));
        for (const DeviceInfo& device : detect_cuda()) all.append(device_dict(device));
        return all;
      },
      nb::sig("def devices() -> list[dict[str, typing.Any]]"),
      "The CPU, then every GPU that the CUDA runtime shows, in its order: cuda:0, cuda:1, …");
  m.def(
      "device_problem", [](const nb::dict& device) { return device_problem(device_from_dict(device)); }, "device"_a,
      "Why this build cannot run on a device, described as in devices(); empty where it can.");
  m.def("device_loss", &device_loss, "ordinal"_a,
        "Why this process can use the GPU with that number no more, and what to do; empty where it can.");
  m.def("measure_rates", &measured_rates, "device"_a, nb::sig("def measure_rates(device: str) -> dict[str, float]"),
        "What a GPU does at best, measured in about half a second: memory_gbps (a copy, read + written), "
        "host_to_device_gbps and device_to_host_gbps (page-locked), transfer_us (until the host has a row of 8 KiB), "
        "f16_tflops (by cuBLAS, in builds that have it). Raises DeviceError.");
  m.def("no_cuda_reason", &no_cuda_reason, "Why devices() shows no GPU; empty when it shows one.");
}

}  // namespace dyno
