// Small text helpers for messages: the nearest valid name to a wrong one, lists of names.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace dyno {

// Levenshtein distance: insertions, deletions and substitutions that turn `a` into `b`.
int edit_distance(std::string_view a, std::string_view b);

// The name nearest to `wrong`; empty if more than half of the letters differ. The first of equally near names wins.
std::string_view nearest_name(std::string_view wrong, std::span<const std::string_view> names);

// "; did you mean 'x'?", or "; expected one of a, b, c" if no name is near.
std::string suggestion(std::string_view wrong, std::span<const std::string_view> names);

std::string join(std::span<const std::string_view> names, std::string_view separator);

}  // namespace dyno
