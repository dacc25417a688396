#include "bindings/cuda_launch.h"

#include <algorithm>
#include <charconv>
#include <map>

#include "bindings/launch_context.h"
#include "core/cuda_devices.h"
#include "core/device_loss.h"
#include "core/error.h"
#include "ops/contract.h"
#ifdef DYNO_HAVE_CUDA
#include "core/cuda/check.h"
#include "ops/matmul/cuda/from_x16.h"
#include "runtime/cuda/handles.h"
#endif

namespace dyno {

DeviceInfo device_from_name(std::string_view name, std::string_view isa) {
  if (name == "cpu") return device_with_isa(isa);
  int ordinal = 0;
  bool known = name == "cuda";
  const bool cpu = name.starts_with("cpu:");
  if (const size_t colon = name.find(':'); (cpu || name.starts_with("cuda:")) && name.size() > colon + 1) {
    const char* end = name.data() + name.size();
    const auto [stop, error] = std::from_chars(name.data() + colon + 1, end, ordinal);
    known = error == std::errc() && stop == end && ordinal >= (cpu ? 1 : 0);
  }
  if (known && cpu) {
    DeviceInfo device = device_with_isa(isa);
    device.ordinal = ordinal;
    return device;
  }
  DYNO_CHECK(ProfileError, known, "[settings] device is '", name, "'; expected cpu, cpu:N, cuda or cuda:N");
  DeviceInfo device = cuda_device(ordinal);
  check_not_lost(ordinal);
  const std::string problem = device_problem(device);
  DYNO_CHECK(DeviceError, problem.empty(), "[cuda] device ", device_name(device), ": ", problem);
  return device;
}

std::string device_problem(const DeviceInfo& device) {
  if (ops::compiled_for(device)) return "";
#ifdef DYNO_HAVE_CUDA
  return str_cat("this build holds code for ", DYNO_CUDA_ARCHITECTURES, " and none for ",
                 device.name.empty() ? "this GPU" : device.name, " (compute capability ",
                 device.compute_capability / 10, ".", device.compute_capability % 10,
                 "); build it with CMAKE_CUDA_ARCHITECTURES=native or ", device.compute_capability);
#else
  return no_cuda_reason();
#endif
}

void repack_x16_on_gpu([[maybe_unused]] const DeviceInfo& device, [[maybe_unused]] DType type,
                       [[maybe_unused]] int64_t rows, [[maybe_unused]] int64_t k, [[maybe_unused]] const uint8_t* x16,
                       [[maybe_unused]] size_t x16_bytes, [[maybe_unused]] const std::vector<uint16_t>& place,
                       [[maybe_unused]] uint8_t* out, [[maybe_unused]] size_t out_bytes) {
#ifdef DYNO_HAVE_CUDA
  const runtime::DeviceScope scope(device.ordinal, "repacking");
  const runtime::Stream stream = runtime::make_stream();
  const runtime::DeviceBuffer from(x16_bytes, "matrices to repack"), to(out_bytes, "repacked matrices");
  DYNO_CUDA_CHECK(cudaMemcpyAsync(from.data(), x16, x16_bytes, cudaMemcpyHostToDevice, stream.get()));
  DYNO_CUDA_CHECK(cudaMemsetAsync(to.data(), 0, out_bytes, stream.get()));
  ops::cuda::X16Matrices some{.x16 = reinterpret_cast<const uint8_t*>(from.data()),
                              .out = reinterpret_cast<uint8_t*>(to.data()),
                              .n = static_cast<int32_t>(rows),
                              .k = static_cast<int32_t>(k)};
  const size_t each = x16_bytes / place.size();
  for (size_t i = 0; i < place.size(); i += static_cast<size_t>(some.count)) {
    some.count = static_cast<int32_t>(std::min<size_t>(place.size() - i, ops::cuda::X16Matrices::kMost));
    std::copy_n(place.begin() + static_cast<std::ptrdiff_t>(i), some.count, some.place);
    some.x16 = reinterpret_cast<const uint8_t*>(from.data()) + each * i;
    ops::cuda::repack_from_x16(type, some, stream.get());
  }
  DYNO_CUDA_CHECK(cudaMemcpyAsync(out, to.data(), out_bytes, cudaMemcpyDeviceToHost, stream.get()));
  DYNO_CUDA_CHECK(cudaStreamSynchronize(stream.get()));
#else
  throw DeviceError(no_cuda_reason());
#endif
}

#ifdef DYNO_HAVE_CUDA

namespace {

// Guard bytes around every argument; a multiple of the alignment that kernels rely on.
constexpr size_t kGpuGuardBytes = 256;
constexpr uint8_t kGpuGuard = 0xa5;

runtime::Blas blas_for(const ops::OpDesc& desc, const ops::Config& config) {
  const bool taken = ops::variants(ops::family_of(desc))[config.variant].name == "cublas";
  return taken ? runtime::Blas(ops::cuda::make_blas()) : runtime::Blas();
}

}  // namespace

struct CudaLaunch::State {
  explicit State(const DeviceInfo& info)
      : device(info), scope(info.ordinal, "running a single op"), stream(runtime::make_stream()) {}

  struct Mirrored {
    runtime::DeviceBuffer memory;
    size_t bytes = 0;
    bool written = false;
  };
  DeviceInfo device;
  runtime::DeviceScope scope;
  runtime::Stream stream;
  runtime::DeviceBuffer workspace, counters;
  runtime::Blas blas;
  std::map<const void*, Mirrored> arrays;
  ops::CudaStream launch;
};

CudaLaunch::CudaLaunch(const DeviceInfo& device, const ops::OpDesc& desc, const ops::Config& config)
    : state_(std::make_unique<State>(device)) {
  State& s = *state_;
  const size_t workspace_bytes = ops::scratch_bytes(desc, config);
  s.blas = blas_for(desc, config);
  // Exactly the requested size, filled with NaNs: memory checkers find accesses beyond it, and results show values that
  // were not written.
  s.workspace = runtime::DeviceBuffer(std::max<size_t>(workspace_bytes, 4), "workspace");
  DYNO_CUDA_CHECK(cudaMemset(s.workspace.data(), 0xff, s.workspace.size()));
  s.counters = runtime::DeviceBuffer(ops::kStreamCounters * sizeof(int32_t), "counters");
  DYNO_CUDA_CHECK(cudaMemset(s.counters.data(), 0, s.counters.size()));
  s.launch = {.handle = s.stream.get(),
              .device = &s.device,
              .workspace = s.workspace.data(),
              .workspace_bytes = workspace_bytes,
              .counters = reinterpret_cast<int32_t*>(s.counters.data()),
              .blas = s.blas.get()};
}

CudaLaunch::~CudaLaunch() = default;

void* CudaLaunch::mirror(const void* host, size_t bytes, bool written) {
  State::Mirrored& array = state_->arrays[host];
  if (array.memory.data() == nullptr) {
    array.memory = runtime::DeviceBuffer(bytes + 2 * kGpuGuardBytes, "an argument");
    array.bytes = bytes;
    DYNO_CUDA_CHECK(cudaMemset(array.memory.data(), kGpuGuard, array.memory.size()));
    DYNO_CUDA_CHECK(cudaMemcpy(array.memory.data() + kGpuGuardBytes, host, bytes, cudaMemcpyHostToDevice));
  }
  DYNO_CHECK(PlanError, array.bytes >= bytes, "[ops] two arguments overlap, but are not the same array");
  array.written |= written;
  return array.memory.data() + kGpuGuardBytes;
}

ops::CudaStream& CudaLaunch::stream() { return state_->launch; }

void CudaLaunch::begin(bool captured) {
  DYNO_CUDA_CHECK(cudaDeviceSynchronize());  // the copies above used another stream
  if (captured) {
    DYNO_CUDA_CHECK(cudaStreamBeginCapture(state_->stream.get(), cudaStreamCaptureModeThreadLocal));
  }
}

void CudaLaunch::end(bool captured) {
  if (!captured) return;
  cudaGraph_t raw = nullptr;
  DYNO_CUDA_CHECK(cudaStreamEndCapture(state_->stream.get(), &raw));
  const runtime::Graph graph(raw);
  cudaGraphExec_t exec = nullptr;
  DYNO_CUDA_CHECK(cudaGraphInstantiate(&exec, graph.get(), 0));
  const runtime::GraphExec owned(exec);
  DYNO_CUDA_CHECK(cudaGraphLaunch(exec, state_->stream.get()));
  DYNO_CUDA_CHECK(cudaStreamSynchronize(state_->stream.get()));
}

void CudaLaunch::finish() {
  State& s = *state_;
  DYNO_CUDA_CHECK(cudaStreamSynchronize(s.stream.get()));
  for (const auto& [host, array] : s.arrays) {
    std::vector<uint8_t> all(array.memory.size());
    DYNO_CUDA_CHECK(cudaMemcpy(all.data(), array.memory.data(), all.size(), cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < kGpuGuardBytes; ++i) {
      DYNO_CHECK(DeviceError, all[i] == kGpuGuard && all[all.size() - 1 - i] == kGpuGuard,
                 "[cuda] a launch wrote outside of an argument of ", array.bytes, " bytes");
    }
    if (array.written)
      std::copy_n(all.data() + kGpuGuardBytes, array.bytes, const_cast<uint8_t*>(static_cast<const uint8_t*>(host)));
  }
  std::vector<int32_t> counters(ops::kStreamCounters);
  DYNO_CUDA_CHECK(cudaMemcpy(counters.data(), s.counters.data(), s.counters.size(), cudaMemcpyDeviceToHost));
  for (const int32_t counter : counters) {
    DYNO_CHECK(DeviceError, counter == 0, "[cuda] a launch left a counter at ", counter);
  }
}

struct CudaTimer::State {
  explicit State(const DeviceInfo& info)
      : device(info), scope(info.ordinal, "running a single op"), stream(runtime::make_stream()) {}

  DeviceInfo device;
  runtime::DeviceScope scope;
  runtime::Stream stream;
  runtime::DeviceBuffer workspace, counters;
  runtime::Blas blas;
  std::vector<runtime::DeviceBuffer> arrays;
  ops::CudaStream launch;
};

CudaTimer::CudaTimer(const DeviceInfo& device, const ops::OpDesc& desc, const std::vector<ops::Config>& configs)
    : state_(std::make_unique<State>(device)) {
  State& s = *state_;
  size_t workspace_bytes = 0;
  for (const ops::Config& config : configs) {
    workspace_bytes = std::max(workspace_bytes, static_cast<size_t>(ops::scratch_bytes(desc, config)));
    if (s.blas.get() == nullptr) s.blas = blas_for(desc, config);
  }
  s.workspace = runtime::DeviceBuffer(std::max<size_t>(workspace_bytes, 4), "workspace");
  s.counters = runtime::DeviceBuffer(ops::kStreamCounters * sizeof(int32_t), "counters");
  DYNO_CUDA_CHECK(cudaMemset(s.counters.data(), 0, s.counters.size()));
  s.launch = {.handle = s.stream.get(),
              .device = &s.device,
              .workspace = s.workspace.data(),
              .workspace_bytes = workspace_bytes,
              .counters = reinterpret_cast<int32_t*>(s.counters.data()),
              .blas = s.blas.get()};
}

CudaTimer::~CudaTimer() = default;

std::byte* CudaTimer::upload(const std::byte* host, size_t bytes) {
  runtime::DeviceBuffer& copy = state_->arrays.emplace_back(bytes, "an argument to time with");
  DYNO_CUDA_CHECK(cudaMemcpy(copy.data(), host, bytes, cudaMemcpyHostToDevice));
  return copy.data();
}

ops::CudaStream& CudaTimer::stream() { return state_->launch; }

std::vector<double> CudaTimer::time(const std::function<void()>& launch_all, size_t launches, double min_seconds) {
  constexpr size_t kLeast = 3, kUsual = 5, kMost = 100'000;
  cudaStream_t stream = state_->stream.get();
  DYNO_CUDA_CHECK(cudaDeviceSynchronize());  // the copies used another stream
  launch_all();                              // loads modules that cannot be loaded during a capture
  DYNO_CUDA_CHECK(cudaStreamSynchronize(stream));
  DYNO_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  cudaGraph_t raw = nullptr;
  try {
    launch_all();
  } catch (...) {
    cudaStreamEndCapture(stream, &raw);
    const runtime::Graph broken(raw);
    throw;
  }
  DYNO_CUDA_CHECK(cudaStreamEndCapture(stream, &raw));
  const runtime::Graph graph(raw);
  cudaGraphExec_t exec = nullptr;
  DYNO_CUDA_CHECK(cudaGraphInstantiate(&exec, graph.get(), 0));
  const runtime::GraphExec owned(exec);
  const runtime::Event begin = runtime::make_timing_event(), end = runtime::make_timing_event();
  const auto replay = [&] {
    DYNO_CUDA_CHECK(cudaEventRecord(begin.get(), stream));
    DYNO_CUDA_CHECK(cudaGraphLaunch(exec, stream));
    DYNO_CUDA_CHECK(cudaEventRecord(end.get(), stream));
    DYNO_CUDA_CHECK(cudaEventSynchronize(end.get()));
    float milliseconds = 0;
    DYNO_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, begin.get(), end.get()));
    return static_cast<double>(milliseconds) * 1e-3;
  };
  double warm = 0;
  for (int i = 0; i < 1 || (warm < 0.1 * min_seconds && i < 1000); ++i) warm += replay();
  std::vector<double> samples;
  double total = 0;
  // A configuration that takes many times its share of the time is a poor choice, and three replays of many launches
  // show that.
  const auto enough = [&] {
    return total >= min_seconds && samples.size() >= (min_seconds > 0 && total >= 3 * min_seconds ? kLeast : kUsual);
  };
  while (!enough() && samples.size() < kMost) {
    const double seconds = replay();
    total += seconds;
    samples.push_back(seconds / static_cast<double>(launches));
  }
  return samples;
}

#endif

}  // namespace dyno
