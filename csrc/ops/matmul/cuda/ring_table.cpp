// Maps weight types to their kernels `ring` and `walk`.
#include "core/error.h"
#include "ops/instances.h"
#include "ops/matmul/cuda/ring.h"
#include "ops/matmul/cuda/walk.h"

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
bool walked(const Problem& p, const SharedPair& pair, int warps, int blocks, int multiprocessors, CUstream_st* stream) {
  if constexpr (has_block_codes(kType) && group_built(KernelGroup::experts)) {
    if (p.type == kType) return launch_walk<kType>(p, pair, warps, blocks, multiprocessors, stream), true;
  }
  return false;
}

}  // namespace

void run_walk(const Problem& p, [[maybe_unused]] const SharedPair& pair, [[maybe_unused]] int warps,
              [[maybe_unused]] int blocks, [[maybe_unused]] int multiprocessors, [[maybe_unused]] CUstream_st* stream) {
#define DYNO_BUILT_QUANT(name) \
  if (walked<DType::name>(p, pair, warps, blocks, multiprocessors, stream)) return;
#define DYNO_BUILT_GPU(name) DYNO_BUILT_QUANT(name)
#include "ops/built_types.inc"
  throw UnsupportedError(str_cat("[walk] ", dtype_name(p.type), " has no kernel"));
}

}  // namespace dyno::ops::cuda
