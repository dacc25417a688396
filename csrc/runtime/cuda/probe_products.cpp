#include <cublas_v2.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "core/cuda/check.h"
#include "core/error.h"
#include "runtime/cuda/probe.h"

namespace dyno::runtime {
namespace {

void check(cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  check_device_answers(what, __FILE__, __LINE__);
  throw DeviceError(str_cat("[probe] ", what, ": ", cublasGetStatusString(status)));
}

struct ProbeBlas {
  ProbeBlas() { check(cublasCreate(&handle), "cublasCreate"); }
  ~ProbeBlas() { cublasDestroy(handle); }
  ProbeBlas(const ProbeBlas&) = delete;
  ProbeBlas& operator=(const ProbeBlas&) = delete;
  cublasHandle_t handle = nullptr;
};

// Random f16 values between -1 and 1, because a product of zeros runs faster than a product of data.
void fill_halves(std::byte* target, size_t bytes, cudaStream_t stream) {
  std::vector<uint16_t> pool(std::min<size_t>(bytes / 2, size_t{1} << 20));
  std::mt19937 random(1);
  for (uint16_t& half : pool) half = static_cast<uint16_t>((random() & 0x83ff) | (0x3000 + (random() % 3) * 0x400));
  for (size_t at = 0; at < bytes; at += pool.size() * 2) {
    DYNO_CUDA_CHECK(cudaMemcpyAsync(target + at, pool.data(), std::min(pool.size() * 2, bytes - at),
                                    cudaMemcpyHostToDevice, stream));
  }
  DYNO_CUDA_CHECK(cudaStreamSynchronize(stream));
}

}  // namespace

double product_tflops(std::byte* memory, size_t bytes, cudaStream_t stream) {
  int n = 8192;
  while (n > 512 && size_t{3} * 2 * static_cast<size_t>(n) * static_cast<size_t>(n) > bytes) n /= 2;
  const size_t matrix = 2 * static_cast<size_t>(n) * static_cast<size_t>(n);
  fill_halves(memory, 2 * matrix, stream);
  const ProbeBlas blas;
  check(cublasSetStream(blas.handle, stream), "cublasSetStream");
  const float one = 1.0f, zero = 0.0f;
  const double seconds = median_seconds(stream, [&] {
    check(
        cublasGemmEx(blas.handle, CUBLAS_OP_T, CUBLAS_OP_N, n, n, n, &one, memory, CUDA_R_16F, n, memory + matrix,
                     CUDA_R_16F, n, &zero, memory + 2 * matrix, CUDA_R_16F, n, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
        "cublasGemmEx");
  });
  return 2.0 * n * n * n / seconds / 1e12;
}

}  // namespace dyno::runtime
