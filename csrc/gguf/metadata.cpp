#include "gguf/metadata.h"

#include <cmath>
#include <limits>
#include <type_traits>
#include <utility>

#include "core/error.h"
#include "gguf/text.h"

namespace dyno {

std::string_view meta_type_name(MetaType type) {
  static constexpr std::string_view kNames[] = {"uint8", "int8",   "uint16", "int16",  "uint32", "int32",  "float32",
                                                "bool",  "string", "array",  "uint64", "int64",  "float64"};
  return kNames[static_cast<uint32_t>(type)];
}

size_t meta_type_size(MetaType type) {
  switch (type) {
    case MetaType::uint8:
    case MetaType::int8:
    case MetaType::boolean:
      return 1;
    case MetaType::uint16:
    case MetaType::int16:
      return 2;
    case MetaType::uint32:
    case MetaType::int32:
    case MetaType::float32:
      return 4;
    case MetaType::uint64:
    case MetaType::int64:
    case MetaType::float64:
      return 8;
    case MetaType::string:
    case MetaType::array:
      break;
  }
  return 0;
}

MetaArray MetaValue::as_array() const {
  return {static_cast<MetaType>(load_unaligned<uint32_t>(data)), load_unaligned<uint64_t>(data + 4), data + 12};
}

std::vector<MetaArray> MetaArray::arrays() const {
  std::vector<MetaArray> out;
  out.reserve(count);
  const std::byte* at = data;
  for (uint64_t i = 0; i < count; ++i) {
    out.push_back(MetaValue{MetaType::array, at}.as_array());
    at = end_of_value(MetaType::array, at);
  }
  return out;
}

const std::byte* end_of_value(MetaType type, const std::byte* data) {
  if (type == MetaType::string) return data + 8 + load_unaligned<uint64_t>(data);
  if (type != MetaType::array) return data + meta_type_size(type);
  const MetaArray array = MetaValue{type, data}.as_array();
  if (const size_t size = meta_type_size(array.element); size != 0) return array.data + array.count * size;
  const std::byte* at = array.data;
  for (uint64_t i = 0; i < array.count; ++i) at = end_of_value(array.element, at);
  return at;
}

// ---- Metadata ----------------------------------------------------------------------------------------------------

bool Metadata::add(const Entry& entry) {
  if (!index_.emplace(entry.key, entries_.size()).second) return false;
  entries_.push_back(entry);
  return true;
}

void Metadata::reserve(size_t n) {
  entries_.reserve(n);
  index_.reserve(n);
}

const Metadata::Entry* Metadata::find(std::string_view key) const {
  const auto it = index_.find(key);
  return it == index_.end() ? nullptr : &entries_[it->second];
}

void Metadata::fail_type(const Entry& entry, std::string_view expected) const {
  throw GgufError(str_cat("[gguf] ", file_, ": key ", in_quotes(entry.key), " at byte ", entry.offset, " has type ",
                          meta_type_name(entry.value.type), " and value ", describe_value(entry.value), "; expected ",
                          expected));
}

void Metadata::fail_absent(std::string_view key) const {
  throw ModelError(str_cat("[gguf] ", file_, ": key ", in_quotes(key), " is missing"));
}

template <typename T>
T Metadata::number(const Entry& entry, MetaType type, const std::byte* data, std::string_view expected) const {
  T out{};
  bool fits = false;
  visit_number(type, data, [&](auto value) {
    using Value = decltype(value);
    if constexpr (std::is_floating_point_v<T>) {
      // A double may be too large for a float, but an infinite value in the file is accepted.
      fits = !std::isfinite(static_cast<double>(value)) ||
             std::abs(static_cast<double>(value)) <= static_cast<double>(std::numeric_limits<T>::max());
      if (fits) out = static_cast<T>(value);
    } else if constexpr (std::is_integral_v<Value>) {
      fits = std::in_range<T>(value);
      out = static_cast<T>(value);
    }
  });
  if (!fits) fail_type(entry, expected);
  return out;
}

template <typename T>
std::optional<T> Metadata::find_number(std::string_view key, std::string_view expected) const {
  const Entry* entry = find(key);
  if (entry == nullptr) return std::nullopt;
  return number<T>(*entry, entry->value.type, entry->value.data, expected);
}

const Metadata::Entry* Metadata::find_array(std::string_view key, std::string_view expected) const {
  const Entry* entry = find(key);
  if (entry != nullptr && entry->value.type != MetaType::array) fail_type(*entry, expected);
  return entry;
}

template <typename T>
std::optional<std::vector<T>> Metadata::find_numbers(std::string_view key, std::string_view expected) const {
  const Entry* entry = find_array(key, expected);
  if (entry == nullptr) return std::nullopt;
  const MetaArray array = entry->value.as_array();
  const size_t size = meta_type_size(array.element);
  if (size == 0 || array.element == MetaType::boolean) fail_type(*entry, expected);
  std::vector<T> out;
  out.reserve(array.count);
  for (uint64_t i = 0; i < array.count; ++i) {
    out.push_back(number<T>(*entry, array.element, array.data + i * size, expected));
  }
  return out;
}

template <typename T>
T Metadata::required(std::optional<T> value, std::string_view key) const {
  if (!value) fail_absent(key);
  return *std::move(value);
}

std::optional<uint32_t> Metadata::find_u32(std::string_view key) const {
  return find_number<uint32_t>(key, "an unsigned integer below 2^32");
}
std::optional<int32_t> Metadata::find_i32(std::string_view key) const {
  return find_number<int32_t>(key, "an integer of 32 bits");
}
std::optional<uint64_t> Metadata::find_u64(std::string_view key) const {
  return find_number<uint64_t>(key, "an unsigned integer");
}
std::optional<int64_t> Metadata::find_i64(std::string_view key) const {
  return find_number<int64_t>(key, "an integer below 2^63");
}
std::optional<float> Metadata::find_f32(std::string_view key) const { return find_number<float>(key, "a number"); }

std::optional<bool> Metadata::find_bool(std::string_view key) const {
  const Entry* entry = find(key);
  if (entry == nullptr) return std::nullopt;
  if (entry->value.type != MetaType::boolean) fail_type(*entry, "a bool");
  return entry->value.as_bool();
}

std::optional<std::string_view> Metadata::find_string(std::string_view key) const {
  const Entry* entry = find(key);
  if (entry == nullptr) return std::nullopt;
  if (entry->value.type != MetaType::string) fail_type(*entry, "a string");
  return entry->value.as_string();
}

std::optional<StringArray> Metadata::find_string_array(std::string_view key) const {
  const Entry* entry = find_array(key, "an array of strings");
  if (entry == nullptr) return std::nullopt;
  const MetaArray array = entry->value.as_array();
  if (array.element != MetaType::string) fail_type(*entry, "an array of strings");
  return array.strings();
}

std::optional<std::vector<int64_t>> Metadata::find_i64_array(std::string_view key) const {
  return find_numbers<int64_t>(key, "an array of integers below 2^63");
}
std::optional<std::vector<float>> Metadata::find_f32_array(std::string_view key) const {
  return find_numbers<float>(key, "an array of numbers");
}

std::optional<std::vector<bool>> Metadata::find_bool_array(std::string_view key) const {
  const Entry* entry = find_array(key, "an array of bools");
  if (entry == nullptr) return std::nullopt;
  const MetaArray array = entry->value.as_array();
  if (array.element != MetaType::boolean) fail_type(*entry, "an array of bools");
  std::vector<bool> out(array.count);
  for (uint64_t i = 0; i < array.count; ++i) out[i] = load_unaligned<uint8_t>(array.data + i) != 0;
  return out;
}

uint32_t Metadata::get_u32(std::string_view key) const { return required(find_u32(key), key); }
int32_t Metadata::get_i32(std::string_view key) const { return required(find_i32(key), key); }
uint64_t Metadata::get_u64(std::string_view key) const { return required(find_u64(key), key); }
int64_t Metadata::get_i64(std::string_view key) const { return required(find_i64(key), key); }
float Metadata::get_f32(std::string_view key) const { return required(find_f32(key), key); }
bool Metadata::get_bool(std::string_view key) const { return required(find_bool(key), key); }
std::string_view Metadata::get_string(std::string_view key) const { return required(find_string(key), key); }
StringArray Metadata::get_string_array(std::string_view key) const { return required(find_string_array(key), key); }
std::vector<int64_t> Metadata::get_i64_array(std::string_view key) const { return required(find_i64_array(key), key); }
std::vector<float> Metadata::get_f32_array(std::string_view key) const { return required(find_f32_array(key), key); }
std::vector<bool> Metadata::get_bool_array(std::string_view key) const { return required(find_bool_array(key), key); }

std::optional<std::vector<uint32_t>> Metadata::find_u32_per_layer(std::string_view key, size_t count) const {
  const Entry* entry = find(key);
  if (entry == nullptr) return std::nullopt;
  if (entry->value.type != MetaType::array) return std::vector<uint32_t>(count, get_u32(key));
  const std::string expected = str_cat("an unsigned integer or an array of ", count, " of them, one per layer");
  std::vector<uint32_t> out = *find_numbers<uint32_t>(key, expected);
  if (out.size() != count) fail_type(*entry, expected);
  return out;
}

std::vector<uint32_t> Metadata::get_u32_per_layer(std::string_view key, size_t count) const {
  return required(find_u32_per_layer(key, count), key);
}

// ---- Text --------------------------------------------------------------------------------------------------------

std::string describe_value(const MetaValue& value, size_t max_items) {
  if (value.type == MetaType::boolean) return value.as_bool() ? "true" : "false";
  if (value.type == MetaType::string) return in_quotes(value.as_string());
  if (value.type != MetaType::array) {
    std::string text;
    visit_number(value.type, value.data, [&](auto number) {
      if constexpr (sizeof(number) == 1) {
        text = std::to_string(number);  // a stream would print it as a character
      } else {
        text = str_cat(number);
      }
    });
    return text;
  }
  const MetaArray array = value.as_array();
  std::string text = str_cat(meta_type_name(array.element), "[", array.count, "]{");
  const std::byte* at = array.data;
  for (uint64_t i = 0; i < array.count && i < max_items; ++i) {
    // Shows few elements of an inner array, so that the text stays short at any depth.
    text += (i == 0 ? "" : ", ") + describe_value({array.element, at}, max_items > 3 ? 3 : max_items - 1);
    at = end_of_value(array.element, at);
  }
  return text + (array.count > max_items ? ", …}" : "}");
}

}  // namespace dyno
