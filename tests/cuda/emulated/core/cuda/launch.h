// Launches of emulated kernels: block after block. The includes of csrc/core/cuda/launch.h find it first.
#pragma once

#include <cuda_runtime.h>

struct CUstream_st;

#define DYNO_CUDA_CHECK(call) static_cast<void>(call)

namespace dyno {

template <typename... Params, typename... Args>
void launch_dependent(const char*, void (*kernel)(Params...), dim3 grid, unsigned threads, size_t, CUstream_st*,
                      const Args&... args) {
  emulated::grid = grid;
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; ++x) {
        emulated::block = dim3(x, y, z);
        emulated::run_block(threads, [&] { kernel(static_cast<Params>(args)...); });
      }
    }
  }
}

}  // namespace dyno
