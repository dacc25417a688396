// The passes that make a plan, each in a file of its own, in this order:
//   place_weights  device, layout and residence of each weight
//   emit           the general op list of the model
//   fuse           a list of fewer, larger launches for few tokens, from the general one
//   join_shared    a list for one token, from the fused one: gate and up of shared experts beside those of the others
//   batch          a list for some dozens of tokens, from the general one
//   expand_mla     a list whose latent attention runs over keys and values of all heads, from the general one
//   place_nodes    a device for each node: that of its weights
//   transfer       a launch wherever a value goes from one device to another
//   hoist          what needs nothing of another device's turn, before that
//   finish_list    what follows from a list's nodes: keys, lives of values, where rows are selected
//   segment        runs of nodes of one device
//   stream         copies of the CPU's weights for the main device: where they lie, and when they have to be there
//   layout_arena   (plan.h) an offset for each value, in the arena of its device
// A list is a value: a pass reads one and gives another, and keeps nothing. Internal to plan/.
#pragma once

#include <functional>
#include <initializer_list>
#include <optional>

#include "plan/plan.h"

namespace dyno::plan {

inline constexpr int64_t kF32 = sizeof(float);

void place_weights(Plan& plan, const model::ModelDesc& model);
NodeList emit(Plan& plan, const model::ModelDesc& model);
// The list that draws a token from the logits.
NodeList emit_draw(Plan& plan, const model::ModelDesc& model);
// Which weights of the CPU the main device reads as copies, and then the list that does.
void mark_streamed(Plan& plan, const model::ModelDesc& model);
// Which weights of the CPU a GPU takes matrices of while its expert cache adapts.
void mark_refilled(Plan& plan, const model::ModelDesc& model);
NodeList emit_streamed(Plan& plan, const model::ModelDesc& model);
// The start of another list: the general one's nodes.
NodeList list_from(const model::ModelDesc& model, const NodeList& general, ListId id);
NodeList fuse(Plan& plan, const model::ModelDesc& model, const NodeList& general);
NodeList join_shared(Plan& plan, const model::ModelDesc& model, const NodeList& fused);
NodeList batch(Plan& plan, const model::ModelDesc& model, const NodeList& general);
NodeList expand_mla(Plan& plan, const model::ModelDesc& model, const NodeList& general);
void place_nodes(Plan& plan, const model::ModelDesc& model, NodeList& list);
// When the nodes of all lists have their devices: throws PlanError where two lists want a vector in two places.
void check_places(const Plan& plan, const model::ModelDesc& model);
void transfer(Plan& plan, NodeList& list);
void hoist(Plan& plan, NodeList& list);
void finish_list(Plan& plan, NodeList& list);
void segment(Plan& plan, NodeList& list);
// Part of finish_list(): Node::gives and gets.
void pair_tiles(Plan& plan, NodeList& list);
void stream(Plan& plan, NodeList& list);

// Before place_nodes: values of another list, of which this one's nodes were made, become values of its own. All lists
// write the same logits.
void own_values(Plan& plan, NodeList& list);
// When all nodes have their devices: the bytes of all weights and those of each device.
void count_weights(Plan& plan, const model::ModelDesc& model);

// The reason that keeps a weight from a GPU; empty if there is none.
std::string why_not_on_gpu(const model::Weight& weight, const DeviceInfo& device);
// Whether a copy of a matrix of the weight, as it lies on the CPU, becomes a matrix as a GPU reads it without work of
// the CPU.
bool can_refill(const Plan& plan, const model::Weight& weight, const WeightPlacement& host);
// Of a weight as it would lie on the main device.
size_t placed_bytes(const Plan& plan, const model::Weight& weight);

// ---- what passes share ---------------------------------------------------------------------------------------------

ValueId add_value(Plan& plan, const std::string& name, size_t bytes_per_token, size_t bytes_fixed, ListId list,
                  DeviceId device = kMainDevice);
int32_t rope_table(Plan& plan, const model::ModelDesc& model, const model::RopeSpec& spec);

template <typename Desc>
Node make_node(std::string name, int32_t layer, const Desc& desc, const OperandsOf<Desc>& operands) {
  return {.name = std::move(name), .layer = layer, .desc = desc, .operands = Operands(operands)};
}

// The operands of a node of that family, or null.
template <typename O>
O* operands_of(Node& node) {
  return std::get_if<O>(&node.operands);
}
template <typename O>
const O* operands_of(const Node& node) {
  return std::get_if<O>(&node.operands);
}

// Whether a row that the node gives depends on rows of other tokens.
bool mixes_tokens(const Node& node);
// Whether a node leaves something in the cache or in the state of sequences.
bool changes_memory(const Node& node);
bool has_state(const Node& node);

using Nodes = std::vector<Node>;
// Places in a list.
struct Span {
  size_t begin = 0, end = 0;
  explicit operator bool() const { return begin < end; }
};
// The nodes of a layer, which stand together.
Span layer_span(const Nodes& nodes, int32_t layer);
// The first node within the span whose operands are O and meet the condition; span.end if there is none.
template <typename O, typename Condition>
size_t find_node(const Nodes& nodes, Span span, const Condition& condition) {
  for (size_t i = span.begin; i < span.end; ++i) {
    const O* operands = operands_of<O>(nodes[i]);
    if (operands != nullptr && condition(*operands)) return i;
  }
  return span.end;
}
// Puts `node` in the place of the nodes of a span.
void replace_nodes(Nodes& nodes, Span span, Node node);

// The op that multiplies by q, k and v of a layer in one launch. None if the weights differ in layout or device, or if
// a factor stands beside one of them. The launch multiplies by no factor.
std::optional<ops::QkvDesc> qkv_desc(const Plan& plan, const model::ModelDesc& model, const model::AttentionSpec& a);
// Puts that op in the place of the three products.
void merge_qkv(Nodes& nodes, int32_t layer, const model::AttentionSpec& a, const ops::QkvDesc& desc);
// Makes a product read the rows before their norm, which it then computes itself.
void norm_inside(Node& node, const NormOperands& norm);
// Asks the readers of each norm whether they norm the rows themselves, up to the first one that does not: norms_rows()
// changes the node if it does. A norm that nobody reads any more goes.
void fold_norms(Nodes& nodes, const std::function<bool(Node&, const NormOperands&)>& norms_rows);
// Part of fuse(): what lies between the products of q, k and v and attention's output, of one layer.
void fuse_attention(Plan& plan, const model::ModelDesc& model, Nodes& nodes, int32_t layer);
// Part of batch(): norms of heads, rotation and the way into the cache of a layer become one launch. False: none knows
// all that they do, and the nodes stay.
bool fuse_stores(Plan& plan, const model::ModelDesc& model, Nodes& nodes, int32_t layer);
// Whether the fused launches of attention know what the layer does.
bool has_plain_attention(const model::LayerSpec& spec);
// Whether the device is a GPU that has a kernel for the op, at any number of tokens that the fused list is for, or at
// these numbers.
bool fused_takes(const DeviceInfo& device, const ops::OpDesc& desc,
                 std::initializer_list<int64_t> numbers = {1, kFusedTokens});
// Whether a node reads a value, or writes it; both if it changes it.
bool reads(const Node& node, ValueId value);
bool writes(const Node& node, ValueId value);
// Whether two operands are the same rows.
bool same_rows(const Operand& a, const Operand& b);
// Whether two weights have one type and layout, and lie on one device.
bool alike(const Plan& plan, model::WeightId a, model::WeightId b);
// Whether all of these weights, of which some may be none, lie on one device.
bool stand_together(const Plan& plan, std::initializer_list<model::WeightId> weights);

}  // namespace dyno::plan
