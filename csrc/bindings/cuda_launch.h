// A single launch on a GPU outside of a session: arguments are copied there, and back after it.
#pragma once

#include <functional>
#include <memory>
#include <string_view>
#include <vector>

#include "bindings/op_args.h"
#include "ops/cuda_stream.h"
#include "ops/registry.h"

namespace dyno {

// The device of "cpu", "cuda" or "cuda:N"; `isa` lowers the CPU's. Throws ProfileError, UnsupportedError for the isa,
// DeviceError for a GPU that is not there or that this build has no code for.
DeviceInfo device_from_name(std::string_view name, std::string_view isa);
// Why this build cannot run on a device; empty where it can.
std::string device_problem(const DeviceInfo& device);

// Matrices [rows, k] of layout x16 in layout gpu by the kernel of ops/matmul/cuda/from_x16.h; throws DeviceError in a
// build without CUDA. `out` is of so many bytes, zeros where no matrix comes to.
void repack_x16_on_gpu(const DeviceInfo& device, DType type, int64_t rows, int64_t k, const uint8_t* x16,
                       size_t x16_bytes, const std::vector<uint16_t>& place, uint8_t* out, size_t out_bytes);

#ifdef DYNO_HAVE_CUDA
class CudaLaunch final : public ArgMirror {
 public:
  // `config` of the op that will be launched: only cuBLAS gets a handle, which takes longer to make than a launch.
  CudaLaunch(const DeviceInfo& device, const ops::OpDesc& desc, const ops::Config& config);
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

// Times launches as a session runs them: captured in a graph and replayed.
class CudaTimer {
 public:
  // `configs` of the op that will be launched: memory for any of them, and a cuBLAS handle if one needs it.
  CudaTimer(const DeviceInfo& device, const ops::OpDesc& desc, const std::vector<ops::Config>& configs);
  ~CudaTimer();

  // A copy of a host array on the device, owned here.
  std::byte* upload(const std::byte* host, size_t bytes);
  ops::CudaStream& stream();
  // Captures what `launch_all` launches, `launches` of them, and replays it until `min_seconds` have been measured and
  // at least five times (three where those take three times min_seconds). Seconds of one launch, for every replay.
  std::vector<double> time(const std::function<void()>& launch_all, size_t launches, double min_seconds);

 private:
  struct State;
  std::unique_ptr<State> state_;
};
#endif

}  // namespace dyno
