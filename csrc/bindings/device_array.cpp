#include "bindings/device_array.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include <optional>
#include <string>
#include <utility>

#include "core/error.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace dyno {
namespace {

std::pair<int, int> dlpack_device(const DeviceArray& array) {
  return array.kind == DeviceKind::cuda ? std::pair(int{nb::device::cuda::value}, array.ordinal)
                                        : std::pair(int{nb::device::cpu::value}, 0);
}

nb::object dlpack(const DeviceArray& array, const std::optional<std::pair<int, int>>& device,
                  std::optional<bool> copy) {
  const auto [type, number] = dlpack_device(array);
  if ((device && *device != std::pair(type, number)) || copy.value_or(false)) {
    throw nb::buffer_error(str_cat("a DeviceArray can be viewed only on its own device (", type, ", ", number,
                                   ") only; take it there and copy it with the library that takes it")
                               .c_str());
  }
  auto* held = new std::shared_ptr<float[]>(array.data);
  const nb::capsule owner(held, [](void* p) noexcept { delete static_cast<std::shared_ptr<float[]>*>(p); });
  const size_t shape[] = {array.rows, array.columns};
  return nb::cast(nb::ndarray<float>(array.data.get(), 2, shape, owner, nullptr, nb::dtype<float>(), type, number));
}

}  // namespace

void bind_device_array(nb::module_& m) {
  nb::class_<DeviceArray>(m, "DeviceArray",
                          "Rows of float32 in the memory of the device that computed them: numpy.from_dlpack, "
                          "cupy.from_dlpack or torch.from_dlpack gives a view. The memory lives as long as this and "
                          "its views, also if the session ends.")
      .def_prop_ro(
          "shape", [](const DeviceArray& a) { return std::pair(a.rows, a.columns); }, "Rows and columns.")
      .def(
          "__dlpack__",
          [](const DeviceArray& a, const nb::object&, const nb::object&,
             const std::optional<std::pair<int, int>>& device,
             std::optional<bool> copy) { return dlpack(a, device, copy); },
          nb::kw_only(), "stream"_a = nb::none(), "max_version"_a = nb::none(), "dl_device"_a = nb::none(),
          "copy"_a = nb::none(),
          nb::sig(
              "def __dlpack__(self, *, stream: object = None, max_version: tuple[int, int] | None = None, "
              "dl_device: tuple[int, int] | None = None, copy: bool | None = None) -> typing_extensions.CapsuleType"),
          "A capsule without a version, whatever `max_version` is. `stream` is not used, since the values are "
          "complete. "
          "Raises BufferError for another device or a copy.")
      .def("__dlpack_device__", &dlpack_device, "Type and number of the device: (1, 0) is the CPU, (2, n) is cuda:n.");
}

}  // namespace dyno
