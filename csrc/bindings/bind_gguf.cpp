// dyno._core.Gguf: a GGUF file as plain Python and NumPy values.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <filesystem>
#include <memory>
#include <vector>

#include "bindings/gil_release.h"
#include "core/error.h"
#include "gguf/dequantize.h"
#include "gguf/gguf_file.h"
#include "gguf/interleaved.h"
#include "gguf/parse.h"
#include "gguf/quant_blocks.h"
#include "gguf/recode.h"
#include "gguf/text.h"
#include "gguf/type_support.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace dyno {
namespace {

// A new NumPy array that owns a copy of `count` values of T, which need not be aligned.
template <typename T>
nb::object copy_to_numpy(const std::byte* data, size_t count) {
  auto values = std::make_unique<T[]>(count);
  if (count > 0) std::memcpy(values.get(), data, count * sizeof(T));
  T* raw = values.release();
  nb::capsule owner(raw, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(raw, {count}, owner));
}

// Strings in files are UTF-8 only by convention. Other bytes become lone surrogates, so that nothing is lost.
nb::object to_str(std::string_view text) {
  PyObject* str = PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "surrogateescape");
  if (str == nullptr) nb::raise_python_error();
  return nb::steal(str);
}

nb::object to_python(const MetaValue& value);

nb::object array_to_python(const MetaArray& array) {
  if (array.element == MetaType::boolean) return copy_to_numpy<bool>(array.data, array.count);
  if (array.element == MetaType::string) {
    nb::list out;
    for (const std::string_view text : array.strings()) out.append(to_str(text));
    return out;
  }
  if (array.element == MetaType::array) {
    nb::list out;
    for (const MetaArray& inner : array.arrays()) out.append(array_to_python(inner));
    return out;
  }
  nb::object out;
  // An empty array has no first element, so the type is taken from a zero.
  static constexpr std::byte kZero[8] = {};
  visit_number(array.element, kZero, [&](auto zero) { out = copy_to_numpy<decltype(zero)>(array.data, array.count); });
  return out;
}

nb::object to_python(const MetaValue& value) {
  if (value.type == MetaType::boolean) return nb::bool_(value.as_bool());
  if (value.type == MetaType::string) return to_str(value.as_string());
  if (value.type == MetaType::array) return array_to_python(value.as_array());
  nb::object out;
  visit_number(value.type, value.data, [&](auto number) { out = nb::cast(number); });
  return out;
}

nb::tuple numpy_shape(const TensorInfo& tensor) {
  nb::list shape;
  for (int i = tensor.n_dims - 1; i >= 0; --i) shape.append(tensor.dims[i]);
  return nb::tuple(shape);
}

nb::list tensor_dicts(const GgufFile& file) {
  nb::list out;
  for (const TensorInfo& tensor : file.tensors()) {
    nb::dict d;
    d["name"] = to_str(tensor.name);
    d["shape"] = numpy_shape(tensor);
    d["dtype"] = dtype_name(tensor.type);
    d["bits_per_weight"] = bits_per_weight(tensor.type, tensor.dims[0]);
    d["kernels"] = type_support(tensor.type);
    d["offset"] = tensor.offset;
    d["nbytes"] = tensor.nbytes;
    d["file"] = tensor.file;
    out.append(d);
  }
  return out;
}

nb::object numpy_f32(std::unique_ptr<float[]> values, const TensorInfo& tensor) {
  std::vector<size_t> shape;
  for (int i = tensor.n_dims - 1; i >= 0; --i) shape.push_back(static_cast<size_t>(tensor.dims[i]));
  float* raw = values.release();
  nb::capsule owner(raw, [](void* p) noexcept { delete[] static_cast<float*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, float>(raw, shape.size(), shape.data(), owner));
}

// The rows of a tensor in the type that a GPU reads, de-interleaved if several rows share a unit.
nb::tuple recode(const GgufFile& file, std::string_view name) {
  const TensorInfo& tensor = file.tensor(name);
  const DTypeInfo& info = dtype_info(tensor.type);
  const DType type = gpu_type(info.plain);
  DYNO_CHECK(UnsupportedError, type != info.plain, "[gguf] tensor ", in_quotes(name), " of ", file.path(), " has type ",
             dtype_name(tensor.type), ", which a GPU reads unchanged");
  const int64_t k = tensor.dims[0], each = info.rows;
  std::vector<std::byte> out(row_bytes(type, k) * static_cast<size_t>(tensor.n_rows()));
  std::vector<std::byte> unit(info.rows * row_bytes(info.plain, k));
  for (int64_t row = 0; row < tensor.n_rows(); row += each) {
    const std::byte* from = tensor.data + static_cast<size_t>(row) * row_bytes(tensor.type, k);
    if (info.kind == TypeClass::interleaved) {
      take_apart(tensor.type, from, unit.data(), k);
      from = unit.data();
    }
    recode_rows(info.plain, from, out.data() + row_bytes(type, k) * static_cast<size_t>(row), each, k);
  }
  file.check_unchanged();
  return nb::make_tuple(std::string(dtype_name(type)),
                        nb::bytes(reinterpret_cast<const char*>(out.data()), out.size()));
}

nb::object dequantize(const GgufFile& file, std::string_view name) {
  const TensorInfo& tensor = file.tensor(name);
  const DTypeInfo& info = dtype_info(tensor.type);
  DYNO_CHECK(UnsupportedError, can_dequantize(info.plain), "[gguf] tensor ", in_quotes(name), " of ", file.path(),
             " has type ", dtype_name(tensor.type), ", which has no kernels");
  const auto elements = static_cast<size_t>(tensor.n_elements());
  auto values = std::make_unique_for_overwrite<float[]>(elements);
  {
    GilRelease release;
    if (info.kind == TypeClass::interleaved) {
      const int64_t k = tensor.dims[0];
      std::vector<std::byte> unit(info.rows * row_bytes(info.plain, k));
      for (int64_t row = 0; row < tensor.n_rows(); row += info.rows) {
        take_apart(tensor.type, tensor.data + static_cast<size_t>(row) * row_bytes(tensor.type, k), unit.data(), k);
        dequantize_rows(info.plain, unit.data(), values.get() + row * k, info.rows, k);
      }
    } else {
      dequantize_rows(tensor.type, tensor.data, values.get(), tensor.n_rows(), tensor.dims[0]);
    }
    file.check_unchanged();
  }
  return numpy_f32(std::move(values), tensor);
}

nb::object raw_bytes(const GgufFile& file, std::string_view name) {
  const TensorInfo& tensor = file.tensor(name);
  nb::object copy = copy_to_numpy<uint8_t>(tensor.data, tensor.nbytes);
  file.check_unchanged();
  return copy;
}

nb::object find_value(const GgufFile& file, std::string_view key) {
  const Metadata::Entry* entry = file.metadata().find(key);
  return entry == nullptr ? nb::none() : to_python(entry->value);
}

template <typename T>
nb::object numpy_copy(const std::vector<T>& values) {
  return copy_to_numpy<T>(reinterpret_cast<const std::byte*>(values.data()), values.size());
}

// The value that the engine gets when it reads `key` as `kind`.
nb::object value_as(const GgufFile& file, std::string_view key, std::string_view kind) {
  const Metadata& metadata = file.metadata();
  if (kind == "u32") return nb::cast(metadata.get_u32(key));
  if (kind == "i32") return nb::cast(metadata.get_i32(key));
  if (kind == "u64") return nb::cast(metadata.get_u64(key));
  if (kind == "i64") return nb::cast(metadata.get_i64(key));
  if (kind == "f32") return nb::cast(metadata.get_f32(key));
  if (kind == "bool") return nb::cast(metadata.get_bool(key));
  if (kind == "string") return to_str(metadata.get_string(key));
  if (kind == "i64[]") return numpy_copy(metadata.get_i64_array(key));
  if (kind == "f32[]") return numpy_copy(metadata.get_f32_array(key));
  nb::list out;
  if (kind == "bool[]") {
    for (const bool value : metadata.get_bool_array(key)) out.append(value);
  } else if (kind == "string[]") {
    for (const std::string_view text : metadata.get_string_array(key)) out.append(to_str(text));
  } else {
    throw Error(str_cat("[gguf] kind ", in_quotes(kind),
                        " of a metadata value; expected u32, i32, u64, i64, f32, bool, string, i64[], f32[], bool[] or "
                        "string[]"));
  }
  return out;
}

nb::bytes quantize(std::string_view dtype,
                   nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu> values) {
  const auto type = dtype_from_name(dtype);
  DYNO_CHECK(UnsupportedError, type && can_quantize(*type), "[gguf] no quantiser for type ", in_quotes(dtype));
  const auto n = static_cast<int64_t>(values.size());
  // Blocks have 16-bit fields; a vector of 32-bit words is aligned for every type.
  std::vector<uint32_t> blocks((row_bytes(*type, n) + 3) / 4);
  quantize_row(*type, values.data(), blocks.data(), n);
  return nb::bytes(reinterpret_cast<const char*>(blocks.data()), row_bytes(*type, n));
}

nb::list tensor_types() {
  nb::list out;
  for (uint32_t id = 0; id < kFirstInternalType; ++id) {
    const DTypeInfo* info = find_dtype(id);
    if (info == nullptr) continue;
    nb::dict d;
    d["name"] = info->name;
    d["id"] = id;
    d["block"] = info->block_elements;
    d["block_bytes"] = info->block_bytes;
    d["row_meta_bytes"] = info->row_meta_bytes;
    d["plain"] = dtype_name(info->plain);
    d["rows"] = info->rows;
    d["kernels"] = type_support(info->type);
    out.append(d);
  }
  return out;
}

}  // namespace

void bind_gguf(nb::module_& m) {
  nb::class_<GgufFile>(m, "Gguf", "A GGUF file, or all shards of a split one. Opening it reads and checks the header.")
      .def(
          "__init__",
          [](GgufFile* self, const std::filesystem::path& path, bool mmap) {
            new (self) GgufFile(GgufFile::open(path.native(), mmap ? Reading::map : Reading::copy));
          },
          "path"_a, nb::kw_only(), "mmap"_a = true,
          nb::sig("def __init__(self, path: str | os.PathLike[str], *, mmap: bool = True) -> None"),
          "Any shard of a split file opens all of them. mmap: tensors are pages of the file; off, the whole file is "
          "read "
          "into memory, and nothing that happens to it later is seen. Raises GgufError, OutOfMemoryError.")
      .def("check_unchanged", &GgufFile::check_unchanged, nb::call_guard<GilRelease>(),
           "Raises GgufError if the file is mapped and not what it was when it was opened: its size or its time of "
           "modification is another one, or a page of it could not be read.")
      .def_prop_ro("version", &GgufFile::version)
      .def_prop_ro("alignment", &GgufFile::alignment)
      .def_prop_ro(
          "path", [](const GgufFile& f) { return to_str(f.path()); }, nb::sig("def path(self, /) -> str"))
      .def_prop_ro(
          "paths",
          [](const GgufFile& f) {
            nb::list out;
            for (const std::string& path : f.paths()) out.append(to_str(path));
            return out;
          },
          nb::sig("def paths(self, /) -> list[str]"))
      .def_prop_ro("file_bytes", &GgufFile::file_bytes, "Size of all shards.")
      .def(
          "keys",
          [](const GgufFile& f) {
            nb::list out;
            for (const Metadata::Entry& entry : f.metadata().entries()) out.append(to_str(entry.key));
            return out;
          },
          nb::sig("def keys(self) -> list[str]"), "Metadata keys in file order.")
      .def("get", &find_value, "key"_a, nb::sig("def get(self, key: str) -> object"),
           "The value of a metadata key, None if there is none. Arrays of strings are lists of str, arrays of numbers "
           "NumPy arrays of the file's type.")
      .def("get_as", &value_as, "key"_a, "kind"_a, nb::sig("def get_as(self, key: str, kind: str) -> object"),
           "The value of a key as u32, i32, u64, i64, f32, bool, string, i64[], f32[], bool[] or string[]: integers of "
           "any width where the value fits, f32 from any number. Raises ModelError for a missing key, GgufError for a "
           "value of another type.")
      .def(
          "get_per_layer",
          [](const GgufFile& f, std::string_view key, size_t count) {
            return numpy_copy(f.metadata().get_u32_per_layer(key, count));
          },
          "key"_a, "count"_a,
          nb::sig("def get_per_layer(self, key: str, count: int) -> numpy.typing.NDArray[numpy.uint32]"),
          "One uint32 per layer: from an array of `count` integers, or one integer for all. Raises as get_as.")
      .def(
          "metadata",
          [](const GgufFile& f) {
            nb::dict out;
            for (const Metadata::Entry& entry : f.metadata().entries()) {
              out[to_str(entry.key)] = to_python(entry.value);
            }
            return out;
          },
          nb::sig("def metadata(self) -> dict[str, object]"))
      .def("tensors", &tensor_dicts, nb::sig("def tensors(self) -> list[dict[str, typing.Any]]"),
           "One dict per tensor: name, shape (NumPy order, contracted dimension last), dtype, bits_per_weight, kernels "
           "(what the engine does with the type), offset and nbytes in shard number `file`.")
      .def("dequantize", &dequantize, "name"_a,
           nb::sig("def dequantize(self, name: str) -> numpy.typing.NDArray[numpy.float32]"),
           "The tensor as float32. Raises ModelError for an unknown name, UnsupportedError for a type without kernels, "
           "GgufError if the file has changed.")
      .def("raw", &raw_bytes, "name"_a, nb::sig("def raw(self, name: str) -> numpy.typing.NDArray[numpy.uint8]"),
           "A copy of the tensor's bytes as uint8. Raises ModelError for an unknown name, GgufError if the file has "
           "changed.")
      .def(
          "advise_drop", [](const GgufFile& f, std::string_view name) { return f.advise_drop(f.tensor(name).bytes()); },
          "name"_a,
          "Gives the whole pages inside a tensor back to the operating system; they are read again when touched. False "
          "when it refused. Raises ModelError for an unknown name.")
      .def("recode", &recode, "name"_a, nb::sig("def recode(self, name: str) -> tuple[str, bytes]"),
           "The type that a GPU reads a tensor as, and its rows in that type. Raises ModelError for an unknown name, "
           "UnsupportedError for a type that stays the same.")
      .def(
          "advise_willneed",
          [](const GgufFile& f, std::string_view name) { return f.advise_willneed(f.tensor(name).bytes()); }, "name"_a,
          "Starts reading a tensor's pages. False when the operating system refused. Raises ModelError for an unknown "
          "name.")
      .def("describe", &GgufFile::describe, "The header as text.");
  m.def(
      "tensor_types", &tensor_types, nb::sig("def tensor_types() -> list[dict[str, typing.Any]]"),
      "Every tensor type that a file may have: name, id, block (values), block_bytes, row_meta_bytes, plain (the type "
      "of a row of an interleaved one, else the name), rows (in a unit), kernels.");
  m.def("quantize", &quantize, "dtype"_a, "values"_a,
        "Packed blocks of float32 values: f32, f16, bf16 and q8_0. Raises UnsupportedError for other types.");
}

}  // namespace dyno
