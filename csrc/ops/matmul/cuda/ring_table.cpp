// Maps weight types to their ring kernels.
#include "core/error.h"
#include "ops/instances.h"
#include "ops/matmul/cuda/ring.h"

namespace dyno::ops::cuda {

void run_ring(const Problem& p, DType other, [[maybe_unused]] int share, [[maybe_unused]] int blocks,
              [[maybe_unused]] int multiprocessors, [[maybe_unused]] CUstream_st* stream) {
#define DYNO_BUILT_MIXED(a, b)                                                         \
  if (p.type == DType::a && other == DType::b) {                                       \
    return launch_ring<DType::a, DType::b>(p, share, blocks, multiprocessors, stream); \
  }
#define DYNO_BUILT_QUANT(name) DYNO_BUILT_MIXED(name, name)
#define DYNO_BUILT_GPU(name) DYNO_BUILT_MIXED(name, name)
#include "ops/built_types.inc"
  throw UnsupportedError(str_cat("[ring] ", dtype_name(p.type), " and ", dtype_name(other), " have no common kernel"));
}

namespace {

template <DType kType>
bool launched(const Problem& p, const RingPair& pair, int share, int blocks, int multiprocessors, CUstream_st* stream) {
  if constexpr (has_block_codes(kType) && group_built(KernelGroup::experts)) {
    if (p.type == kType) return launch_ring_pair<kType>(p, pair, share, blocks, multiprocessors, stream), true;
  }
  return false;
}

}  // namespace

void run_ring_pair(const Problem& p, [[maybe_unused]] const RingPair& pair, [[maybe_unused]] int share,
                   [[maybe_unused]] int blocks, [[maybe_unused]] int multiprocessors,
                   [[maybe_unused]] CUstream_st* stream) {
#define DYNO_BUILT_QUANT(name) \
  if (launched<DType::name>(p, pair, share, blocks, multiprocessors, stream)) return;
#define DYNO_BUILT_GPU(name) DYNO_BUILT_QUANT(name)
#include "ops/built_types.inc"
  throw UnsupportedError(str_cat("[ring] ", dtype_name(p.type), " has no kernel for a shared expert's matrices"));
}

}  // namespace dyno::ops::cuda
