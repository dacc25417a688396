#include "core/text.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "core/error.h"

namespace dyno {
namespace {

// Names come from files. Longer ones are not compared.
constexpr size_t kMaxCompared = 128;

}  // namespace

int edit_distance(std::string_view a, std::string_view b) {
  std::vector<int> row(b.size() + 1);
  std::iota(row.begin(), row.end(), 0);
  for (size_t i = 0; i < a.size(); ++i) {
    int diagonal = row[0];
    row[0] = static_cast<int>(i) + 1;
    for (size_t j = 0; j < b.size(); ++j) {
      const int substituted = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({row[j] + 1, row[j + 1] + 1, substituted});
    }
  }
  return row.back();
}

std::string_view nearest_name(std::string_view wrong, std::span<const std::string_view> names) {
  if (wrong.size() > kMaxCompared) return {};
  std::string_view best;
  int best_distance = 0;
  for (const std::string_view name : names) {
    const int distance = edit_distance(wrong, name);
    const int limit = static_cast<int>(std::max(wrong.size(), name.size()) + 1) / 2;
    if (distance <= limit && (best.empty() || distance < best_distance)) {
      best = name;
      best_distance = distance;
    }
  }
  return best;
}

std::string suggestion(std::string_view wrong, std::span<const std::string_view> names) {
  const std::string_view near = nearest_name(wrong, names);
  if (!near.empty()) return str_cat("; did you mean '", near, "'?");
  return str_cat("; expected one of ", join(names, ", "));
}

std::string join(std::span<const std::string_view> names, std::string_view separator) {
  std::string out;
  for (const std::string_view name : names) {
    if (!out.empty()) out += separator;
    out += name;
  }
  return out;
}

}  // namespace dyno
