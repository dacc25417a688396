// The first pass: writes the general op list of a model, with one function for each part of a layer. Internal to plan/.
#pragma once

#include <string>

#include "plan/passes/passes.h"

namespace dyno::plan {

class Emitter {
 public:
  Emitter(Plan& plan, const model::ModelDesc& model, NodeList& list) : plan_(plan), model_(model), list_(list) {}
  void build();
  // The draw list, after the logits of the general list.
  void build_draw();

 private:
  void embed(Operand out);
  // The residual stream of a draft head, from embeddings and the model's hidden rows.
  void draft_input();
  // The input of a product. If it is a normalised row, the norm is emitted at the first use of its result.
  struct Input {
    Operand before{};  // the rows before the norm
    model::WeightId norm = model::kNone;
    Operand f32{};
    Operand q8{};
    int64_t width = 0;
    int32_t rows_factor = 1;
    std::string name{};
  };
  struct Qkv {
    Operand q{}, k{}, v{};
  };
  struct Routing {
    Operand ids{}, weights{}, workspace{};
  };

  // Values. Widths are in f32 elements per token.
  Operand value(const std::string& name, int64_t width);
  Operand value_bytes(const std::string& name, size_t bytes_per_token, size_t bytes_fixed = 0);
  static Operand slice(Operand operand, int64_t offset_elements);

  // Appends a node. Operands of another family than the desc's, or a missing required operand, do not compile.
  template <typename Desc>
  Node& emit(const std::string& name, const Desc& desc, const OperandsOf<Desc>& operands, int32_t layer,
             int32_t rows_factor = 1) {
    list_.nodes.push_back(
        {.name = name, .layer = layer, .desc = desc, .rows_factor = rows_factor, .operands = Operands(operands)});
    return list_.nodes.back();
  }

  // Whether attention of a layer or a product must be float32 throughout: on a GPU with numerics=exact. On the CPU the
  // desc needs no such flag.
  bool exact_on(DeviceId device) const;
  // The device, type and layout of a weight in this list.
  ListId weights_list() const { return home_ ? ListId::general : list_.id; }
  DeviceId device_of(model::WeightId id) const { return plan_.device_in(weights_list(), id); }
  DType type_of(model::WeightId id) const { return plan_.type_of(id); }
  ops::Layout layout_of(model::WeightId id) const { return plan_.layout_in(weights_list(), id); }
  // The factor of the tensor, by which its products are multiplied.
  float scale_of(model::WeightId id) const { return static_cast<float>(model_.weight(id).scale); }
  bool scaled(model::WeightId id) const {
    return model_.weight(id).scale != 1.0 || model_.weight(id).scales != model::kNone;
  }
  bool exact_attention(int32_t layer) const { return exact_on(plan_.kv[static_cast<size_t>(layer)].device); }
  ops::ActType act_for(model::WeightId id) const;
  static Input normed(const std::string& name, Operand x, model::WeightId weight, int64_t n);
  Operand f32_of(Input& input, int32_t layer);
  // `input` in the given form. It is quantised once and shared by later calls with the same Input.
  Operand as(ops::ActType act, Input& input, int32_t layer);
  // `input` in the form that products with weight `w` read.
  Operand source(Input& input, model::WeightId w, int32_t layer) { return as(act_for(w), input, layer); }

  Operand rms_norm(const std::string& name, Operand x, model::WeightId weight, int64_t n, int32_t layer);
  void head_norm(const std::string& name, Operand x, model::WeightId weight, int64_t heads, int64_t dim, int32_t layer);
  // y = [residual + scale *] (x·wᵀ + bias)
  void matmul(const std::string& name, Input& x, model::WeightId w, model::WeightId bias, Operand y, Operand residual,
              float scale, int32_t layer);
  // Emits a node and marks it as independent of the previous node, unless other nodes had to be emitted first.
  template <typename Emit>
  void beside(const Emit& emit_node) {
    const size_t before = list_.nodes.size();
    emit_node();
    list_.nodes.back().beside = list_.nodes.size() == before + 1;
  }
  struct Product {
    std::string name{};
    model::WeightId w = model::kNone;
    Operand y{};
  };
  // Two products of the same rows, without bias.
  void two_products(Input& x, const Product& first, const Product& second, int32_t layer);
  void batched_matmul(const std::string& name, Input& x, model::WeightId w, Operand y, int32_t layer);
  // Adds a projection's output to the residual stream, after a norm if the architecture has one.
  void project(const std::string& name, Input& x, model::WeightId w, model::WeightId bias, model::WeightId post_norm,
               const std::string& post_norm_name, int32_t layer, double output_scale = 1.0);
  void rope(const std::string& name, Operand x, const model::RopeSpec& spec, int64_t heads, int64_t head_dim,
            int64_t offset, int32_t layer);
  void store(const std::string& name, Operand x, int64_t width, bool value_cache, int32_t layer);

  // Layers with recurrent state (emit_recurrent.cpp).
  void recurrent(const model::LayerSpec& layer, int32_t index);
  void linear(const model::LayerSpec& layer, int32_t index, Input& h);
  struct LinearInputs {
    Operand q{}, k{}, v{}, step{}, beta{}, gate{};
  };
  LinearInputs linear_inputs(const model::RecurrentSpec& r, Input& h, int32_t layer);
  Operand convolve(const model::RecurrentSpec& r, const std::string& name, Operand x, model::WeightId w, int64_t n,
                   int32_t layer);
  Operand product(const std::string& name, Input& x, model::WeightId w, int32_t layer);
  Operand low_rank_product(const std::string& name, Input& x, model::WeightId low, model::WeightId w, int32_t layer);
  void short_conv(const model::LayerSpec& layer, int32_t index, Input& h);
  // Adds a state of `elements` f32 per sequence and returns its index.
  int32_t state(const std::string& name, int64_t elements);

  // Attention (emit_attention.cpp).
  void gqa(const model::LayerSpec& layer, int32_t index);
  void mla(const model::LayerSpec& layer, int32_t index);
  // From queries [heads, nope + rotary] and the stored latents to [heads, v_head].
  Operand latent_attention(const model::AttentionSpec& a, Operand q, int32_t layer);
  Qkv qkv_products(const model::AttentionSpec& a, Input& h, int32_t layer);
  // Norms of heads, rotation, and the store of k and v in the cache.
  void store_qkv(const model::AttentionSpec& a, const Qkv& x, int32_t layer);
  // store_qkv() and the attention itself.
  void attend(const model::AttentionSpec& a, const Qkv& x, Operand out, int32_t layer);
  // Attention of the absorbed queries over the stored latents.
  void attend_latents(const model::AttentionSpec& a, Operand absorbed, Operand out, int32_t layer);
  // The selection of sparse attention, by an indexer that reads the rows of the layer and its low-rank queries.
  void select_positions(const model::AttentionSpec& a, Input& h, Input& q_low, int32_t layer);
  // Rotation and store for latent attention.
  void store_latent(const model::AttentionSpec& a, Operand q, Operand latent, int32_t layer);

  // Feed-forward (emit_ffn.cpp).
  void feed_forward(const model::LayerSpec& layer, int32_t index);
  void dense_ffn(const model::LayerSpec& layer, int32_t index, Input& h);
  void moe_ffn(const model::LayerSpec& layer, int32_t index, Input& h);
  // A mixture of experts in parallel to a dense FFN; both are normalised and added.
  void both_ffns(const model::LayerSpec& layer, int32_t index, Input& h);
  // The layer's per-layer embedding, added to the residual stream.
  void add_layer_input(const model::LayerSpec& layer, int32_t index);
  // The per-layer embeddings of all layers, [layers, layer_input].
  void layer_inputs();
  // Whether two matrices have the same layout and device, so that one launch can read both.
  bool stand_alike(model::WeightId a, model::WeightId b) const;
  bool stand_together(model::WeightId a, model::WeightId b) const;  // on one device
  // activation(gate) * up of a dense FFN; [width]
  Operand up_gate(const std::string& name, const model::FfnSpec& ffn, Input& h, int32_t layer);
  // `suffix`: of the names of values and nodes.
  Routing routing_values(const model::FfnSpec& ffn, const char* suffix, int32_t layer);
  Routing route_experts(const model::FfnSpec& ffn, Input& h, int32_t layer);
  // activation(gate) * up of a token's experts; [used, width]
  Operand experts_up_gate(const model::FfnSpec& ffn, Input& h, const Routing& routing, const char* suffix,
                          int32_t layer);
  // Their down products; [used, n_embd]
  Operand experts_down(const model::FfnSpec& ffn, Operand hidden, const Routing& routing, const char* suffix,
                       int32_t layer);
  // total = [residual + scale *] the weighted sum of the experts.
  void experts(const model::FfnSpec& ffn, Input& h, const Routing& routing, Operand residual, Operand total,
               int32_t layer);
  // experts() for a layer of which some experts are cached on the main device.
  void divided_experts(const model::FfnSpec& ffn, Input& h, const Routing& routing, Operand residual, Operand total,
                       int32_t layer);

  // experts() in the streamed list, if the CPU computes some of the experts.
  void shared_experts(const model::FfnSpec& ffn, Input& h, const Routing& routing, Operand residual, Operand total,
                      int32_t layer);
  // The products on one device; `share` is the expected share of the rows.
  Operand divided_products(const model::FfnSpec& ffn, Input& h, const Routing& routing, const char* suffix,
                           double share, int32_t layer);

  Plan& plan_;
  const model::ModelDesc& model_;
  NodeList& list_;
  Operand residual_{};
  Operand layer_inputs_{};
  Operand selected_{};  // positions of the last selection
  int32_t moe_count_ = 0;
  bool home_ = false;  // products read weights on their own device, also in the streamed list
};

}  // namespace dyno::plan
