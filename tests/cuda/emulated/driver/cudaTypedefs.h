// The driver's functions behind cuda_runtime.h.
#pragma once

#include <cuda.h>

using PFN_cuGetErrorName_v6000 = CUresult (*)(CUresult, const char**);
using PFN_cuMemGetAllocationGranularity_v10020 = CUresult (*)(size_t*, const CUmemAllocationProp*,
                                                              CUmemAllocationGranularity_flags);
using PFN_cuMemAddressReserve_v10020 = CUresult (*)(CUdeviceptr*, size_t, size_t, CUdeviceptr, unsigned long long);
using PFN_cuMemAddressFree_v10020 = CUresult (*)(CUdeviceptr, size_t);
using PFN_cuMemCreate_v10020 = CUresult (*)(CUmemGenericAllocationHandle*, size_t, const CUmemAllocationProp*,
                                            unsigned long long);
using PFN_cuMemRelease_v10020 = CUresult (*)(CUmemGenericAllocationHandle);
using PFN_cuMemMap_v10020 = CUresult (*)(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long);
using PFN_cuMemUnmap_v10020 = CUresult (*)(CUdeviceptr, size_t);
using PFN_cuMemSetAccess_v10020 = CUresult (*)(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t);
