// The fields of family transfer, by name: of its key, a node's operands and a launch's arguments.
#pragma once

#include "ops/arguments.h"
#include "ops/transfer/transfer.h"

namespace dyno::ops {

template <typename V>
constexpr void for_each_field(std::type_identity<TransferDesc>, V&& v) {
  v("m", &TransferDesc::m, In::never);
  v("row", &TransferDesc::row, In::if_set);
  v("fixed", &TransferDesc::fixed, In::if_set);
}

struct TransferOperands {
  Reads x;
  Writes y;
};
DYNO_FIELDS(TransferOperands, x, y)
DYNO_FIELDS(TransferArgs, x, y)

// Names and sizes of a single launch's arguments.
template <typename Visitor>
void arguments(const TransferDesc& d, TransferArgs& a, Visitor& v) {
  v.bytes("x", a.x, d.bytes());
  v.bytes_out("y", a.y, d.bytes());
}

}  // namespace dyno::ops
