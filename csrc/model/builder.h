// The builder for architecture files: checked access to metadata and weights. Every shape is checked against the
// hyper-parameters here, so that the plan and the kernels can rely on it.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <vector>

#include "core/error.h"
#include "model/model_desc.h"

namespace dyno::model {

// Limits of the kernels for recurrent layers (ops/linear_attention, ops/short_conv): dimensions of a head, and taps.
inline constexpr int64_t kMaxStateHead = 512, kMaxConvTaps = 8;

class Builder {
 public:
  Builder(const GgufFile& file, ModelDesc& model, Part part);

  // Metadata with the architecture's prefix: integer("block_count") reads "<arch>.block_count".
  int64_t integer(std::string_view key, int64_t least = 0) const;  // required
  int64_t integer_or(std::string_view key, int64_t fallback, int64_t least = 0) const;
  double real(std::string_view key) const;
  double real_or(std::string_view key, double fallback) const;
  bool flag_or(std::string_view key, bool fallback) const;
  std::optional<std::string> text(std::string_view key) const;
  // One number per layer; a scalar applies to all layers.
  int64_t per_layer(std::string_view key, int64_t layer, std::optional<int64_t> fallback, int64_t least = 0) const;
  int64_t conv_taps(std::string_view key) const;  // of a short convolution
  bool has_key(std::string_view key) const;
  bool is_array(std::string_view key) const;
  bool has_tensor(std::string_view name) const;
  // The rows of a matrix in the file; 0 if there is no such tensor.
  int64_t rows_of(std::string_view name) const;

  // w[rows, cols]; throws ModelError if it is missing or has another shape.
  WeightId matrix(const std::string& name, int64_t rows, int64_t cols);
  WeightId matrix_optional(const std::string& name, int64_t rows, int64_t cols);
  // w[batch, rows, cols]
  WeightId stack(const std::string& name, int64_t batch, int64_t rows, int64_t cols);
  // A vector as f32 [n], or a stack of them [batch, n].
  WeightId vector(const std::string& name, int64_t n);
  // A vector of n numbers in any shape; if `first` is not 0, it must be the file's first dimension.
  WeightId values(const std::string& name, int64_t n, int64_t first = 0);
  WeightId vector_optional(const std::string& name, int64_t n, int64_t batch = 1);
  // Half of the rows of each of `parts` parts of a tensor with `parts` * 2 * `rows` rows, in the file's type. The
  // result is one matrix, or with `stacked` one matrix per part.
  WeightId half(const std::string& name, bool second, int64_t parts, int64_t rows, int64_t cols, bool stacked = false);
  // The one number of a tensor.
  double number(const std::string& name);
  WeightId derived(const std::string& name, const std::string& suffix, Transform transform, DType type, int64_t batch,
                   int64_t rows, int64_t cols);
  // Checks a tensor's shape {ne0, ne1, …} without adding a weight.
  const TensorInfo& expect_tensor(const std::string& name, std::initializer_list<int64_t> shape) const;

  // Head counts, norms, embedding and output, which all architectures share. Sizes `layers`.
  struct CommonFacts {
    std::string_view output_norm = "output_norm.weight";
    std::string_view eps = "attention.layer_norm_rms_epsilon";
  };
  void common(const CommonFacts& facts);
  void common() { common(CommonFacts{}); }
  // The blocks to describe, with their number in the file: the blocks of the trunk, or only the block of the head.
  struct Block {
    LayerSpec& layer;
    int64_t index;
  };
  std::vector<Block> blocks();
  bool is_head() const { return part_ == Part::draft_head; }
  LayerSpec& layer(int64_t index) { return model.layers.at(static_cast<size_t>(index)); }
  // "<architecture>.<name>"
  std::string key(std::string_view name) const;
  // "blk.<layer>.<what>"
  static std::string blk(int64_t layer, std::string_view what);

  // Building blocks that architectures share; each fills the spec from the tensors in the file.
  // `rotary_dims` of 0: the file's rope.dimension_count, or the whole head.
  RopeSpec rope(bool neox, int64_t rotary_dims = 0);
  struct GqaFacts {
    bool norm = true;        // attn_norm before the products
    bool gated = false;      // attn_q has a query and a gate for each head
    int64_t key_length = 0;  // of a head; 0: from the metadata for all layers
    int64_t value_length = 0;
    bool v_may_be_k = false;         // if attn_v is missing, values are the products of attn_k
    int64_t shared_kv = -1;          // as in AttentionSpec
    QkNorm qk_norm = QkNorm::heads;  // of the q and k norms in the file
  };
  // Norm, q/k/v (or fused qkv) with the biases that the file has, output projection; scale 1/sqrt(dk).
  void gqa(LayerSpec& layer, int64_t index, const RopeSpec& rope, const GqaFacts& facts);
  void gqa(LayerSpec& layer, int64_t index, const RopeSpec& rope) { gqa(layer, index, rope, GqaFacts{}); }
  void require_qk_norm(const LayerSpec& layer, int64_t index) const;
  // Whether a layer has a sliding window: all layers except every n-th. n is the default pattern, or comes from the
  // file.
  bool is_local_layer(int64_t index, int64_t default_pattern) const;
  // A flag from an optional array with one flag per layer.
  std::optional<bool> layer_flag(std::string_view key, int64_t index) const;
  int64_t feed_forward(int64_t index) const { return per_layer("feed_forward_length", index, std::nullopt, 1); }
  void dense_ffn(LayerSpec& layer, int64_t index, int64_t width, bool gated = true);
  struct MoeFacts {
    ops::Gating gating = ops::Gating::softmax;  // if the file has no key for it
    bool normalize = false;                     // if the file has no key for it
    int64_t width = 0;
    int64_t shared_width = 0;
    bool gated = true;
  };
  void moe_ffn(LayerSpec& layer, int64_t index, const MoeFacts& facts) { moe_ffn(layer.ffn, index, facts); }
  void moe_ffn(FfnSpec& ffn, int64_t index, const MoeFacts& facts);

  // Called last: records tensors that were not used.
  void finish();

  ModelDesc& model;

 private:
  // Norms, embedding and output of a head.
  void head_facts();
  WeightId add(const std::string& name, Transform transform, DType type, int64_t batch, int64_t rows, int64_t cols);
  // The factor of an NVFP4 tensor, or the factors of its matrices.
  void add_scale(const std::string& name, WeightId id);

  // An array is read and checked once, not once per layer, because a file may have millions of elements and 4096
  // layers.
  const std::vector<int64_t>& integers(std::string_view name) const;
  const std::vector<bool>& flags(std::string_view name) const;

  const GgufFile& file_;
  Part part_;
  int64_t trunk_layers_ = 0;
  mutable std::map<std::string, std::vector<int64_t>, std::less<>> integers_;
  mutable std::map<std::string, std::vector<bool>, std::less<>> flags_;
  std::set<std::string, std::less<>> used_;
  std::map<std::string, WeightId, std::less<>> scaled_;  // weights with a factor, by the tensor's name
};

// One entry per architecture file.
struct Architecture {
  std::string_view name;
  void (*build)(Builder&);
  bool has_head = false;  // build() describes Builder::blocks()
};

void build_llama(Builder&);
void build_qwen2(Builder&);
void build_qwen2moe(Builder&);
void build_qwen3(Builder&);
void build_qwen35(Builder&);
void build_lfm2(Builder&);
void build_gemma4(Builder&);
void build_granitehybrid(Builder&);
void build_kimi_linear(Builder&);

void build_nemotron_h(Builder&);

// A layer of Mamba-2 after its norm attn_norm, in arch/granitehybrid.cpp.
void mamba2(Builder& b, LayerSpec& layer, int64_t index);
// Multi-head latent attention, in arch/deepseek2.cpp.
void latent_attention(Builder& b, LayerSpec& layer, int64_t index, RopeSpec rope);
void build_qwen3moe(Builder&);
void build_deepseek2(Builder&);
void build_gemma3(Builder&);
void build_gpt_oss(Builder&);
void build_glm4moe(Builder&);
void build_granitemoe(Builder&);
void build_bailingmoe2(Builder&);
void build_ernie45moe(Builder&);
void build_hunyuan_moe(Builder&);
void build_minimax_m2(Builder&);
void build_mistral3(Builder&);
void build_muse_glimmer(Builder&);
void build_olmo2(Builder&);
void build_seed_oss(Builder&);
void build_smollm3(Builder&);

}  // namespace dyno::model
