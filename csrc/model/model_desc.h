// ModelDesc: the description of a model. Input: GgufFile. Output: layer specs that the plan walks. A plain value; it
// points into its GgufFile, which must outlive it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "gguf/gguf_file.h"
#include "ops/op.h"

namespace dyno::model {

// Index into ModelDesc::weights; kNone if the model has no such tensor.
using WeightId = int32_t;
inline constexpr WeightId kNone = -1;

// A change of a tensor that the loader makes before kernels read it.
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
  std::string name;  // name of the GGUF tensor, with a suffix if one tensor yields several weights
  const TensorInfo* tensor = nullptr;
  Transform transform = Transform::none;
  DType type = DType::f32;  // after the transform
  int64_t batch = 1;        // experts, or heads
  int64_t rows = 0;
  int64_t cols = 0;   // the contracted dimension
  int64_t parts = 1;  // of first_half and second_half
  // A factor stored next to the tensor. The loader does not apply it to matrices: products are multiplied by it. A
  // vector includes it.
  double scale = 1.0;
  WeightId scales = kNone;  // the same with one factor per matrix of the stack
  bool table = false;       // read by token id (embed)
  // The matrices of the tensor in this weight, in this order; empty: all of them.
  std::vector<int32_t> picks{};
};

enum class RopeScaling : uint8_t {
  none,
  linear,
  yarn,
  still,  // all frequencies are 0: the layer does not rotate
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
  double attention_factor = 1.0;       // multiplies cos and sin; YaRN has a factor of its own beside it
  bool yarn_scales_cos_sin = true;     // deepseek2 includes the magnitude in the attention scale instead
  WeightId frequency_factors = kNone;  // divisors of the frequencies (llama 3), f32 [n_rot / 2]
  // Queries at position p are multiplied by 1 + position_scale * ln(1 + floor(p / position_step)); keys are not.
  double position_scale = 0;
  int64_t position_step = 1;
};

enum class AttentionKind : uint8_t { gqa, mla };

// The rows over which queries and keys are normalised, and when.
enum class QkNorm : uint8_t {
  heads,             // each head, before the rotation
  heads_after_rope,  // each head, after the rotation
  projection,        // all heads of a token together, before the rotation
};

struct AttentionSpec {
  AttentionKind kind = AttentionKind::gqa;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t dk = 0;  // of a query and key head, as multiplied with the rows of the cache
  int64_t dv = 0;
  double scale = 0;
  int64_t window = 0;  // 0: every earlier position; else query p reads key j iff p - j < window
  double softcap = 0;
  RopeSpec rope;

  // gqa: q, k, v or one fused qkv
  WeightId q = kNone, k = kNone, v = kNone, qkv = kNone;
  WeightId q_bias = kNone, k_bias = kNone, v_bias = kNone, qkv_bias = kNone;
  WeightId q_norm = kNone, k_norm = kNone;
  bool v_norm = false;             // an RMS norm without weights on each value head
  bool v_is_k = false;             // no `v`: values are the products of `k`, before its norm and rotation
  int64_t shared_kv = -1;          // no `k` and `v`: the layer reads the cache of this earlier layer
  QkNorm qk_norm = QkNorm::heads;  // if q_norm and k_norm exist
  WeightId sinks = kNone;          // [heads]

  // mla (DeepSeek-V2, arXiv:2405.04434), computed in absorbed form over the latent cache
  int64_t kv_lora = 0;                                  // width of the latent
  int64_t nope = 0;                                     // non-rotary dims of a query head
  int64_t v_head = 0;                                   // dims of a value head before the output projection
  WeightId q_a = kNone, q_a_norm = kNone, q_b = kNone;  // low-rank queries; otherwise `q`
  WeightId kv_a = kNone, kv_a_norm = kNone;
  WeightId k_b = kNone;  // [heads, kv_lora, nope]
  WeightId v_b = kNone;  // [heads, v_head, kv_lora]

  // Sparse attention: a query attends to the `selects` positions with the best scores of an indexer; 0: to all. A layer
  // without an indexer uses the selection of the nearest earlier layer that has one.
  struct Indexer {
    int64_t heads = 0;                             // 0: none
    int64_t dk = 0;                                // of each head, and of the one key of a position
    RopeSpec rope;                                 // of the first dimensions
    WeightId q_b = kNone;                          // [heads * dk, rows of q_a]
    WeightId k = kNone;                            // [dk, n_embd]
    WeightId k_norm = kNone, k_norm_bias = kNone;  // [dk]
    WeightId weights = kNone;                      // [heads, n_embd]: the factors of the heads' scores
    double eps = 1e-6;                             // of the norm of keys
  };
  int64_t selects = 0;
  Indexer indexer;

  WeightId gate = kNone;  // [heads * dv, n_embd]: the sigmoid of its product scales the output of attention
  WeightId output = kNone, output_bias = kNone;
};

// The kind of a layer that mixes tokens through a fixed-size state instead of attention.
enum class RecurrentKind : uint8_t {
  none,
  linear,      // a short convolution, then linear attention (ops/linear_attention), a norm and a gate
  short_conv,  // a short convolution between two gates
};

struct RecurrentSpec {
  RecurrentKind kind = RecurrentKind::none;
  int64_t taps = 0;
  // linear with rule delta: `in` computes q, k [k_heads, dk] and v [v_heads, dv] of a token, in this order; or only q,
  // and in_k and in_v compute the others. Rule additive (Mamba-2): `in` computes gate, v, k, q and step. short_conv:
  // `in` computes the gate before the convolution, the gate after it and its input, n_embd each.
  ops::LinearRule rule = ops::LinearRule::delta;  // this and the next three members as in ops::LinearAttentionDesc
  bool grouped = false;
  bool channel_decay = false;
  int64_t k_heads = 0, v_heads = 0, dk = 0, dv = 0;
  WeightId in = kNone, in_k = kNone, in_v = kNone;
  WeightId conv = kNone, conv_k = kNone, conv_v = kNone;  // [channels, taps], f32
  WeightId conv_bias = kNone;
  // [v_heads * dv, …]: SiLU or sigmoid of its product scales the output. Its input is n_embd wide, or the product of
  // gate_low.
  WeightId gate = kNone, gate_low = kNone;
  bool sigmoid_gate = false;
  bool gate_first = false;                                  // before the norm
  WeightId step = kNone, step_low = kNone, beta = kNone;    // [v_heads, …]; with channel_decay [v_heads * dk, …]
  WeightId decay = kNone, step_bias = kNone, skip = kNone;  // [v_heads]; step_bias like step
  WeightId norm = kNone;                                    // [v_heads * dv / norm_rows], for all rows or for each row
  int64_t norm_rows = 0;                                    // rows per token over which the norm runs
  bool norm_shared = true;                                  // whether all rows share the weights
  WeightId output = kNone;
};

enum class FfnKind : uint8_t { none, dense, moe };

struct FfnSpec {
  FfnKind kind = FfnKind::dense;
  ops::Activation activation = ops::Activation::silu;
  int64_t width = 0;  // of one (expert's) hidden layer

  // Dense FFN, or the shared experts of a mixture (all of them as one FFN). Without `gate`, the activation uses the
  // product with `up` for both inputs; the same holds for experts.
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
  WeightId router_norm = kNone;   // norm of the router's input, if it reads the residual stream instead of ffn_norm's
                                  // rows
  double router_scale = 1.0;      // factor of the router's product
  WeightId expert_scale = kNone;  // [experts]: factor of the chosen experts' weights
  WeightId experts_gate = kNone, experts_up = kNone, experts_down = kNone;
  WeightId experts_gate_bias = kNone, experts_up_bias = kNone, experts_down_bias = kNone;

  // Experts with a copy on the main device, in the order of their places there, and their matrices.
  struct Cached {
    std::vector<int32_t> experts{};
    WeightId gate = kNone, up = kNone, down = kNone;
    WeightId gate_bias = kNone, up_bias = kNone, down_bias = kNone;
  };
  Cached cached;
};

struct LayerSpec {
  WeightId attn_norm = kNone;  // kNone: attention reads the residual stream directly
  AttentionSpec attention;     // without heads if the layer is recurrent or only an FFN
  RecurrentSpec recurrent;
  WeightId attn_post_norm = kNone;  // applied to attention's output, before it is added to the residual stream
  WeightId ffn_norm = kNone;        // kNone: the FFN reads the residual stream directly
  FfnSpec ffn;
  WeightId ffn_post_norm = kNone;
  // A mixture in parallel to the dense FFN (gemma4): `ffn` is the dense one with its own norm after it, and both are
  // added before ffn_post_norm.
  std::optional<FfnSpec> beside;
  WeightId ffn_own_norm = kNone, beside_norm = kNone, beside_own_norm = kNone;
  // Per-layer embeddings: u = gelu(input_gate * h) * input of the layer; h += norm(input_up * u).
  WeightId input_gate = kNone, input_up = kNone, input_norm = kNone;
  double output_scale = 1.0;  // factor of the residual stream after the layer

  bool is_recurrent() const { return recurrent.kind != RecurrentKind::none; }
  bool has_attention() const { return attention.heads > 0; }
  // The mixture of experts of the layer, or null.
  const FfnSpec* mixture() const { return ffn.kind == FfnKind::moe ? &ffn : beside ? &*beside : nullptr; }
  FfnSpec* mixture() { return ffn.kind == FfnKind::moe ? &ffn : beside ? &*beside : nullptr; }
};

// The part of a file to describe.
enum class Part : uint8_t {
  trunk,
  draft_head,  // the first block after the trunk, which predicts one further token: a model of one layer
};

// The input of a draft head: projection · (norm(embedding of the token), norm(hidden row of the previous token)).
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
  // If not 0: attention reads the best chosen_positions positions, which an indexer selects. Up to this number of
  // positions it reads all.
  int64_t chosen_positions = 0;
  double norm_eps = 0;
  double post_norm_eps = 0;  // for norms of the outputs of attention and FFN; 0: norm_eps
  double embedding_scale = 1.0;
  bool embedding_norm = false;  // an RMS norm without weights on the embedding's rows
  double residual_scale = 1.0;  // factor of the outputs of attention and FFN
  double logit_scale = 1.0;     // factor of the logits
  double logit_softcap = 0;

  // Per-layer embeddings: for every token, a row [layers, layer_input] of a table, and a product of its embedding.
  int64_t layer_input = 0;
  WeightId layer_embd = kNone, layer_proj = kNone, layer_proj_norm = kNone;

  WeightId token_embd = kNone;
  WeightId output_norm = kNone;
  WeightId output = kNone;  // the embedding table if tied
  WeightId output_bias = kNone;
  bool tied_output = false;

  std::optional<DraftInput> draft_input;  // for Part::draft_head
  int64_t draft_blocks = 0;               // blocks after the trunk, in the file

  std::vector<LayerSpec> layers;
  std::vector<Weight> weights;
  std::vector<std::string> unused_tensors;  // tensors in the file that decoding does not need (next-token heads, …)

  const Weight& weight(WeightId id) const { return weights.at(static_cast<size_t>(id)); }
  int64_t moe_layers() const;
  int64_t experts() const;       // of the largest mixture; 0 if there is none
  int64_t experts_used() const;  // per token, in the largest mixture
  bool has_state() const;        // whether a layer is recurrent
  // Number of weights in matrices, without tied duplicates.
  int64_t parameters() const;
  std::string describe() const;
};

// Throws ModelError for an unknown architecture (with the known ones), a missing tensor, a wrong shape or an impossible
// hyper-parameter. Throws UnsupportedError for Part::draft_head if the file or the engine has no such head.
ModelDesc describe_model(const GgufFile& file, Part part = Part::trunk);

// The model with only its first `count` layers and the output: the same shapes, but fewer layers, for measurements. Its
// answers are meaningless. 0: all layers. Throws PlanError if there are not as many layers, and UnsupportedError if
// later layers share weights with earlier ones.
ModelDesc first_layers(ModelDesc model, int64_t count);

// Whether single experts of a mixture can be on another device than the others.
bool can_cache_experts(const ModelDesc& model, const FfnSpec& spec);
// The model with separate weights for these experts, by layer: FfnSpec::cached. Throws PlanError for experts that do
// not exist or cannot be cached.
ModelDesc with_cached_experts(ModelDesc model, const std::vector<std::vector<int32_t>>& experts);

std::vector<std::string_view> known_architectures();

}  // namespace dyno::model
