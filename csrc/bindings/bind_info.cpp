// dyno._core.build_info and cpu_info: what was built, and what it runs on.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <initializer_list>
#include <string>
#include <utility>

#include "bindings/convert.h"
#include "build_info.h"
#include "core/cuda_devices.h"
#include "core/device_info.h"

namespace nb = nanobind;

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
    d["l1d_bytes"] = info.l1d_bytes;
    d["l2_bytes"] = info.l2_bytes;
    d["l3_bytes"] = info.l3_bytes;
  } else {
    d["l2_bytes"] = info.l2_bytes;
    d["compute_capability"] = info.compute_capability;
    d["sm_count"] = info.sm_count;
    d["shared_per_block_bytes"] = info.shared_per_block_bytes;
  }
  return d;
}

void bind_info(nb::module_& m) {
  m.def("build_info", &build_info, nb::sig("def build_info() -> dict[str, typing.Any]"),
        "Version, compiler, every build switch and the instruction sets that kernels were compiled for.");
  m.def(
      "cpu_info", [] { return device_dict(detect_cpu()); }, nb::sig("def cpu_info() -> dict[str, typing.Any]"),
      "The CPU this process runs on: name, isa (the best usable set), features, cores, cache sizes, memory.");
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
  m.def("no_cuda_reason", &no_cuda_reason, "Why devices() shows no GPU; empty when it shows one.");
}

}  // namespace dyno
