// The memory of a GPU's cache on the device of driver/cuda_runtime.h, for tests.
#include "runtime/cuda/cache_memory.h"

#include <cuda.h>
#include <cudaTypedefs.h>

#include <cstring>
#include <iterator>
#include <memory>
#include <string>

#include "core/cuda_devices.h"
#include "core/error.h"
#include "runtime/cuda/cache_memory.cpp"

namespace {

constexpr uintptr_t kBase = uintptr_t{1} << 40;

CUresult error_name(CUresult, const char** name) {
  *name = "an error of the test's driver";
  return CUDA_SUCCESS;
}
CUresult granularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *bytes = emulated::kPieceBytes;
  return CUDA_SUCCESS;
}
CUresult reserve(CUdeviceptr* at, size_t, size_t, CUdeviceptr, unsigned long long) {
  *at = kBase;
  return CUDA_SUCCESS;
}
CUresult free_addresses(CUdeviceptr, size_t) { return CUDA_SUCCESS; }
CUresult create(CUmemGenericAllocationHandle*, size_t, const CUmemAllocationProp*, unsigned long long) {
  return emulated::mapped.size() < emulated::most_pieces ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult release(CUmemGenericAllocationHandle) { return CUDA_SUCCESS; }
CUresult map(CUdeviceptr at, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long) {
  return emulated::mapped.insert(at).second ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult unmap(CUdeviceptr at, size_t) {
  for (const emulated::Work& work : emulated::works) emulated::faults += static_cast<int64_t>(work.pieces.count(at));
  return emulated::mapped.erase(at) == 1 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult set_access(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }

struct Function {
  const char* name;
  void* at;
};
#define FUNCTION(name, function) {name, reinterpret_cast<void*>(function)}
const Function kFunctions[] = {
    FUNCTION("cuGetErrorName", error_name),
    FUNCTION("cuMemGetAllocationGranularity", granularity),
    FUNCTION("cuMemAddressReserve", reserve),
    FUNCTION("cuMemAddressFree", free_addresses),
    FUNCTION("cuMemCreate", create),
    FUNCTION("cuMemRelease", release),
    FUNCTION("cuMemMap", map),
    FUNCTION("cuMemUnmap", unmap),
    FUNCTION("cuMemSetAccess", set_access),
};

std::unique_ptr<dyno::runtime::CacheMemory> cache;

}  // namespace

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** found, unsigned, int,
                                             cudaDriverEntryPointQueryResult* result) {
  for (const Function& function : kFunctions) {
    if (std::strcmp(function.name, name) == 0) *found = function.at;
  }
  *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

namespace dyno {

void cuda_check(cudaError_t status, const char* expression, const char*, int) {
  if (status != cudaSuccess) throw DeviceError(expression);
}
void cuda_check_nothrow(cudaError_t, const char*, const char*, int) noexcept {}
void check_device_answers(const char*, const char*, int) {}
DeviceInfo cuda_device(int) {
  DeviceInfo info;
  info.maps_memory = true;
  return info;
}

namespace runtime {

// Only a cache by need is made here.
DeviceBuffer::DeviceBuffer(size_t, const char*) { throw DeviceError("no whole buffers in this test"); }
DeviceBuffer::~DeviceBuffer() = default;
DeviceBuffer::DeviceBuffer(DeviceBuffer&&) noexcept {}
DeviceBuffer& DeviceBuffer::operator=(DeviceBuffer&&) noexcept { return *this; }
Event make_event() { return Event(new emulated::Event); }
void destroy_event(cudaEvent_t event) noexcept { delete event; }

}  // namespace runtime
}  // namespace dyno

extern "C" {

// A cache of `bytes` on a device with so many pieces.
void open_cache(size_t bytes, size_t pieces) {
  cache.reset();
  emulated::stream = {};
  emulated::works.clear();
  emulated::faults = emulated::waits = 0;
  emulated::most_pieces = pieces;
  cache = std::make_unique<dyno::runtime::CacheMemory>(0, bytes, /*by_need=*/true);
}
// False if the device has no memory left.
bool take(size_t begin, size_t end) {
  try {
    cache->take(begin, end, &emulated::stream);
  } catch (const dyno::OutOfMemoryError&) {
    return false;
  }
  return true;
}
// The same, where the device cannot record an event; whether that was an error.
bool take_without_event(size_t begin, size_t end) {
  emulated::failing_records = 1;
  bool failed = false;
  try {
    cache->take(begin, end, &emulated::stream);
  } catch (const dyno::DeviceError&) {
    failed = true;
  }
  emulated::failing_records = 0;
  return failed;
}
// Starts a work that uses these bytes.
void start(size_t begin, size_t end) { emulated::begin(kBase + begin, end - begin); }
void finish() { emulated::wait(emulated::stream.begun); }
void give_back(size_t begin, size_t end) { cache->give_back(begin, end); }
void give_back_later(size_t begin, size_t end) { cache->give_back_later(begin, end); }
void settle() { cache->settle(); }
bool unsettled() { return cache->unsettled(); }
size_t taken() { return cache->taken(); }
size_t mapped() { return emulated::mapped.size() * emulated::kPieceBytes; }
int64_t faults() { return emulated::faults; }
int64_t waits() { return emulated::waits; }

}  // extern "C"
