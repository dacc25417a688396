// The op contract. Every family folder under ops/ defines the same names: Desc, candidates, default_config, supports,
// launch and cost(). A Config may change the speed, but never the result beyond the op's tolerance.
//
// Config is one type for all families, so that profiles, tests and bindings need no knowledge of a family. It consists
// of a variant (index into the family's variants.def) and up to kMaxParams named integers.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/device_info.h"
#include "core/dtype.h"

namespace dyno::ops {

enum class Family : uint8_t {
#define DYNO_OP_FAMILY(name, ...) name,
#include "ops/families.def"
};
inline constexpr int kFamilyCount = 0
#define DYNO_OP_FAMILY(...) +1
#include "ops/families.def"
    ;
std::string_view family_name(Family family);

inline constexpr int kMaxParams = 5;

struct VariantInfo {
  std::string_view name;
  DeviceKind device;
  CpuIsa min_isa;                                        // cpu variants
  std::array<std::string_view, kMaxParams> param_names;  // unused ones are empty
};

struct Config {
  uint8_t variant = 0;
  std::array<int16_t, kMaxParams> params{};
  friend bool operator==(const Config&, const Config&) = default;
};

// Whether an operation is supported, and the reason if it is not.
struct Support {
  bool ok = true;
  std::string reason;
  explicit operator bool() const { return ok; }
  static Support yes() { return {}; }
  static Support no(std::string why) { return {false, std::move(why)}; }
};

// Lower bounds of the bytes moved through memory and of the floating-point operations (a multiply-add counts as two).
struct Cost {
  double bytes = 0;
  double flops = 0;
};

// legal: everything that supports() accepts on `device`; compiled: only instances in this binary.
enum class CandidateSet : uint8_t { legal, compiled };

// The arrangement of a weight matrix in memory.
enum class Layout : uint8_t {
  plain,  // as in the file: rows of blocks
  x16,    // 16 rows interleaved, the same bits: see ops/matmul/layout.h
  gpu,    // tensor-core fragments, the same bits: see ops/matmul/gpu_layout.h
};
std::string_view layout_name(Layout layout);

// The type of activations in a product with weights.
enum class ActType : uint8_t {
  f32,
  q8,  // int8, one f32 scale per 32 values, and sums: see ops/copy/act_q8.h
};
std::string_view act_name(ActType act);

enum class Activation : uint8_t {
  silu,        // silu(gate) * up
  gelu_tanh,   // gelu_tanh(gate) * up
  swiglu_oai,  // min(gate, 7) * sigmoid(1.702 * min(gate, 7)) * (clamp(up, -7, 7) + 1), gpt-oss
  relu,        // max(gate, 0) * up; if both are the same product, this is relu² (nemotron_h)
};
std::string_view activation_name(Activation activation);

// The path of a quantised product on a GPU. Settings choose it by the number of tokens in the u-batch (plan/paths.h); a
// Config never does. `any`: not chosen yet, so every variant is a candidate.
enum class ProductPath : uint8_t {
  any,
  matvec,      // weights are streamed once for few rows
  mmq,         // tensor cores; weights are dequantised within the kernel
  dequantize,  // weights are dequantised to memory, then multiplied at full rate
};
std::string_view product_path_name(ProductPath path);

#ifdef DYNO_CUDA_FORCE_MMQ
inline constexpr bool kDequantizeBuilt = false;
#else
inline constexpr bool kDequantizeBuilt = true;
#endif
// Dense products that are not on path matvec use cuBLAS at every size.
#ifdef DYNO_CUDA_FORCE_CUBLAS
inline constexpr bool kForceBlas = true;
#else
inline constexpr bool kForceBlas = false;
#endif

// Element type of the products of path `dequantize`.
enum class ComputeType : uint8_t { f16, bf16, f32 };
std::string_view compute_type_name(ComputeType type);

// ---- Desc of each family. `m` (tokens), `path`, `compute` and the forms of tiles are not part of op_key(). ----

// Rows of a table by token id: out[m, n] f32 = table[id, :] * scale.
struct EmbedDesc {
  DType type = DType::f32;
  int64_t m = 1, n = 0;
  friend bool operator==(const EmbedDesc&, const EmbedDesc&) = default;
};

// RMS norm over rows of `n`: y = (x / sqrt(mean(x^2) + eps) * weight [+ residual]) * scale. There are `rows_per_token`
// rows per token (norms of heads have one per head).
struct NormDesc {
  int64_t m = 1, n = 0, rows_per_token = 1;
  bool add = false;      // out = residual + norm(x)
  bool centred = false;  // layer norm: the mean is subtracted from x first, and a bias may be added to the product
  friend bool operator==(const NormDesc&, const NormDesc&) = default;
};

// Rotary embedding in place on [m, heads, head_dim], the first (or, with `offset`, a middle) n_rot dims of each head.
struct RopeDesc {
  int64_t m = 1, heads = 1, head_dim = 0, n_rot = 0, offset = 0;
  bool neox = false;  // pairs (i, i + n_rot/2) instead of (2i, 2i+1)
  friend bool operator==(const RopeDesc&, const RopeDesc&) = default;
};

// y[m, n] (f32) = x[m, k] · wᵀ, w [n, k]. With batch > 1: y[m, b, n] = x[m, b, k] · w[b]ᵀ (per-head products of MLA).
// Epilogue: y = residual + scale * (x·wᵀ + bias), each part optional. With `norm`, each row of x is RMS-normalised
// first (here and in up_gate, moe_up_gate and qkv).
struct MatmulDesc {
  DType type = DType::f32;
  Layout layout = Layout::plain;
  ActType act = ActType::f32;
  int64_t m = 1, n = 0, k = 0, batch = 1;
  bool norm = false;
  bool exact = false;   // float32 throughout, whatever the device prefers
  int64_t x_tiles = 0;  // x is HalfTiles (half_tiles.h) of this height; 0: rows
  ProductPath path = ProductPath::any;
  ComputeType compute = ComputeType::f16;
  friend bool operator==(const MatmulDesc&, const MatmulDesc&) = default;
};

// One product per (token, slot): y[m, used, n] = x · w[id]ᵀ + bias[id], w [experts, n, k]. The input row is x[token]
// (x_per_slot = false) or x[token, slot].
struct MatmulIdDesc {
  DType type = DType::f32;
  Layout layout = Layout::plain;
  ActType act = ActType::f32;
  int64_t m = 1, n = 0, k = 0, experts = 1, used = 1;
  bool x_per_slot = false;
  ProductPath path = ProductPath::any;
  ComputeType compute = ComputeType::f16;
  friend bool operator==(const MatmulIdDesc&, const MatmulIdDesc&) = default;
};

// y[m, n] = activation(x·gateᵀ + bias_g, x·upᵀ + bias_u).
struct UpGateDesc {
  DType type = DType::f32;  // of both
  Layout layout = Layout::plain;
  ActType act = ActType::f32;
  Activation activation = Activation::silu;
  int64_t m = 1, n = 0, k = 0;
  bool norm = false;
  int64_t y_tiles = 0;  // y is HalfTiles (half_tiles.h) of this height; 0: rows
  ProductPath path = ProductPath::any;
  ComputeType compute = ComputeType::f16;
  friend bool operator==(const UpGateDesc&, const UpGateDesc&) = default;
};

// up_gate per (token, slot): y[m, used, n]. With shared > 0, also gate and up of a shared expert, which every token
// uses: shared_y[m, shared] of the same rows and activation, without biases. Supported for one token on CUDA only, with
// rows in bytes.
struct MoeUpGateDesc {
  DType type = DType::f32;
  Layout layout = Layout::plain;
  ActType act = ActType::f32;
  Activation activation = Activation::silu;
  int64_t m = 1, n = 0, k = 0, experts = 1, used = 1, shared = 0;
  bool norm = false;
  bool bytes = false;  // x is also there as byte rows, see ops/matmul/byte_rows.h
  ProductPath path = ProductPath::any;
  ComputeType compute = ComputeType::f16;
  friend bool operator==(const MoeUpGateDesc&, const MoeUpGateDesc&) = default;
};

enum class Gating : uint8_t { softmax, sigmoid, softmax_selected };
std::string_view gating_name(Gating gating);

// Router logits [m, experts] -> ids [m, used] int32 and weights [m, used] f32. Steps: probabilities by `gating`;
// selection scores = probabilities + selection bias; group masking (group score = sum of its two best); top `used`
// (ties to the lower id); weights = unbiased probabilities of the selected experts; normalise; scale, by one factor for
// all and by a factor per expert.
struct MoeRouteDesc {
  int64_t m = 1, experts = 1, used = 1, groups = 1, groups_used = 1;
  Gating gating = Gating::softmax;
  bool normalize = false;
  friend bool operator==(const MoeRouteDesc&, const MoeRouteDesc&) = default;
};

// out[m, n] = residual + scale * sum over slots of weight[m, slot] * x[m, slot, n].
struct MoeSumDesc {
  int64_t m = 1, n = 0, used = 1;
  friend bool operator==(const MoeSumDesc&, const MoeSumDesc&) = default;
};

// Causal attention of m query tokens over the KV cache: q [m, heads, dk] -> out [m, heads, dv].
struct AttentionDesc {
  int64_t m = 1, heads = 1, kv_heads = 1, dk = 0, dv = 0;
  DType k_type = DType::f16, v_type = DType::f16;
  bool v_in_k = false;  // MLA: V is the first dv elements of each K row
  bool sinks = false;   // one logit per head is added to the softmax denominator
  bool windowed = false;
  bool softcap = false;
  bool exact = false;     // f32 queries and weights, whatever the device prefers
  int64_t out_tiles = 0;  // out is HalfTiles (half_tiles.h) of this height, and every run has one token; 0: rows
  bool paired = false;    // f32 keys and values are f16 pairs: high parts of a head, then rests (mla_expand)
  int64_t selected = 0;   // a query reads at most so many positions, which a list of each token names; 0: all
  friend bool operator==(const AttentionDesc&, const AttentionDesc&) = default;
};

// Converts rows of f32 [m, width] to the cache type and writes them to their cache positions.
struct KvStoreDesc {
  int64_t m = 1, width = 0;
  DType type = DType::f16;
  friend bool operator==(const KvStoreDesc&, const KvStoreDesc&) = default;
};

// Converts activations: f32 [m, k] -> rows of `act`. With f32, copies rows between strides.
struct CopyDesc {
  ActType act = ActType::q8;
  int64_t m = 1, k = 0;
  friend bool operator==(const CopyDesc&, const CopyDesc&) = default;
};

// y[m, n] = activation(gate) * up, if the two products could not be one launch (their types differ). With experts > 0,
// n covers `used` adjacent slots, one per expert; each expert may have a factor for gate and one for up.
struct GluDesc {
  int64_t m = 1, n = 0;
  Activation activation = Activation::silu;
  int64_t experts = 0, used = 1;
  friend bool operator==(const GluDesc&, const GluDesc&) = default;
};

// Up to three products of the same rows, with possibly different types: q[m, n] = x · wqᵀ + bias_q, k[m, n_k], v[m,
// n_v]. Without a third product n_v is 0.
struct QkvDesc {
  DType type = DType::f32, type_k = DType::f32, type_v = DType::f32;
  Layout layout = Layout::plain;
  int64_t m = 1, n = 0, n_k = 0, n_v = 0, k = 0;
  bool norm = false;
  friend bool operator==(const QkvDesc&, const QkvDesc&) = default;
};

// out[m, n] = residual + scale * sum over slots of weight[m, slot] * (x[m, slot, k] · w[id]ᵀ + bias[id]): matmul_id and
// moe_sum in one, w [experts, n, k]. With shared > 0 the sum also has shared_x[m, shared] · shared_wᵀ.
struct MoeDownSumDesc {
  DType type = DType::f32;
  Layout layout = Layout::plain;
  int64_t m = 1, n = 0, k = 0, experts = 1, used = 1, shared = 0;
  friend bool operator==(const MoeDownSumDesc&, const MoeDownSumDesc&) = default;
};

// Keys and values of all heads from m rows of the latent cache (lora dims of latent, then rope of a shared rotary key):
// keys[m, h, nope + rope] = latent · k_b[h], rotary part; values[m, h, dv] = latent · v_b[h]ᵀ; expanded_type().
// k_b [heads, lora, nope], v_b [heads, dv, lora].
// paired: a head's numbers from an f32 cache are f16 pairs in as many bytes: high parts, then rests times kRestFactor.
struct MlaExpandDesc {
  DType k_type = DType::f16, v_type = DType::f16;  // of k_b and v_b
  int64_t m = 1, heads = 1, nope = 0, rope = 0, dv = 0, lora = 0;
  DType cache_type = DType::f16;
  Layout k_layout = Layout::plain, v_layout = Layout::plain;
  bool paired = false;
  friend bool operator==(const MlaExpandDesc&, const MlaExpandDesc&) = default;
};

// The steps between the products of q, k, v and attention: norms of heads, rotation of the first n_rot dims of q and k,
// and the store of k and v in the cache. q [m, heads, dk] is updated in place; k [m, kv_heads, dk] and v [m, kv_heads,
// dv] are only read.
// latent (MLA): k is the cache row [m, dk], whose first dk - n_rot dims are normalised and whose other dims are
// rotated; there is no v. The last n_rot dims of each q [m, heads, nope + n_rot] are rotated and written to the last
// dims of q_out [m, heads, dk].
struct QkvRopeStoreDesc {
  int64_t m = 1, heads = 1, kv_heads = 1, dk = 0, dv = 0, n_rot = 0, nope = 0;
  DType k_type = DType::f16, v_type = DType::f16;
  bool neox = false;    // as in RopeDesc
  bool q_norm = false;  // RMS norm over each head before the rotation
  bool k_norm = false;
  bool latent = false;
  bool v_norm = false;  // the same over each value head, without weights
  friend bool operator==(const QkvRopeStoreDesc&, const QkvRopeStoreDesc&) = default;
};

// qkv_rope_store and attention in one. q, k and v are the values before norm and rotation, and are only read. latent
// (MLA): the last n_rot dims of each query are not read from q [m, heads, dk], but, unrotated, from the end of each row
// of q_rotary [m, heads, nope + n_rot].
struct RopeAttentionDesc {
  int64_t m = 1, heads = 1, kv_heads = 1, dk = 0, dv = 0, n_rot = 0, nope = 0;
  DType k_type = DType::f16, v_type = DType::f16;
  bool neox = false;
  bool q_norm = false;
  bool k_norm = false;
  bool latent = false;
  bool sinks = false;
  bool windowed = false;
  bool softcap = false;
  bool v_norm = false;
  QkvRopeStoreDesc store() const {
    return {m, heads, kv_heads, dk, dv, n_rot, nope, k_type, v_type, neox, q_norm, k_norm, latent, v_norm};
  }
  AttentionDesc attention() const {
    return {m, heads, kv_heads, dk, dv, k_type, v_type, latent, sinks, windowed, softcap, false};
  }
  friend bool operator==(const RopeAttentionDesc&, const RopeAttentionDesc&) = default;
};

// How a token updates the state of linear attention: see ops/linear_attention/linear_attention.h.
enum class LinearRule : uint8_t { delta, additive };
std::string_view linear_rule_name(LinearRule rule);

// RMS norm of rows x [m, k], router product with w [experts, k] and the routing of MoeRouteDesc in one.
struct NormRouteDesc {
  DType type = DType::f32;  // of the router
  Layout layout = Layout::plain;
  int64_t m = 1, k = 0, experts = 1, used = 1, groups = 1, groups_used = 1;
  Gating gating = Gating::softmax;
  bool normalize = false;
  bool bytes = false;  // also writes byte rows, see ops/matmul/byte_rows.h
  MoeRouteDesc route() const { return {m, experts, used, groups, groups_used, gating, normalize}; }
  friend bool operator==(const NormRouteDesc&, const NormRouteDesc&) = default;
};

// Samples one token per row of logits [m, n_vocab]. A pure function: random numbers are an input.
struct SampleDesc {
  int64_t m = 1, n_vocab = 0;
  friend bool operator==(const SampleDesc&, const SampleDesc&) = default;
};

}  // namespace dyno::ops
