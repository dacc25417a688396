#include "ops/matmul/cuda/dequantize.h"

#include <algorithm>

#include "core/error.h"
#include "ops/instances.h"
#include "ops/matmul/cuda/blas.h"
#include "ops/matmul/gpu_layout.h"

namespace dyno::ops::cuda {

namespace {

// Maximum bytes of a part's unpacked weights, and of its sums.
constexpr int64_t kPartBytes = int64_t{256} << 20;
constexpr int64_t kPartRows = 256;  // parts are a multiple of this

size_t aligned(int64_t bytes) { return static_cast<size_t>((bytes + 255) / 256 * 256); }

bool is_tiles(Unpacked form) { return form == Unpacked::tiles_f16 || form == Unpacked::tiles_bf16; }

// Whether everything is float32.
bool is_wide(const Shape& s, Kernel kernel) { return kernel == Kernel::float32 || s.compute == ComputeType::f32; }

Unpacked form_of(const Shape& s, Kernel kernel) {
  if (kernel == Kernel::half_mma) return Unpacked::fragments;
  if (kernel == Kernel::half_staged) return s.compute == ComputeType::bf16 ? Unpacked::tiles_bf16 : Unpacked::tiles_f16;
  if (is_wide(s, kernel)) return Unpacked::rows_f32;
  return s.compute == ComputeType::bf16 ? Unpacked::rows_bf16 : Unpacked::rows_f16;
}

}  // namespace

int64_t unpacked_bytes(Unpacked form, int64_t n, int64_t k) {
  if (form == Unpacked::fragments) return gpu_layout_bytes(DType::f16, n, k);
  if (is_tiles(form)) return (n + 63) / 64 * ((k + kGpuTile - 1) / kGpuTile) * 8192;
  return n * k * (form == Unpacked::rows_f32 ? 4 : 2);
}

DequantizePlan plan_dequantize(const Shape& s, const Choice& choice) {
  DequantizePlan plan;
  const bool blas = choice.kernel == Kernel::cublas;
  const int64_t pair = s.gated ? 2 : 1, batch = s.experts ? 1 : s.matrices;
  plan.form = form_of(s, choice.kernel);
  plan.unpacks = !(plan.form == Unpacked::fragments && s.type == DType::f16);
  plan.converts_x = !is_wide(s, choice.kernel);
  if (s.compute == ComputeType::bf16) {
    plan.x_format = {.passes = 1, .bf16 = true};
  } else {
    plan.x_format = {.passes = half_passes(s.type)};
  }

  plan.rows = s.n;
  plan.matrices = s.matrices;
  if (plan.unpacks && s.experts) {
    plan.matrices = std::clamp(kPartBytes / (pair * unpacked_bytes(plan.form, s.n, s.k)), int64_t{1}, s.matrices);
  } else if (plan.unpacks) {
    const int64_t row = pair * batch * unpacked_bytes(plan.form, kPartRows, s.k) / kPartRows;
    const int64_t sums = blas ? pair * batch * s.rows * 4 : 1;
    const int64_t most = kPartBytes / std::max(row, sums) / kPartRows * kPartRows;
    plan.rows = std::min(s.n, std::max(most, kPartRows));
  }

  size_t at = 0;
  const auto place = [&](size_t& offset, int64_t bytes) {
    offset = at;
    at += aligned(bytes);
  };
  if (plan.converts_x) place(plan.x, s.x_rows * plan.x_format.row_bytes(s.k));
  if (plan.unpacks) {
    const int64_t count = s.experts ? plan.matrices : batch;
    if (is_tiles(plan.form)) {
      place(plan.w, count * unpacked_bytes(plan.form, pair * plan.rows, s.k));
    } else {
      place(plan.w, count * unpacked_bytes(plan.form, plan.rows, s.k));
      if (s.gated) place(plan.w_up, count * unpacked_bytes(plan.form, plan.rows, s.k));
    }
  }
  if (blas) {
    place(plan.sums, batch * s.rows * plan.rows * 4);
    if (s.gated) place(plan.sums_up, batch * s.rows * plan.rows * 4);
    place(plan.blas, static_cast<int64_t>(kBlasWorkspace));
  }
  plan.bytes = at;
  return plan;
}

#if defined(DYNO_HAVE_CUDA) && !defined(DYNO_CUDA_FORCE_MMQ)
// In every build that has `half_mma` (type_kernels() has only weight types).
template <DType kType>
void gemm_mma(const Problem& p, int tokens, int warps, CUstream_st* stream);

namespace {

// The problem for rows [first, first + rows) of every matrix.
Problem part_of(const Problem& p, int64_t first, int64_t rows) {
  Problem part = p;
  const auto shift = [&](auto*& pointer) {
    if (pointer != nullptr) pointer += first;
  };
  shift(part.y);
  shift(part.bias);
  shift(part.bias_up);
  shift(part.residual);
  part.n = static_cast<int32_t>(rows);
  return part;
}

}  // namespace

void run_dequantized(const Choice& choice, const Shape& s, Problem p, CudaStream& stream) {
  const DequantizePlan plan = plan_dequantize(s, choice);
  DYNO_CHECK(DeviceError, stream.workspace_bytes >= plan.bytes, "[matmul] the stream's workspace has ",
             stream.workspace_bytes, " bytes, ", plan.bytes, " are needed");
  auto* base = reinterpret_cast<uint8_t*>(stream.workspace);
  const int64_t batch = s.experts ? 1 : s.matrices;
  if (plan.converts_x) {
    const int64_t rows = s.x_rows / batch;
    halve_rows(plan.x_format, p.x, p.x_stride, p.x_batch_stride, rows, batch, p.k, base + plan.x, stream.handle);
    p.x = base + plan.x;
    p.x_stride = plan.x_format.row_bytes(p.k);
    p.x_batch_stride = rows * p.x_stride;
    p.passes = plan.x_format.passes;
  }
  if (s.experts) group_rows(p, std::max(choice.tokens, 1), stream.handle);

  const DType unpacked_type = plan.form == Unpacked::rows_f32 ? DType::f32 : DType::f16;
  const bool tiles = is_tiles(plan.form);
  const int64_t step = s.experts ? plan.matrices : plan.rows, count = s.experts ? s.matrices : s.n;
  for (int64_t first = 0; first < count; first += step) {
    const int64_t size = std::min(step, count - first);
    Problem part = s.experts ? p : part_of(p, first, size);
    if (s.experts) {
      part.first_matrix = static_cast<int32_t>(first);
      part.last_matrix = static_cast<int32_t>(first + size);
    }
    if (plan.unpacks) {
      UnpackJob job{.w = p.w,
                    .w_stride = p.w_stride,
                    .out = base + plan.w,
                    .first_row = s.experts ? 0 : first,
                    .rows = s.experts ? s.n : size,
                    .k = s.k,
                    .first_matrix = s.experts ? first : 0,
                    .matrices = s.experts ? size : batch,
                    .pair = tiles && p.gated() ? 1 : 0,
                    .first_place = s.experts ? p.groups + s.matrices + 1 : nullptr};
      const TypeKernels& kernels = type_kernels(p.type);
      kernels.unpack(job, plan.form, stream.handle);
      part.w_stride = unpacked_bytes(plan.form, job.rows * (job.pair == 0 ? 1 : 2), s.k);
      const int64_t shift = part.first_matrix * part.w_stride;
      part.w = job.out - shift;
      if (p.gated()) {
        job.w = p.w_up;
        if (tiles) {
          job.pair = 2;
        } else {
          job.out = base + plan.w_up;
        }
        kernels.unpack(job, plan.form, stream.handle);
        part.w_up = job.out - shift;
      }
    }
    part.type = unpacked_type;
    if (choice.kernel == Kernel::cublas) {
      multiply_with_blas(part, plan, s.compute, stream);
    } else if (tiles) {
      if constexpr (!group_built(KernelGroup::experts)) {
        throw_left_out(KernelGroup::experts);
      } else {
        gemm_unpacked(part, plan.form == Unpacked::tiles_bf16, choice.rows, stream.device->sm_count, stream.handle);
      }
    } else if (choice.kernel == Kernel::half_mma) {
      if constexpr (variant_compiled("mma", type_bit(DType::f16))) {
        gemm_mma<DType::f16>(part, choice.tokens, choice.warps, stream.handle);
      } else {
        throw_left_out("half_mma", p.type, {static_cast<int16_t>(choice.tokens), static_cast<int16_t>(choice.warps)});
      }
    } else {
      type_kernels(DType::f32).exact(part, stream.handle);
    }
  }
}
#endif

}  // namespace dyno::ops::cuda
