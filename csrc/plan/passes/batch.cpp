// The op list for some dozens of tokens, a step of a server: the general one, in which what lies between products is
// fused. There a launch costs as much as its work, and the products want tiles that the fused list does not have.
#include "plan/passes/passes.h"

namespace dyno::plan {

NodeList batch(Plan& plan, const model::ModelDesc& model, const NodeList& general) {
  NodeList list{.id = ListId::batched, .nodes = general.nodes, .residual = general.residual};
  bool gains = false;
  for (size_t i = 0; i < model.layers.size(); ++i) {
    if (has_plain_attention(model.layers[i])) gains |= fuse_stores(plan, model, list.nodes, static_cast<int32_t>(i));
  }
  return gains ? list : NodeList{.id = ListId::batched};
}

}  // namespace dyno::plan
