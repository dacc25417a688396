// Small text helpers for messages: the nearest valid name to a wrong one, lists of names.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace dyno {

// Levenshtein distance: insertions, deletions and substitutions that turn `a` into `b`.
int edit_distance(std::string_view a, std::string_view b);

// The name nearest to `wrong`, or an empty view when none is near enough to be what was meant (more than half of the
// letters differ). Ties go to the first.
std::string_view nearest_name(std::string_view wrong, std::span<const std::string_view> names);

// "; did you mean 'x'?" or, when nothing is near, "; expected one of a, b, c".
std::string suggestion(std::string_view wrong, std::span<const std::string_view> names);

std::string join(std::span<const std::string_view> names, std::string_view separator);

}  // namespace dyno
