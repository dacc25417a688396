// The passes that build a plan. Each has its own file. Their order is:
//   place_weights  device, layout and residence of each weight
//   emit           the general op list of the model
//   fuse           a list of fewer, larger launches for few tokens, from the general one
//   join_shared    a list for one token, from the fused one: gate and up of shared experts in the launch of the experts
//   batch          a list for prompts and for many sequences, from the general one
//   expand_mla     a list with latent attention over keys and values of all heads, from another list
//   place_nodes    the device of each node: the device of its weights
//   transfer       a launch for each value that moves from one device to another
//   hoist          moves nodes that do not depend on another device before its turn
//   finish_list    properties of a list's nodes: keys, lifetimes of values, where rows are selected
//   segment        runs of nodes on one device
//   stream         copies of the CPU's weights for the main device: their memory and the nodes that need them
//   layout_arena   (plan.h) the offset of each value in the arena of its device
// A list is a value: a pass reads one and returns another, and keeps no state. Internal to plan/.
#pragma once

#include <functional>
#include <initializer_list>
#include <optional>

#include "plan/plan.h"

namespace dyno::plan {

inline constexpr int64_t kF32 = sizeof(float);

void place_weights(Plan& plan, const model::ModelDesc& model);
NodeList emit(Plan& plan, const model::ModelDesc& model);
// The list that samples a token from the logits.
NodeList emit_draw(Plan& plan, const model::ModelDesc& model);
// Marks the CPU weights that the main device reads as copies. emit_streamed() then builds the list that reads them.
void mark_streamed(Plan& plan, const model::ModelDesc& model);
// Marks the CPU weights whose matrices move to a GPU while its expert cache adapts.
void mark_refilled(Plan& plan, const model::ModelDesc& model);
NodeList emit_streamed(Plan& plan, const model::ModelDesc& model);
// A copy of the general list's nodes, as the start of another list.
NodeList list_from(const model::ModelDesc& model, const NodeList& general, ListId id);
NodeList fuse(Plan& plan, const model::ModelDesc& model, const NodeList& general);
NodeList join_shared(Plan& plan, const model::ModelDesc& model, const NodeList& fused);
NodeList batch(Plan& plan, const model::ModelDesc& model, const NodeList& general);
// The list `from` with expanded latent attention, as the list `id`. Empty if no layer can be expanded.
NodeList expand_mla(Plan& plan, const model::ModelDesc& model, const NodeList& from, ListId id);
void place_nodes(Plan& plan, const model::ModelDesc& model, NodeList& list);
// Called when the nodes of all lists have a device: throws PlanError if two lists need a vector on two devices.
void check_places(const Plan& plan, const model::ModelDesc& model);
void transfer(Plan& plan, NodeList& list);
void hoist(Plan& plan, NodeList& list);
void finish_list(Plan& plan, NodeList& list);
void segment(Plan& plan, NodeList& list);
// Part of finish_list(): sets Node::gives and gets.
void pair_tiles(Plan& plan, NodeList& list);
// Finds the fetches of the streamed lists, and the memory of the copies, which both lists share.
void stream(Plan& plan);

// Called before place_nodes: values of the list from which this one was made become separate values. All lists write
// the same logits.
void own_values(Plan& plan, NodeList& list);
// Called when all nodes have a device: the weight bytes in total and of each device.
void count_weights(Plan& plan, const model::ModelDesc& model);

// The reason that a weight cannot be on a GPU; empty if it can.
std::string why_not_on_gpu(const model::Weight& weight, const DeviceInfo& device);
// Whether a GPU can use a copy of the weight's matrices on the CPU without work of the CPU.
bool can_refill(const Plan& plan, const model::Weight& weight, const WeightPlacement& host);
// Bytes of a weight if it were on the main device.
size_t placed_bytes(const Plan& plan, const model::Weight& weight);

// ---- what passes share ---------------------------------------------------------------------------------------------

ValueId add_value(Plan& plan, const std::string& name, size_t bytes_per_token, size_t bytes_fixed, ListId list,
                  DeviceId device = kMainDevice);
int32_t rope_table(Plan& plan, const model::ModelDesc& model, const model::RopeSpec& spec);

template <typename Desc>
Node make_node(std::string name, int32_t layer, const Desc& desc, const OperandsOf<Desc>& operands) {
  return {.name = std::move(name), .layer = layer, .desc = desc, .operands = Operands(operands)};
}

// The operands of a node if it belongs to family O, or null.
template <typename O>
O* operands_of(Node& node) {
  return std::get_if<O>(&node.operands);
}
template <typename O>
const O* operands_of(const Node& node) {
  return std::get_if<O>(&node.operands);
}

// Whether a row that the node writes depends on rows of other tokens.
bool mixes_tokens(const Node& node);
// Whether a node changes the cache or the state of sequences.
bool changes_memory(const Node& node);
bool has_state(const Node& node);

using Nodes = std::vector<Node>;
// Places in a list.
struct Span {
  size_t begin = 0, end = 0;
  explicit operator bool() const { return begin < end; }
};
// The nodes of a layer, which are adjacent.
Span layer_span(const Nodes& nodes, int32_t layer);
// The first node in the span with operands O that meet the condition; span.end if there is none.
template <typename O, typename Condition>
size_t find_node(const Nodes& nodes, Span span, const Condition& condition) {
  for (size_t i = span.begin; i < span.end; ++i) {
    const O* operands = operands_of<O>(nodes[i]);
    if (operands != nullptr && condition(*operands)) return i;
  }
  return span.end;
}
// Replaces the nodes of a span by `node`.
void replace_nodes(Nodes& nodes, Span span, Node node);

// The op that multiplies by q, k and v of a layer in one launch. Empty if the weights differ in layout or device, or if
// one of them has a factor, which the launch does not support.
std::optional<ops::QkvDesc> qkv_desc(const Plan& plan, const model::ModelDesc& model, const model::AttentionSpec& a);
// Replaces the three products by that op.
void merge_qkv(Nodes& nodes, int32_t layer, const model::AttentionSpec& a, const ops::QkvDesc& desc);
// The same for two consecutive products of the same rows: q and k, or the first products of latent attention.
std::optional<ops::QkvDesc> pair_desc(const Plan& plan, const model::ModelDesc& model, model::WeightId first,
                                      model::WeightId second);
// The new name is the name of the first product plus `suffix`.
void merge_pair(Nodes& nodes, int32_t layer, model::WeightId first, const char* suffix, const ops::QkvDesc& desc);
// Makes a product read the rows before their norm and compute the norm itself.
void norm_inside(Node& node, const NormOperands& norm);
// Lets the readers of each norm compute the norm themselves, up to the first reader that does not. norms_rows() changes
// the node if it supports this. A norm without readers is removed.
void fold_norms(Nodes& nodes, const std::function<bool(Node&, const NormOperands&)>& norms_rows);
// Part of fuse(): the nodes of one layer between the products of q, k and v and attention's output.
void fuse_attention(Plan& plan, const model::ModelDesc& model, Nodes& nodes, int32_t layer);
// Part of batch(): norms of heads or latents, rotation and store of a layer become one launch. False if no launch
// supports all of them; the nodes then stay.
bool fuse_stores(Plan& plan, const model::ModelDesc& model, Nodes& nodes, int32_t layer);
// Whether the fused launches of attention support the layer.
bool has_plain_attention(const model::LayerSpec& spec);
// Whether the device is a GPU with a kernel for the op, for all token counts of the fused list, or for `numbers`.
bool fused_takes(const DeviceInfo& device, const ops::OpDesc& desc,
                 std::initializer_list<int64_t> numbers = {1, kFusedTokens});
// Whether a node reads a value, or writes it; both are true if it updates the value.
bool reads(const Node& node, ValueId value);
bool writes(const Node& node, ValueId value);
// Whether two operands refer to the same rows.
bool same_rows(const Operand& a, const Operand& b);
// Whether two weights have the same type, layout and device.
bool alike(const Plan& plan, model::WeightId a, model::WeightId b);
// Whether all of these weights are on one device. kNone is ignored.
bool stand_together(const Plan& plan, std::initializer_list<model::WeightId> weights);

}  // namespace dyno::plan
