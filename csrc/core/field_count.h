// How many members an aggregate has, so that a list of its members can be held against it at compile time.
#pragma once

#include <cstddef>
#include <utility>

namespace dyno {

namespace detail {
struct AnyMember {
  template <typename T>
  operator T() const;
};
template <size_t>
using AnyMemberAt = AnyMember;

template <typename T, size_t... I>
constexpr bool takes_members(std::index_sequence<I...>) {
  return requires { T{AnyMemberAt<I>{}...}; };
}
}  // namespace detail

// Members of arrays and of base classes do not count as one: T has neither.
template <typename T, size_t kMost = 40>
constexpr size_t field_count() {
  if constexpr (kMost == 0 || detail::takes_members<T>(std::make_index_sequence<kMost>{})) {
    return kMost;
  } else {
    return field_count<T, kMost - 1>();
  }
}

}  // namespace dyno
