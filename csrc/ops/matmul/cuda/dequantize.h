// Path `dequantize` on the host: its workspace and its launches. Weights are unpacked in parts that limit the
// workspace; each part is multiplied before the next one replaces it.
#pragma once

#include "ops/matmul/cuda/choice.h"

namespace dyno::ops::cuda {

struct DequantizePlan {
  HalfRows x_format;
  bool converts_x = true;  // false: float32 rows are multiplied directly
  Unpacked form = Unpacked::rows_f16;
  bool unpacks = true;  // false: the weights already have this form
  // Per part: rows of each matrix, and (with experts) number of matrices.
  int64_t rows = 0, matrices = 1;
  // Offsets in the workspace.
  size_t x = 0, w = 0, w_up = 0, sums = 0, sums_up = 0, blas = 0;
  size_t bytes = 0;
};
DequantizePlan plan_dequantize(const Shape& shape, const Choice& choice);

void run_dequantized(const Choice& choice, const Shape& shape, Problem problem, CudaStream& stream);

}  // namespace dyno::ops::cuda
