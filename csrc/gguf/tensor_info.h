// One tensor of a GGUF file: its checked description, and a view of its bytes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "core/dtype.h"

namespace dyno {

struct TensorInfo {
  std::string_view name;
  // Elements per dimension, contracted dimension first as in the file (dims[0] is the length of a row); 1 from index
  // n_dims on.
  std::array<int64_t, 4> dims{1, 1, 1, 1};
  int n_dims = 0;
  DType type = DType::f32;
  const std::byte* data = nullptr;  // mapped, at least 8-byte aligned
  size_t nbytes = 0;
  uint32_t file = 0;    // index of the shard
  uint64_t offset = 0;  // of the data, from the start of that file

  int64_t n_elements() const { return dims[0] * dims[1] * dims[2] * dims[3]; }
  int64_t n_rows() const { return dims[1] * dims[2] * dims[3]; }
  std::span<const std::byte> bytes() const { return {data, nbytes}; }
};

// "[4096, 128]": the dimensions in file order.
std::string describe_shape(const TensorInfo& tensor);

}  // namespace dyno
