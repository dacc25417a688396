// The context of a single launch outside a session: instruction set, threads, scratch memory.
#pragma once

#include <memory>
#include <string_view>

#include "ops/cpu_context.h"

namespace dyno {

// This machine with the given instruction set; "auto" is its best one. Throws UnsupportedError if this machine or this
// build does not have it.
DeviceInfo device_with_isa(std::string_view isa);

class LaunchContext {
 public:
  // Scratch memory has exactly the size of scratch_bytes(), rounded up to 64 bytes, and is followed by guard bytes.
  LaunchContext(size_t scratch_bytes, int threads, CpuIsa isa);

  ops::CpuContext& context() { return context_; }

  // Throws Error if a launch wrote past its scratch memory, which means that scratch_bytes() of its family is wrong.
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
