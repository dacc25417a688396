#include "ops/matmul/cuda/choice.h"

#include <algorithm>

#include "core/error.h"
#include "ops/matmul/gpu_layout.h"

namespace dyno::ops::cuda {

namespace {

#if defined(DYNO_HAVE_CUDA)
constexpr std::string_view kArchitectures = DYNO_CUDA_ARCHITECTURES;
#else
constexpr std::string_view kArchitectures = "90a";  // selection for a chip that this build holds no code for
#endif

bool has_wgmma(const DeviceInfo& device) {
  return device.compute_capability == 90 && kArchitectures.find("90a") != std::string_view::npos;
}

// Blocks that a tile size makes; with experts, of the rows that an even routing gives each of them.
int64_t blocks_of(const Shape& s, int tokens, int warps) {
  const int64_t rows_of_w = warps * (s.gated ? 16 : 32);
  const int64_t groups = s.experts ? std::min(s.matrices, s.rows) : s.matrices;
  const int64_t rows = s.experts ? (s.rows + groups - 1) / groups : s.rows;
  return groups * ((rows + tokens - 1) / tokens) * ((s.n + rows_of_w - 1) / rows_of_w);
}

// What every chip gives a block, for descriptions of devices that do not say.
int64_t shared_of(const DeviceInfo& device) {
  return device.shared_per_block_bytes > 0 ? device.shared_per_block_bytes : 48 << 10;
}

// What a block of stream needs of shared memory at least.
int64_t least_shared(const Shape& s, int warps, int stripes) {
  const int64_t columns = s.experts ? 1 : std::min<int64_t>(s.rows, 8);
  return stream_least_bytes(s.type, s.other.value_or(s.type), columns, warps, s.gated ? 2 : stripes);
}

}  // namespace

Support supports_choice(const Shape& s, const Choice& choice, const DeviceInfo& device) {
  if (s.act != ActType::f32) return Support::no("CUDA kernels take f32 activations, not q8");
  if (s.norm && choice.path != Path::stream) return Support::no("only stream norms the rows of a product");
  if (choice.path == Path::exact) {
    if (s.layout != Layout::plain) return Support::no(str_cat("exact reads layout plain, not ", layout_name(s.layout)));
    return Support::yes();
  }
  if (s.layout != Layout::gpu) {
    return Support::no(str_cat("stream, mma and wgmma read layout gpu, not ", layout_name(s.layout)));
  }
  if (s.k % 32 != 0) return Support::no(str_cat("k=", s.k, " is no multiple of 32"));
  if (choice.path == Path::wgmma && !has_wgmma(device)) {
    return Support::no(str_cat("wgmma needs compute capability 9.0 and code for 90a; the device has ",
                               device.compute_capability / 10, ".", device.compute_capability % 10,
                               ", the code is for ", kArchitectures));
  }
  if (choice.path == Path::stream) {
    const int64_t needed = least_shared(s, choice.warps, choice.stripes);
    if (needed > shared_of(device)) {
      return Support::no(str_cat("warps=", choice.warps, " need ", needed, " bytes of shared memory, a block has ",
                                 shared_of(device)));
    }
  }
  if (choice.path == Path::stream && !s.experts && s.rows > 64) {
    return Support::no(str_cat("m=", s.rows, ": stream takes at most 64 tokens"));
  }
  return Support::yes();
}

std::optional<int> stream_warps(int64_t blocks, int64_t k_tiles, const DeviceInfo& device) {
  constexpr int64_t kWarpsAtOnce = 16;  // of a multiprocessor
  for (const int warps : {16, 8, 4}) {
    if (warps > 4 && k_tiles < 2 * warps) continue;
    if (blocks * warps <= kWarpsAtOnce * std::max(device.sm_count, 1)) return warps;
  }
  return std::nullopt;
}

namespace {

// A gated pair is two stripes, one of each matrix.
Choice stream_choice(const Shape& s, int64_t k_tiles, const DeviceInfo& device) {
  const int64_t groups = s.experts ? s.rows : (s.rows + 7) / 8 * s.matrices;
  const auto warps = [&](int stripes) {
    const int64_t rows = s.gated ? kGpuRows : stripes * kGpuRows;
    return stream_warps((s.n + rows - 1) / rows * groups, k_tiles, device).value_or(0);
  };
  const int one = s.gated ? 0 : warps(1), two = warps(2);
  Choice choice{Path::stream, 0, 0, 2};
  if (one > 0 && one >= two) {
    choice.warps = one;
    choice.stripes = 1;
  } else {
    // Several rounds: warps enough for a k that is long, few where blocks are many anyhow.
    choice.warps = two > 0 ? two : s.n > 65536 || k_tiles < 16 ? 4 : 8;
  }
  while (choice.warps > 4 && least_shared(s, choice.warps, choice.stripes) > shared_of(device)) {
    choice.warps /= 2;
  }
  return choice;
}

}  // namespace

// Measured on an H200 (benchmarks/results); other chips follow the same order of sizes.
Choice default_choice(const Shape& s, const DeviceInfo& device) {
  if (s.layout != Layout::gpu) return {Path::exact};
  const int64_t k_tiles = (s.k + kGpuTile - 1) / kGpuTile;
  // Rows of x that meet the same weights, were the routing even.
  const int64_t shared = s.experts ? (s.rows + s.matrices - 1) / s.matrices : s.rows;
  if (s.norm || (s.experts ? s.rows <= s.matrices : s.rows <= 16)) {
    return stream_choice(s, k_tiles, device);
  }
  const bool wgmma = has_wgmma(device);
  const Path path = wgmma ? Path::wgmma : Path::mma;
  if (s.experts) {
    // Tiles follow the rows an expert gets; a tile that is half empty still multiplies.
    if (shared >= 96) return {path, 64, 8};
    if (shared >= 24) return wgmma ? Choice{path, 64, 8} : Choice{path, 32, 4};
    return {path, shared >= 12 ? 32 : 16, 4};
  }
  // The largest tile that still gives nearly every multiprocessor a block.
  const int64_t wanted = std::max(device.sm_count, 1) * 9 / 10;
  for (const Choice& choice : {Choice{path, 128, 8}, Choice{path, 128, 4}, Choice{path, 64, 4}, Choice{path, 32, 4}}) {
    if (!wgmma && (choice.tokens == 128 || choice.warps == 8)) continue;
    if (choice.tokens / 2 < s.rows && blocks_of(s, choice.tokens, choice.warps) >= wanted) return choice;
  }
  return {path, s.rows > 16 ? 32 : 16, 4};
}

bool stream_takes_both(DType type, DType other) {
  if (type == other) return true;
#define DYNO_MIXED(a, b) \
  if (type == DType::a && other == DType::b) return true;
#include "ops/matmul/cuda/mixed_types.def"
#undef DYNO_MIXED
  return false;
}

size_t choice_scratch_bytes(const Shape& s, const Choice& choice) {
  if (choice.path == Path::exact || choice.path == Path::stream) return 0;
  return static_cast<size_t>(s.x_rows * half_row_bytes(s.type, s.k));
}

#ifdef DYNO_HAVE_CUDA
void run_stream(Problem p, DType other, const Choice& choice, CudaStream& stream) {
  p.shared_limit = static_cast<int32_t>(stream.device->shared_per_block_bytes);
  if (other != p.type) return stream_mixed(p, other, choice.warps, choice.stripes, stream.handle);
  type_kernels(p.type).stream(p, choice.warps, choice.stripes, stream.handle);
}

void run(const Choice& choice, const Shape& shape, Problem p, CudaStream& stream) {
  const TypeKernels& kernels = type_kernels(p.type);
  if (choice.path == Path::exact) return kernels.exact(p, stream.handle);
  if (choice.path == Path::stream) return run_stream(p, p.type, choice, stream);
  const size_t scratch = choice_scratch_bytes(shape, choice);
  DYNO_CHECK(DeviceError, stream.workspace_bytes >= scratch, "[matmul] the stream's workspace has ",
             stream.workspace_bytes, " bytes, ", scratch, " are needed");
  auto* half = reinterpret_cast<uint8_t*>(stream.workspace);
  const int64_t batch = p.grouping == Grouping::experts ? 1 : p.matrices;
  const int64_t rows = shape.x_rows / batch;
  halve_rows(p.type, p.x, p.x_stride, p.x_batch_stride, rows, batch, p.k, half, stream.handle);
  p.x = half;
  p.x_stride = half_row_bytes(p.type, p.k);
  p.x_batch_stride = rows * p.x_stride;
  if (p.grouping == Grouping::experts) group_rows(p, choice.tokens, stream.handle);
  (choice.path == Path::mma ? kernels.gemm_mma : kernels.gemm_wgmma)(p, choice.tokens, choice.warps, stream.handle);
}
#endif

}  // namespace dyno::ops::cuda
