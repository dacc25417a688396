// What a single launch outside of a session needs: instruction set, threads, scratch memory.
#pragma once

#include <memory>
#include <string_view>

#include "ops/cpu_context.h"

namespace dyno {

// This machine with the instruction set of that name, "auto" being its best. Throws UnsupportedError for one that this
// machine or this build does not have.
DeviceInfo device_with_isa(std::string_view isa);

class LaunchContext {
 public:
  // Scratch is exactly what scratch_bytes() asks for (rounded up to 64 bytes), so that a launch that uses more is found
  // by the sanitizers.
  LaunchContext(size_t scratch_bytes, int threads, CpuIsa isa);

  ops::CpuContext& context() { return context_; }

 private:
  struct Free {
    void operator()(std::byte* p) const;
  };
  std::unique_ptr<std::byte, Free> scratch_;
  ThreadPool pool_;
  ops::CpuContext context_;
};

}  // namespace dyno
