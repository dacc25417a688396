// Op keys: writing and parsing. Both use the field lists of fields.h, so a new field there round-trips.
#include <charconv>
#include <limits>

#include "core/error.h"
#include "core/text.h"
#include "ops/fields.h"
#include "ops/names.h"
#include "ops/registry.h"

namespace dyno::ops {
namespace {

// Above any tensor's shape; products of two shapes fit 64 bits.
constexpr int64_t kMaxShape = int64_t{1} << 31;

std::string_view key_name(std::string_view field) {
  constexpr std::string_view kEnding = "_type";
  if (field.size() > kEnding.size() && field.ends_with(kEnding)) field.remove_suffix(kEnding.size());
  return field;
}

std::string value_text(int64_t value) { return std::to_string(value); }
std::string value_text(DType type) { return std::string(dtype_name(type)); }
template <typename E>
  requires std::is_enum_v<E>
std::string value_text(E value) {
  return std::string(enum_names(value)[static_cast<size_t>(value)]);
}

template <typename D>
std::string write_key(const D& desc) {
  const D defaults;
  std::string key(family_name(family_of(desc)));
  for_each_field(std::type_identity<D>{}, [&](std::string_view field, auto member, In in) {
    const auto& value = desc.*member;
    if (in == In::never || (in == In::if_set && value == defaults.*member)) return;
    key += ' ';
    if constexpr (std::is_same_v<decltype(value), const bool&>) {
      key += field;
    } else {
      if (field != "type") key.append(key_name(field)).append("=");
      key += value_text(value);
    }
  });
  return key;
}

struct Word {
  std::string_view name;   // empty for a word without '='
  std::string_view value;  // then the whole word
  bool used = false;
};

std::vector<Word> split_words(std::string_view text) {
  std::vector<Word> words;
  while (!text.empty()) {
    const size_t space = std::min(text.find(' '), text.size());
    const std::string_view word = text.substr(0, space);
    text.remove_prefix(std::min(space + 1, text.size()));
    if (word.empty()) continue;
    const size_t equals = word.find('=');
    if (equals == std::string_view::npos) {
      words.push_back({{}, word});
    } else {
      words.push_back({word.substr(0, equals), word.substr(equals + 1)});
    }
  }
  return words;
}

class KeyParser {
 public:
  KeyParser(std::string_view key, std::vector<Word> words) : key_(key), words_(std::move(words)) {}

  template <typename T>
  void field(std::string_view field_name, T& out, In in) {
    if (in == In::never) return;
    const std::string_view name = key_name(field_name);
    names_.push_back(name);
    if constexpr (std::is_same_v<T, bool>) {
      if (Word* word = find({}, name)) {
        word->used = true;
        out = true;
      }
    } else {
      Word* word = field_name == "type" ? first_bare() : find(name, {});
      if (word == nullptr) {
        DYNO_CHECK(ProfileError, in != In::always, "[key] '", key_, "': ", name, field_name == "type" ? "" : "=",
                   " is missing");
        return;
      }
      word->used = true;
      parse(name, word->value, out);
    }
  }

  // A word that matches no field is an error.
  void finish() const {
    for (const Word& word : words_) {
      if (word.used) continue;
      const std::string_view shown = word.name.empty() ? word.value : word.name;
      for (const Word& other : words_) {
        DYNO_CHECK(ProfileError,
                   &other == &word || !other.used || other.name != word.name ||
                       (word.name.empty() && other.value != word.value),
                   "[key] '", key_, "': '", shown, "' is given twice");
      }
      throw ProfileError(str_cat("[key] '", key_, "': unknown field '", shown, "'", suggestion(shown, names_)));
    }
  }

 private:
  Word* find(std::string_view name, std::string_view value) {
    for (Word& word : words_) {
      if (word.used || word.name != name || (name.empty() && word.value != value)) continue;
      return &word;
    }
    return nullptr;
  }
  Word* first_bare() {
    return !words_.empty() && words_.front().name.empty() && !words_.front().used ? &words_.front() : nullptr;
  }

  void parse(std::string_view name, std::string_view text, int64_t& out) const {
    const char* end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, out);
    const int64_t least = name == "offset" ? 0 : 1;
    DYNO_CHECK(ProfileError, error == std::errc() && stop == end && out >= least && out <= kMaxShape, "[key] '", key_,
               "': ", name, "='", text, "' is not a whole number from ", least, " to ", kMaxShape);
  }
  void parse(std::string_view name, std::string_view text, DType& out) const {
    const std::optional<DType> type = dtype_from_name(text);
    DYNO_CHECK(ProfileError, type.has_value(), "[key] '", key_, "': ", name, " '", text,
               "' is not a tensor type; expected one such as f16 or q4_0");
    out = *type;
  }
  template <typename E>
    requires std::is_enum_v<E>
  void parse(std::string_view name, std::string_view text, E& out) const {
    const std::span<const std::string_view> names = enum_names(out);
    for (size_t i = 0; i < names.size(); ++i) {
      if (names[i] == text) {
        out = static_cast<E>(i);
        return;
      }
    }
    throw ProfileError(str_cat("[key] '", key_, "': unknown ", name, " '", text, "'", suggestion(text, names)));
  }

  std::string_view key_;
  std::vector<Word> words_;
  std::vector<std::string_view> names_;
};

template <size_t I = 0>
OpDesc empty_desc(Family family) {
  if constexpr (I == std::variant_size_v<OpDesc>) {
    throw ProfileError(str_cat("[key] no op family has the number ", static_cast<int>(family)));
  } else {
    const std::variant_alternative_t<I, OpDesc> desc;
    return family_of(desc) == family ? OpDesc(desc) : empty_desc<I + 1>(family);
  }
}

}  // namespace

Family family_from_name(std::string_view name) {
  for (size_t i = 0; i < kFamilyNames.size(); ++i) {
    if (kFamilyNames[i] == name) return static_cast<Family>(i);
  }
  throw ProfileError(str_cat("[ops] unknown op family '", name, "'", suggestion(name, kFamilyNames)));
}

OpDesc default_desc(Family family) { return empty_desc(family); }

std::string op_key(const OpDesc& desc) {
  return std::visit([](const auto& d) { return write_key(d); }, desc);
}

OpDesc parse_key(std::string_view key, int64_t tokens) {
  std::vector<Word> words = split_words(key);
  DYNO_CHECK(ProfileError, !words.empty(), "[key] an op key is empty");
  DYNO_CHECK(ProfileError, tokens >= 1, "[key] '", key, "': ", tokens, " tokens; at least 1 is needed");
  const Family family = family_from_name(words.front().value);
  words.erase(words.begin());
  OpDesc desc = default_desc(family);
  std::visit(
      [&](auto& d) {
        KeyParser parser(key, std::move(words));
        for_each_field(std::type_identity<std::decay_t<decltype(d)>>{},
                       [&](std::string_view name, auto member, In in) { parser.field(name, d.*member, in); });
        parser.finish();
        d.m = tokens;
      },
      desc);
  return desc;
}

}  // namespace dyno::ops
