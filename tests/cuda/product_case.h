// One matrix product on a GPU, of any of the four families: its weights, inputs, float64 reference and launch.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <functional>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "ops/cuda_stream.h"
#include "ops/op.h"
#include "ops/registry.h"

namespace dyno::testing {

// Device memory with guard bytes on both sides.
class GuardedBuffer {
 public:
  GuardedBuffer() = default;
  explicit GuardedBuffer(size_t bytes);
  ~GuardedBuffer();
  GuardedBuffer(GuardedBuffer&& other) noexcept;
  GuardedBuffer& operator=(GuardedBuffer&& other) noexcept;

  void* data() const { return base_ == nullptr ? nullptr : base_ + kGuard; }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data());
  }
  void fill(int byte) const;  // the data, not the guards
  bool guards_intact() const;
  size_t bytes() const { return bytes_; }

 private:
  static constexpr size_t kGuard = 1024;
  std::byte* base_ = nullptr;
  size_t bytes_ = 0;
};

template <typename T>
GuardedBuffer upload(const std::vector<T>& values);
template <typename T>
std::vector<T> download(const GuardedBuffer& buffer, size_t count);

// Blocks of random codes under scales that make weights of about ±0.05.
std::vector<std::byte> random_weights(DType type, int64_t rows, int64_t k, uint64_t seed);

// How (token, slot) rows choose experts.
enum class Routing { uniform, one_expert, half_empty, skewed };

struct ProductOptions {
  bool bias = false, residual = false, reference = true;
  Routing routing = Routing::uniform;
  uint64_t seed = 1;
  int copies = 1;  // of the weights, for timing with a cold L2
};

class ProductCase {
 public:
  ProductCase(const ops::OpDesc& desc, const ProductOptions& options);

  // Enqueues one launch with copy `copy` of the weights; with another compute type than f16, on path dequantize.
  void launch(const ops::Config& config, ops::CudaStream& stream, int copy = 0,
              ops::ComputeType compute = ops::ComputeType::f16) const;

  const std::vector<double>& reference() const { return reference_; }
  // Squared error over squared answers that operands of a compute type cost, by a reference of rounded operands.
  double rounding_nmse(ops::ComputeType compute) const { return rounding_nmse_[static_cast<size_t>(compute)]; }
  const GuardedBuffer& y() const { return y_; }
  size_t y_count() const { return y_count_; }
  double weight_bytes() const { return weight_bytes_; }  // of the experts in use

 private:
  ops::OpDesc desc_;
  ProductOptions options_;
  GuardedBuffer w_[2], x_, bias_[2], residual_, ids_, workspace_, y_;
  size_t copy_bytes_ = 0, expert_bytes_ = 0, y_count_ = 0;
  double weight_bytes_ = 0;
  std::vector<double> reference_;
  std::array<double, 3> rounding_nmse_{};  // by ComputeType
};

}  // namespace dyno::testing
