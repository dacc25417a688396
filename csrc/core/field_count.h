// The number of an aggregate's members, so that a list of its members can be held against it at compile time.
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

// Whether an aggregate has this many members. Members of arrays and of base classes do not count as one: T has neither.
template <typename T, size_t kMembers>
inline constexpr bool has_fields = detail::takes_members<T>(std::make_index_sequence<kMembers>{}) &&
                                   !detail::takes_members<T>(std::make_index_sequence<kMembers + 1>{});

}  // namespace dyno
