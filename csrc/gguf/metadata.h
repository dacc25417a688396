// The key-value section of a GGUF file, as views into the mapped bytes. Values are copied only on request, so a
// vocabulary of hundreds of thousands of strings costs one pass over their lengths.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace dyno {

// Value types, with the ids of the format.
enum class MetaType : uint32_t {
  uint8 = 0,
  int8 = 1,
  uint16 = 2,
  int16 = 3,
  uint32 = 4,
  int32 = 5,
  float32 = 6,
  boolean = 7,
  string = 8,
  array = 9,
  uint64 = 10,
  int64 = 11,
  float64 = 12,
};

std::string_view meta_type_name(MetaType type);  // "uint8", …, "bool", "string", "array"
// Bytes of a value of a type with a fixed size; 0 for strings and arrays.
size_t meta_type_size(MetaType type);

template <typename T>
T load_unaligned(const std::byte* data) {
  T value;
  std::memcpy(&value, data, sizeof(T));
  return value;
}

// The strings of an array, in order. Forward iteration only, because strings with lengths follow each other.
class StringArray {
 public:
  class Iterator {
   public:
    using iterator_category = std::forward_iterator_tag;
    using value_type = std::string_view;
    using difference_type = std::ptrdiff_t;
    using pointer = const value_type*;
    using reference = value_type;

    Iterator() = default;
    std::string_view operator*() const {
      return {reinterpret_cast<const char*>(data_ + 8), load_unaligned<uint64_t>(data_)};
    }
    Iterator& operator++() {
      data_ += 8 + load_unaligned<uint64_t>(data_);
      --left_;
      return *this;
    }
    Iterator operator++(int) {
      const Iterator before = *this;
      ++*this;
      return before;
    }
    bool operator==(const Iterator& other) const { return left_ == other.left_; }

   private:
    friend class StringArray;
    Iterator(const std::byte* data, uint64_t left) : data_(data), left_(left) {}
    const std::byte* data_ = nullptr;
    uint64_t left_ = 0;
  };

  StringArray(const std::byte* data, uint64_t count) : data_(data), count_(count) {}
  uint64_t size() const { return count_; }
  Iterator begin() const { return {data_, count_}; }
  Iterator end() const { return {nullptr, 0}; }
  // Views for random access; 16 bytes each.
  std::vector<std::string_view> to_vector() const { return {begin(), end()}; }

 private:
  const std::byte* data_;
  uint64_t count_;
};

// A value whose bytes were checked when the file was opened.
struct MetaValue {
  MetaType type;
  const std::byte* data;  // first byte of the value, not aligned

  // The caller must have checked `type`.
  bool as_bool() const { return load_unaligned<uint8_t>(data) != 0; }
  std::string_view as_string() const {
    return {reinterpret_cast<const char*>(data + 8), load_unaligned<uint64_t>(data)};
  }
  struct MetaArray as_array() const;
};

struct MetaArray {
  MetaType element;
  uint64_t count;
  const std::byte* data;  // first element

  StringArray strings() const { return {data, count}; }  // element == string
  std::vector<MetaArray> arrays() const;                 // element == array
};

// First byte after a checked value.
const std::byte* end_of_value(MetaType type, const std::byte* data);

// Calls visit(value) with the number at `data` in its own type. False if `type` is not a number (bool is not one).
template <typename Visit>
bool visit_number(MetaType type, const std::byte* data, Visit&& visit) {
  switch (type) {
    case MetaType::uint8:
      visit(load_unaligned<uint8_t>(data));
      return true;
    case MetaType::int8:
      visit(load_unaligned<int8_t>(data));
      return true;
    case MetaType::uint16:
      visit(load_unaligned<uint16_t>(data));
      return true;
    case MetaType::int16:
      visit(load_unaligned<int16_t>(data));
      return true;
    case MetaType::uint32:
      visit(load_unaligned<uint32_t>(data));
      return true;
    case MetaType::int32:
      visit(load_unaligned<int32_t>(data));
      return true;
    case MetaType::uint64:
      visit(load_unaligned<uint64_t>(data));
      return true;
    case MetaType::int64:
      visit(load_unaligned<int64_t>(data));
      return true;
    case MetaType::float32:
      visit(load_unaligned<float>(data));
      return true;
    case MetaType::float64:
      visit(load_unaligned<double>(data));
      return true;
    default:
      return false;
  }
}

// The keys and values of one file, in file order. Views: valid while the file is mapped.
//
// find_x returns nothing for a missing key; get_x throws ModelError. Both throw GgufError, with key, value, type and
// byte offset, if the value has another type. Integers of any width and sign are converted if the value fits; f32 also
// accepts f64 and integers.
class Metadata {
 public:
  struct Entry {
    std::string_view key;
    MetaValue value;
    uint64_t offset;  // of the value, in the file
  };

  Metadata() = default;
  explicit Metadata(std::string file) : file_(std::move(file)) {}
  bool add(const Entry& entry);  // false if the key already exists
  void reserve(size_t n);

  const std::vector<Entry>& entries() const { return entries_; }
  bool contains(std::string_view key) const { return index_.contains(key); }
  const Entry* find(std::string_view key) const;

  std::optional<uint32_t> find_u32(std::string_view key) const;
  std::optional<int32_t> find_i32(std::string_view key) const;
  std::optional<uint64_t> find_u64(std::string_view key) const;
  std::optional<int64_t> find_i64(std::string_view key) const;
  std::optional<float> find_f32(std::string_view key) const;
  std::optional<bool> find_bool(std::string_view key) const;
  std::optional<std::string_view> find_string(std::string_view key) const;
  std::optional<StringArray> find_string_array(std::string_view key) const;
  std::optional<std::vector<int64_t>> find_i64_array(std::string_view key) const;
  std::optional<std::vector<float>> find_f32_array(std::string_view key) const;
  std::optional<std::vector<bool>> find_bool_array(std::string_view key) const;

  uint32_t get_u32(std::string_view key) const;
  int32_t get_i32(std::string_view key) const;
  uint64_t get_u64(std::string_view key) const;
  int64_t get_i64(std::string_view key) const;
  float get_f32(std::string_view key) const;
  bool get_bool(std::string_view key) const;
  std::string_view get_string(std::string_view key) const;
  StringArray get_string_array(std::string_view key) const;
  std::vector<int64_t> get_i64_array(std::string_view key) const;
  std::vector<float> get_f32_array(std::string_view key) const;
  std::vector<bool> get_bool_array(std::string_view key) const;

  uint32_t get_u32(std::string_view key, uint32_t absent) const { return find_u32(key).value_or(absent); }
  float get_f32(std::string_view key, float absent) const { return find_f32(key).value_or(absent); }
  bool get_bool(std::string_view key, bool absent) const { return find_bool(key).value_or(absent); }
  std::string_view get_string(std::string_view key, std::string_view absent) const {
    return find_string(key).value_or(absent);
  }

  // One number per layer: an array of exactly `count` integers, or one integer for all layers.
  std::optional<std::vector<uint32_t>> find_u32_per_layer(std::string_view key, size_t count) const;
  std::vector<uint32_t> get_u32_per_layer(std::string_view key, size_t count) const;

 private:
  [[noreturn]] void fail_type(const Entry& entry, std::string_view expected) const;
  [[noreturn]] void fail_absent(std::string_view key) const;
  template <typename T>
  T number(const Entry& entry, MetaType type, const std::byte* data, std::string_view expected) const;
  template <typename T>
  std::optional<T> find_number(std::string_view key, std::string_view expected) const;
  template <typename T>
  std::optional<std::vector<T>> find_numbers(std::string_view key, std::string_view expected) const;
  template <typename T>
  T required(std::optional<T> value, std::string_view key) const;
  const Entry* find_array(std::string_view key, std::string_view expected) const;

  std::string file_;
  std::vector<Entry> entries_;
  std::unordered_map<std::string_view, size_t> index_;
};

// A value as text, for tables and messages; at most `max_items` elements of an array.
std::string describe_value(const MetaValue& value, size_t max_items = 8);

}  // namespace dyno
