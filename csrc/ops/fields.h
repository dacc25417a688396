// The fields of every Desc with their names, for op keys, their parser and the bindings. Each family lists its own in
// ops/<family>/fields.h.
//
// for_each_field(std::type_identity<D>{}, visit) calls visit(name, &D::field, In) in the order of the op key. `In` says
// how the key shows it:
//   always    type fields stand alone when the name is "type", all others are name=value
//   if_set    left out while the field has its default (what "off" means: batch=1, layout=plain, a flag that is false)
//   never     not part of the key: the number of tokens, and what settings decide
// A name that ends in "_type" is shown without that ending: k=f16.
#pragma once

#include "core/field_count.h"
#include "ops/all_fields.h"
#include "ops/registry.h"

namespace dyno::ops {

namespace detail {
template <typename D>
constexpr size_t listed_fields() {
  size_t count = 0;
  for_each_field(std::type_identity<D>{}, [&](std::string_view, auto, In) { ++count; });
  return count;
}
}  // namespace detail
// A field that is not listed would be missing in keys and could not be set from Python.
#define DYNO_OP_FAMILY(name, Stem, ...)                                      \
  static_assert(has_fields<Stem##Desc, detail::listed_fields<Stem##Desc>()>, \
                "ops/" #name "/fields.h lists every field of " #Stem "Desc once");
#include "ops/families.def"

}  // namespace dyno::ops
