// Every CUDA candidate of the four families of matrix products against float64, over odd shapes: error, guard bytes,
// equal bits when launched again. Prints one line for each fault and the number of launches; exit status 1 on a fault.
//   check_products [type]
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>

#include "core/cuda/check.h"
#include "core/cuda_devices.h"
#include "ops/matmul/cuda/blas.h"
#include "product_case.h"

namespace {

using namespace dyno;
using testing::ProductCase;
using testing::ProductOptions;
using testing::Routing;

struct Checker {
  DeviceInfo device = cuda_device(0), few = device;
  ops::CudaStream stream;
  testing::GuardedBuffer workspace{size_t{96} << 20};
  bool above_minimum = false;  // the weights' type
  int launches = 0, faults = 0;
  double worst = 0, closest = 0;

  Checker() {
    DYNO_CUDA_CHECK(cudaStreamCreate(&stream.handle));
    stream.device = &device;
    few.sm_count = 7;
    stream.workspace = workspace.as<std::byte>();
    stream.blas = ops::cuda::make_blas();
  }

  ~Checker() { ops::cuda::destroy_blas(stream.blas); }

  // Four times what the rounding of its operands costs this very case (twice the error in every element), and what
  // float32 sums do that tensor cores cut off: less than a unit in the last place for each of the 2·k/16 steps.
  // Weights that stand above a minimum are rounded thrice on the way to halves: scale, minimum and sum. With codes of
  // 0..31 over a minimum in their middle these are 18, 15.5 and 9 scales (root mean square), so the weights' share of
  // the error is (18² + 15.5² + 9²) / 9² = 8 times what the rounding of the sum alone, which is known here, costs;
  // activations have the other half. Hence four times as much again.
  double limit_of(const ProductCase& product, const std::string& name, ops::ComputeType compute) const {
    if (name.starts_with("exact") || name.starts_with("tf32_pairs") || compute == ops::ComputeType::f32) return 1e-11;
    return (above_minimum ? 16 : 4) * product.rounding_nmse(compute) + 1e-9;
  }

  void run(const ops::OpDesc& desc, const ProductOptions& options) {
    const ProductCase product(desc, options);
    run(product, desc, ops::ComputeType::f16);
    for (const auto compute : {ops::ComputeType::bf16, ops::ComputeType::f32}) {
      run(product, ops::with_path(desc, ops::ProductPath::dequantize, compute), compute);
    }
  }

  void run(const ProductCase& product, const ops::OpDesc& desc, ops::ComputeType compute) {
    double power = 0;
    for (const double v : product.reference()) power += v * v;
    for (const ops::Config& config : ops::candidates(desc, device, ops::CandidateSet::compiled)) {
      const std::string name = ops::describe(ops::family_of(desc), config);
      const bool any_path = name.starts_with("exact") || name.starts_with("tf32_pairs");
      if (compute != ops::ComputeType::f16 && any_path) continue;  // has run
      stream.workspace_bytes = ops::scratch_bytes(desc, config);   // no more than it asked for
      std::vector<float> y[2];
      for (auto& values : y) {
        product.y().fill(0xff);  // NaN wherever nothing is written
        product.launch(config, stream, 0, compute);
        DYNO_CUDA_CHECK(cudaStreamSynchronize(stream.handle));
        values = testing::download<float>(product.y(), product.y_count());
        ++launches;
        stream.device = &few;  // the second time on a number of multiprocessors that is no power of two
      }
      stream.device = &device;
      double error = 0;
      for (size_t i = 0; i < product.y_count(); ++i) {
        const double difference = y[0][i] - product.reference()[i];
        error += difference * difference;
      }
      const double nmse = error / power, limit = limit_of(product, name, compute);
      const bool same = std::memcmp(y[0].data(), y[1].data(), y[0].size() * 4) == 0;
      const bool guards = product.y().guards_intact() && workspace.guards_intact();
      if (compute == ops::ComputeType::f16 && nmse > worst) worst = nmse;
      if (limit > 1e-11 && nmse / limit > closest) closest = nmse / limit;
      if (!(nmse <= limit) || !same || !guards) {
        ++faults;
        std::printf("FAULT %s m=%lld %s %s: nmse %.3g (limit %.3g)%s%s\n", ops::op_key(desc).c_str(),
                    static_cast<long long>(ops::tokens_of(desc)), name.c_str(),
                    std::string(ops::compute_type_name(compute)).c_str(), nmse, limit,
                    same ? "" : ", other bits the second time", guards ? "" : ", guard bytes overwritten");
      }
    }
  }
};

void check_type(Checker& checker, DType type) {
  const int64_t block = dtype_info(type).block_elements;
  const auto k_of = [&](int64_t k) { return (k + block - 1) / block * block; };
  checker.above_minimum =
      type == DType::q4_1 || type == DType::q5_1 || type == DType::q2_k || type == DType::q4_k || type == DType::q5_k;
  uint64_t seed = 1;
  for (const ops::Layout layout : {ops::Layout::plain, ops::Layout::gpu}) {
    if (layout == ops::Layout::gpu && type == DType::f32) continue;
    for (const auto& [m, n, k] : {std::array<int64_t, 3>{1, 19, 352}, {5, 77, 32}, {37, 77, 160}, {130, 272, 96}}) {
      checker.run(ops::MatmulDesc{.type = type, .layout = layout, .m = m, .n = n, .k = k_of(k)},
                  {.bias = m % 2 == 1, .residual = m != 5, .seed = ++seed});
    }
    checker.run(ops::MatmulDesc{.type = type, .layout = layout, .m = 9, .n = 48, .k = k_of(128), .batch = 3},
                {.seed = ++seed});
    // Enough k for all the blocks of a cluster, in unequal parts, and neither rows nor columns that fill a tile.
    for (const auto& [m, n] : {std::array<int64_t, 2>{21, 70}, {67, 200}, {139, 36}}) {
      checker.run(ops::MatmulDesc{.type = type, .layout = layout, .m = m, .n = n, .k = k_of(1120)},
                  {.bias = true, .residual = n > 100, .seed = ++seed});
    }
    checker.run(ops::UpGateDesc{.type = type, .layout = layout, .m = 21, .n = 72, .k = k_of(1120)}, {.seed = ++seed});
    for (const int64_t m : {1, 33}) {
      checker.run(
          ops::UpGateDesc{
              .type = type, .layout = layout, .activation = ops::Activation::gelu_tanh, .m = m, .n = 80, .k = k_of(96)},
          {.bias = m > 1, .seed = ++seed});
    }
    for (const auto& [m, routing] :
         {std::pair<int64_t, Routing>{1, Routing::uniform}, {19, Routing::half_empty}, {60, Routing::one_expert}}) {
      for (const bool x_per_slot : {false, true}) {
        checker.run(ops::MatmulIdDesc{.type = type,
                                      .layout = layout,
                                      .m = m,
                                      .n = 80,
                                      .k = k_of(160),
                                      .experts = 7,
                                      .used = 3,
                                      .x_per_slot = x_per_slot},
                    {.bias = x_per_slot, .routing = routing, .seed = ++seed});
      }
      checker.run(ops::MoeUpGateDesc{.type = type,
                                     .layout = layout,
                                     .activation = ops::Activation::swiglu_oai,
                                     .m = m,
                                     .n = 144,
                                     .k = k_of(64),
                                     .experts = 5,
                                     .used = 2},
                  {.bias = true, .routing = routing, .seed = ++seed});
    }
    // More tiles of the widest kernel than it has clusters on `few`, the last of them in part; k longer than its
    // stages.
    checker.run(ops::MatmulDesc{.type = type, .layout = layout, .m = 300, .n = 592, .k = k_of(576)},
                {.bias = true, .residual = true, .seed = ++seed});
    checker.run(ops::MatmulDesc{.type = type, .layout = layout, .m = 257, .n = 80, .k = k_of(320), .batch = 3},
                {.seed = ++seed});
    for (const auto activation : {ops::Activation::silu, ops::Activation::gelu_tanh, ops::Activation::swiglu_oai}) {
      checker.run(
          ops::UpGateDesc{.type = type, .layout = layout, .activation = activation, .m = 300, .n = 272, .k = k_of(96)},
          {.bias = true, .seed = ++seed});
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    Checker checker;
    for (const DType type : {DType::f32, DType::f16, DType::bf16, DType::q4_0, DType::q4_1, DType::q5_0, DType::q5_1,
                             DType::q8_0, DType::q2_k, DType::q3_k, DType::q4_k, DType::q5_k, DType::q6_k,
                             DType::iq4_nl, DType::iq4_xs, DType::mxfp4, DType::q8_16, DType::q4_16}) {
      if (argc < 2 || dtype_name(type) == argv[1]) check_type(checker, type);
    }
    std::printf("%d launches on %s, %d faults, largest nmse in halves %.2g, closest to its limit %.2g\n",
                checker.launches, checker.device.name.c_str(), checker.faults, checker.worst, checker.closest);
    return checker.faults == 0 && checker.launches > 0 ? 0 : 1;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
