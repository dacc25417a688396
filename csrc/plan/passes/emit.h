// The first pass: writes the general op list of a model, one function for each part of a layer. Internal to plan/.
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
  // The residual stream of a head that drafts: of embeddings and the model's hidden rows.
  void draft_input();
  // The input of a product. Where it is a normed row, the norm is emitted when something asks for its result.
  struct Input {
    Operand before{};  // of the norm
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

  // Appends a node. Operands of another family than the desc's, or without one that the family needs, do not compile.
  template <typename Desc>
  Node& emit(const std::string& name, const Desc& desc, const OperandsOf<Desc>& operands, int32_t layer,
             int32_t rows_factor = 1) {
    list_.nodes.push_back(
        {.name = name, .layer = layer, .desc = desc, .rows_factor = rows_factor, .operands = Operands(operands)});
    return list_.nodes.back();
  }

  // Attention of a layer, or a product: float32 throughout on a GPU with numerics: exact. The CPU needs no word for it.
  bool exact_on(DeviceId device) const;
  // Where and how this list finds a weight.
  ListId weights_list() const { return home_ ? ListId::general : list_.id; }
  DeviceId device_of(model::WeightId id) const { return plan_.device_in(weights_list(), id); }
  DType type_of(model::WeightId id) const { return plan_.type_of(id); }
  ops::Layout layout_of(model::WeightId id) const { return plan_.layout_in(weights_list(), id); }
  // The factor beside the tensor, by which its products are multiplied.
  float scale_of(model::WeightId id) const { return static_cast<float>(model_.weight(id).scale); }
  bool scaled(model::WeightId id) const {
    return model_.weight(id).scale != 1.0 || model_.weight(id).scales != model::kNone;
  }
  bool exact_attention(int32_t layer) const { return exact_on(plan_.kv[static_cast<size_t>(layer)].device); }
  ops::ActType act_for(model::WeightId id) const;
  static Input normed(const std::string& name, Operand x, model::WeightId weight, int64_t n);
  Operand f32_of(Input& input, int32_t layer);
  // `input` in the form its weight wants; quantised once and shared by later calls with the same Input.
  Operand as(ops::ActType act, Input& input, int32_t layer);
  // `input` in the form that weight `w` meets.
  Operand source(Input& input, model::WeightId w, int32_t layer) { return as(act_for(w), input, layer); }

  Operand rms_norm(const std::string& name, Operand x, model::WeightId weight, int64_t n, int32_t layer);
  void head_norm(const std::string& name, Operand x, model::WeightId weight, int64_t heads, int64_t dim, int32_t layer);
  // y = [residual + scale *] (x·wᵀ + bias)
  void matmul(const std::string& name, Input& x, model::WeightId w, model::WeightId bias, Operand y, Operand residual,
              float scale, int32_t layer);
  // Emits a node that needs nothing of the one before it, unless others have to come first.
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
  // Two products of the same rows, without biases.
  void two_products(Input& x, const Product& first, const Product& second, int32_t layer);
  void batched_matmul(const std::string& name, Input& x, model::WeightId w, Operand y, int32_t layer);
  // Adds a projection's output to the residual stream, through a norm where the architecture has one.
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
  // A state of so many f32 elements a sequence; its index.
  int32_t state(const std::string& name, int64_t elements);

  // Attention (emit_attention.cpp).
  void gqa(const model::LayerSpec& layer, int32_t index);
  void mla(const model::LayerSpec& layer, int32_t index);
  // From queries [heads, nope + rotary] and the stored latents to [heads, v_head].
  Operand latent_attention(const model::AttentionSpec& a, Operand q, int32_t layer);
  Qkv qkv_products(const model::AttentionSpec& a, Input& h, int32_t layer);
  // Norms of heads, rotation, and the way of k and v into the cache.
  void store_qkv(const model::AttentionSpec& a, const Qkv& x, int32_t layer);
  // Both, and attention itself.
  void attend(const model::AttentionSpec& a, const Qkv& x, Operand out, int32_t layer);
  // Of the absorbed queries with the stored latents.
  void attend_latents(const model::AttentionSpec& a, Operand absorbed, Operand out, int32_t layer);
  // The same of latent attention.
  void store_latent(const model::AttentionSpec& a, Operand q, Operand latent, int32_t layer);

  // Feed-forward (emit_ffn.cpp).
  void feed_forward(const model::LayerSpec& layer, int32_t index);
  void dense_ffn(const model::LayerSpec& layer, int32_t index, Input& h);
  void moe_ffn(const model::LayerSpec& layer, int32_t index, Input& h);
  // A mixture beside a dense FFN, both normed and added.
  void both_ffns(const model::LayerSpec& layer, int32_t index, Input& h);
  // The layer's per-layer embedding, added to the residual stream.
  void add_layer_input(const model::LayerSpec& layer, int32_t index);
  // Of all layers, [layers, layer_input].
  void layer_inputs();
  // Whether two matrices have one layout and one device, so that a launch can take both.
  bool stand_alike(model::WeightId a, model::WeightId b) const;
  bool stand_together(model::WeightId a, model::WeightId b) const;  // on one device
  // activation(gate) * up of a dense FFN; [width]
  Operand up_gate(const std::string& name, const model::FfnSpec& ffn, Input& h, int32_t layer);
  // `suffix`: of the names of values and nodes.
  Routing routing_values(const model::FfnSpec& ffn, const char* suffix, int32_t layer);
  Routing route_experts(const model::FfnSpec& ffn, Input& h, int32_t layer);
  // The same for a token's experts; [used, width]
  Operand experts_up_gate(const model::FfnSpec& ffn, Input& h, const Routing& routing, const char* suffix,
                          int32_t layer);
  // Their down products; [used, n_embd]
  Operand experts_down(const model::FfnSpec& ffn, Operand hidden, const Routing& routing, const char* suffix,
                       int32_t layer);
  // total = [residual + scale *] the weighted sum of these.
  void experts(const model::FfnSpec& ffn, Input& h, const Routing& routing, Operand residual, Operand total,
               int32_t layer);
  // The same where some of the experts also lie on the main device.
  void divided_experts(const model::FfnSpec& ffn, Input& h, const Routing& routing, Operand residual, Operand total,
                       int32_t layer);

  // The same in the streamed list where the CPU takes some of the experts.
  void shared_experts(const model::FfnSpec& ffn, Input& h, const Routing& routing, Operand residual, Operand total,
                      int32_t layer);
  // The products of one device; `share` of the rows are expected to be its own.
  Operand divided_products(const model::FfnSpec& ffn, Input& h, const Routing& routing, const char* suffix,
                           double share, int32_t layer);

  Plan& plan_;
  const model::ModelDesc& model_;
  NodeList& list_;
  Operand residual_{};
  Operand layer_inputs_{};
  int32_t moe_count_ = 0;
  bool home_ = false;  // products read weights where they lie, also in the streamed list
};

}  // namespace dyno::plan
