// ModelDesc: what a model is, as a table of facts. Input: GgufFile. Output: layer specs that the plan walks.
// A plain value; it points into the GgufFile it was made from, which must outlive it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "gguf/gguf_file.h"
#include "ops/op.h"

namespace dyno::model {

// Index into ModelDesc::weights; kNone where a model has no such tensor.
using WeightId = int32_t;
inline constexpr WeightId kNone = -1;

// A change that the loader makes to a tensor before kernels see it.
enum class Transform : uint8_t {
  none,
  to_f32,             // small vectors: norms, biases, sinks, frequency factors
  kv_b_k_transposed,  // legacy attn_kv_b: the key half of each head, transposed to [heads, kv_lora, nope], f32 or f16
  kv_b_v,             // legacy attn_kv_b: the value half of each head, rows as in the file
  first_half,         // the first half of the rows of each of Weight::parts parts of the tensor
  second_half,        // the other half
};

// One matrix (or stack of `batch` matrices, or vector) that a kernel reads: w[batch, rows, cols].
struct Weight {
  std::string name;  // of the GGUF tensor, with a suffix where one tensor yields several weights
  const TensorInfo* tensor = nullptr;
  Transform transform = Transform::none;
  DType type = DType::f32;  // after the transform
  int64_t batch = 1;        // experts, or heads
  int64_t rows = 0;
  int64_t cols = 0;   // the contracted dimension
  int64_t parts = 1;  // of first_half and second_half
  // A factor beside the tensor, which the loader leaves out: products are multiplied by it, a vector has it inside.
  double scale = 1.0;
  WeightId scales = kNone;  // the same with a number for each matrix of the stack
  bool table = false;       // read by token id (embed)
  // Matrices of the tensor that this weight consists of, in this order; empty: all of them.
  std::vector<int32_t> picks{};
};

enum class RopeScaling : uint8_t {
  none,
  linear,
  yarn,
  still,  // every frequency is 0: the layer does not rotate
};

struct RopeSpec {
  bool neox = false;
  int64_t n_rot = 0;
  double base = 10000.0;
  RopeScaling scaling = RopeScaling::none;
  double factor = 1.0;  // context extension: 1 = none
  int64_t original_context = 0;
  double beta_fast = 32.0;
  double beta_slow = 1.0;
  double attention_factor = 1.0;       // of the file; multiplies YaRN's own
  bool yarn_scales_cos_sin = true;     // deepseek2 folds the magnitude into the attention scale instead
  WeightId frequency_factors = kNone;  // divisors of the frequencies (llama 3), f32 [n_rot / 2]
  // Queries at position p are multiplied by 1 + position_scale * ln(1 + floor(p / position_step)), keys are not.
  double position_scale = 0;
  int64_t position_step = 1;
};

enum class AttentionKind : uint8_t { gqa, mla };

// The rows over which queries and keys are normed, and when.
enum class QkNorm : uint8_t {
  heads,             // each head, before the rotation
  heads_after_rope,  // each head, after it
  projection,        // all heads of a token together, before the rotation
};

struct AttentionSpec {
  AttentionKind kind = AttentionKind::gqa;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t dk = 0;  // of a query and key head, as multiplied with the cache's rows
  int64_t dv = 0;
  double scale = 0;
  int64_t window = 0;  // 0: every earlier position; else key j is seen by query p iff p - j < window
  double softcap = 0;
  RopeSpec rope;

  // gqa: q, k, v or one fused qkv
  WeightId q = kNone, k = kNone, v = kNone, qkv = kNone;
  WeightId q_bias = kNone, k_bias = kNone, v_bias = kNone, qkv_bias = kNone;
  WeightId q_norm = kNone, k_norm = kNone;
  bool v_norm = false;             // an RMS norm without weights on each value head
  bool v_is_k = false;             // no `v`: values are the products of `k`, before its norm and rotation
  int64_t shared_kv = -1;          // no `k` and `v`: the layer reads the cache of this earlier one
  QkNorm qk_norm = QkNorm::heads;  // where q_norm and k_norm are there
  WeightId sinks = kNone;          // [heads]

  // mla (DeepSeek-V2, arXiv:2405.04434), computed in absorbed form over the latent cache
  int64_t kv_lora = 0;                                  // width of the latent
  int64_t nope = 0;                                     // non-rotary dims of a query head
  int64_t v_head = 0;                                   // dims of a value head before the output projection
  WeightId q_a = kNone, q_a_norm = kNone, q_b = kNone;  // low-rank queries; otherwise `q`
  WeightId kv_a = kNone, kv_a_norm = kNone;
  WeightId k_b = kNone;  // [heads, kv_lora, nope]
  WeightId v_b = kNone;  // [heads, v_head, kv_lora]

  WeightId gate = kNone;  // [heads * dv, n_embd]: the sigmoid of its product scales attention's output
  WeightId output = kNone, output_bias = kNone;
};

// A layer that mixes tokens through a state of fixed size instead of attention.
enum class RecurrentKind : uint8_t {
  none,
  linear,      // a short convolution, then linear attention (ops/linear_attention), normed and gated
  short_conv,  // a short convolution between two gates
};

struct RecurrentSpec {
  RecurrentKind kind = RecurrentKind::none;
  int64_t taps = 0;
  // linear with the rule delta: `in` gives q, k [k_heads, dk] and v [v_heads, dv] of a token, in this order; or q
  // alone, and in_k and in_v the others. Rule additive (Mamba-2): the gate, v, k, q and step. short_conv: the gate
  // before the convolution, the gate behind it and its input, n_embd each.
  ops::LinearRule rule = ops::LinearRule::delta;  // this and the next three as in ops::LinearAttentionDesc
  bool grouped = false;
  bool channel_decay = false;
  int64_t k_heads = 0, v_heads = 0, dk = 0, dv = 0;
  WeightId in = kNone, in_k = kNone, in_v = kNone;
  WeightId conv = kNone, conv_k = kNone, conv_v = kNone;  // [channels, taps], f32
  WeightId conv_bias = kNone;
  // [v_heads * dv, …]: SiLU, or the sigmoid, of its product scales the output. It reads n_embd rows, or those of
  // gate_low.
  WeightId gate = kNone, gate_low = kNone;
  bool sigmoid_gate = false;
  bool gate_first = false;                                  // before the norm
  WeightId step = kNone, step_low = kNone, beta = kNone;    // [v_heads, …]; with channel_decay [v_heads * dk, …]
  WeightId decay = kNone, step_bias = kNone, skip = kNone;  // [v_heads]; step_bias like step
  WeightId norm = kNone;                                    // [v_heads * dv / norm_rows], or with a row for each
  int64_t norm_rows = 0;                                    // of a token
  bool norm_shared = true;                                  // one row of weights
  WeightId output = kNone;
};

enum class FfnKind : uint8_t { none, dense, moe };

struct FfnSpec {
  FfnKind kind = FfnKind::dense;
  ops::Activation activation = ops::Activation::silu;
  int64_t width = 0;  // of one (expert's) hidden layer

  // dense FFN, or the shared experts of a mixture (all of them side by side). Without `gate` the activation takes the
  // product with `up` twice; likewise for experts.
  WeightId gate = kNone, up = kNone, down = kNone;
  WeightId gate_bias = kNone, up_bias = kNone, down_bias = kNone;
  int64_t dense_width = 0;
  WeightId shared_gate = kNone;  // [1, n_embd]: the sigmoid of its product scales the shared experts

  // mixture of experts
  int64_t experts = 0, used = 0, groups = 1, groups_used = 1;
  ops::Gating gating = ops::Gating::softmax;
  bool normalize = false;
  double weights_scale = 1.0;
  WeightId router = kNone, router_bias = kNone, selection_bias = kNone;
  WeightId router_norm = kNone;   // the router reads the residual stream through this norm instead of ffn_norm's rows
  double router_scale = 1.0;      // on the router's product
  WeightId expert_scale = kNone;  // [experts]: on the weights of the chosen
  WeightId experts_gate = kNone, experts_up = kNone, experts_down = kNone;
  WeightId experts_gate_bias = kNone, experts_up_bias = kNone, experts_down_bias = kNone;

  // Experts that also lie on the main device, in the order of their places there, and their matrices.
  struct Cached {
    std::vector<int32_t> experts{};
    WeightId gate = kNone, up = kNone, down = kNone;
    WeightId gate_bias = kNone, up_bias = kNone, down_bias = kNone;
  };
  Cached cached;
};

struct LayerSpec {
  WeightId attn_norm = kNone;  // none: attention reads the residual stream itself
  AttentionSpec attention;     // without heads where the layer is recurrent, or a FFN alone
  RecurrentSpec recurrent;
  WeightId attn_post_norm = kNone;  // on the attention's output, before it joins the residual stream
  WeightId ffn_norm = kNone;        // likewise
  FfnSpec ffn;
  WeightId ffn_post_norm = kNone;
  // A mixture beside the dense FFN (gemma4): `ffn` is the dense one with a norm of its own behind it, and both are
  // added before ffn_post_norm.
  std::optional<FfnSpec> beside;
  WeightId ffn_own_norm = kNone, beside_norm = kNone, beside_own_norm = kNone;
  // Per-layer embeddings: u = gelu(input_gate * h) * input of the layer; h += norm(input_up * u).
  WeightId input_gate = kNone, input_up = kNone, input_norm = kNone;
  double output_scale = 1.0;  // on the residual stream behind the layer

  bool is_recurrent() const { return recurrent.kind != RecurrentKind::none; }
  bool has_attention() const { return attention.heads > 0; }
  // The mixture of the layer, if there is one.
  const FfnSpec* mixture() const { return ffn.kind == FfnKind::moe ? &ffn : beside ? &*beside : nullptr; }
  FfnSpec* mixture() { return ffn.kind == FfnKind::moe ? &ffn : beside ? &*beside : nullptr; }
};

// The part of a file that is described.
enum class Part : uint8_t {
  trunk,
  draft_head,  // the first block behind the trunk, which predicts one token further: a model of one layer
};

// How such a head reads its input: projection · (norm(embedding of the token), norm(hidden row of the token before
// it)).
struct DraftInput {
  WeightId embd_norm = kNone, hidden_norm = kNone;
  WeightId projection = kNone;  // [n_embd, 2 * n_embd]
};

struct ModelDesc {
  std::string architecture;
  std::string name;
  int64_t n_layers = 0;
  int64_t n_embd = 0;
  int64_t n_vocab = 0;
  int64_t n_ctx_train = 0;
  // Attention reads the best so many positions, which an indexer chooses, and n_ctx_train is no more than that: up to
  // there it reads all of them, and nothing here chooses yet. 0: none is chosen.
  int64_t chosen_positions = 0;
  double norm_eps = 0;
  double post_norm_eps = 0;  // of norms on what attention and FFN add; 0: norm_eps
  double embedding_scale = 1.0;
  bool embedding_norm = false;  // an RMS norm without weights on the embedding's rows
  double residual_scale = 1.0;  // on what attention and FFN add to the residual stream
  double logit_scale = 1.0;     // logits are multiplied by it
  double logit_softcap = 0;

  // Per-layer embeddings: of every token a row [layers, layer_input] of a table, and a product of its embedding.
  int64_t layer_input = 0;
  WeightId layer_embd = kNone, layer_proj = kNone, layer_proj_norm = kNone;

  WeightId token_embd = kNone;
  WeightId output_norm = kNone;
  WeightId output = kNone;  // the embedding table where tied
  WeightId output_bias = kNone;
  bool tied_output = false;

  std::optional<DraftInput> draft_input;  // of Part::draft_head
  int64_t draft_blocks = 0;               // behind the trunk, in the file

  std::vector<LayerSpec> layers;
  std::vector<Weight> weights;
  std::vector<std::string> unused_tensors;  // in the file, not needed to decode (next-token heads, …)

  const Weight& weight(WeightId id) const { return weights.at(static_cast<size_t>(id)); }
  int64_t moe_layers() const;
  int64_t experts() const;       // of the largest mixture, 0 without one
  int64_t experts_used() const;  // likewise, by a token
  bool has_state() const;        // whether a layer is recurrent
  // Weights of matrices, without tied duplicates.
  int64_t parameters() const;
  std::string describe() const;
};

// Throws ModelError: unknown architecture (lists the known ones), missing or mis-shaped tensor, impossible
// hyper-parameter.
// Of a head also UnsupportedError, where the file or the engine has none.
ModelDesc describe_model(const GgufFile& file, Part part = Part::trunk);

// The model with only the first `count` of its layers, and the output behind them: the same shapes and less of them,
// for measurements. Its answers mean nothing. 0: all layers. Throws PlanError for a count that it does not have,
// UnsupportedError where later layers are part of earlier weights.
ModelDesc first_layers(ModelDesc model, int64_t count);

// Whether single experts of a mixture can lie on another device than the others.
bool can_cache_experts(const ModelDesc& model, const FfnSpec& spec);
// The model with weights of their own for these experts of each layer, by layer: FfnSpec::cached. Throws PlanError for
// experts that it does not have, or that cannot be cached.
ModelDesc with_cached_experts(ModelDesc model, const std::vector<std::vector<int32_t>>& experts);

std::vector<std::string_view> known_architectures();

}  // namespace dyno::model
