// The conversion of rows that are sorted by expert, as functions that a test calls on the CPU. The test sorts.
#include <cuda_runtime.h>

#include "ops/matmul/cuda/sorted_rows.cu"

using namespace dyno;
using namespace dyno::ops::cuda;

namespace {

SortedRows format_of(const int64_t* numbers) {
  return {.rows = numbers[0], .k = numbers[1], .matrices = numbers[2], .passes = static_cast<int>(numbers[3])};
}

}  // namespace

extern "C" {

void run_backwards(int backwards) { emulated::backwards = backwards != 0; }

// numbers: rows, k, matrices, passes. Writes places, then the offsets of scales, experts, list, row_of and place_of,
// the bytes of all, and the most tiles.
void layout(const int64_t* numbers, int64_t* out) {
  const SortedRows f = format_of(numbers);
  const int64_t found[] = {f.places(),    f.scales_at(),   f.experts_at(), f.list_at(),
                           f.row_of_at(), f.place_of_at(), f.bytes(),      f.most_tiles()};
  std::copy(std::begin(found), std::end(found), out);
}

// numbers: as above, then the slots of a row of x, and n. `workspace` has experts and place_of.
void convert(const int64_t* numbers, const float* x, uint8_t* workspace, float* y) {
  Problem p;
  p.rows = static_cast<int32_t>(numbers[0]), p.k = static_cast<int32_t>(numbers[1]);
  p.matrices = static_cast<int32_t>(numbers[2]), p.x_divisor = static_cast<int32_t>(numbers[4]);
  p.x = reinterpret_cast<const uint8_t*>(x), p.x_stride = int64_t{p.k} * 4;
  p.y = y, p.n = static_cast<int32_t>(numbers[5]), p.y_stride = p.n;
  tile_sorted_rows(p, format_of(numbers), workspace, nullptr);
}

}  // extern "C"
