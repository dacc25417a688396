// The op list for few tokens: the same layer in fewer, larger launches, for devices whose launches cost more than the
// work of a small op. What no fused launch covers stays as OpList emits it. Internal to plan/.
#pragma once

#include "plan/op_list.h"

namespace dyno::plan {

class FusedList final : public OpList {
 public:
  using OpList::OpList;

 private:
  // Whether the device has a kernel for the op, at any number of tokens that come this way.
  bool takes(const ops::OpDesc& desc) const;

  // Products of streamed weights norm their rows themselves.
  Source source(Input& input, model::WeightId w, int32_t layer) override;

  // Attention part: q, k and v in one launch, and so the first products of latent attention.
  void two_products(Input& x, const Product& first, const Product& second, int32_t layer) override;
  Qkv qkv_products(const model::AttentionSpec& a, Input& h, int32_t layer) override;

  // Experts part: down products, weighted sum and residual in one launch.
  void experts_down(const model::FfnSpec& f, Operand hidden, const Routing& routing, int32_t layer) override;

  // Norms of heads, rotation and the cache in one launch, with attention itself where it can; norm, router and the
  // choice of experts in another.
  void store_qkv(const model::AttentionSpec& a, const Qkv& x, int32_t layer) override;
  void store_latent(const model::AttentionSpec& a, Operand q, Operand latent, int32_t layer) override;
  void attend(const model::AttentionSpec& a, const Qkv& x, Operand out, int32_t layer) override;
  void attend_latents(const model::AttentionSpec& a, Operand absorbed, Operand q, Operand out, int32_t layer) override;
  Routing route_experts(const model::FfnSpec& f, Input& h, int32_t layer) override;

  Operand latent_{};  // of the layer at hand, where attention is to store it
};

}  // namespace dyno::plan
