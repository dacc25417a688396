#include "runtime/cuda/cache_memory.h"

#include <cuda.h>
#include <cudaTypedefs.h>

#include <algorithm>
#include <string>
#include <utility>

#include "core/cuda/check.h"
#include "core/cuda_devices.h"
#include "core/error.h"

namespace dyno::runtime {
namespace {

// Functions of the driver, found through the runtime, because the engine does not link with the driver's library.
struct Driver {
  PFN_cuGetErrorName_v6000 error_name;
  PFN_cuMemGetAllocationGranularity_v10020 granularity;
  PFN_cuMemAddressReserve_v10020 reserve;
  PFN_cuMemAddressFree_v10020 free_addresses;
  PFN_cuMemCreate_v10020 create;
  PFN_cuMemRelease_v10020 release;
  PFN_cuMemMap_v10020 map;
  PFN_cuMemUnmap_v10020 unmap;
  PFN_cuMemSetAccess_v10020 set_access;
};

constexpr unsigned kDriverVersion = 10020;

template <typename Function>
void find(const char* name, Function& function) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
  DYNO_CUDA_CHECK(cudaGetDriverEntryPointByVersion(name, &found, kDriverVersion, cudaEnableDefault, &result));
#else
  DYNO_CUDA_CHECK(cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result));
#endif
  DYNO_CHECK(DeviceError, result == cudaDriverEntryPointSuccess && found != nullptr, "[cuda] this driver has no ", name,
             ", which cache_tokens and window_cache=window need; leave cache_tokens at 0 and window_cache at full");
  function = reinterpret_cast<Function>(found);
}

const Driver& driver() {
  static const Driver known = [] {
    Driver d{};
    find("cuGetErrorName", d.error_name);
    find("cuMemGetAllocationGranularity", d.granularity);
    find("cuMemAddressReserve", d.reserve);
    find("cuMemAddressFree", d.free_addresses);
    find("cuMemCreate", d.create);
    find("cuMemRelease", d.release);
    find("cuMemMap", d.map);
    find("cuMemUnmap", d.unmap);
    find("cuMemSetAccess", d.set_access);
    return d;
  }();
  return known;
}

std::string named(CUresult status) {
  const char* name = nullptr;
  if (driver().error_name(status, &name) != CUDA_SUCCESS || name == nullptr) return std::to_string(status);
  return name;
}

void check(CUresult status, const char* doing) {
  if (status == CUDA_SUCCESS) return;
  // If the device itself fails, the runtime's error is reported.
  check_device_answers(doing, __FILE__, __LINE__);
  throw DeviceError(str_cat("[cuda] ", doing, ": ", named(status)));
}

CUmemAllocationProp properties(int ordinal) {
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  prop.location.id = ordinal;
  return prop;
}

CUdeviceptr address(const std::byte* data) { return reinterpret_cast<CUdeviceptr>(data); }

}  // namespace

CacheMemory::CacheMemory(int ordinal, size_t bytes, bool by_need) : size_(bytes), ordinal_(ordinal) {
  if (bytes == 0) return;
  if (!by_need) {
    whole_ = DeviceBuffer(bytes, "the KV cache");
    data_ = whole_.data();
    return;
  }
  DYNO_CHECK(DeviceError, cuda_device(ordinal).maps_memory, "[cuda] device cuda:", ordinal,
             " has no virtual memory management, which cache_tokens and window_cache=window need; ",
             "leave cache_tokens at 0 and window_cache at full");
  const CUmemAllocationProp prop = properties(ordinal);
  check(driver().granularity(&piece_bytes_, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
        "asking for the granularity of memory");
  CUdeviceptr base = 0;
  const size_t pieces = pieces_of(bytes);
  check(driver().reserve(&base, pieces * piece_bytes_, 0, 0, 0), "reserving addresses for the KV cache");
  data_ = reinterpret_cast<std::byte*>(base);
  mapped_.assign(pieces, false);
  turns_.assign(pieces, 0);
}

CacheMemory::~CacheMemory() {
  if (!by_need()) return;
  for (size_t piece = 0; piece < mapped_.size(); ++piece) unmap(piece);
  driver().free_addresses(address(data_), mapped_.size() * piece_bytes_);
}

CacheMemory::CacheMemory(CacheMemory&& other) noexcept { *this = std::move(other); }

CacheMemory& CacheMemory::operator=(CacheMemory&& other) noexcept {
  std::swap(whole_, other.whole_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(ordinal_, other.ordinal_);
  std::swap(piece_bytes_, other.piece_bytes_);
  std::swap(mapped_, other.mapped_);
  std::swap(turns_, other.turns_);
  std::swap(leaves_, other.leaves_);
  std::swap(leaving_, other.leaving_);
  std::swap(turn_, other.turn_);
  return *this;
}

size_t CacheMemory::taken() const {
  if (!by_need()) return size_;
  return static_cast<size_t>(std::count(mapped_.begin(), mapped_.end(), true)) * piece_bytes_;
}

void CacheMemory::map(size_t piece) {
  const CUmemAllocationProp prop = properties(ordinal_);
  CUmemGenericAllocationHandle handle{};
  const CUresult created = driver().create(&handle, piece_bytes_, &prop, 0);
  if (created == CUDA_ERROR_OUT_OF_MEMORY) {
    throw OutOfMemoryError(str_cat(
        "[cuda] device cuda:", ordinal_, " has no memory left for the KV cache, which holds ", taken(),
        " bytes of the at most ", size_, "; something else takes the device's memory: end it, or reset sequences"));
  }
  check(created, "taking memory for the KV cache");
  const CUdeviceptr at = address(data_) + piece * piece_bytes_;
  const CUresult mapped = driver().map(at, piece_bytes_, 0, handle, 0);
  // The mapping keeps the memory alive.
  const CUresult released = driver().release(handle);
  check(mapped, "mapping memory for the KV cache");
  mapped_[piece] = true;
  check(released, "releasing a handle of the KV cache");
  CUmemAccessDesc access{};
  access.location = prop.location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  const CUresult opened = driver().set_access(at, piece_bytes_, &access, 1);
  if (opened != CUDA_SUCCESS) unmap(piece);
  check(opened, "opening memory for the KV cache");
}

void CacheMemory::unmap(size_t piece) noexcept {
  if (!mapped_[piece]) return;
  turns_[piece] = 0;
  // A lost device returns an error, and has no memory to free.
  driver().unmap(address(data_) + piece * piece_bytes_, piece_bytes_);
  mapped_[piece] = false;
}

void CacheMemory::take(size_t begin, size_t end, cudaStream_t stream) {
  if (!by_need() || begin >= end) return;
  if (!leaves_.empty()) {
    Leaving last{.turn = turn_, .over = make_event(), .pieces = {}};
    DYNO_CUDA_CHECK(cudaEventRecord(last.over.get(), stream));
    leaving_.push_back(std::move(last));
    leaving_.back().pieces.swap(leaves_);  // after everything that can fail, so that the pieces are always freed
  }
  let_go(/*all=*/false);
  for (size_t piece = begin / piece_bytes_; piece < pieces_of(std::min(end, size_)); ++piece) {
    turns_[piece] = 0;
    if (mapped_[piece]) continue;
    try {
      map(piece);
    } catch (const OutOfMemoryError&) {
      if (leaving_.empty()) throw;
      let_go(/*all=*/true);
      map(piece);
    }
    DYNO_CUDA_CHECK(cudaMemsetAsync(data_ + piece * piece_bytes_, 0, piece_bytes_, stream));
  }
}

void CacheMemory::give_back(size_t begin, size_t end) {
  if (!by_need()) return;
  for (size_t piece = pieces_of(begin); (piece + 1) * piece_bytes_ <= end && piece < mapped_.size(); ++piece) {
    unmap(piece);
  }
}

void CacheMemory::give_back_later(size_t begin, size_t end) {
  if (!by_need()) return;
  if (leaves_.empty()) ++turn_;
  for (size_t piece = pieces_of(begin); (piece + 1) * piece_bytes_ <= end && piece < mapped_.size(); ++piece) {
    if (!mapped_[piece] || turns_[piece] == turn_) continue;
    turns_[piece] = turn_;
    leaves_.push_back(piece);
  }
}

void CacheMemory::settle() {
  let_go(/*all=*/true);
  for (const size_t piece : std::exchange(leaves_, {})) unmap(piece);  // a take() since then has emptied the list
}

void CacheMemory::let_go(bool all) {
  while (!leaving_.empty()) {
    const cudaEvent_t over = leaving_.front().over.get();
    if (all || leaving_.size() > 1) {
      DYNO_CUDA_CHECK(cudaEventSynchronize(over));
    } else if (const cudaError_t status = cudaEventQuery(over); status == cudaErrorNotReady) {
      static_cast<void>(cudaGetLastError());  // cudaErrorNotReady is not an error
      return;
    } else {
      DYNO_CUDA_CHECK(status);
    }
    let_go(leaving_.front());
    leaving_.erase(leaving_.begin());
  }
}

void CacheMemory::let_go(const Leaving& leaving) noexcept {
  for (const size_t piece : leaving.pieces) {
    if (turns_[piece] == leaving.turn) unmap(piece);
  }
}

void CacheMemory::clear(cudaStream_t stream) {
  if (by_need()) {
    DYNO_CUDA_CHECK(cudaStreamSynchronize(stream));
    leaves_.clear();
    leaving_.clear();
    for (size_t piece = 0; piece < mapped_.size(); ++piece) unmap(piece);
  } else if (size_ > 0) {
    DYNO_CUDA_CHECK(cudaMemsetAsync(data_, 0, size_, stream));
  }
}

}  // namespace dyno::runtime
