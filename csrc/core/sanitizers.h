// Whether this file is compiled under AddressSanitizer (DYNO_SANITIZE). Allocations are then separate, so that it
// detects more overruns.
#pragma once

namespace dyno {

#if defined(__SANITIZE_ADDRESS__)
inline constexpr bool kAddressSanitizer = true;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
inline constexpr bool kAddressSanitizer = true;
#else
inline constexpr bool kAddressSanitizer = false;
#endif
#else
inline constexpr bool kAddressSanitizer = false;
#endif

}  // namespace dyno
