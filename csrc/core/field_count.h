// The number of members of an aggregate, so that a list of its members can be checked at compile time.
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

// Whether an aggregate has this many members. Arrays and base classes do not count as one member; T must have neither.
template <typename T, size_t kMembers>
inline constexpr bool has_fields = detail::takes_members<T>(std::make_index_sequence<kMembers>{}) &&
                                   !detail::takes_members<T>(std::make_index_sequence<kMembers + 1>{});

}  // namespace dyno
