// The context of a single launch outside of a session: instruction set, threads, scratch memory.
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
  // Scratch is exactly what scratch_bytes() asks for (rounded up to 64 bytes), with guard bytes behind it.
  LaunchContext(size_t scratch_bytes, int threads, CpuIsa isa);

  ops::CpuContext& context() { return context_; }

  // Throws Error when a launch wrote past its scratch: scratch_bytes() of its family is wrong.
  void check_scratch() const;

 private:
  struct Free {
    void operator()(std::byte* p) const;
  };
  std::unique_ptr<std::byte, Free> scratch_;
  size_t scratch_bytes_;
  ThreadPool pool_;
  ops::CpuContext context_;
};

}  // namespace dyno
