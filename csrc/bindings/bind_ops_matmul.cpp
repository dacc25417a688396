// dyno._core.ops: weight layouts on NumPy arrays.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "bindings/cuda_launch.h"
#include "bindings/gil_release.h"
#include "bindings/launch_context.h"
#include "core/error.h"
#include "ops/copy/act_q8.h"
#include "ops/matmul/gpu_layout.h"
#include "ops/matmul/layout.h"
#include "ops/names.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace dyno {
namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

DType type_of(std::string_view name) {
  const auto type = dtype_from_name(name);
  DYNO_CHECK(UnsupportedError, type.has_value(), "[layout] unknown tensor type '", name,
             "'; expected one such as f16 or q4_0");
  return *type;
}

ops::Layout layout_of(std::string_view name) {
  for (size_t i = 0; i < ops::kLayoutNames.size(); ++i) {
    if (ops::kLayoutNames[i] == name) return static_cast<ops::Layout>(i);
  }
  throw UnsupportedError(str_cat("[layout] unknown layout '", name, "'; expected plain, x16 or gpu"));
}

void check_size(const Bytes& w, DType type, ops::Layout layout, int64_t rows, int64_t k) {
  const size_t bytes = ops::layout_bytes(type, layout, rows, k);
  DYNO_CHECK(PlanError, w.size() == bytes, "[layout] ", rows, " rows of ", k, " ", dtype_name(type), " values are ",
             bytes, " bytes, not ", w.size());
}

template <typename T>
nb::object owned(T* data, std::initializer_list<size_t> shape) {
  const nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, T>(data, shape, owner));
}

nb::object repack(std::string_view type_name, const Bytes& plain, int64_t rows, int64_t k, std::string_view layout_name,
                  std::string_view source_name) {
  const DType type = type_of(type_name);
  const ops::Layout layout = layout_of(layout_name), source = layout_of(source_name);
  DYNO_CHECK(UnsupportedError, layout != ops::Layout::plain,
             "[layout] layout is plain, which needs no repacking; expected x16 or gpu");
  const bool from_x16 = source == ops::Layout::x16 && layout == ops::Layout::gpu;
  DYNO_CHECK(UnsupportedError, from_x16 || source == ops::Layout::plain, "[layout] layout ", layout_name,
             " cannot be made from layout ", source_name, "; x16 is made from plain, and gpu from plain or x16");
  check_size(plain, type, source, rows, k);
  const size_t bytes = ops::layout_bytes(type, layout, rows, k);
  auto* out = new uint8_t[bytes];
  nb::object result = owned(out, {bytes});
  const GilRelease unlocked;
  if (layout == ops::Layout::gpu) {
    const auto make = from_x16 ? ops::repack_gpu_from_x16 : ops::repack_gpu;
    make(type, rows, k, reinterpret_cast<const std::byte*>(plain.data()), reinterpret_cast<std::byte*>(out), 0,
         (rows + ops::kGpuRows - 1) / ops::kGpuRows);
  } else {
    ops::repack_rows(type, plain.data(), out, rows, k);
  }
  return result;
}

// Uses the kernel that repacks copies of streamed weights. Matrix i of `x16` goes to place[i].
nb::object repack_on_gpu(std::string_view type_name, const Bytes& x16, int64_t rows, int64_t k,
                         const std::vector<uint16_t>& place, std::string_view device_name) {
  const DType type = type_of(type_name);
  const DeviceInfo device = device_from_name(device_name, "auto");
  DYNO_CHECK(DeviceError, device.kind == DeviceKind::cuda, "[layout] device is '", device_name,
             "'; expected a GPU (cuda:N)");
  const size_t each = ops::layout_bytes(type, ops::Layout::x16, rows, k);
  const size_t made = ops::layout_bytes(type, ops::Layout::gpu, rows, k);
  DYNO_CHECK(GgufError, !place.empty() && x16.size() == each * place.size(), "[layout] ", x16.size(),
             " bytes given for ", place.size(), " matrices of ", each);
  const size_t bytes = made * (size_t{*std::max_element(place.begin(), place.end())} + 1);
  auto* out = new uint8_t[bytes];
  nb::object result = owned(out, {bytes});
  const GilRelease unlocked;
  repack_x16_on_gpu(device, type, rows, k, x16.data(), x16.size(), place, out, bytes);
  return result;
}

nb::object unpack(std::string_view type_name, std::string_view layout_name, const Bytes& w, int64_t rows, int64_t k,
                  std::string_view isa_name) {
  const DType type = type_of(type_name);
  const ops::Layout layout = layout_of(layout_name);
  const CpuIsa isa = device_with_isa(isa_name).isa;
  check_size(w, type, layout, rows, k);
  auto* out = new float[static_cast<size_t>(rows * k)];
  nb::object result = owned(out, {static_cast<size_t>(rows), static_cast<size_t>(k)});
  const GilRelease unlocked;
  ops::unpack_rows(type, layout, w.data(), out, rows, k, isa);
  return result;
}

}  // namespace

void bind_ops_matmul(nb::module_& o) {
  o.def(
      "layout_supported",
      [](std::string_view type, std::string_view layout) {
        return ops::layout_supported(type_of(type), layout_of(layout));
      },
      "type"_a, "layout"_a, "Whether weights of a type can have a layout: plain, x16 or gpu.");
  o.def(
      "layout_bytes",
      [](std::string_view type, std::string_view layout, int64_t rows, int64_t k) {
        return ops::layout_bytes(type_of(type), layout_of(layout), rows, k);
      },
      "type"_a, "layout"_a, "rows"_a, "k"_a, "Bytes of a weight matrix [rows, k].");
  o.def(
      "repack", &repack, "type"_a, "plain"_a, "rows"_a, "k"_a, "layout"_a = "x16", "source"_a = "plain",
      nb::sig("def repack(type: str, plain: numpy.typing.NDArray[numpy.uint8], rows: int, k: int, layout: str = 'x16', "
              "source: str = 'plain') -> numpy.typing.NDArray[numpy.uint8]"),
      "A weight matrix (bytes) in layout x16 or gpu, made of a plain one; gpu also of layout x16 (`source`).");
  o.def(
      "repack_on_gpu", &repack_on_gpu, "type"_a, "x16"_a, "rows"_a, "k"_a, "place"_a, "device"_a = "cuda:0",
      nb::sig("def repack_on_gpu(type: str, x16: numpy.typing.NDArray[numpy.uint8], rows: int, k: int, place: "
              "collections.abc.Sequence[int], device: str = 'cuda:0') -> numpy.typing.NDArray[numpy.uint8]"),
      "Matrices of layout x16 in layout gpu, by the kernel that repacks copies of streamed weights: matrix i comes to "
      "place[i], and places that none comes to are zeros.");
  o.def(
      "unpack", &unpack, "type"_a, "layout"_a, "w"_a, "rows"_a, "k"_a, "isa"_a = "auto",
      nb::sig("def unpack(type: str, layout: str, w: numpy.typing.NDArray[numpy.uint8], rows: int, k: int, isa: str = "
              "'auto') -> numpy.typing.NDArray[numpy.float32]"),
      "A matrix in any layout as float32 [rows, k], through the kernels that matmul uses.");
  o.def("act_q8_row_bytes", &ops::act_q8_row_bytes, "k"_a, "Bytes of a row of k quantised activations.");
}

}  // namespace dyno
