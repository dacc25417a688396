// Writes the op list of a model into a plan: one function per part of a layer. Internal to plan/.
#pragma once

#include <string>

#include "plan/plan.h"

namespace dyno::plan {

class OpList {
 public:
  OpList(Plan& plan, const model::ModelDesc& model) : plan_(plan), model_(model) {}

  void build();

 private:
  // Values. Widths are in f32 elements per token.
  Operand value(const std::string& name, int64_t width);
  Operand value_bytes(const std::string& name, size_t bytes_per_token, size_t bytes_fixed = 0);
  static Operand slice(Operand operand, int64_t offset_elements);

  Node& emit(const std::string& name, ops::OpDesc desc, int32_t layer, int32_t rows_factor = 1);
  void touch(const Operand& operand, int node);
  void finish_uses();

  bool exact_attention() const;
  ops::ActType act_for(model::WeightId id) const;
  // `x` in the form its weight wants; quantised once and shared by later calls with the same `cache`.
  struct Input {
    Operand f32{};
    Operand q8{};
    int64_t width = 0;
    int32_t rows_factor = 1;
    std::string name{};
  };
  Operand as(ops::ActType act, Input& input, int32_t layer);

  Operand rms_norm(const std::string& name, Operand x, model::WeightId weight, int64_t n, int32_t layer);
  void head_norm(const std::string& name, Operand x, model::WeightId weight, int64_t heads, int64_t dim, int32_t layer);
  // y = [residual + scale *] (x·wᵀ + bias)
  void matmul(const std::string& name, Input& x, model::WeightId w, model::WeightId bias, Operand y, Operand residual,
              float scale, int32_t layer);
  void batched_matmul(const std::string& name, Input& x, model::WeightId w, Operand y, int32_t layer);
  // Adds a projection's output to the residual stream, through a norm where the architecture has one.
  void project(const std::string& name, Input& x, model::WeightId w, model::WeightId bias, model::WeightId post_norm,
               const std::string& post_norm_name, int32_t layer);
  void rope(const std::string& name, Operand x, const model::RopeSpec& spec, int64_t heads, int64_t head_dim,
            int64_t offset, int32_t layer);
  void store(const std::string& name, Operand x, int64_t width, bool value_cache, int32_t layer);

  void gqa(const model::LayerSpec& layer, int32_t index);
  void mla(const model::LayerSpec& layer, int32_t index);
  void dense_ffn(const model::LayerSpec& layer, int32_t index, Input& h);
  void moe_ffn(const model::LayerSpec& layer, int32_t index, Input& h);
  // activation(gate) * up of a dense FFN; [width]
  Operand up_gate(const std::string& name, const model::FfnSpec& ffn, Input& h, int32_t layer);
  int32_t rope_table(const model::RopeSpec& spec);

  Plan& plan_;
  const model::ModelDesc& model_;
  Operand residual_;
  int32_t moe_count_ = 0;
};

}  // namespace dyno::plan
