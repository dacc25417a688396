#include "core/dtype.h"

#include <algorithm>
#include <array>
#include <cctype>

#include "core/error.h"

namespace dyno {
namespace {

// Sorted by id. Sizes: GGUF specification; see docs/explain/architecture.md.
constexpr std::array kTypes = {
    DTypeInfo{DType::f32, "f32", 1, 4, true},
    DTypeInfo{DType::f16, "f16", 1, 2, true},
    DTypeInfo{DType::q4_0, "q4_0", 32, 18, true},
    DTypeInfo{DType::q4_1, "q4_1", 32, 20, true},
    DTypeInfo{DType::q5_0, "q5_0", 32, 22, true},
    DTypeInfo{DType::q5_1, "q5_1", 32, 24, true},
    DTypeInfo{DType::q8_0, "q8_0", 32, 34, true},
    DTypeInfo{DType::q8_1, "q8_1", 32, 36, false},
    DTypeInfo{DType::q2_k, "q2_k", 256, 84, true},
    DTypeInfo{DType::q3_k, "q3_k", 256, 110, true},
    DTypeInfo{DType::q4_k, "q4_k", 256, 144, true},
    DTypeInfo{DType::q5_k, "q5_k", 256, 176, true},
    DTypeInfo{DType::q6_k, "q6_k", 256, 210, true},
    DTypeInfo{DType::q8_k, "q8_k", 256, 292, false},
    DTypeInfo{DType::iq2_xxs, "iq2_xxs", 256, 66, false},
    DTypeInfo{DType::iq2_xs, "iq2_xs", 256, 74, false},
    DTypeInfo{DType::iq3_xxs, "iq3_xxs", 256, 98, false},
    DTypeInfo{DType::iq1_s, "iq1_s", 256, 50, false},
    DTypeInfo{DType::iq4_nl, "iq4_nl", 32, 18, true},
    DTypeInfo{DType::iq3_s, "iq3_s", 256, 110, false},
    DTypeInfo{DType::iq2_s, "iq2_s", 256, 82, false},
    DTypeInfo{DType::iq4_xs, "iq4_xs", 256, 136, true},
    DTypeInfo{DType::i8, "i8", 1, 1, false},
    DTypeInfo{DType::i16, "i16", 1, 2, false},
    DTypeInfo{DType::i32, "i32", 1, 4, false},
    DTypeInfo{DType::i64, "i64", 1, 8, false},
    DTypeInfo{DType::f64, "f64", 1, 8, false},
    DTypeInfo{DType::iq1_m, "iq1_m", 256, 56, false},
    DTypeInfo{DType::bf16, "bf16", 1, 2, true},
    DTypeInfo{DType::tq1_0, "tq1_0", 256, 54, false},
    DTypeInfo{DType::tq2_0, "tq2_0", 256, 66, false},
    DTypeInfo{DType::mxfp4, "mxfp4", 32, 17, true},
    DTypeInfo{DType::nvfp4, "nvfp4", 64, 36, false},
    DTypeInfo{DType::q1_0, "q1_0", 128, 18, false},
    DTypeInfo{DType::q2_0, "q2_0", 64, 18, false},
};

}  // namespace

const DTypeInfo* find_dtype(uint32_t id) {
  const auto it = std::find_if(kTypes.begin(), kTypes.end(),
                               [id](const DTypeInfo& t) { return static_cast<uint32_t>(t.type) == id; });
  return it == kTypes.end() ? nullptr : &*it;
}

const DTypeInfo& dtype_info(DType type) {
  const DTypeInfo* info = find_dtype(static_cast<uint32_t>(type));
  DYNO_CHECK(Error, info != nullptr, "[dtype] unknown type id ", static_cast<uint32_t>(type));
  return *info;
}

std::optional<DType> dtype_from_name(std::string_view name) {
  const auto same = [name](const DTypeInfo& t) {
    return std::equal(t.name.begin(), t.name.end(), name.begin(), name.end(),
                      [](char a, char b) { return a == std::tolower(static_cast<unsigned char>(b)); });
  };
  const auto it = std::find_if(kTypes.begin(), kTypes.end(), same);
  if (it == kTypes.end()) return std::nullopt;
  return it->type;
}

}  // namespace dyno
