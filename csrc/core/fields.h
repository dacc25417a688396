// Reflection: the members of a struct by name, at compile time. After a struct, in its namespace,
//   DYNO_FIELDS(Type, first, second, …)
// lists all its members; a missing one is a compile error. for_each_field(Type) and field_index(Type, name) then visit
// them in that order.
#pragma once

#include <string_view>
#include <type_traits>
#include <utility>

#include "core/field_count.h"

namespace dyno {

template <typename T, typename Member>
struct Field {
  std::string_view name;
  Member T::*member;
};
template <typename T, typename Member>
constexpr Field<T, Member> named_field(std::string_view name, Member T::*member) {
  return {name, member};
}

// The fields of one struct. One base class per field compiles many times faster than std::tuple and std::tuple_cat, and
// every source that includes the plan pays for it.
template <size_t I, typename F>
struct FieldAt {
  F field;
};
template <typename Sequence, typename... F>
struct FieldList;
template <size_t... I, typename... F>
struct FieldList<std::index_sequence<I...>, F...> : FieldAt<I, F>... {
  static constexpr size_t kCount = sizeof...(F);
  template <typename Visit>
  constexpr void visit(Visit& call) const {
    (call(FieldAt<I, F>::field.name, FieldAt<I, F>::field.member), ...);
  }
};
// An empty first argument, because `DYNO_FIELDS` puts a comma before each field.
struct BeforeFields {};
template <typename... F>
constexpr auto field_list(BeforeFields, F... field) {
  return FieldList<std::index_sequence_for<F...>, F...>{{field}...};
}
template <size_t I, typename F>
constexpr F field_at(const FieldAt<I, F>& at) {
  return at.field;
}

inline constexpr size_t kNoField = static_cast<size_t>(-1);

template <typename T>
constexpr auto fields() {
  return fields_of(std::type_identity<T>{});
}
template <typename T>
inline constexpr size_t kFields = decltype(fields<T>())::kCount;

// Calls visit(name, pointer to member) for each field.
template <typename T, typename Visit>
constexpr void for_each_field(Visit&& visit) {
  fields<T>().visit(visit);
}

// Calls visit.template operator()<I>() with the number of each field, if the name must be a compile-time constant.
template <typename T, typename Visit>
constexpr void for_each_field_index(Visit&& visit) {
  [&]<size_t... I>(std::index_sequence<I...>) {
    (visit.template operator()<I>(), ...);
  }(std::make_index_sequence<kFields<T>>{});
}

// The number of the field whose name is `name` followed by `ending`; kNoField if there is none.
template <typename T>
constexpr size_t field_index(std::string_view name, std::string_view ending = "") {
  size_t found = kNoField, at = 0;
  for_each_field<T>([&](std::string_view field, auto) {
    const bool same = field.size() == name.size() + ending.size() && field.starts_with(name) && field.ends_with(ending);
    if (same) found = at;
    ++at;
  });
  return found;
}

}  // namespace dyno

// Applies a macro to each argument.
#define DYNO_PARENTHESES ()
#define DYNO_EXPAND(...) DYNO_EXPAND_3(DYNO_EXPAND_3(DYNO_EXPAND_3(__VA_ARGS__)))
#define DYNO_EXPAND_3(...) DYNO_EXPAND_2(DYNO_EXPAND_2(DYNO_EXPAND_2(__VA_ARGS__)))
#define DYNO_EXPAND_2(...) DYNO_EXPAND_1(DYNO_EXPAND_1(DYNO_EXPAND_1(__VA_ARGS__)))
#define DYNO_EXPAND_1(...) __VA_ARGS__
#define DYNO_FOR_EACH(macro, ...) __VA_OPT__(DYNO_EXPAND(DYNO_FOR_EACH_STEP(macro, __VA_ARGS__)))
#define DYNO_FOR_EACH_STEP(macro, first, ...) \
  macro(first) __VA_OPT__(DYNO_FOR_EACH_NEXT DYNO_PARENTHESES(macro, __VA_ARGS__))
#define DYNO_FOR_EACH_NEXT() DYNO_FOR_EACH_STEP

#define DYNO_FIELD_OF_TYPE(field) , ::dyno::named_field(#field, &Type::field)
#define DYNO_FIELDS(Struct, ...)                                                                       \
  constexpr auto fields_of(std::type_identity<Struct>) {                                               \
    using Type [[maybe_unused]] = Struct;                                                              \
    return ::dyno::field_list(::dyno::BeforeFields {} DYNO_FOR_EACH(DYNO_FIELD_OF_TYPE, __VA_ARGS__)); \
  }                                                                                                    \
  static_assert(::dyno::has_fields<Struct, decltype(fields_of(std::type_identity<Struct>{}))::kCount>, \
                "DYNO_FIELDS(" #Struct ") names every member once");
