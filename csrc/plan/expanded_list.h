// The op list for prompts of models with latent attention: keys and values of all heads are made from the latents, then
// attention is that of any model. Internal to plan/.
#pragma once

#include "plan/op_list.h"

namespace dyno::plan {

class ExpandedList final : public OpList {
 public:
  using OpList::OpList;

 protected:
  Operand latent_attention(const model::AttentionSpec& a, Operand q, int32_t layer) override;
};

}  // namespace dyno::plan
