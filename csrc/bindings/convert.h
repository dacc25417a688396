// Conversion of engine values to Python dicts, shared by the binding files.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <string>
#include <vector>

#include "core/device_info.h"
#include "gguf/gguf_file.h"
#include "model/model_desc.h"

namespace dyno {

// The file of a Python `Gguf`, which stays alive as long as the result, or of a path, which is opened. Throws
// GgufError, TypeError.
std::shared_ptr<const GgufFile> gguf_of(const nanobind::object& file);
nanobind::dict device_dict(const DeviceInfo& info);
nanobind::dict model_dict(const model::ModelDesc& model);

// Reads settings out of a dict, one by one; unknown keys are errors.
class SettingsReader {
 public:
  SettingsReader(nanobind::dict dict, std::string what) : dict_(std::move(dict)), what_(std::move(what)) {}
  int64_t integer(const char* name, int64_t fallback);
  double number(const char* name, double fallback);
  bool flag(const char* name, bool fallback);
  std::string text(const char* name, const std::string& fallback);
  // A list of strings; empty if the key is missing.
  std::vector<std::string> texts(const char* name);
  // Throws ProfileError with every unknown key.
  void finish();
  // {name: default} of every setting that was read so far.
  const nanobind::dict& asked() const { return asked_; }

 private:
  nanobind::object take(const char* name);
  template <typename T>
  void remember(const char* name, const T& fallback);
  [[noreturn]] void fail(const char* name, const char* expected, const nanobind::object& value);

  nanobind::dict dict_;
  std::string what_;
  std::vector<std::string> known_;
  nanobind::dict asked_;
};

}  // namespace dyno
