// Plan: everything that is decided before the first token. Where each weight lies and in which layout, what the memory
// is used for, and the ordered list of ops with their operands. Pure host code; a value that can be printed.
//
// Operands are slices of per-token rows. A value's memory is [tokens, row]; the executor turns (value, byte offset,
// byte stride) into pointers once the arena exists, so the same op list serves any number of tokens up to the u-batch.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/device_info.h"
#include "model/model_desc.h"
#include "ops/registry.h"
#include "plan/operands.h"

namespace dyno::plan {

enum class Numerics : uint8_t {
  standard,  // quantised weights meet int8 activations on a CPU, and f16 on a GPU
  exact,     // f32 activations and accumulation everywhere: the reference for every check
};
std::string_view numerics_name(Numerics numerics);

// A device of a plan: an index into Plan::devices. 0 is the main one.
using DeviceId = int32_t;
inline constexpr DeviceId kMainDevice = 0;

// The way between a device and the memory of the machine. Zeros: as fast as the copy itself.
struct Link {
  double bytes_per_second = 0;
  double latency_seconds = 0;
  friend bool operator==(const Link&, const Link&) = default;
};

// How fast a device is: measured, or assumed by its properties.
struct Rates {
  double bytes_per_second = 0;         // of the device's own memory, read and written
  double weight_bytes_per_second = 0;  // of matrices that products with few rows read; 0: as bytes_per_second
  double core_bytes_per_second = 0;    // of one thread of the CPU; 0: as bytes_per_second
  double flops_one = 0;                // of products with one row, operations a second
  double flops_many = 0;               // of products with kManyRows rows and more
  double launch_seconds = 0;           // of an op that does nothing
  double spread_seconds = 0;           // of a product more: until all threads have begun and ended their parts
  double expert_seconds = 0;           // of a product of experts more: until their numbers are known
  Link link;                           // to the memory of the machine; a virtual device has the plan's
};
inline constexpr int64_t kManyRows = 64;
// Of the device of that name.
struct NamedRates {
  std::string device;
  Rates rates;
};

// A further CPU device of the same process, which stands for a device of that link and that much memory.
struct VirtualDevice {
  Link link;
  bool streams = false;     // as main device it takes copies of the CPU's weights, as a GPU does
  size_t memory_bytes = 0;  // that its weights, cache and arena may take; 0: as much as the machine has
};

// Which weights lie on another device than the main one, see plan/placement.h.
struct PlacementOptions {
  std::vector<VirtualDevice> virtual_devices;  // cpu:1, cpu:2, … beside the CPU
  std::vector<std::string> rules;              // "REGEX=DEVICE" by the tensor's name; the first that matches decides
  bool cpu_moe = false;                        // experts of all layers to the CPU
  int64_t n_cpu_moe = 0;                       // experts of the first so many layers to the CPU
  std::optional<int64_t> n_gpu_layers;  // the others than these last layers, of which the output is one, to the CPU
  // With a GPU as main device: the CPU and other GPUs, which rules can name. A plan keeps those that hold weights.
  std::vector<DeviceInfo> beside_gpu;
  bool split_layers = false;      // over all GPUs, or all virtual devices, of the plan
  std::vector<double> shares;     // of these devices by their numbers; empty: by their memory
  size_t main_memory = 0;         // bytes that the main device may hold, where it is not the CPU; 0: no limit
  size_t host_memory = 0;         // likewise the CPU
  bool automatic = false;         // without any of these: what does not fit the main device goes to the CPU
  bool choose_cache = false;      // `automatic` may also choose ExpertCacheOptions::mib
  std::vector<NamedRates> rates;  // for `automatic`; of other devices assumed ones
};

// The most used experts of layers whose experts lie on the CPU also lie on the main device, which multiplies by them.
struct ExpertCacheOptions {
  int64_t mib = 0;  // that they take at most
  // Which these are changes with the choices of the tokens that run.
  bool adaptive = false;
  // How often each expert was chosen while a text ran, [layers with experts][experts]; empty: not recorded, and the
  // first experts of each layer are cached. Experts that never were chosen are not cached, unless the cache adapts.
  std::vector<std::vector<int64_t>> uses{};
};

// Where weights and threads of the CPU go on a machine with several NUMA nodes. All but off copy weights that products
// read out of the file's pages, whose place other programs decide, and hold each thread on a node.
enum class NumaMode : uint8_t {
  off,         // where the system puts them
  interleave,  // pages by turns over the nodes
  pin,         // rows of a matrix on the node whose threads multiply by them first; experts are interleaved
  mirror,      // a copy of all weights on each node
};
std::string_view numa_name(NumaMode mode);

// Settings that need the weights to be loaded again.
struct LoadOptions {
  Numerics numerics = Numerics::standard;
  bool cpu_repack = true;
  bool mmap = true;  // the CPU reads weights that need no other layout from the file's own pages
  NumaMode numa = NumaMode::off;
  int64_t layers = 0;  // only the first so many of the model, for measurements; 0: all
  ExpertCacheOptions expert_cache{};
  PlacementOptions placement{};
};

// The rows that layers with a sliding window keep in the cache.
enum class WindowCache : uint8_t {
  automatic,  // `window` if they then keep at most half their rows, on a GPU that maps memory half of it; else `full`
  full,       // of all positions, so that a sequence can go back anywhere
  window,     // that later tokens read, of checkpoints, and of stops on the way
};
std::string_view window_cache_name(WindowCache mode);  // auto, full, window
// Rows before the window that stay, so that a sequence can go back by so many positions at any time.
inline constexpr int64_t kWindowSlack = 256;
// Rows are given back in steps of so many positions.
inline constexpr int64_t kWindowStep = 256;
// Positions between two stops, of which the window stays; on a GPU it may be more, see Plan::cache_stride(). A sequence
// that goes back further than its window reads so many tokens again at most, and stops keep an eighth of the rows.
constexpr int64_t window_stride(int64_t window) {
  return std::max<int64_t>(1024, (8 * window + kWindowStep - 1) / kWindowStep * kWindowStep);
}

// Settings that re-create the KV cache and keep the weights.
struct ContextOptions {
  int64_t ctx = 0;  // positions per sequence; 0: min(the model's limit, 4096)
  // Default: f16, but f32 with exact numerics and where the cache holds MLA latents. A latent's rounding reaches all
  // heads' keys and values at once, and the whole cache of such a model is a tenth of a GQA cache.
  std::optional<DType> kv_type_k;
  std::optional<DType> kv_type_v;
  int64_t sequences = 1;
  // Positions that all sequences together hold at most, so that only so much memory is taken; 0: sequences x ctx. A GPU
  // has to map memory by need for that.
  int64_t cache_tokens = 0;
  WindowCache window_cache = WindowCache::automatic;
};

inline constexpr int64_t kBalanced = -1;
// Which products run on the main device over a copy of weights that lie on the CPU, and from how many tokens on.
struct OffloadOptions {
  int64_t min_tokens = 32;  // of a u-batch; with experts times experts / used
  bool matmul = true, matmul_id = true, up_gate = true, moe_up_gate = true;
  // Of the experts that tokens of a streamed u-batch are routed to, the CPU multiplies by so many percent meanwhile;
  // kBalanced: so many that both are expected to end together.
  int64_t cpu_share = 0;
  friend bool operator==(const OffloadOptions&, const OffloadOptions&) = default;
};

// A weight of the CPU that the streamed list reads on the main device, where a copy comes for each u-batch.
struct StreamedWeight {
  bool wanted = false;
  ops::Layout layout = ops::Layout::plain;  // of the copy
  size_t bytes = 0;
  size_t offset = 0;     // in the main device's memory for such copies
  int64_t matrices = 1;  // that cross each by itself
  // A weight of the main device that has some of these matrices already: cached experts; kNone: none.
  model::WeightId cached = model::kNone;
};
// Where copies that are repacked on the main device wait for it: one is filled while the other is repacked.
inline constexpr size_t kStages = 2;

struct WeightPlacement {
  DeviceId device = kMainDevice;
  DType type = DType::f32;  // that kernels read: the model's, or gpu_type() of it (gguf/recode.h)
  ops::Layout layout = ops::Layout::plain;
  bool mapped = false;    // kernels read the file's own pages; otherwise an owned copy of `bytes`
  bool mappable = false;  // they could: with the setting `mmap`
  size_t bytes = 0;       // of a copy
  size_t copies = 1;      // on so many NUMA nodes
  int32_t layer = -1;     // -1: of none
  bool experts = false;   // those that a router chooses among
  bool lent = false;      // another session of the same device holds it, see borrow_weights()
  StreamedWeight stream{};
  // Of a weight of the CPU beside a GPU: its matrices come to the places of cached experts while tokens run, each
  // through a stage of so many bytes if it is repacked there.
  bool refills = false;
  size_t refill_stage = 0;
};

// A plan holds several op lists over the same weights and cache, of which a u-batch runs through one, and on a GPU
// the list that draws a token from its logits.
enum class ListId : uint8_t {
  general,   // any number of tokens
  fused,     // few, larger launches for at most kFusedTokens tokens
  single,    // one token: the fused list, with launches that are faster for that alone
  batched,   // more tokens, at most kBatchedTokens: products as in the general list, what lies between them fused
  expanded,  // latent attention with keys and values of all heads: for prompts
  draw,      // behind any of these, from one row of logits: generation
  streamed,  // for prompts: products of the CPU's weights on the main device
};
inline constexpr size_t kListCount = 7;
inline constexpr int64_t kFusedTokens = 8;
inline constexpr int64_t kBatchedTokens = 64;
std::string_view list_name(ListId list);

// How a GPU computes latent attention. absorbed: queries meet the latents themselves. expanded: keys and values of all
// heads are made from the latents of the whole context for every u-batch, which costs products and memory, and then a
// query and key head are a third as wide.
enum class MlaMode : uint8_t {
  automatic,  // expanded for sequences with at least kExpandTokens new tokens
  expanded,
  absorbed,
};
std::string_view mla_mode_name(MlaMode mode);  // auto, expanded, absorbed
inline constexpr int64_t kExpandTokens = 32;
// Whether `automatic` expands f32 caches too, on GPUs that attend to f32 keys in pairs of halves.
inline constexpr bool kExpandF32 = true;

struct Value {
  std::string name;
  size_t bytes_per_token = 0;
  size_t bytes_fixed = 0;
  ListId list = ListId::general;
  DeviceId device = kMainDevice;
  int first_use = -1;  // node indices of its list
  int last_use = -1;
  size_t offset = 0;  // in the arena of its device
};

struct RopeTable {
  std::vector<float> inv_freq;  // [n_rot / 2]
  float mscale = 1.0f;          // on cos and sin
  float position_scale = 0;     // as in ops::RopeArgs; only the family rope takes it
  int64_t position_step = 1;
  friend bool operator==(const RopeTable&, const RopeTable&) = default;
};

struct Node {
  std::string name;  // "blk.3.attn_q"
  int32_t layer = -1;
  DeviceId device = kMainDevice;
  ops::OpDesc desc;         // m = 1; of the family of the operands
  int32_t key = -1;         // index into Plan::keys
  int32_t rows_factor = 1;  // the desc's m is tokens * rows_factor
  Operands operands;
  bool per_run = false;  // launched for each run by itself; such nodes stand together
  bool beside = false;   // needs nothing of the node before it and the other way round: both can run at once
  // Of a product with experts: another device multiplies the rows of other experts, and this one so large a share.
  bool divided = false;
  bool at_home = false;  // in the streamed list: reads its weights where they lie
  // In the streamed list: left out where the CPU takes none of the layer's experts.
  bool for_cpu_share = false;
  double share = 1;
  // Of Plan::passings: the rows that this op gives to another one, and the rows that it gets; -1: none.
  int32_t gives = -1, gets = -1;
};

// Two ops of a list that may pass rows on as HalfTiles (ops/half_tiles.h), if the kernels of both can.
struct Passing {
  int32_t from = -1, to = -1;  // keys of the op that gives the rows and of the product that alone reads them
  ValueId value = kNoValue;    // one of these rows; others have the same memory
};

// An op as profiles name it: all nodes of a device with this key share one Config per token bucket.
struct OpUse {
  ops::OpDesc desc;  // m = 1
  std::string key;
  DeviceId device = kMainDevice;
  std::array<int, kListCount> count{};  // nodes of each list
  int rows_factor = 1;

  int count_in(ListId list) const { return count[static_cast<size_t>(list)]; }
};

// Nodes [begin, end) of a list, all of one device.
struct Segment {
  DeviceId device = kMainDevice;
  int32_t begin = 0, end = 0;
};

// Before `node` of the streamed list: copies of these weights have to be there, of the experts that `ids` names alone
// where it is a value. The copies of a layer lie in one half of the memory for them, those of the next in the other.
struct Fetch {
  int32_t node = 0;
  int32_t order = 0;  // of the layer, among those with streamed weights
  std::vector<model::WeightId> weights{};
  ValueId ids = kNoValue;  // int32 [tokens, used] on the main device
  int64_t experts = 0, used = 0;
  int32_t shared_layer = -1;  // the node reads which of this layer's experts the CPU takes; -1: another node
};

struct NodeList {
  ListId id = ListId::general;
  std::vector<Node> nodes{};
  std::vector<Segment> segments{};
  // Nodes from here on change neither cache nor state: without logits they need not run.
  int32_t settled_node = 0;
  // After this node of the last layer only the rows whose logits are wanted go on; these values are compacted.
  int32_t select_node = -1;
  std::vector<ValueId> select_values{};
  // The first node behind the last layer. Where all rows go through that, they are selected here.
  int32_t head_node = -1;
  std::vector<ValueId> head_values{};
  ValueId residual = kNoValue;
  ValueId rows_in = kNoValue;  // of a head: hidden rows of the model, which the caller gives
  // Behind this node the rows that the output matrix reads, normed, are in `hidden`: embeddings end here. The general
  // list and the streamed one have it, and all lists of a model with a head that drafts, which reads these rows too.
  int32_t hidden_node = -1;
  ValueId hidden = kNoValue;
  std::vector<Fetch> fetches{};  // of the streamed list, by node
};

struct KvLayer {
  DeviceId device = kMainDevice;             // of the layer's attention
  int64_t k_row_bytes = 0, v_row_bytes = 0;  // one position, all heads; v is 0 when V lies within K
  size_t k_offset = 0, v_offset = 0;         // in the cache of its device
  // The layer reads the rows that a window of so many positions sees; 0: of all positions.
  int64_t reads = 0;
  // Of them it keeps no others; 0: it keeps all.
  int64_t window = 0;
};

// The state that a recurrent layer keeps of each sequence instead of keys and values, f32. It cannot be rewound: what
// a sequence held before is only in copies.
struct State {
  std::string name;               // "blk.3.conv_state"
  int64_t elements = 0;           // of one sequence
  DeviceId device = kMainDevice;  // of the node that changes it
  size_t offset = 0;              // in the states of its device, [sequences, elements]
  size_t sequence_bytes() const { return static_cast<size_t>(elements) * sizeof(float); }
};

struct PlannedDevice {
  DeviceInfo info;
  Link link;
  bool streams = false;     // see OffloadOptions: a GPU, or a virtual device that stands for one
  size_t memory_limit = 0;  // for the bytes below; 0: none of its own
  size_t weights_bytes = 0, kv_bytes = 0, state_bytes = 0, arena_bytes = 0;
  size_t kv_address_bytes = 0;  // of the cache; kv_bytes is the most memory that it takes of them
  size_t stream_bytes = 0;      // of the main device: copies of streamed weights
  size_t scratch_bytes = 0;     // set when configurations are chosen; that of all CPU devices stands with the first
};

struct Plan {
  std::vector<PlannedDevice> devices;
  std::string placement_note;  // of a placement that was chosen automatically: what, and why
  LoadOptions load;
  ContextOptions context;                        // ctx resolved
  WindowCache window_cache = WindowCache::full;  // what context.window_cache became with these devices
  DType kv_type_k = DType::f16;
  DType kv_type_v = DType::f16;
  int64_t ubatch = 0;

  std::vector<WeightPlacement> weights;  // parallel to ModelDesc::weights
  std::vector<Value> values;
  NodeList general{.id = ListId::general};
  NodeList fused{.id = ListId::fused};    // without nodes where nothing is fused: on the CPU, with numerics exact
  NodeList single{.id = ListId::single};  // without nodes where no layer gains
  // Fused products are matvec's, so its thresholds bound them as well.
  int64_t fused_tokens = kFusedTokens;
  NodeList batched{.id = ListId::batched};    // without nodes as well where no layer gains
  bool fusion = true;                         // whether these three are used where there are any
  NodeList expanded{.id = ListId::expanded};  // where latent attention can be expanded, on a GPU
  MlaMode mla_mode = MlaMode::automatic;
  bool expands_f32 = false;                   // `automatic` expands an f32 cache, see expands()
  NodeList draw{.id = ListId::draw};          // without nodes on the CPU, where the session draws
  NodeList streamed{.id = ListId::streamed};  // without nodes where nothing is streamed
  OffloadOptions offload;
  int64_t streams_from = 0;       // tokens of a u-batch
  std::vector<OpUse> keys;        // of all lists
  std::vector<Passing> passings;  // of all lists, on GPUs
  std::vector<RopeTable> rope_tables;
  size_t cached_bytes = 0;  // of experts of the CPU that also lie on the main device
  // By layer with cached experts: the place of each expert in the main device's copies at load; -1 where it has none.
  std::vector<std::vector<int32_t>> expert_places;
  // Of layers whose experts the streamed list shares with the CPU: how many there are, by layer, else 0. Their places
  // are chosen for each u-batch, in tables behind those of expert_places.
  std::vector<int64_t> shared_experts;
  int32_t shared_table(int32_t layer) const { return static_cast<int32_t>(expert_places.size()) + layer; }
  bool is_shared_table(int32_t table) const { return table >= static_cast<int32_t>(expert_places.size()); }
  // Whether the choices of a split are counted, since cached experts follow them. Shared ones are noted when they
  // cross.
  bool counts_choices(int32_t table) const { return load.expert_cache.adaptive && !is_shared_table(table); }
  std::vector<KvLayer> kv;  // of each layer; without rows where it has no keys
  // The longest window of a layer that keeps its window alone; 0: no layer does.
  int64_t cache_window() const;
  // Whether each GPU that holds a part of the cache can map memory for rows (DeviceInfo).
  bool maps_cache() const;
  // Whether a GPU's cache takes memory as rows are written.
  bool cache_by_need() const { return context.cache_tokens > 0 || cache_window() > 0; }
  // Of windows that stay on the way, see window_stride(); 0: no layer keeps its window alone. A GPU maps large pieces,
  // of which a stop keeps one or two, so there at least eight of them lie between two stops.
  int64_t cache_stride() const;
  // Checkpoints of all sequences that can keep their window in the cache.
  int64_t window_checkpoints() const { return cache_window() > 0 ? context.sequences + 1 : 0; }
  std::vector<State> states;  // of all layers; empty where every layer has keys and values
  ValueId logits = kNoValue;  // lives in the caller's memory, not in the arena

  // Of all devices together.
  size_t weights_bytes = 0;  // owned copies and mapped pages that kernels read
  size_t mirror_bytes = 0;   // of them, copies on further NUMA nodes
  size_t kv_bytes = 0;       // at most: addresses of `kv_address_bytes` are reserved, and memory is taken as needed
  size_t kv_address_bytes = 0;
  size_t state_bytes = 0;
  size_t arena_bytes = 0;
  size_t scratch_bytes = 0;  // all threads together; set when configurations are chosen
  const DeviceInfo& device(DeviceId id) const { return devices[static_cast<size_t>(id)].info; }
  const DeviceInfo& main_device() const { return device(kMainDevice); }
  const DeviceInfo& device_of(model::WeightId id) const { return device(weights[static_cast<size_t>(id)].device); }
  // That kernels read: copies that the streamed list reads have it too.
  DType type_of(model::WeightId id) const { return weights[static_cast<size_t>(id)].type; }
  // Where and in which layout the nodes of a list find a weight.
  bool streams(ListId list, model::WeightId id) const {
    return list == ListId::streamed && weights[static_cast<size_t>(id)].stream.wanted;
  }
  // In which list a node of a list finds its weights.
  static ListId weights_list(const Node& node, ListId list) { return node.at_home ? ListId::general : list; }
  DeviceId device_in(ListId list, model::WeightId id) const {
    return streams(list, id) ? kMainDevice : weights[static_cast<size_t>(id)].device;
  }
  ops::Layout layout_in(ListId list, model::WeightId id) const {
    const WeightPlacement& weight = weights[static_cast<size_t>(id)];
    return streams(list, id) ? weight.stream.layout : weight.layout;
  }
  size_t bytes_in(ListId list, model::WeightId id) const {
    const WeightPlacement& weight = weights[static_cast<size_t>(id)];
    return streams(list, id) ? weight.stream.bytes : weight.bytes;
  }
  // Of a stage: matrices in the layout in which they cross, before they are repacked. The stages stand at the end of
  // the memory for copies.
  size_t stage_bytes() const;
  // Where the logits are written.
  DeviceId logits_device() const { return values[static_cast<size_t>(logits)].device; }
  // Whether any u-batch runs through the expanded list. With an f32 cache its keys and values are f32 as well, and pay
  // only where attention can take them on tensor cores.
  bool expands() const {
    const bool pays = kv_type_k != DType::f32 || expands_f32;
    return !expanded.nodes.empty() && (mla_mode == MlaMode::expanded || (mla_mode == MlaMode::automatic && pays));
  }
  // Of the arena: the keys and values that the expanded list makes for one context.
  size_t expanded_bytes() const;
  // Whether the fused list has attention that norms, rotates and stores as well.
  bool fuses_attention() const {
    return std::any_of(keys.begin(), keys.end(), [](const OpUse& use) {
      return std::holds_alternative<ops::RopeAttentionDesc>(use.desc) && use.count_in(ListId::fused) > 0;
    });
  }
  // The list that a u-batch of that many tokens of `runs` sequences runs through.
  const NodeList& list_for(int64_t tokens, int64_t runs = 1) const {
    if (!streamed.nodes.empty() && tokens >= streams_from) return streamed;
    if (expands() && (mla_mode == MlaMode::expanded || tokens >= kExpandTokens * runs)) return expanded;
    if (fusion && tokens == 1 && fused_tokens > 0 && !single.nodes.empty()) return single;
    if (fusion && tokens <= fused_tokens && !fused.nodes.empty()) return fused;
    return fusion && tokens <= kBatchedTokens && !batched.nodes.empty() ? batched : general;
  }
  // The list that computes `NodeList::hidden` of a u-batch.
  const NodeList& hidden_list(int64_t tokens) const {
    return !streamed.nodes.empty() && tokens >= streams_from ? streamed : general;
  }
  size_t total_bytes() const {
    return weights_bytes + kv_bytes + state_bytes + arena_bytes + scratch_bytes + devices.front().stream_bytes;
  }
  size_t lent_bytes() const;  // of weights that another session holds, which no other number here counts
  // Of one sequence's states, one behind the other.
  size_t sequence_state_bytes() const;

  // NUMA nodes over which the CPU's weights and threads are placed; 1 where they are not.
  int numa_nodes() const;

  std::string describe(const model::ModelDesc& model) const;
  // Of the head that drafts beside a model: its memory.
  std::string describe_head() const;
};

// `device`: the main one. Throws PlanError (context beyond the model's limit, impossible cache type, placement that
// cannot be) or UnsupportedError.
Plan build_plan(const model::ModelDesc& model, const DeviceInfo& device, const LoadOptions& load,
                const ContextOptions& context, int64_t ubatch, MlaMode mla_mode = MlaMode::automatic,
                const OffloadOptions& offload = {});

// Weights that lie on a GPU in two plans of one file, in the same type and layout, are in its memory once: `plan` takes
// them from `lender`, and counts them no more. Their ids there, parallel to ModelDesc::weights; kNone: its own.
std::vector<model::WeightId> borrow_weights(Plan& plan, const model::ModelDesc& model, const Plan& lender,
                                            const model::ModelDesc& lending);

// Rows behind the end of a sequence that have memory on a GPU, where memory is taken by need: kernels may read to the
// end of a tile, of which the longest has 256 rows (flash_keys() times flash_key_warps()). Memory is mapped in pieces.
inline constexpr int64_t kRowsBehind = 256;
inline constexpr size_t kMappedPiece = size_t{2} << 20;

// Bytes of the keys or the values of a layer, of `row` bytes a position, with other context settings than the plan's.
size_t kv_memory(const Plan& plan, const ContextOptions& context, const KvLayer& layer, int64_t row);

// Device memory that is nobody's plan: kernels' code, cuBLAS, graphs, logits.
inline constexpr size_t kDeviceReserve = size_t{512} << 20;

// Throws OutOfMemoryError that says what to change when the plan does not fit into `free_bytes` of a GPU.
// `weights_loaded`: the weights lie there already, and only the rest is asked for.
void check_memory(const Plan& plan, DeviceId gpu, size_t free_bytes, bool weights_loaded = false);
// Likewise of the machine, whose memory virtual devices share. Weights that are read in place need nothing.
void check_host_memory(const Plan& plan, size_t free_bytes, bool weights_loaded = false);

// Likewise for each device that has a memory limit of its own.
void check_limits(const Plan& plan, bool weights_loaded = false);
// How long `bytes` take from one device to another: they pass the links of both, of which the slower sets the rate.
double transfer_seconds(const Link& from, const Link& to, size_t bytes);

// Re-plans the arena for another u-batch or mla_mode; op lists and placement stay.
void layout_arena(Plan& plan, int64_t ubatch);
// Whether a value lies in the arena, and how many bytes a u-batch needs there.
bool in_arena(const Plan& plan, ValueId id);
size_t value_bytes(const Plan& plan, const Value& value);
// An offset for each state, after nodes have their devices.
void layout_states(Plan& plan);
// Counts the memory of the cache.
void count_kv(Plan& plan);
// Re-plans the cache, after the weights have their devices.
void layout_kv(Plan& plan, const model::ModelDesc& model, const ContextOptions& context);

RopeTable make_rope_table(const model::RopeSpec& rope, const float* frequency_factors);

}  // namespace dyno::plan
