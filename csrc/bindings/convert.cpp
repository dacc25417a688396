#include "bindings/convert.h"

#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <filesystem>

#include "bindings/gil_release.h"
#include "core/error.h"

namespace nb = nanobind;

namespace dyno {

std::shared_ptr<const GgufFile> gguf_of(const nb::object& file) {
  if (nb::isinstance<GgufFile>(file)) {
    // Sessions end without the GIL, which nanobind's own deleter would ask for without a guard.
    PyObject* object = nb::object(file).release().ptr();
    return {nb::cast<const GgufFile*>(file), [object](const GgufFile*) { drop_reference(object); }};
  }
  std::filesystem::path path;
  if (!nb::try_cast(file, path)) {
    throw nb::type_error(
        str_cat("a model is an open Gguf or a path, not ", nb::cast<std::string>(nb::repr(file.type()))).c_str());
  }
  return std::make_shared<GgufFile>(GgufFile::open(path.native()));
}

template <typename T>
void SettingsReader::remember(const char* name, const T& fallback) {
  asked_[name] = fallback;
}

nb::object SettingsReader::take(const char* name) {
  known_.emplace_back(name);
  if (!dict_.contains(name)) return nb::none();
  return nb::borrow(dict_[name]);
}

void SettingsReader::fail(const char* name, const char* expected, const nb::object& value) {
  throw ProfileError(str_cat("[settings] ", what_, " setting ", name, " is ", nb::cast<std::string>(nb::str(value)),
                             "; expected ", expected));
}

int64_t SettingsReader::integer(const char* name, int64_t fallback) {
  remember(name, fallback);
  const nb::object value = take(name);
  if (value.is_none()) return fallback;
  int64_t out = 0;
  if (nb::isinstance<nb::bool_>(value) || !nb::try_cast<int64_t>(value, out)) fail(name, "a whole number", value);
  return out;
}

double SettingsReader::number(const char* name, double fallback) {
  remember(name, fallback);
  const nb::object value = take(name);
  if (value.is_none()) return fallback;
  double out = 0;
  if (nb::isinstance<nb::bool_>(value) || !nb::try_cast<double>(value, out)) fail(name, "a number", value);
  return out;
}

bool SettingsReader::flag(const char* name, bool fallback) {
  remember(name, fallback);
  const nb::object value = take(name);
  if (value.is_none()) return fallback;
  if (!nb::isinstance<nb::bool_>(value)) fail(name, "true or false", value);
  return nb::cast<bool>(value);
}

std::string SettingsReader::text(const char* name, const std::string& fallback) {
  remember(name, fallback);
  const nb::object value = take(name);
  if (value.is_none()) return fallback;
  if (!nb::isinstance<nb::str>(value)) fail(name, "a string", value);
  return nb::cast<std::string>(value);
}

std::vector<std::string> SettingsReader::texts(const char* name) {
  const nb::object value = take(name);
  std::vector<std::string> out;
  remember(name, nb::list());
  if (value.is_none()) return out;
  // A string is also a sequence (of characters), so it must be excluded.
  if (nb::isinstance<nb::str>(value) || !nb::try_cast<std::vector<std::string>>(value, out)) {
    fail(name, "a list of strings", value);
  }
  return out;
}

void SettingsReader::finish() {
  for (const auto& [key, value] : dict_) {
    const auto name = nb::cast<std::string>(nb::str(key));
    if (std::find(known_.begin(), known_.end(), name) != known_.end()) continue;
    std::string names;
    for (const std::string& known : known_) names += (names.empty() ? "" : ", ") + known;
    throw ProfileError(str_cat("[settings] unknown ", what_, " setting '", name, "'; known: ", names));
  }
}

}  // namespace dyno
