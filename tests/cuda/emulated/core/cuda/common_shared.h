// Emulated blocks share no multiprocessor.
#pragma once

namespace dyno {

template <typename... Params>
void prefer_common_shared_memory(void (*)(Params...)) {}

}  // namespace dyno
