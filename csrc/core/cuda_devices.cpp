#include "core/cuda_devices.h"

#include <array>
#include <memory>
#include <mutex>
#include <utility>

#include "core/device_loss.h"
#include "core/error.h"

#ifdef DYNO_HAVE_CUDA
#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime.h>
#include <dlfcn.h>

#include "core/cuda/check.h"
#endif

namespace dyno {

#ifdef DYNO_HAVE_CUDA

namespace {

// The device count; if it is 0, `reason` says why.
int count_devices(std::string& reason) {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) {
    (void)cudaGetLastError();
    reason = str_cat("the CUDA runtime sees no GPU: ", cudaGetErrorString(status));
    return 0;
  }
  if (count == 0) reason = "the CUDA runtime sees no GPU";
  return count;
}

// Asks the loaded driver directly. The runtime has no such attribute, and requesting driver functions through it might
// initialise the device. A driver that does not know the attribute has no virtual memory management.
bool maps_memory(int ordinal) {
  const std::unique_ptr<void, int (*)(void*)> driver(dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD), dlclose);
  if (driver == nullptr) return false;
  const auto device_of = reinterpret_cast<PFN_cuDeviceGet_v2000>(dlsym(driver.get(), "cuDeviceGet"));
  const auto attribute = reinterpret_cast<PFN_cuDeviceGetAttribute_v2000>(dlsym(driver.get(), "cuDeviceGetAttribute"));
  CUdevice device{};
  int supported = 0;
  return device_of != nullptr && attribute != nullptr && device_of(&device, ordinal) == CUDA_SUCCESS &&
         attribute(&supported, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device) == CUDA_SUCCESS &&
         supported != 0;
}

DeviceInfo describe(int ordinal) {
  cudaDeviceProp properties{};
  DYNO_CUDA_CHECK(cudaGetDeviceProperties(&properties, ordinal));
  DeviceInfo info;
  info.kind = DeviceKind::cuda;
  info.ordinal = ordinal;
  info.name = properties.name;
  info.memory_bytes = static_cast<int64_t>(properties.totalGlobalMem);
  info.compute_capability = properties.major * 10 + properties.minor;
  info.sm_count = properties.multiProcessorCount;
  info.shared_per_block_bytes = static_cast<int64_t>(properties.sharedMemPerBlockOptin);
  info.l2_bytes = properties.l2CacheSize;
  std::array<char, 32> bus{};
  DYNO_CUDA_CHECK(cudaDeviceGetPCIBusId(bus.data(), static_cast<int>(bus.size()), ordinal));
  info.pci_bus_id = bus.data();
  info.maps_memory = maps_memory(ordinal);
  return info;
}

}  // namespace

// The runtime makes its list once per process. The list is also cached here, because a GPU that is lost later does not
// answer.
std::vector<DeviceInfo> detect_cuda() {
  static std::mutex mutex;
  static std::vector<DeviceInfo> known;
  const std::lock_guard lock(mutex);
  if (known.empty()) {
    std::string reason;
    std::vector<DeviceInfo> found;
    const int count = count_devices(reason);
    for (int i = 0; i < count; ++i) found.push_back(describe(i));
    known = std::move(found);
  }
  return known;
}

std::string no_cuda_reason() {
  if (any_device_lost()) return "";  // the list had a GPU
  std::string reason;
  (void)count_devices(reason);
  return reason;
}

size_t cuda_free_bytes(int ordinal) {
  check_not_lost(ordinal);
  const CudaStep step(ordinal, "");
  DYNO_CUDA_CHECK(cudaSetDevice(ordinal));
  size_t free = 0, total = 0;
  DYNO_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  return free;
}

#else

std::vector<DeviceInfo> detect_cuda() { return {}; }
std::string no_cuda_reason() { return "this build has no CUDA engine (GGML_CUDA=OFF)"; }
size_t cuda_free_bytes(int ordinal) {
  throw DeviceError(str_cat("[cuda] device cuda:", ordinal, ": ", no_cuda_reason()));
}

#endif

DeviceInfo cuda_device(int ordinal) {
  const std::vector<DeviceInfo> devices = detect_cuda();
  DYNO_CHECK(DeviceError, !devices.empty(), "[cuda] device cuda:", ordinal, ": ", no_cuda_reason());
  DYNO_CHECK(DeviceError, ordinal >= 0 && static_cast<size_t>(ordinal) < devices.size(), "[cuda] device cuda:", ordinal,
             " does not exist; this machine shows ", devices.size(), ", from cuda:0 on");
  return devices[static_cast<size_t>(ordinal)];
}

}  // namespace dyno
