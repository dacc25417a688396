// A single launch on a GPU outside of a session: arguments are copied there, and back after it.
#pragma once

#include <memory>
#include <string_view>

#include "bindings/op_args.h"
#include "ops/cuda_stream.h"

namespace dyno {

// The device of "cpu", "cuda" or "cuda:N"; `isa` lowers the CPU's. Throws ProfileError, DeviceError, UnsupportedError.
DeviceInfo device_from_name(std::string_view name, std::string_view isa);
std::string device_name(const DeviceInfo& device);

#ifdef DYNO_HAVE_CUDA
class CudaLaunch final : public ArgMirror {
 public:
  CudaLaunch(const DeviceInfo& device, size_t workspace_bytes);
  ~CudaLaunch() override;

  // Arrays with the same address share their copy.
  void* mirror(const void* host, size_t bytes, bool written) override;
  ops::CudaStream& stream();

  // With `captured`, what is launched between these two is captured and then replayed once.
  void begin(bool captured);
  void end(bool captured);
  // Waits, checks that the counters were left at zero, and brings written arrays back.
  void finish();

 private:
  struct State;
  std::unique_ptr<State> state_;
};
#endif

}  // namespace dyno
