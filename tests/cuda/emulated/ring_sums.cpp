// The end of a product whose blocks share k, as a function that a test calls on the CPU.
#define __CUDA_ARCH__ 900
#include <cuda_runtime.h>

namespace {

unsigned threads_of_block = 256;

// A thread's place within its block, whose cluster runs as one emulated block.
dim3 thread_of_block() { return {emulated::fibers[emulated::current].index.x % threads_of_block, 0, 0}; }
unsigned rank_of_block() { return emulated::fibers[emulated::current].index.x / threads_of_block; }

}  // namespace

#undef threadIdx
#define threadIdx thread_of_block()

#include "ops/matmul/cuda/gemm_ring_sums.cuh"

using namespace dyno;
using namespace dyno::ops::cuda;

namespace {

// sums: [parts][rows][n], of a gated pair [parts][rows][2][n].
template <int kTokens, bool kScaled>
void run(const Problem& p, int rows, int parts, const float* sums) {
  constexpr unsigned kStretch = device::kBlockStretch;
  const GemmRingShape shape = gemm_ring_shape(DType::q4_k, p.k, kTokens, rows, parts, 1, true,
                                              kScaled ? CodesForm::from_tiles : CodesForm::rows);
  const TiledRows format{.rows = p.rows, .k = p.k, .height = kTokens, .sums = true};
  threads_of_block = 32 * static_cast<unsigned>(shape.warps());
  const int columns = p.gated() ? rows / 2 : rows, matrices = p.gated() ? 2 : 1;
  std::vector<uint8_t> memory(static_cast<unsigned>(parts) * size_t{kStretch}, 0xff);
  emulated::shared_memory = memory.data();
  for (int x = 0; x < format.token_tiles(); ++x) {
    for (int y = 0; y * columns < p.n; ++y) {
      for (int part = 0; part < parts; ++part) {
        auto* own = reinterpret_cast<float*>(memory.data() + static_cast<unsigned>(part) * size_t{kStretch});
        for (int token = 0; token < kTokens; ++token) {
          for (int i = 0; i < rows; ++i) {
            // Stripes of 16 rows of w; the two matrices of a gated pair take turns.
            const int matrix = p.gated() ? i / 16 % 2 : 0,
                      column = y * columns + (p.gated() ? i / 32 * 16 + i % 16 : i);
            const int row = x * kTokens + token;
            own[token * shape.sums_stride + i] =
                row < p.rows && column < p.n ? sums[((int64_t{part} * p.rows + row) * matrices + matrix) * p.n + column]
                                             : NAN;
          }
        }
      }
      emulated::block = dim3(static_cast<unsigned>(x), static_cast<unsigned>(y), 0);
      emulated::run_block(static_cast<unsigned>(parts) * threads_of_block, [&] {
        const unsigned rank = rank_of_block();
        const auto product = GemmRingProduct::of<false>(p, rows);
        const GemmRingEpilogue<kTokens, false, kScaled> epilogue(p, product, format, shape, 0, static_cast<int>(rank),
                                                                 rank * kStretch, shape.warps());
        const GemmRingItem first = epilogue.load(static_cast<int>(threadIdx.x));
        device::cluster_arrive();
        device::cluster_wait();
        epilogue.finish(first);
      });
    }
  }
}

}  // namespace

extern "C" void run_backwards(int backwards) { emulated::backwards = backwards != 0; }

// numbers: rows, n, tokens and rows of w of a block, parts, y_stride, whether a gated pair, whether x has one scale for
// each row. inputs: sums, scales of x, bias, residual; null if there is none. Returns 0 for a block without a kernel.
extern "C" int add_sums(const int64_t* numbers, const float* const* inputs, float scale, float* y) {
  Problem p;
  p.rows = static_cast<int32_t>(numbers[0]), p.n = static_cast<int32_t>(numbers[1]), p.k = 16 * 256;
  const auto tokens = static_cast<int>(numbers[2]), rows = static_cast<int>(numbers[3]);
  p.bias = inputs[2], p.residual = inputs[3], p.scale = scale;
  p.y = y, p.y_stride = numbers[5];
  const uint8_t up = 0;
  if (numbers[6] != 0) p.w_up = &up;
  // The scales follow after the tiles of x, which nothing here reads.
  const TiledRows format{.rows = p.rows, .k = p.k, .height = tokens, .sums = true};
  std::vector<float> x(static_cast<size_t>(format.bytes()) / 4, NAN);
  if (inputs[1] != nullptr) std::copy_n(inputs[1], p.rows, x.begin() + format.scales_at() / 4);
  p.x = reinterpret_cast<const uint8_t*>(x.data());
  const auto start = [&]<int kTokens>() {
    const auto parts = static_cast<int>(numbers[4]);
    numbers[7] != 0 ? run<kTokens, false>(p, rows, parts, inputs[0]) : run<kTokens, true>(p, rows, parts, inputs[0]);
    return 1;
  };
  return tokens == 16   ? start.template operator()<16>()
         : tokens == 32 ? start.template operator()<32>()
         : tokens == 64 ? start.template operator()<64>()
                        : 0;
}
