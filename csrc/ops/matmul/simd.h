// Vectors of sixteen lanes, one for each row of a weight tile: the only vector width in the matmul kernels.
//
//   F  16 floats            I  16 int32            B  64 bytes: 16 lanes of 4 consecutive k
//
// AVX-512 holds each in one register, AVX2 in two, the portable version in an array. For kernel sources only.
#pragma once

#include <cstdint>
#include <cstring>

#include "ops/isa.h"

#if defined(__AVX512VNNI__)
#include "ops/matmul/simd_avx512.h"
#elif defined(__AVX2__)
#include "ops/matmul/simd_avx2.h"
#else
#include "ops/matmul/simd_portable.h"
#endif
