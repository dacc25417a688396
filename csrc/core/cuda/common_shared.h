// One size of shared memory for the kernels of a token.
#pragma once

namespace dyno {

// Asks that a multiprocessor has the same size of shared memory for each kernel with which this function is called. By
// default the driver chooses 8 to 132 KiB for the kernels of a token, each by its own use. A launch with another size
// than the one before starts later, probably because a multiprocessor changes its size only while no block runs there.
// Does nothing where launches do not start early. The wish holds for all later launches of the kernel on this device.
// Throws DeviceError.
void prefer_common_shared_memory(const void* kernel);

template <typename... Params>
void prefer_common_shared_memory(void (*kernel)(Params...)) {
  prefer_common_shared_memory(reinterpret_cast<const void*>(kernel));
}

}  // namespace dyno
