#include "core/dtype.h"

#include <algorithm>
#include <array>
#include <cctype>

#include "core/error.h"

namespace dyno {
namespace {

// Sizes from the GGUF specification; from id 133 on, from ik_llama.cpp.
constexpr std::array kTypes = {
#define DYNO_FLOAT_TYPE(name, id, bytes) \
  DTypeInfo{DType::name, #name, TypeClass::floats, 1, bytes, 0, DType::name, 1, true},
#define DYNO_DATA_TYPE(name, id, block, bytes) \
  DTypeInfo{DType::name, #name, TypeClass::data, block, bytes, 0, DType::name, 1, false},
#define DYNO_QUANT_TYPE(name, id, block, bytes, ...) \
  DTypeInfo{DType::name, #name, TypeClass::quant, block, bytes, 0, DType::name, 1, true},
#define DYNO_CODED_TYPE(name, id, block, bytes, meta, ...) \
  DTypeInfo{DType::name, #name, TypeClass::coded, block, bytes, meta, DType::name, 1, true},
#define DYNO_VALUES_TYPE(name, id, block, bytes, meta) \
  DTypeInfo{DType::name, #name, TypeClass::values, block, bytes, meta, DType::name, 1, true},
#define DYNO_GPU_TYPE(name, id, block, bytes) \
  DTypeInfo{DType::name, #name, TypeClass::gpu, block, bytes, 0, DType::name, 1, true},
#define DYNO_INTERLEAVED_TYPE(name, id, block, bytes, meta, plain, rows) \
  DTypeInfo{DType::name, #name, TypeClass::interleaved, block, bytes, meta, DType::plain, rows, true},
#include "core/weight_types.def"
};

constexpr size_t kIds = 512;  // above every id

// Index into kTypes plus one, by id; 0 for an unknown id.
constexpr auto kIndexOf = [] {
  std::array<uint8_t, kIds> index{};
  for (size_t i = 0; i < kTypes.size(); ++i) {
    uint8_t& entry = index[static_cast<size_t>(kTypes[i].type)];
    if (entry != 0) throw "two types have one id";
    entry = static_cast<uint8_t>(i + 1);
  }
  return index;
}();
static_assert(kTypes.size() < 255);

}  // namespace

const DTypeInfo* find_dtype(uint32_t id) {
  if (id >= kIds || kIndexOf[id] == 0) return nullptr;
  return &kTypes[kIndexOf[id] - size_t{1}];
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
