// Plan: everything that is decided before the first token. It has the device and layout of each weight, the use of
// memory, and the ordered list of ops with their operands. Pure host code; a value that can be printed.
//
// Operands are slices of per-token rows. A value's memory is [tokens, row]. The executor turns (value, byte offset,
// byte stride) into pointers once the arena exists, so one op list serves any number of tokens up to the u-batch.
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
  standard,  // quantised weights are multiplied by int8 activations on a CPU, and by f16 on a GPU
  exact,     // f32 activations and accumulation everywhere: the reference for every check
};
std::string_view numerics_name(Numerics numerics);

// A device of a plan: an index into Plan::devices. Index 0 is the main device.
using DeviceId = int32_t;
inline constexpr DeviceId kMainDevice = 0;

// The connection between a device and the host memory. Zero: no limit beyond the speed of the copy itself.
struct Link {
  double bytes_per_second = 0;
  double latency_seconds = 0;
  friend bool operator==(const Link&, const Link&) = default;
};

// The speed of a device: measured, or assumed from its properties.
struct Rates {
  double bytes_per_second = 0;         // of the device's own memory, reads and writes
  double weight_bytes_per_second = 0;  // of matrices in products with few rows; 0: bytes_per_second
  double core_bytes_per_second = 0;    // of one CPU thread; 0: bytes_per_second
  double flops_one = 0;                // floating-point operations per second of products with one row
  double flops_many = 0;               // the same with kManyRows rows or more
  double launch_seconds = 0;           // of an empty op
  double spread_seconds = 0;           // extra time of a product: all threads start and end their parts
  double expert_seconds = 0;           // extra time of a product of experts: the chosen experts must be known
  Link link;                           // to the host memory; for a virtual device, the plan's link
};
inline constexpr int64_t kManyRows = 64;
// The rates of the device with that name.
struct NamedRates {
  std::string device;
  Rates rates;
};

// An additional CPU device of the same process. It simulates a device with that link and that much memory.
struct VirtualDevice {
  Link link;
  bool streams = false;     // as the main device, it copies weights of the CPU for prompts, as a GPU does
  size_t memory_bytes = 0;  // limit for its weights, cache and arena; 0: the memory of the machine
};

// Which weights are on another device than the main one; see plan/placement.h.
struct PlacementOptions {
  std::vector<VirtualDevice> virtual_devices;  // cpu:1, cpu:2, … in addition to the CPU
  std::vector<std::string> rules;              // "REGEX=DEVICE" by tensor name; the first match decides
  bool cpu_moe = false;                        // experts of all layers are on the CPU
  int64_t n_cpu_moe = 0;                       // experts of the first n_cpu_moe layers are on the CPU
  std::optional<int64_t> n_gpu_layers;  // only the last n_gpu_layers layers, including the output, are on the GPU
  // For a GPU as the main device: the CPU and other GPUs, which rules can name. A plan keeps only devices with weights.
  std::vector<DeviceInfo> beside_gpu;
  bool split_layers = false;      // split layers over all GPUs, or all virtual devices, of the plan
  std::vector<double> shares;     // of these devices in ascending order; empty: by their memory
  size_t main_memory = 0;         // limit of the main device in bytes, if it is not the CPU; 0: no limit
  size_t host_memory = 0;         // the same limit for the CPU
  bool automatic = false;         // without any of the above: if the model does not fit the main device, part of it
                                  // goes to the CPU
  bool choose_cache = false;      // `automatic` may also choose ExpertCacheOptions::mib
  std::vector<NamedRates> rates;  // for `automatic`; other devices have assumed rates
};

// Copies of the most used experts on the main device, for layers whose experts are on the CPU. The main device computes
// their products.
struct ExpertCacheOptions {
  int64_t mib = 0;  // limit of their total size
  // Whether the set of cached experts follows the routing of the tokens that run.
  bool adaptive = false;
  // How often each expert was chosen while a text ran, [layers with experts][experts]. If empty (not recorded), the
  // first experts of each layer are cached. An expert that was never chosen is not cached, unless the cache adapts.
  std::vector<std::vector<int64_t>> uses{};
};

// Where weights and threads of the CPU are placed on a machine with several NUMA nodes. All modes except off copy the
// weights of products out of the file's pages, whose nodes other programs determine, and bind each thread to a node.
enum class NumaMode : uint8_t {
  off,         // the system decides
  interleave,  // pages alternate between the nodes
  pin,         // rows of a matrix on the node of the threads that multiply by them; experts are interleaved
  mirror,      // a copy of all weights on each node
};
std::string_view numa_name(NumaMode mode);

// Settings that require the weights to be loaded again.
struct LoadOptions {
  Numerics numerics = Numerics::standard;
  bool cpu_repack = true;
  bool mmap = true;  // the CPU reads weights in the file's layout directly from the mapped file
  NumaMode numa = NumaMode::off;
  int64_t layers = 0;  // only the first layers of the model, for measurements; 0: all
  ExpertCacheOptions expert_cache{};
  PlacementOptions placement{};
};

// The rows that the cache keeps for layers with a sliding window.
enum class WindowCache : uint8_t {
  automatic,  // `window` if it at least halves the rows (on a GPU that maps memory: the bytes), else `full`
  full,       // rows of all positions, so that a sequence can return to any position
  window,     // rows that later tokens read, and the windows of checkpoints and stops
};
std::string_view window_cache_name(WindowCache mode);  // auto, full, window
// Additional rows before the window, so that a sequence can always go back by this many positions.
inline constexpr int64_t kWindowSlack = 256;
// Rows are freed in steps of this many positions.
inline constexpr int64_t kWindowStep = 256;
// Positions between two stops, which are positions whose window is kept; on a GPU it may be more, see
// Plan::cache_stride(). A sequence that goes back further than its window recomputes at most this many tokens. Stops
// keep an eighth of the rows.
constexpr int64_t window_stride(int64_t window) {
  return std::max<int64_t>(1024, (8 * window + kWindowStep - 1) / kWindowStep * kWindowStep);
}

// Settings that re-create the KV cache but keep the weights.
struct ContextOptions {
  int64_t ctx = 0;  // positions per sequence; 0: min(the model's limit, 4096)
  // Default: f16, or f32 with exact numerics and for a cache of MLA latents. The rounding of a latent affects the keys
  // and values of all heads at once, and the whole cache of such a model is a tenth of a GQA cache.
  std::optional<DType> kv_type_k;
  std::optional<DType> kv_type_v;
  int64_t sequences = 1;
  // The maximum of positions in all sequences together, which limits the memory; 0: sequences x ctx. On a GPU this
  // requires mapping of memory on demand.
  int64_t cache_tokens = 0;
  WindowCache window_cache = WindowCache::automatic;
};

inline constexpr int64_t kBalanced = -1;
// Which products run on the main device with copies of CPU weights, and from how many tokens on.
struct OffloadOptions {
  int64_t min_tokens = 32;  // of a u-batch; for experts, this number times experts / used
  bool matmul = true, matmul_id = true, up_gate = true, moe_up_gate = true;
  // Percentage of the chosen experts of a streamed u-batch that the CPU multiplies by concurrently. kBalanced: both are
  // expected to end at the same time.
  int64_t cpu_share = 0;
  friend bool operator==(const OffloadOptions&, const OffloadOptions&) = default;
};

// A CPU weight that the streamed list reads on the main device. It is copied there for each u-batch.
struct StreamedWeight {
  bool wanted = false;
  ops::Layout layout = ops::Layout::plain;  // of the copy
  size_t bytes = 0;
  size_t offset = 0;     // in the main device's memory for these copies
  int64_t matrices = 1;  // that are copied individually
  // A weight on the main device that already has some of these matrices (cached experts); kNone if there is none.
  model::WeightId cached = model::kNone;
};
// Staging buffers for copies that the main device repacks: one is filled while the other is repacked.
inline constexpr size_t kStages = 2;

struct WeightPlacement {
  DeviceId device = kMainDevice;
  DType type = DType::f32;  // that kernels read: the model's type, or its gpu_type() (gguf/recode.h)
  ops::Layout layout = ops::Layout::plain;
  bool mapped = false;    // kernels read the mapped file; otherwise an owned copy of `bytes`
  bool mappable = false;  // kernels could read the mapped file if `mmap` is set
  size_t bytes = 0;       // of one copy
  size_t copies = 1;      // number of copies, each on another NUMA node
  int32_t layer = -1;     // -1: no layer
  bool experts = false;   // experts that a router chooses
  bool lent = false;      // another session on the same device owns it, see borrow_weights()
  StreamedWeight stream{};
  // For a CPU weight with a GPU as the main device: its matrices replace cached experts while tokens run. If the GPU
  // repacks them, each goes through a staging buffer of refill_stage bytes.
  bool refills = false;
  size_t refill_stage = 0;
};

// A plan has several op lists over the same weights and cache. A u-batch runs one of them. On a GPU, the list `draw`
// samples a token from the logits.
enum class ListId : uint8_t {
  general,            // any number of tokens
  fused,              // fewer, larger launches for at most kFusedTokens tokens
  single,             // one token: the fused list with launches that are faster for one token only
  batched,            // any number of tokens: products as in the general list, other ops fused
  expanded,           // for prompts: latent attention over keys and values of all heads
  draw,               // after any other list: samples from one row of logits
  streamed,           // for prompts: products with CPU weights on the main device
  streamed_expanded,  // the streamed list with expanded latent attention
};
inline constexpr size_t kListCount = 8;
inline constexpr int64_t kFusedTokens = 8;
inline constexpr int64_t kRingTokens = 64;        // of the batched list; more tokens run tiles of prompts
inline constexpr int64_t kBatchedTokens = 65536;  // the largest u-batch
std::string_view list_name(ListId list);
constexpr bool is_streamed(ListId list) { return list == ListId::streamed || list == ListId::streamed_expanded; }
constexpr bool is_expanded(ListId list) { return list == ListId::expanded || list == ListId::streamed_expanded; }

// How a GPU computes latent attention. absorbed: attention over the latents themselves. expanded: for every u-batch,
// keys and values of all heads are computed from the latents of the whole context. This costs products and memory, but
// query and key heads are a third as wide.
enum class MlaMode : uint8_t {
  automatic,  // expanded for sequences with at least kExpandTokens new tokens
  expanded,
  absorbed,
};
std::string_view mla_mode_name(MlaMode mode);  // auto, expanded, absorbed
inline constexpr int64_t kExpandTokens = 32;
// Whether `automatic` also expands f32 caches, on GPUs that compute attention over f32 keys with f16 pairs.
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
  float mscale = 1.0f;          // factor of cos and sin
  float position_scale = 0;     // as in ops::RopeArgs; only the family rope reads it
  int64_t position_step = 1;
  friend bool operator==(const RopeTable&, const RopeTable&) = default;
};

struct Node {
  std::string name;  // "blk.3.attn_q"
  int32_t layer = -1;
  DeviceId device = kMainDevice;
  ops::OpDesc desc;         // with m = 1; the family of the operands
  int32_t key = -1;         // index into Plan::keys
  int32_t rows_factor = 1;  // the desc's m is tokens * rows_factor
  Operands operands;
  bool per_run = false;  // one launch per run (sequence); such nodes are adjacent
  bool beside = false;   // independent of the previous node, so that both can run concurrently
  // For a product of experts: another device multiplies the rows of other experts. `share` is the share of this device.
  bool divided = false;
  bool at_home = false;  // in the streamed list: reads its weights on their own device
  // In the streamed list: skipped if the CPU computes none of the layer's experts.
  bool for_cpu_share = false;
  double share = 1;
  // Indices into Plan::passings: rows that this op writes for another op, and rows that it reads; -1: none.
  int32_t gives = -1, gets = -1;
};

// Two ops of a list that may exchange rows as HalfTiles (ops/half_tiles.h), if the kernels of both support it.
struct Passing {
  int32_t from = -1, to = -1;  // keys of the op that writes the rows and of the only product that reads them
  ValueId value = kNoValue;    // one such value; the others have the same memory
};

// An op as profiles name it. All nodes of a device with this key share one Config per token bucket.
struct OpUse {
  ops::OpDesc desc;  // m = 1
  std::string key;
  DeviceId device = kMainDevice;
  std::array<int, kListCount> count{};  // nodes in each list
  int rows_factor = 1;

  int count_in(ListId list) const { return count[static_cast<size_t>(list)]; }
};

// Nodes [begin, end) of a list, all of one device.
struct Segment {
  DeviceId device = kMainDevice;
  int32_t begin = 0, end = 0;
};

// Weights that must be copied before `node` of the streamed list runs; if `ids` is a value, only the experts that it
// names. Half of the copy memory holds the copies of a layer, the other half those of the next layer.
struct Fetch {
  int32_t node = 0;
  int32_t order = 0;  // index of the layer among the layers with streamed weights
  std::vector<model::WeightId> weights{};
  ValueId ids = kNoValue;  // int32 [tokens, used] on the main device
  int64_t experts = 0, used = 0;
  int32_t shared_layer = -1;  // layer whose experts the CPU shares, if this node reads which ones; else -1
};

struct NodeList {
  ListId id = ListId::general;
  std::vector<Node> nodes{};
  std::vector<Segment> segments{};
  // Nodes from here on change neither cache nor state, so they are skipped if no logits are wanted.
  int32_t settled_node = 0;
  // After this node of the last layer, only rows whose logits are wanted continue. These values are compacted.
  int32_t select_node = -1;
  std::vector<ValueId> select_values{};
  // The first node after the last layer. If all rows pass it, rows are selected here.
  int32_t head_node = -1;
  std::vector<ValueId> head_values{};
  ValueId residual = kNoValue;
  ValueId rows_in = kNoValue;  // for a draft head: hidden rows of the model, which the caller provides
  // After this node, `hidden` has the normalised rows that the output matrix reads; embeddings end here. The general
  // and the streamed list have it. If the model has a draft head, which reads these rows too, all lists have it.
  int32_t hidden_node = -1;
  ValueId hidden = kNoValue;
  std::vector<Fetch> fetches{};  // of the streamed lists, in the order of nodes
};

struct KvLayer {
  DeviceId device = kMainDevice;  // of the layer's attention
  // One position, all heads. If V is part of K, v is 0, or the row of an indexer's key, which is f32.
  int64_t k_row_bytes = 0, v_row_bytes = 0;
  bool v_is_index = false;
  size_t k_offset = 0, v_offset = 0;  // in the cache of its device
  // The layer reads only the rows in a window of this many positions; 0: rows of all positions.
  int64_t reads = 0;
  // The layer keeps only this many positions in the cache; 0: all.
  int64_t window = 0;
};

// The f32 state that a recurrent layer keeps for each sequence instead of keys and values. It cannot be rewound:
// earlier states exist only as copies.
struct State {
  std::string name;               // "blk.3.conv_state"
  int64_t elements = 0;           // of one sequence
  DeviceId device = kMainDevice;  // of the node that updates it
  size_t offset = 0;              // in the states of its device, [sequences, elements]
  size_t sequence_bytes() const { return static_cast<size_t>(elements) * sizeof(float); }
};

struct PlannedDevice {
  DeviceInfo info;
  Link link;
  bool streams = false;     // see OffloadOptions: a GPU, or a virtual device that simulates one
  size_t memory_limit = 0;  // for the bytes below; 0: no separate limit
  size_t weights_bytes = 0, kv_bytes = 0, state_bytes = 0, arena_bytes = 0;
  size_t least_arena_bytes = 0;  // without kept values, see Plan::keeps_expanded
  size_t kv_address_bytes = 0;   // reserved addresses of the cache; kv_bytes is the most memory that is mapped there
  size_t stream_bytes = 0;       // for the main device: copies of streamed weights
  size_t scratch_bytes = 0;      // known after configurations are chosen; the first CPU device has the scratch of all
                                 // CPU devices
};

struct Plan {
  std::vector<PlannedDevice> devices;
  std::string placement_note;  // for an automatic placement: the choice and its reason
  LoadOptions load;
  ContextOptions context;                        // ctx resolved
  WindowCache window_cache = WindowCache::full;  // context.window_cache, resolved for these devices
  DType kv_type_k = DType::f16;
  DType kv_type_v = DType::f16;
  int64_t ubatch = 0;
  int64_t selects = 0;  // positions that sparse attention selects; 0: it reads all positions of such a context

  std::vector<WeightPlacement> weights;  // parallel to ModelDesc::weights
  std::vector<Value> values;
  NodeList general{.id = ListId::general};
  NodeList fused{.id = ListId::fused};    // empty if nothing is fused: on the CPU, or with numerics=exact
  NodeList single{.id = ListId::single};  // empty if no layer gains
  // The thresholds of matvec also limit this, because fused products are matvec products.
  int64_t fused_tokens = kFusedTokens;
  NodeList batched{.id = ListId::batched};    // empty if no layer gains
  int64_t batched_tokens = kBatchedTokens;    // limited by mmq_max_tokens, because its products are of path mmq
  bool fusion = true;                         // whether fused, single and batched lists are used
  NodeList expanded{.id = ListId::expanded};  // for latent attention on a GPU, if it can be expanded
  MlaMode mla_mode = MlaMode::automatic;
  // Whether the keys and values that the expanded list computes stay in memory for the next u-batch of the sequence:
  // each layer has memory of its own then. layout_arena() decides it if it may.
  bool keeps_expanded = false, may_keep_expanded = true;
  bool expands_f32 = false;                                     // `automatic` expands an f32 cache, see expands()
  NodeList draw{.id = ListId::draw};                            // empty on the CPU, where the session samples
  NodeList streamed{.id = ListId::streamed};                    // empty if nothing is streamed
  NodeList streamed_expanded{.id = ListId::streamed_expanded};  // empty if nothing is streamed or expanded
  OffloadOptions offload;
  int64_t streams_from = 0;       // tokens in a u-batch
  std::vector<OpUse> keys;        // of all lists
  std::vector<Passing> passings;  // of all lists, on GPUs
  std::vector<RopeTable> rope_tables;
  size_t cached_bytes = 0;  // of CPU experts with a copy on the main device
  // For each layer with cached experts: the index of each expert in the main device's copies at load; -1 if not cached.
  std::vector<std::vector<int32_t>> expert_places;
  // For each layer whose experts the streamed list shares with the CPU: the number of its experts, else 0. Places are
  // chosen for each u-batch, in tables that follow the tables of expert_places.
  std::vector<int64_t> shared_experts;
  int32_t shared_table(int32_t layer) const { return static_cast<int32_t>(expert_places.size()) + layer; }
  bool is_shared_table(int32_t table) const { return table >= static_cast<int32_t>(expert_places.size()); }
  // Whether the choices at a split are counted, because cached experts follow them. Shared experts are counted when
  // they are copied.
  bool counts_choices(int32_t table) const { return load.expert_cache.adaptive && !is_shared_table(table); }
  std::vector<KvLayer> kv;  // one per layer; row sizes are 0 in a layer without keys
  // The longest window of the layers that keep only their window; 0 if there is no such layer.
  int64_t cache_window() const;
  // Whether each GPU that holds a part of the cache can map memory for rows (DeviceInfo).
  bool maps_cache() const;
  // Whether a GPU's cache takes memory as rows are written.
  bool cache_by_need() const { return context.cache_tokens > 0 || cache_window() > 0; }
  // Positions between two stops, see window_stride(); 0 if no layer keeps only its window. A GPU maps memory in large
  // pieces, and a stop keeps one or two of them. So on a GPU at least eight pieces lie between two stops.
  int64_t cache_stride() const;
  // Number of checkpoints, over all sequences, that can keep their window in the cache.
  int64_t window_checkpoints() const { return cache_window() > 0 ? context.sequences + 1 : 0; }
  std::vector<State> states;  // of all layers; empty if every layer has keys and values
  ValueId logits = kNoValue;  // in the caller's memory, not in the arena

  // Sums over all devices.
  size_t weights_bytes = 0;  // owned copies and mapped pages that kernels read
  size_t mirror_bytes = 0;   // of these, copies on further NUMA nodes
  size_t kv_bytes = 0;       // maximum; `kv_address_bytes` of addresses are reserved, and memory is mapped on demand
  size_t kv_address_bytes = 0;
  size_t state_bytes = 0;
  size_t arena_bytes = 0;
  size_t scratch_bytes = 0;  // of all threads; known after configurations are chosen
  const DeviceInfo& device(DeviceId id) const { return devices[static_cast<size_t>(id)].info; }
  const DeviceInfo& main_device() const { return device(kMainDevice); }
  const DeviceInfo& device_of(model::WeightId id) const { return device(weights[static_cast<size_t>(id)].device); }
  // The type that kernels read. Copies for the streamed list have it too.
  DType type_of(model::WeightId id) const { return weights[static_cast<size_t>(id)].type; }
  // The device and layout of a weight for the nodes of a list.
  bool streams(ListId list, model::WeightId id) const {
    return is_streamed(list) && weights[static_cast<size_t>(id)].stream.wanted;
  }
  // The list whose weights a node reads.
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
  // The size of a staging buffer: matrices in the layout in which they are copied, before they are repacked. The
  // buffers are at the end of the memory for copies.
  size_t stage_bytes() const;
  // The device that writes the logits.
  DeviceId logits_device() const { return values[static_cast<size_t>(logits)].device; }
  // Whether any u-batch runs the expanded list. With an f32 cache, its keys and values are f32 as well. This pays only
  // if attention can read them on tensor cores.
  bool expands() const {
    const bool pays = kv_type_k != DType::f32 || expands_f32;
    return !expanded.nodes.empty() && (mla_mode == MlaMode::expanded || (mla_mode == MlaMode::automatic && pays));
  }
  // Arena bytes of the keys and values that the expanded list computes for one context: of one layer, or if they are
  // kept, of all layers.
  size_t expanded_bytes() const;
  // Whether the attention ops of the fused list include norm, rotation and store.
  bool fuses_attention() const {
    return std::any_of(keys.begin(), keys.end(), [](const OpUse& use) {
      return std::holds_alternative<ops::RopeAttentionDesc>(use.desc) && use.count_in(ListId::fused) > 0;
    });
  }
  // The list for a u-batch of `tokens` tokens in `runs` sequences.
  const NodeList& list_for(int64_t tokens, int64_t runs = 1) const {
    const bool long_enough = mla_mode == MlaMode::expanded || tokens >= kExpandTokens * runs;
    const bool expand = expands() && long_enough;
    if (!streamed.nodes.empty() && tokens >= streams_from) {
      return expand && !streamed_expanded.nodes.empty() ? streamed_expanded : streamed;
    }
    if (expand) return expanded;
    if (fusion && tokens == 1 && fused_tokens > 0 && !single.nodes.empty()) return single;
    if (fusion && tokens <= fused_tokens && !fused.nodes.empty()) return fused;
    return fusion && tokens <= batched_tokens && !batched.nodes.empty() ? batched : general;
  }
  // The list that computes `NodeList::hidden` for a u-batch.
  const NodeList& hidden_list(int64_t tokens) const {
    return !streamed.nodes.empty() && tokens >= streams_from ? streamed : general;
  }
  size_t total_bytes() const {
    return weights_bytes + kv_bytes + state_bytes + arena_bytes + scratch_bytes + devices.front().stream_bytes;
  }
  size_t lent_bytes() const;  // weights that another session owns; no other number here includes them
  // Bytes of all states of one sequence.
  size_t sequence_state_bytes() const;

  // NUMA nodes over which the CPU's weights and threads are placed; 1 if they are not placed.
  int numa_nodes() const;

  std::string describe(const model::ModelDesc& model) const;
  // The memory of a draft head, as text.
  std::string describe_head() const;
};

// `device`: the main device. Throws PlanError for a context beyond the model's limit, an unsupported cache type or an
// impossible placement; or UnsupportedError.
Plan build_plan(const model::ModelDesc& model, const DeviceInfo& device, const LoadOptions& load,
                const ContextOptions& context, int64_t ubatch, MlaMode mla_mode = MlaMode::automatic,
                const OffloadOptions& offload = {});

// Shares weights between two plans of one file. A weight on the same GPU with the same type and layout exists once:
// `plan` uses the one of `lender` and does not count its bytes. Returns the ids in `lender`, parallel to
// ModelDesc::weights; kNone: not shared.
std::vector<model::WeightId> borrow_weights(Plan& plan, const model::ModelDesc& model, const Plan& lender,
                                            const model::ModelDesc& lending);

// Rows after the end of a sequence that need memory on a GPU that maps it on demand. Kernels may read to the end of a
// tile, and every tile is shorter than that. Memory is mapped in pieces.
inline constexpr int64_t kRowsBehind = 256;
inline constexpr size_t kMappedPiece = size_t{2} << 20;

// Bytes of the keys or values of a layer with `row` bytes per position, for other context settings than the plan's.
size_t kv_memory(const Plan& plan, const ContextOptions& context, const KvLayer& layer, int64_t row);

// Device memory that no plan counts: code of kernels, cuBLAS, graphs, logits.
inline constexpr size_t kDeviceReserve = size_t{512} << 20;

// Throws OutOfMemoryError with remedies if the plan does not fit into `free_bytes` of a GPU. `weights_loaded`: the
// weights are already there, so only the rest is needed.
void check_memory(const Plan& plan, DeviceId gpu, size_t free_bytes, bool weights_loaded = false);
// The same check for the machine, whose memory virtual devices share. Weights that are read in place need no memory.
void check_host_memory(const Plan& plan, size_t free_bytes, bool weights_loaded = false);

// The same check for each device with its own memory limit.
void check_limits(const Plan& plan, bool weights_loaded = false);
// The time to copy `bytes` from one device to another over the links of both; the slower link sets the rate.
double transfer_seconds(const Link& from, const Link& to, size_t bytes);

// Plans the arena again for another u-batch or mla_mode. Op lists and placement do not change.
void layout_arena(Plan& plan, int64_t ubatch);
// Whether a value is in the arena, and its bytes for one u-batch.
bool in_arena(const Plan& plan, ValueId id);
size_t value_bytes(const Plan& plan, const Value& value);
// Assigns an offset to each state, after all nodes have a device.
void layout_states(Plan& plan);
// Computes the memory of the cache.
void count_kv(Plan& plan);
// Plans the cache again, after all weights have a device.
void layout_kv(Plan& plan, const model::ModelDesc& model, const ContextOptions& context);

RopeTable make_rope_table(const model::RopeSpec& rope, const float* frequency_factors);

}  // namespace dyno::plan
