// Strings of untrusted files: UTF-8 validation and quoting for messages.
#pragma once

#include <string>
#include <string_view>

namespace dyno {

// True for well-formed UTF-8: no overlong forms, no surrogates, nothing above U+10FFFF.
bool is_utf8(std::string_view text);

// `text` in single quotes, for error messages and tables: control characters and bytes that are not UTF-8 as \xNN,
// cut after `max_bytes` bytes of the text.
std::string in_quotes(std::string_view text, size_t max_bytes = 80);

}  // namespace dyno
