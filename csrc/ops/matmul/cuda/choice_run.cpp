// The launches of a choice.
#include "core/error.h"
#include "ops/matmul/cuda/choice.h"
#include "ops/matmul/cuda/choice_forms.h"
#include "ops/matmul/cuda/dequantize.h"
#include "ops/matmul/cuda/ring.h"
#include "ops/matmul/cuda/tf32_pairs.h"
#include "ops/matmul/cuda/walk.h"

namespace dyno::ops::cuda {

size_t choice_scratch_bytes(const Shape& s, const Choice& choice) {
  if (path_of(choice.kernel) == ProductPath::any || path_of(choice.kernel) == ProductPath::matvec) return 0;
  if (path_of(choice.kernel) == ProductPath::dequantize) return plan_dequantize(s, choice).bytes;
  if (has_wide_tiles(choice.kernel)) return static_cast<size_t>(wide_format(s, choice).bytes());
  if (choice.kernel == Kernel::wgmma_sorted) return static_cast<size_t>(sorted_rows(s).bytes());
  if (s.x_tiles > 0) return 0;
  if (is_gemm_ring(choice.kernel)) return static_cast<size_t>(ring_rows(s, choice).bytes());
  return static_cast<size_t>(s.x_rows * HalfRows{.passes = half_passes(s.type)}.row_bytes(s.k));
}

#ifdef DYNO_HAVE_CUDA
void run_stream(Problem p, DType other, const Choice& choice, CudaStream& stream) {
  p.shared_limit = static_cast<int32_t>(stream.device->shared_per_block_bytes);
  if (choice.kernel == Kernel::ring) {
    return run_ring(p, other, choice.share, choice.blocks, stream.device->sm_count, stream.handle);
  }
  if (choice.kernel == Kernel::walk) {
    return run_walk(p, {}, choice.warps, choice.blocks, stream.device->sm_count, stream.handle);
  }
  if (other != p.type) return stream_mixed(p, other, choice.warps, choice.stripes, stream.handle);
  type_kernels(p.type).stream(p, choice.warps, choice.stripes, stream.handle);
}

void run(const Choice& choice, const Shape& shape, Problem p, CudaStream& stream) {
  p.last_matrix = p.matrices;
#ifndef DYNO_CUDA_FORCE_MMQ
  if (path_of(choice.kernel) == ProductPath::dequantize) return run_dequantized(choice, shape, p, stream);
#endif
  const TypeKernels& kernels = type_kernels(p.type);
  p.shared_limit = static_cast<int32_t>(stream.device->shared_per_block_bytes);
  if (choice.kernel == Kernel::exact) return kernels.exact(p, stream.handle);
  if (choice.kernel == Kernel::tf32_pairs) {
    return gemm_tf32_pairs(p, choice.parts, stream.device->sm_count, stream.handle);
  }
  if (path_of(choice.kernel) == ProductPath::matvec) return run_stream(p, p.type, choice, stream);
  const size_t scratch = choice_scratch_bytes(shape, choice);
  DYNO_CHECK(DeviceError, stream.workspace_bytes >= scratch, "[matmul] the stream's workspace has ",
             stream.workspace_bytes, " bytes, ", scratch, " are needed");
  auto* half = reinterpret_cast<uint8_t*>(stream.workspace);
  const RowNorm norm = p.normed ? RowNorm{true, p.norm, p.norm_eps} : RowNorm{};
  if (is_gemm_ring(choice.kernel)) {
    const TiledRows format = ring_rows(shape, choice);
    if (shape.x_tiles > 0) return run_gemm_codes(p, format, ring_shape_of(shape, choice), stream.handle);
    tile_rows(format, p.x, p.x_stride, p.x_batch_stride, half, stream.handle, norm);
    p.x = half;
    const auto start = choice.kernel == Kernel::wgmma_codes ? run_gemm_codes : run_gemm_ring;
    return start(p, format, ring_shape_of(shape, choice), stream.handle);
  }
  if (has_wide_tiles(choice.kernel)) {
    const TiledRows format = wide_format(shape, choice);
    tile_rows(format, p.x, p.x_stride, p.x_batch_stride, half, stream.handle, norm);
    p.x = half;
    const int group = format.parts > 1 ? kWideGroup : choice.group;
    gemm_wide(p, format, group, stream.device->sm_count, stream.handle);
    return;
  }
  if (choice.kernel == Kernel::wgmma_sorted) {
    const SortedRows format = sorted_rows(shape);
    sort_rows(p, format, half, stream.handle);
    tile_sorted_rows(p, format, half, stream.handle);
    p.x = half;
    gemm_sorted(p, format, stream.device->sm_count, stream.handle);
    return;
  }
  const int64_t batch = p.grouping == Grouping::experts ? 1 : p.matrices;
  const int64_t rows = shape.x_rows / batch;
  const HalfRows format{.passes = half_passes(p.type)};
  if (p.grouping == Grouping::experts) {
    halve_and_group(format, p, rows, choice.tokens, half, stream.handle);
  } else {
    halve_rows(format, p.x, p.x_stride, p.x_batch_stride, rows, batch, p.k, half, stream.handle, norm);
  }
  p.passes = format.passes;
  p.x = half;
  p.x_stride = format.row_bytes(p.k);
  p.x_batch_stride = rows * p.x_stride;
  if (choice.kernel == Kernel::wgmma_split) return kernels.gemm_split(p, choice.tokens, choice.parts, stream.handle);
  (choice.kernel == Kernel::mma ? kernels.gemm_mma : kernels.gemm_wgmma)(p, choice.tokens, choice.warps, stream.handle);
}
#endif

}  // namespace dyno::ops::cuda
