// Hopper tiles for weights that path `dequantize` has unpacked.
#include "ops/matmul/cuda/gemm_staged.cuh"

namespace dyno::ops::cuda {

void gemm_unpacked(const Problem& p, bool bf16, int rows_of_w, int multiprocessors, CUstream_st* stream) {
  const auto launch = rows_of_w == 128 ? (bf16 ? gemm_staged_launch<true, 1> : gemm_staged_launch<false, 1>)
                                       : (bf16 ? gemm_staged_launch<true, 2> : gemm_staged_launch<false, 2>);
  launch(p, multiprocessors, stream);
  DYNO_LAUNCH_CHECK("matmul");
}

}  // namespace dyno::ops::cuda
