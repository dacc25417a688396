// NumPy arrays that own data which C++ computed.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <initializer_list>
#include <memory>
#include <utility>

namespace dyno {

template <typename T>
nanobind::object owned_array(std::unique_ptr<T[]> data, std::initializer_list<size_t> shape) {
  T* raw = data.release();
  nanobind::capsule owner(raw, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return nanobind::cast(nanobind::ndarray<nanobind::numpy, T>(raw, shape, owner));
}
template <typename T>
nanobind::object owned_array(std::shared_ptr<T[]> data, std::initializer_list<size_t> shape) {
  T* raw = data.get();
  auto* held = new std::shared_ptr<T[]>(std::move(data));
  nanobind::capsule owner(held, [](void* p) noexcept { delete static_cast<std::shared_ptr<T[]>*>(p); });
  return nanobind::cast(nanobind::ndarray<nanobind::numpy, T>(raw, shape, owner));
}

}  // namespace dyno
