#include "product_case.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <utility>

#include "core/cuda/check.h"
#include "core/error.h"
#include "gguf/dequantize.h"
#include "gguf/quant_blocks.h"
#include "ops/matmul/gpu_layout.h"
#include "ops/matmul/layout.h"
#include "ops/matmul/matmul.h"
#include "ops/matmul_id/matmul_id.h"
#include "ops/moe_up_gate/moe_up_gate.h"
#include "ops/up_gate/up_gate.h"

namespace dyno::testing {

namespace {

constexpr uint8_t kGuardByte = 0xa5;

// The fields of the four descs, under one set of names.
struct Common {
  DType type;
  ops::Layout layout;
  int64_t m, n, k, matrices = 1, used = 1, batch = 1;
  bool experts = false, gated = false, x_per_slot = false;
  ops::Activation activation = ops::Activation::silu;
  int64_t rows() const { return m * used; }
  int64_t x_rows() const { return x_per_slot ? rows() : m * batch; }
};

template <typename Desc>
Common common_of(const Desc& d) {
  if constexpr (requires { d.layout, d.n; }) {
    Common c{d.type, d.layout, d.m, d.n, d.k};
    if constexpr (requires { d.experts; }) c.experts = true, c.matrices = d.experts, c.used = d.used;
    if constexpr (requires { d.batch; }) c.matrices = c.batch = d.batch;
    if constexpr (requires { d.x_per_slot; }) c.x_per_slot = d.x_per_slot;
    if constexpr (requires { d.activation; }) c.gated = true, c.activation = d.activation;
    return c;
  } else {
    throw UnsupportedError("[test] not a matrix product");
  }
}
Common common_of(const ops::OpDesc& desc) {
  return std::visit([](const auto& d) { return common_of(d); }, desc);
}

double activate(ops::Activation activation, double gate, double up) {
  switch (activation) {
    case ops::Activation::silu:
      return gate / (1 + std::exp(-gate)) * up;
    case ops::Activation::gelu_tanh:
      return 0.5 * gate * (1 + std::tanh(0.7978845608028654 * gate * (1 + 0.044715 * gate * gate))) * up;
    case ops::Activation::relu:
      return std::max(gate, 0.0) * up;
    default: {
      const double limited = std::min(gate, 7.0);
      return limited / (1 + std::exp(-1.702 * limited)) * (std::clamp(up, -7.0, 7.0) + 1);
    }
  }
}

std::vector<float> normal(size_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> draw;
  std::vector<float> out(count);
  for (float& v : out) v = draw(random);
  return out;
}

// The factors of a kernel of `compute`. Weights become halves first; beside weights that are floats, activations are
// two halves each, which lose nothing here.
float weight_operand(float v, ops::ComputeType compute) {
  const float half = f16_to_f32(f32_to_f16(v));
  return compute == ops::ComputeType::f32   ? v
         : compute == ops::ComputeType::f16 ? half
                                            : bf16_to_f32(f32_to_bf16(half));
}
float x_operand(float v, DType weights, ops::ComputeType compute) {
  if (compute == ops::ComputeType::bf16) return bf16_to_f32(f32_to_bf16(v));
  return compute == ops::ComputeType::f32 || is_float(weights) ? v : f16_to_f32(f32_to_f16(v));
}

std::vector<int32_t> route(const Common& c, Routing routing, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<double> share(static_cast<size_t>(c.matrices), 1.0);
  for (size_t e = 0; e < share.size(); ++e) {
    if (routing == Routing::skewed) share[e] = 1.0 / (1.0 + 0.05 * static_cast<double>(e));
    if (routing == Routing::half_empty && e % 2 == 0) share[e] = 0;
    if (routing == Routing::one_expert) share[e] = e + 1 == share.size() ? 1 : 0;
  }
  std::discrete_distribution<int32_t> draw(share.begin(), share.end());
  std::vector<int32_t> ids(static_cast<size_t>(c.rows()));
  for (int32_t& id : ids) id = draw(random);
  return ids;
}

// The products in float64.
void multiply(const Common& c, const ProductOptions& options, const std::vector<int32_t>& ids,
              const std::vector<float>& x, const std::vector<float> (&w)[2], const std::vector<float> (&bias)[2],
              const std::vector<float>& residual, std::vector<double>& out) {
  const int mats = c.gated ? 2 : 1;
  for (int64_t row = 0; row < c.rows(); ++row) {
    for (int64_t b = 0; b < c.batch; ++b) {
      const int64_t matrix = c.experts ? ids[static_cast<size_t>(row)] : b;
      const int64_t x_row = c.experts ? (c.x_per_slot ? row : row / c.used) : row * c.batch + b;
      for (int64_t j = 0; j < c.n; ++j) {
        double sum[2] = {};
        for (int i = 0; i < mats; ++i) {
          const float* row_of_w = w[i].data() + (matrix * c.n + j) * c.k;
          for (int64_t at = 0; at < c.k; ++at)
            sum[i] += static_cast<double>(row_of_w[at]) * x[static_cast<size_t>(x_row * c.k + at)];
          if (options.bias) sum[i] += bias[i][static_cast<size_t>((c.experts ? matrix * c.n : 0) + j)];
        }
        const auto at = static_cast<size_t>((row * c.batch + b) * c.n + j);
        out[at] = c.gated ? activate(c.activation, sum[0], sum[1])
                          : sum[0] * (options.residual ? 0.75 : 1) + (options.residual ? residual[at] : 0);
      }
    }
  }
}

}  // namespace

GuardedBuffer::GuardedBuffer(size_t bytes) : bytes_(bytes) {
  void* p = nullptr;
  DYNO_CUDA_CHECK(cudaMalloc(&p, bytes + 2 * kGuard));
  base_ = static_cast<std::byte*>(p);
  DYNO_CUDA_CHECK(cudaMemset(base_, kGuardByte, bytes + 2 * kGuard));
}
GuardedBuffer::~GuardedBuffer() {
  if (base_ != nullptr) DYNO_CUDA_CHECK_NOTHROW(cudaFree(base_));
}
GuardedBuffer::GuardedBuffer(GuardedBuffer&& other) noexcept
    : base_(std::exchange(other.base_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
GuardedBuffer& GuardedBuffer::operator=(GuardedBuffer&& other) noexcept {
  std::swap(base_, other.base_);
  std::swap(bytes_, other.bytes_);
  return *this;
}
void GuardedBuffer::fill(int byte) const { DYNO_CUDA_CHECK(cudaMemset(data(), byte, bytes_)); }
bool GuardedBuffer::guards_intact() const {
  std::vector<uint8_t> guards(2 * kGuard);
  DYNO_CUDA_CHECK(cudaMemcpy(guards.data(), base_, kGuard, cudaMemcpyDeviceToHost));
  DYNO_CUDA_CHECK(cudaMemcpy(guards.data() + kGuard, base_ + kGuard + bytes_, kGuard, cudaMemcpyDeviceToHost));
  return std::all_of(guards.begin(), guards.end(), [](uint8_t b) { return b == kGuardByte; });
}

template <typename T>
GuardedBuffer upload(const std::vector<T>& values) {
  GuardedBuffer out(values.size() * sizeof(T));
  DYNO_CUDA_CHECK(cudaMemcpy(out.data(), values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  return out;
}
template <typename T>
std::vector<T> download(const GuardedBuffer& buffer, size_t count) {
  std::vector<T> out(count);
  DYNO_CUDA_CHECK(cudaMemcpy(out.data(), buffer.data(), count * sizeof(T), cudaMemcpyDeviceToHost));
  return out;
}
template std::vector<float> download<float>(const GuardedBuffer&, size_t);

std::vector<std::byte> random_weights(DType type, int64_t rows, int64_t k, uint64_t seed) {
  std::mt19937_64 random(seed);
  const DTypeInfo& info = dtype_info(type);
  std::vector<std::byte> out(static_cast<size_t>(rows) * row_bytes(type, k));
  if (is_float(type)) {
    const std::vector<float> values = normal(static_cast<size_t>(rows * k), seed);
    std::vector<float> scaled(values);
    for (float& v : scaled) v *= 0.05f;
    quantize_row(type, scaled.data(), out.data(), rows * k);
    return out;
  }
  for (size_t i = 0; i < out.size(); i += 8) {
    const uint64_t bits = random();
    std::memcpy(out.data() + i, &bits, std::min<size_t>(8, out.size() - i));
  }
  // Offsets of the halves of a block that are scales, and what makes weights of the wanted size.
  struct Scales {
    size_t d, min;
    float scale, min_scale;
  };
  constexpr size_t kNone = ~size_t{0};
  const auto scales = [&]() -> Scales {
    switch (type) {
      case DType::q4_0:
        return {0, kNone, 0.006f, 0};
      case DType::q4_1:
        return {0, 2, 0.006f, -0.05f};
      case DType::q5_0:
        return {0, kNone, 0.003f, 0};
      case DType::q5_1:
        return {0, 2, 0.003f, -0.05f};
      case DType::q8_0:
        return {0, kNone, 0.0004f, 0};
      case DType::iq4_nl:
        return {0, kNone, 0.0005f, 0};
      case DType::q2_k:
        return {80, 82, 0.002f, 0.002f};
      case DType::q3_k:
        return {108, kNone, 0.0005f, 0};
      case DType::q4_k:
        return {0, 2, 0.0001f, 0.0008f};
      case DType::q5_k:
        return {0, 2, 0.00005f, 0.0008f};
      case DType::q6_k:
        return {208, kNone, 0.00003f, 0};
      case DType::iq4_xs:
        return {0, kNone, 0.00002f, 0};
      default:
        return {kNone, kNone, 0, 0};
    }
  }();
  std::uniform_real_distribution<float> spread(0.5f, 1.5f);
  const auto put = [&](std::byte* at, float value) {
    const uint16_t half = f32_to_f16(value);
    std::memcpy(at, &half, 2);
  };
  for (std::byte* block = out.data(); block < out.data() + out.size(); block += info.block_bytes) {
    if (scales.d != kNone) put(block + scales.d, scales.scale * spread(random));
    if (scales.min != kNone) put(block + scales.min, scales.min_scale * spread(random));
    if (type == DType::q8_16) {
      const float d = 3e-6f * spread(random);
      std::memcpy(block, &d, sizeof d);
    }
    if (type == DType::q4_16) {
      BlockQ4_16 b;
      std::memcpy(&b, block, sizeof b);
      b.d = 6e-6f * spread(random);
      for (int i = 0; i < 16; ++i) b.table[i] = static_cast<int8_t>(15 * i - 119);  // one table for a matrix
      b.bias = 127, b.shift = 4;
      std::memcpy(block, &b, sizeof b);
    }
    if (type == DType::mxfp4) *block = static_cast<std::byte>(119 + random() % 5);
  }
  return out;
}

ProductCase::ProductCase(const ops::OpDesc& desc, const ProductOptions& options) : desc_(desc), options_(options) {
  const Common c = common_of(desc);
  const int mats = c.gated ? 2 : 1;
  const size_t plain = static_cast<size_t>(c.n) * row_bytes(c.type, c.k);
  expert_bytes_ = ops::layout_bytes(c.type, c.layout, c.n, c.k);
  copy_bytes_ = expert_bytes_ * static_cast<size_t>(c.matrices);
  y_count_ = static_cast<size_t>(c.rows() * c.n * c.batch);

  std::vector<int32_t> ids;
  weight_bytes_ = static_cast<double>(expert_bytes_) * mats * static_cast<double>(c.batch);
  if (c.experts) {
    ids = route(c, options.routing, options.seed + 3);
    std::vector<int32_t> in_use(ids);
    std::sort(in_use.begin(), in_use.end());
    const auto distinct = std::unique(in_use.begin(), in_use.end()) - in_use.begin();
    weight_bytes_ = static_cast<double>(expert_bytes_) * mats * static_cast<double>(distinct);
    ids_ = upload(ids);
    workspace_ = GuardedBuffer(4 * static_cast<size_t>(ops::moe_workspace_ints(c.m, c.used, c.matrices)));
  }
  const std::vector<float> x = normal(static_cast<size_t>(c.x_rows() * c.k), options.seed + 1);
  x_ = upload(x);
  y_ = GuardedBuffer(y_count_ * 4);
  std::vector<float> residual, bias[2];
  if (options.residual) residual = normal(y_count_, options.seed + 2), residual_ = upload(residual);

  std::vector<float> values[2];
  for (int i = 0; i < mats; ++i) {
    // For timing alone one expert's bytes serve all of them.
    const int64_t distinct = options.reference ? c.matrices : 1;
    const std::vector<std::byte> w =
        random_weights(c.type, c.n * distinct, c.k, options.seed + 10 + static_cast<uint64_t>(i));
    std::vector<std::byte> laid_out(expert_bytes_ * static_cast<size_t>(distinct));
    for (size_t e = 0; e < static_cast<size_t>(distinct); ++e) {
      if (c.layout == ops::Layout::gpu) {
        ops::repack_gpu(c.type, c.n, c.k, w.data() + e * plain, laid_out.data() + e * expert_bytes_, 0,
                        (c.n + ops::kGpuRows - 1) / ops::kGpuRows);
      } else {
        std::memcpy(laid_out.data() + e * expert_bytes_, w.data() + e * plain, plain);
      }
    }
    w_[i] = GuardedBuffer(copy_bytes_ * static_cast<size_t>(options.copies));
    for (size_t at = 0; at < w_[i].bytes(); at += laid_out.size()) {
      DYNO_CUDA_CHECK(cudaMemcpy(w_[i].as<std::byte>() + at, laid_out.data(), laid_out.size(), cudaMemcpyHostToDevice));
    }
    if (options.bias) {
      bias[i] =
          normal(static_cast<size_t>(c.n * (c.experts ? c.matrices : 1)), options.seed + 20 + static_cast<uint64_t>(i));
      bias_[i] = upload(bias[i]);
    }
    if (options.reference) {
      values[i].resize(static_cast<size_t>(c.n * c.matrices * c.k));
      dequantize_row(c.type, w.data(), values[i].data(), c.n * c.matrices * c.k);
    }
  }
  if (!options.reference) return;
  const auto answers = [&](ops::ComputeType compute) {
    std::vector<double> out(y_count_);
    std::vector<float> seen(x), w[2];
    for (float& v : seen) v = x_operand(v, c.type, compute);
    for (int i = 0; i < mats; ++i) {
      w[i] = values[i];
      for (float& v : w[i]) v = weight_operand(v, compute);
    }
    multiply(c, options, ids, seen, w, bias, residual, out);
    return out;
  };
  reference_ = answers(ops::ComputeType::f32);
  for (const auto compute : {ops::ComputeType::f16, ops::ComputeType::bf16}) {
    const std::vector<double> rounded = answers(compute);
    double error = 0, power = 0;
    for (size_t i = 0; i < y_count_; ++i) {
      error += (rounded[i] - reference_[i]) * (rounded[i] - reference_[i]);
      power += reference_[i] * reference_[i];
    }
    rounding_nmse_[static_cast<size_t>(compute)] = error / power;
  }
}

void ProductCase::launch(const ops::Config& config, ops::CudaStream& stream, int copy, ops::ComputeType compute) const {
  const ops::OpDesc desc =
      compute == ops::ComputeType::f16 ? desc_ : ops::with_path(desc_, ops::ProductPath::dequantize, compute);
  const Common c = common_of(desc_);
  const std::byte* w = w_[0].as<std::byte>() + static_cast<size_t>(copy) * copy_bytes_;
  const std::byte* up = c.gated ? w_[1].as<std::byte>() + static_cast<size_t>(copy) * copy_bytes_ : nullptr;
  const auto stride = static_cast<int64_t>(expert_bytes_);
  if (const auto* d = std::get_if<ops::MatmulDesc>(&desc)) {
    ops::launch(config, *d,
                {.x = x_.data(),
                 .x_stride_bytes = c.k * 4 * c.batch,
                 .x_batch_stride_bytes = c.k * 4,
                 .w = w,
                 .w_batch_stride_bytes = stride,
                 .bias = bias_[0].as<float>(),
                 .residual = residual_.as<float>(),
                 .scale = options_.residual ? 0.75f : 1.0f,
                 .y = y_.as<float>(),
                 .y_stride = c.n * c.batch,
                 .y_batch_stride = c.n},
                stream);
  } else if (const auto* d = std::get_if<ops::UpGateDesc>(&desc)) {
    ops::launch(config, *d,
                {.x = x_.data(),
                 .x_stride_bytes = c.k * 4,
                 .w_gate = w,
                 .w_up = up,
                 .bias_gate = bias_[0].as<float>(),
                 .bias_up = bias_[1].as<float>(),
                 .y = y_.as<float>(),
                 .y_stride = c.n},
                stream);
  } else if (const auto* d = std::get_if<ops::MatmulIdDesc>(&desc)) {
    ops::launch(config, *d,
                {.x = x_.data(),
                 .x_stride_bytes = c.k * 4,
                 .w = w,
                 .w_expert_stride_bytes = stride,
                 .bias = bias_[0].as<float>(),
                 .ids = ids_.as<int32_t>(),
                 .y = y_.as<float>(),
                 .workspace = workspace_.as<int32_t>()},
                stream);
  } else {
    ops::launch(config, std::get<ops::MoeUpGateDesc>(desc),
                {.x = x_.data(),
                 .x_stride_bytes = c.k * 4,
                 .w_gate = w,
                 .w_up = up,
                 .w_expert_stride_bytes = stride,
                 .bias_gate = bias_[0].as<float>(),
                 .bias_up = bias_[1].as<float>(),
                 .ids = ids_.as<int32_t>(),
                 .y = y_.as<float>(),
                 .workspace = workspace_.as<int32_t>()},
                stream);
  }
}

}  // namespace dyno::testing
