// A block loads a run (kX16RunK of k) of 16 rows to shared memory unchanged, and writes the run's words of layout gpu.
// Both transfers are contiguous; bytes are rearranged only on the chip.
#include "core/cuda/check.h"
#include "core/error.h"
#include "ops/matmul/cuda/from_x16.h"
#include "ops/matmul/gpu_pack.h"

namespace dyno::ops::cuda {
namespace {

constexpr int kThreads = 256;

template <DType kType>
__global__ void __launch_bounds__(kThreads) from_x16_kernel(const X16Matrices m) {
  using Rows = X16Rows<kType>;
  constexpr GpuFormat f = gpu_format(kType);
  constexpr int kUnitK = f.unit_k(), kUnitBytes = f.unit_bytes(), kUnitWords = kUnitBytes / 4;
  __shared__ uint4 staged[kX16RunK / Rows::per_block * Rows::record / 16];

  const int k0 = static_cast<int>(blockIdx.x) * kX16RunK, stripe = static_cast<int>(blockIdx.y);
  const int here = min(kX16RunK, m.k - k0), records = here / Rows::per_block, units = (here + kUnitK - 1) / kUnitK;
  const int64_t tile_bytes = static_cast<int64_t>(m.k / Rows::per_block) * Rows::record;
  const int64_t stripe_bytes = static_cast<int64_t>((m.k + kUnitK - 1) / kUnitK) * kUnitBytes;
  const int64_t tiles = gridDim.y;
  const auto* from = reinterpret_cast<const uint4*>(m.x16 + (blockIdx.z * tiles + stripe) * tile_bytes +
                                                    static_cast<int64_t>(k0 / Rows::per_block) * Rows::record);
  for (int i = threadIdx.x; i < records * (Rows::record / 16); i += kThreads) staged[i] = from[i];
  __syncthreads();

  const Rows rows{reinterpret_cast<const uint8_t*>(staged), min(kX16Rows, m.n - stripe * kX16Rows), here};
  auto* out = reinterpret_cast<uint32_t*>(m.out + (m.place[blockIdx.z] * tiles + stripe) * stripe_bytes +
                                          static_cast<int64_t>(k0 / kUnitK) * kUnitBytes);
  for (int i = threadIdx.x; i < units * kUnitWords; i += kThreads) {
    out[i] = pack_word<kType>(rows, 0, i / kUnitWords * kUnitK, i % kUnitWords);
  }
}

template <DType kType>
void start(const X16Matrices& m, CUstream_st* stream) {
  const dim3 grid(static_cast<unsigned>((m.k + kX16RunK - 1) / kX16RunK),
                  static_cast<unsigned>((m.n + kX16Rows - 1) / kX16Rows), static_cast<unsigned>(m.count));
  from_x16_kernel<kType><<<grid, kThreads, 0, stream>>>(m);
  DYNO_LAUNCH_CHECK("repack");
}

}  // namespace

void repack_from_x16(DType type, [[maybe_unused]] const X16Matrices& matrices, [[maybe_unused]] CUstream_st* stream) {
  switch (type) {
#define DYNO_BUILT_QUANT(name) \
  case DType::name:            \
    return start<DType::name>(matrices, stream);
#include "ops/built_types.inc"
    default:
      throw UnsupportedError(str_cat("[gpu layout] type ", dtype_name(type), " is not repacked from layout x16"));
  }
}

}  // namespace dyno::ops::cuda
