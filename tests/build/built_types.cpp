// Compiled with the lists of a build for one profile: prints what the contract says of weight types and groups
// of kernels, a line each.
#include <cstdio>
#include <type_traits>

#include "core/error.h"
#include "ops/contract.h"

using namespace dyno;
using namespace dyno::ops;

namespace {

constexpr VariantInfo kVariants[] = {{"stream", DeviceKind::cuda, CpuIsa::portable, {}},
                                     {"gemm", DeviceKind::cpu, CpuIsa::portable, {}},
                                     {"direct", DeviceKind::cuda, CpuIsa::portable, {}},
                                     {"rows", DeviceKind::cuda, CpuIsa::portable, {}}};

template <typename Desc>
void print(const char* what, const Desc& desc, uint8_t variant = 0) {
  std::printf("%s %s\n", what, holds_instance(desc, kVariants, {variant, {}}) ? "held" : "left out");
}

template <typename What>
void print(const char* what, const What& of, DeviceKind kind, int capability) {
  DeviceInfo device;
  device.kind = kind;
  device.compute_capability = capability;
  Support support;
  if constexpr (std::is_same_v<What, DType>) {
    support = type_built(of, device);
  } else {
    support = groups_built(groups_of(of), device);
  }
  std::printf("%s %s\n", what, support ? "built" : support.reason.c_str());
}

}  // namespace

int main() {
  print("matmul q4_k", MatmulDesc{.type = DType::q4_k});
  print("matmul f32", MatmulDesc{.type = DType::f32});
  print("matmul q5_k", MatmulDesc{.type = DType::q5_k});
  print("matmul q5_k on a cpu", MatmulDesc{.type = DType::q5_k}, 1);
  print("qkv q4_k q4_k q6_k", QkvDesc{.type = DType::q4_k, .type_k = DType::q4_k, .type_v = DType::q6_k, .n_v = 64});
  print("qkv q4_k q5_k q6_k", QkvDesc{.type = DType::q4_k, .type_k = DType::q5_k, .type_v = DType::q6_k, .n_v = 64});
  print("qkv q4_k q4_k q8_0", QkvDesc{.type = DType::q4_k, .type_k = DType::q4_k, .type_v = DType::q8_0, .n_v = 64});
  print("qkv q4_k q4_k without a third", QkvDesc{.type = DType::q4_k, .type_k = DType::q4_k, .type_v = DType::q8_0});
  print("mla_expand q6_k q8_0", MlaExpandDesc{.k_type = DType::q6_k, .v_type = DType::q8_0});
  print("mla_expand q8_0 q6_k", MlaExpandDesc{.k_type = DType::q8_0, .v_type = DType::q6_k});
  print("mla_expand q6_k f32", MlaExpandDesc{.k_type = DType::q6_k, .v_type = DType::f32});
  print("kv_store of a q8_0 cache", KvStoreDesc{.type = DType::q8_0});
  print("attention of a q8_0 cache", AttentionDesc{.dk = 128, .dv = 128, .k_type = DType::q8_0, .v_type = DType::q8_0},
        2);
  print("norm", NormDesc{});
  print("type q6_k", DType::q6_k, DeviceKind::cuda, 90);
  print("type q8_0", DType::q8_0, DeviceKind::cuda, 90);
  print("type q8_0 for a chip without code", DType::q8_0, DeviceKind::cuda, 80);
  print("type q8_0 on a cpu", DType::q8_0, DeviceKind::cpu, 0);

  const auto heads = [](int64_t size) { return AttentionDesc{.dk = size, .dv = size}; };
  print("direct with heads of 128", heads(128), 2);
  print("direct with heads of 64", heads(64), 2);
  print("rows with heads of 64", heads(64), 3);
  print("rows with heads of 512", heads(512), 3);
  print("routing", MoeRouteDesc{});
  print("heads of 128", heads(128), DeviceKind::cuda, 90);
  print("heads of 64", heads(64), DeviceKind::cuda, 90);
  print("heads of 64 with exact numerics", AttentionDesc{.dk = 64, .dv = 64, .exact = true}, DeviceKind::cuda, 90);
  print("experts of a chip without code", MoeRouteDesc{}, DeviceKind::cuda, 80);
  print("experts on a cpu", MoeRouteDesc{}, DeviceKind::cpu, 0);
  print("experts", MoeRouteDesc{}, DeviceKind::cuda, 90);
  try {
    throw_left_out(KernelGroup::heads_64);
  } catch (const UnsupportedError& error) {
    std::printf("a launch: %.57s\n", error.what());
  }
  return 0;
}
