// The driver's types behind cuda_runtime.h.
#pragma once

#include <cstddef>
#include <cstdint>

using CUdeviceptr = uintptr_t;
using CUmemGenericAllocationHandle = uint64_t;
enum CUresult : uint8_t { CUDA_SUCCESS, CUDA_ERROR_OUT_OF_MEMORY, CUDA_ERROR_INVALID_VALUE };
enum CUmemAllocationType : uint8_t { CU_MEM_ALLOCATION_TYPE_PINNED = 1 };
enum CUmemLocationType : uint8_t { CU_MEM_LOCATION_TYPE_DEVICE = 1 };
enum CUmemAccess_flags : uint8_t { CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3 };
enum CUmemAllocationGranularity_flags : uint8_t { CU_MEM_ALLOC_GRANULARITY_MINIMUM };
struct CUmemLocation {
  CUmemLocationType type;
  int id;
};
struct CUmemAllocationProp {
  CUmemAllocationType type;
  CUmemLocation location;
};
struct CUmemAccessDesc {
  CUmemLocation location;
  CUmemAccess_flags flags;
};
