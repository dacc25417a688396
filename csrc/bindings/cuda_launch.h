// A single launch on a GPU outside a session: arguments are copied to the GPU before it and back after it.
#pragma once

#include <functional>
#include <memory>
#include <string_view>
#include <vector>

#include "bindings/op_args.h"
#include "ops/cuda_stream.h"
#include "ops/registry.h"

namespace dyno {

// The device "cpu", "cuda" or "cuda:N"; `isa` limits the CPU's instruction set. Throws ProfileError, UnsupportedError
// for the isa, and DeviceError for a GPU that does not exist or for which this build has no code.
DeviceInfo device_from_name(std::string_view name, std::string_view isa);
// The reason that this build cannot run on a device; empty if it can.
std::string device_problem(const DeviceInfo& device);

// Repacks matrices [rows, k] of layout x16 to layout gpu with the kernel of ops/matmul/cuda/from_x16.h. Matrix i goes
// to place[i] of `out`, which has out_bytes; unused places become zero. Throws DeviceError in a build without CUDA.
void repack_x16_on_gpu(const DeviceInfo& device, DType type, int64_t rows, int64_t k, const uint8_t* x16,
                       size_t x16_bytes, const std::vector<uint16_t>& place, uint8_t* out, size_t out_bytes);

#ifdef DYNO_HAVE_CUDA
class CudaLaunch final : public ArgMirror {
 public:
  // `config`: of the op that will be launched. A cuBLAS handle is created only if it is needed, because this takes
  // longer than a launch.
  CudaLaunch(const DeviceInfo& device, const ops::OpDesc& desc, const ops::Config& config);
  ~CudaLaunch() override;

  // Arrays with the same address share their copy.
  void* mirror(const void* host, size_t bytes, bool written) override;
  ops::CudaStream& stream();

  // With `captured`, launches between these two calls are captured and then replayed once.
  void begin(bool captured);
  void end(bool captured);
  // Waits, checks that the counters were reset to zero, and copies written arrays back.
  void finish();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Times launches as a session runs them: captured in a graph and replayed.
class CudaTimer {
 public:
  // `configs`: of the op that will be launched. Allocates memory for any of them, and a cuBLAS handle if one needs it.
  CudaTimer(const DeviceInfo& device, const ops::OpDesc& desc, const std::vector<ops::Config>& configs);
  ~CudaTimer();

  // Copies a host array to the device; this object owns the copy.
  std::byte* upload(const std::byte* host, size_t bytes);
  ops::CudaStream& stream();
  // Captures the `launches` launches of `launch_all`. Replays them until `min_seconds` have been measured, at least
  // five times (three times if these take three times min_seconds). Returns the seconds of one launch for each replay.
  std::vector<double> time(const std::function<void()>& launch_all, size_t launches, double min_seconds);

 private:
  struct State;
  std::unique_ptr<State> state_;
};
#endif

}  // namespace dyno
