#include "ops/matmul/cuda/blas.h"

#include <cublas_v2.h>

#include "core/cuda/check.h"
#include "core/error.h"
#include "ops/matmul/cuda/dequantize.h"

namespace dyno::ops::cuda {

namespace {

void check(cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  check_device_answers(what, __FILE__, __LINE__);  // cuBLAS does not say that a launch before its own has failed
  throw DeviceError(str_cat("[cublas] ", what, ": ", cublasGetStatusString(status)));
}

}  // namespace

void* make_blas() {
  cublasHandle_t handle = nullptr;
  check(cublasCreate(&handle), "cublasCreate");
  return handle;
}

void destroy_blas(void* blas) noexcept {
  if (blas != nullptr) cublasDestroy(static_cast<cublasHandle_t>(blas));
}

void multiply_with_blas(const Problem& p, const DequantizePlan& plan, ComputeType compute, CudaStream& stream) {
  DYNO_CHECK(DeviceError, stream.blas != nullptr, "[cublas] the stream has no cuBLAS handle");
  auto* const handle = static_cast<cublasHandle_t>(stream.blas);
  check(cublasSetStream(handle, reinterpret_cast<cudaStream_t>(stream.handle)), "cublasSetStream");
  check(cublasSetWorkspace(handle, stream.workspace + plan.blas, kBlasWorkspace), "cublasSetWorkspace");
  const bool wide = compute == ComputeType::f32;
  const cudaDataType_t type = wide ? CUDA_R_32F : compute == ComputeType::bf16 ? CUDA_R_16BF : CUDA_R_16F;
  // Pedantic: float32 stays float32, whatever the environment says of TF32.
  const cublasComputeType_t sums_type = wide ? CUBLAS_COMPUTE_32F_PEDANTIC : CUBLAS_COMPUTE_32F;
  const int64_t element = wide ? 4 : 2, pass_bytes = (p.k + 63) / 64 * 128;

  const auto multiply = [&](const uint8_t* w, float* sums) {
    for (int pass = 0; pass < p.passes; ++pass) {
      const float one = 1.0f, beta = pass == 0 ? 0.0f : 1.0f;
      // Column-major: sums [n, rows] = wᵀ [k, n] · x [k, rows].
      check(cublasGemmStridedBatchedEx(handle, CUBLAS_OP_T, CUBLAS_OP_N, p.n, p.rows, p.k, &one, w, type, p.k,
                                       p.w_stride / element, p.x + pass * pass_bytes, type,
                                       static_cast<int>(p.x_stride / element), p.x_batch_stride / element, &beta, sums,
                                       CUDA_R_32F, p.n, static_cast<int64_t>(p.n) * p.rows, p.matrices, sums_type,
                                       CUBLAS_GEMM_DEFAULT),
            "cublasGemmStridedBatchedEx");
    }
  };
  auto* sums = reinterpret_cast<float*>(stream.workspace + plan.sums);
  auto* sums_up = p.gated() ? reinterpret_cast<float*>(stream.workspace + plan.sums_up) : nullptr;
  multiply(p.w, sums);
  if (p.gated()) multiply(p.w_up, sums_up);
  finish_sums(p, sums, sums_up, plan.converts_x, stream.handle);
}

}  // namespace dyno::ops::cuda
