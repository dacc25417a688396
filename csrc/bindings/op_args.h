// Reads the arguments of a launch from a dict of NumPy arrays and scalars, and checks their types and sizes.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/text.h"

namespace dyno {

// Maps a host array to the address that a launch on another device uses.
class ArgMirror {
 public:
  virtual ~ArgMirror() = default;
  virtual void* mirror(const void* host, size_t bytes, bool written) = 0;
};

class OpArgs {
 public:
  OpArgs(std::string_view family, const nanobind::dict& args, ArgMirror* mirror = nullptr)
      : family_(family), args_(args), mirror_(mirror) {}

  // An array of at least `count` elements of type T. Throws if the name is missing or None.
  template <typename T>
  const T* in(const char* name, int64_t count) {
    const T* data = optional_in<T>(name, count);
    DYNO_CHECK(PlanError, data != nullptr, "[", family_, "] argument ", name, " is missing");
    return data;
  }
  template <typename T>
  const T* optional_in(const char* name, int64_t count) {
    return pointer<const T, nanobind::ndarray<nanobind::ro, nanobind::c_contig, nanobind::device::cpu>>(name, count);
  }
  template <typename T>
  T* optional_out(const char* name, int64_t count) {
    return pointer<T, nanobind::ndarray<nanobind::c_contig, nanobind::device::cpu>>(name, count);
  }
  template <typename T>
  T* out(const char* name, int64_t count) {
    T* data = optional_out<T>(name, count);
    DYNO_CHECK(PlanError, data != nullptr, "[", family_, "] argument ", name, " is missing");
    return data;
  }
  template <typename T>
  T number(const char* name, T fallback) {
    const nanobind::object value = get(name);
    if (!value.is_valid() || value.is_none()) return fallback;
    T result{};
    bool cast = nanobind::try_cast(value, result);
    if constexpr (std::is_same_v<T, bool>) {
      int flag = 0;  // 0 and 1 are accepted as well
      if (!cast && nanobind::try_cast(value, flag)) cast = true, result = flag != 0;
    }
    DYNO_CHECK(PlanError, cast, "[", family_, "] argument ", name, " is not a number");
    return result;
  }
  void require(bool there, const char* name) const {
    DYNO_CHECK(PlanError, there, "[", family_, "] argument ", name, " is missing");
  }
  nanobind::object get(const char* name) {
    names_.push_back(name);
    return args_.contains(name) ? nanobind::object(args_[name]) : nanobind::object();
  }
  // Throws if an argument was not read.
  void finish() const {
    for (const auto& [key, value] : args_) {
      const auto text = nanobind::cast<std::string>(key);
      DYNO_CHECK(PlanError, std::find(names_.begin(), names_.end(), text) != names_.end(), "[", family_,
                 "] unknown argument '", text, "'", suggestion(text, names_));
    }
  }

 private:
  template <typename T, typename Array>
  T* pointer(const char* name, int64_t count) {
    const nanobind::object value = get(name);
    if (!value.is_valid() || value.is_none()) return nullptr;
    Array array;
    DYNO_CHECK(PlanError, nanobind::try_cast(value, array, false), "[", family_, "] argument ", name,
               " is not a contiguous NumPy array, or is read-only although the op writes it");
    DYNO_CHECK(PlanError, array.dtype() == nanobind::dtype<std::remove_const_t<T>>(), "[", family_, "] argument ", name,
               " has the wrong element type");
    DYNO_CHECK(PlanError, static_cast<int64_t>(array.size()) >= count, "[", family_, "] argument ", name, " has ",
               array.size(), " elements; expected ", count, " or more");
    void* data = const_cast<void*>(static_cast<const void*>(array.data()));
    if (mirror_ != nullptr) data = mirror_->mirror(data, array.nbytes(), !std::is_const_v<T>);
    return static_cast<T*>(data);
  }

  std::string family_;
  const nanobind::dict& args_;
  ArgMirror* mirror_;
  std::vector<std::string_view> names_;
};

}  // namespace dyno
