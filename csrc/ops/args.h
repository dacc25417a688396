// Arguments of each family's launch: pointers and runtime scalars. Pointers belong to the device of the launch. Strides
// are in elements unless the name says bytes. A missing optional pointer is null.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dyno::ops {

struct EmbedArgs {
  const void* table = nullptr;   // [rows, n] of the desc's type, plain layout
  int64_t rows = 0;              // the caller checks ids
  const int32_t* ids = nullptr;  // [m]
  float* out = nullptr;          // [m, n]
  float scale = 1.0f;
};

struct NormArgs {
  const float* x = nullptr;
  int64_t x_stride = 0;             // between tokens; rows of one token are contiguous
  const float* weight = nullptr;    // [n], null = all ones
  int64_t weight_stride = 0;        // between the rows of a token: [rows_per_token, n]; 0: the same weights for all
                                    // rows
  const float* residual = nullptr;  // [m, n], if desc.add
  float* out = nullptr;             // may be x
  int64_t out_stride = 0;
  float eps = 0;
  float scale = 1.0f;           // factor of the output, including the residual
  const float* bias = nullptr;  // [n], if desc.centred: added to the product with the weight
};

struct RopeArgs {
  float* x = nullptr;
  int64_t x_stride = 0;                // between tokens
  const int32_t* positions = nullptr;  // [m]
  const float* inv_freq = nullptr;     // [n_rot/2], with rope scaling included
  float mscale = 1.0f;                 // YaRN's factor of cos and sin
  // An additional factor of both: 1 + position_scale * ln(1 + floor(position / position_step)).
  float position_scale = 0;
  int64_t position_step = 1;
};

// The norm of a product that normalises its input rows (desc.norm).
struct NormInside {
  const float* weight = nullptr;  // [k], null = all ones
  float eps = 0;
};

struct MatmulArgs {
  const void* x = nullptr;     // f32 [m, k] or q8 rows
  int64_t x_stride_bytes = 0;  // between tokens
  int64_t x_batch_stride_bytes = 0;
  const void* w = nullptr;
  int64_t w_batch_stride_bytes = 0;
  const float* bias = nullptr;      // [n]
  const float* residual = nullptr;  // [m, n] with y's stride; may be y
  float scale = 1.0f;
  float* y = nullptr;
  int64_t y_stride = 0;  // between tokens
  int64_t y_batch_stride = 0;
  NormInside norm{};
};

struct MatmulIdArgs {
  const void* x = nullptr;
  int64_t x_stride_bytes = 0;  // between rows: tokens, or (token, slot) if x_per_slot
  const void* w = nullptr;
  int64_t w_expert_stride_bytes = 0;
  const float* bias = nullptr;   // [experts, n]
  const int32_t* ids = nullptr;  // [m, used]
  float* y = nullptr;            // [m, used, n], contiguous
  int32_t* workspace = nullptr;  // moe_workspace_ints(m, used, experts) elements
};

struct UpGateArgs {
  const void* x = nullptr;
  int64_t x_stride_bytes = 0;
  const void* w_gate = nullptr;
  const void* w_up = nullptr;
  const float* bias_gate = nullptr;
  const float* bias_up = nullptr;
  float* y = nullptr;
  int64_t y_stride = 0;
  NormInside norm{};
};

struct MoeUpGateArgs {
  const void* x = nullptr;
  int64_t x_stride_bytes = 0;
  const void* x_bytes = nullptr;  // m byte rows of the same values, where desc.bytes
  const void* w_gate = nullptr;
  const void* w_up = nullptr;
  int64_t w_expert_stride_bytes = 0;  // of both matrices
  const float* bias_gate = nullptr;   // [experts, n]
  const float* bias_up = nullptr;
  const int32_t* ids = nullptr;
  float* y = nullptr;  // [m, used, n]
  int32_t* workspace = nullptr;
  NormInside norm{};
  const void* shared_gate = nullptr;  // [shared, k]
  const void* shared_up = nullptr;
  float* shared_y = nullptr;  // [m, shared]
};

// Number of ints that a launch of matmul_id or moe_up_gate needs to group rows by expert.
inline int64_t moe_workspace_ints(int64_t m, int64_t used, int64_t experts) { return m * used + 2 * experts + 2; }

struct MoeRouteArgs {
  const float* logits = nullptr;          // [m, experts]
  const float* selection_bias = nullptr;  // [experts]
  const int32_t* pinned = nullptr;        // [m, used]: fixed choice of experts, instead of the router's
  float scale = 1.0f;
  const float* expert_scale = nullptr;  // [experts], factor of the weights of chosen experts
  int32_t* ids = nullptr;               // [m, used]
  float* weights = nullptr;             // [m, used]
};

struct MoeSumArgs {
  const float* x = nullptr;  // [m, used, n]
  // Rows that another device computed for its experts. If other_ids is 0 or more, the row comes from other_x; without
  // other_x the row is skipped.
  const float* other_x = nullptr;      // [m, used, n]
  const int32_t* other_ids = nullptr;  // [m, used]; null: all rows are in x
  const float* weights = nullptr;      // [m, used]; null: ones
  const float* residual = nullptr;     // [m, n], may be out
  float scale = 1.0f;
  float* out = nullptr;  // [m, n]
};

// Consecutive tokens of one sequence within a batch.
struct SequenceRun {
  int32_t first_token = 0;  // row in the batch
  int32_t n_tokens = 0;
  int32_t position = 0;  // of the first token; the cache already has positions [0, position)
  int32_t slot = 0;      // index of the sequence in the cache
};

struct AttentionArgs {
  const float* q = nullptr;
  int64_t q_stride = 0;                // between tokens
  const std::byte* k_cache = nullptr;  // [slots, ctx, kv_heads, dk] of k_type
  const std::byte* v_cache = nullptr;  // [slots, ctx, kv_heads, dv] of v_type; unused if v_in_k
  int64_t k_row_bytes = 0;             // one position, all heads
  int64_t v_row_bytes = 0;
  int64_t slot_positions = 0;  // ctx
  const SequenceRun* runs = nullptr;
  int32_t n_runs = 0;
  // For the division of a GPU launch only; they do not affect which keys are read. `runs` in host memory, or null, and
  // an upper bound of their positions, after the batch; 0: slot_positions.
  const SequenceRun* host_runs = nullptr;
  int64_t depth = 0;
  const float* sinks = nullptr;  // [heads]
  float scale = 1.0f;
  float softcap = 0;   // if desc.softcap
  int32_t window = 0;  // if desc.windowed: query p reads key j iff p - j < window
  // Rows before a run's position were stored by earlier, completed u-batches, not by the preceding launches.
  bool settled = false;
  float* out = nullptr;
  int64_t out_stride = 0;
  const int32_t* selected = nullptr;  // [m, desc.selected], as family index_select writes it
  int64_t selected_stride = 0;        // between tokens
};

struct KvStoreArgs {
  const float* x = nullptr;  // [m, width]
  int64_t x_stride = 0;
  std::byte* cache = nullptr;  // [slots, ctx, width] of desc.type
  int64_t row_bytes = 0;       // stride between positions
  int64_t byte_offset = 0;     // within a row
  int64_t slot_positions = 0;
  const SequenceRun* runs = nullptr;
  int32_t n_runs = 0;
};

struct CopyArgs {
  const float* x = nullptr;
  int64_t x_stride = 0;
  void* out = nullptr;  // rows of act_q8_row_bytes(k)
  int64_t out_stride_bytes = 0;
};

struct GluArgs {
  const float* gate = nullptr;  // [m, n]
  int64_t gate_stride = 0;
  const float* up = nullptr;  // [m, n], may be y
  int64_t up_stride = 0;
  const int32_t* ids = nullptr;       // [m, used], if desc.experts > 0, as the next two
  const float* gate_scale = nullptr;  // [experts]
  const float* up_scale = nullptr;
  float* y = nullptr;
  int64_t y_stride = 0;
};

// Products of qkv: 0 q, 1 k, 2 v.
struct QkvArgs {
  const float* x = nullptr;
  int64_t x_stride_bytes = 0;  // between tokens
  const void* w[3]{};
  const float* bias[3]{};
  float* y[3]{};
  int64_t y_stride[3]{};  // between tokens
  NormInside norm{};
};

struct MoeDownSumArgs {
  const float* x = nullptr;  // [m, used, k]
  const void* w = nullptr;
  int64_t w_expert_stride_bytes = 0;
  const float* bias = nullptr;      // [experts, n]
  const int32_t* ids = nullptr;     // [m, used]
  const float* weights = nullptr;   // [m, used]
  const float* residual = nullptr;  // [m, n], may be out
  float scale = 1.0f;
  // The launch that wrote the ids has completed when this launch starts, even if the preceding launch is still running.
  bool settled = false;
  const float* shared_x = nullptr;  // [m, shared]
  const void* shared_w = nullptr;   // [n, shared]
  float* out = nullptr;             // [m, n]
};

struct MlaExpandArgs {
  const std::byte* latents = nullptr;  // [m, lora + rope] of the cache's type
  int64_t row_bytes = 0;               // between rows
  const void* k_b = nullptr;
  int64_t k_b_stride_bytes = 0;  // between heads
  const void* v_b = nullptr;
  int64_t v_b_stride_bytes = 0;
  uint16_t* keys = nullptr;    // f16 [m, heads, nope + rope]; f32 with an f32 cache, see expanded_floats()
  uint16_t* values = nullptr;  // f16 [m, heads, dv]; f32 with an f32 cache
};

struct QkvRopeStoreArgs {
  float* q = nullptr;      // updated in place; latent: read only
  int64_t q_stride = 0;    // between tokens, as the next ones
  float* q_out = nullptr;  // if latent; a GPU also writes other queries here instead of in place, if it is not null
  int64_t q_out_stride = 0;
  const float* k = nullptr;
  int64_t k_stride = 0;
  const float* v = nullptr;  // only if not latent
  int64_t v_stride = 0;
  const float* q_norm = nullptr;  // [dk], if desc.q_norm
  const float* k_norm = nullptr;  // [dk] or, if latent, [dk - n_rot]; if desc.k_norm
  float eps = 0;
  const int32_t* positions = nullptr;  // [m]
  const float* inv_freq = nullptr;     // [n_rot/2]
  float mscale = 1.0f;
  std::byte* k_cache = nullptr;  // [slots, ctx, kv_heads, dk] of k_type
  std::byte* v_cache = nullptr;  // [slots, ctx, kv_heads, dv] of v_type
  int64_t k_row_bytes = 0;       // stride between positions
  int64_t v_row_bytes = 0;
  int64_t slot_positions = 0;
  const SequenceRun* runs = nullptr;
  int32_t n_runs = 0;
};

struct RopeAttentionArgs {
  const float* q = nullptr;
  int64_t q_stride = 0;             // between tokens, as the next ones
  const float* q_rotary = nullptr;  // only if latent
  int64_t q_rotary_stride = 0;
  const float* k = nullptr;
  int64_t k_stride = 0;
  const float* v = nullptr;  // only if not latent
  int64_t v_stride = 0;
  const float* q_norm = nullptr;  // as in QkvRopeStoreArgs
  const float* k_norm = nullptr;
  float eps = 0;
  const int32_t* positions = nullptr;  // [m]
  const float* inv_freq = nullptr;     // [n_rot/2]
  float mscale = 1.0f;
  std::byte* k_cache = nullptr;  // as in AttentionArgs; the rows of new tokens are written
  std::byte* v_cache = nullptr;
  int64_t k_row_bytes = 0;
  int64_t v_row_bytes = 0;
  int64_t slot_positions = 0;
  const SequenceRun* runs = nullptr;
  int32_t n_runs = 0;
  const SequenceRun* host_runs = nullptr;  // as in AttentionArgs
  int64_t depth = 0;
  const float* sinks = nullptr;
  float scale = 1.0f;
  float softcap = 0;
  int32_t window = 0;
  bool settled = false;
  float* out = nullptr;
  int64_t out_stride = 0;

  AttentionArgs attention() const {
    return {q,         q_stride, k_cache, v_cache, k_row_bytes, v_row_bytes, slot_positions, runs, n_runs,
            host_runs, depth,    sinks,   scale,   softcap,     window,      settled,        out,  out_stride};
  }
};

struct NormRouteArgs {
  const float* x = nullptr;     // [m, k]
  int64_t x_stride = 0;         // between tokens
  const float* norm = nullptr;  // [k], null = all ones
  float eps = 0;
  const void* w = nullptr;      // [experts, k] of the desc's type and layout
  const float* bias = nullptr;  // [experts], added to the router's product
  float* normed = nullptr;      // [m, k], the normalised rows, for other readers
  int64_t normed_stride = 0;
  void* bytes = nullptr;  // m byte rows of the normalised rows, where desc.bytes
  MoeRouteArgs route{};   // without logits
};

struct ShortConvArgs {
  const float* x = nullptr;       // [m, n]
  int64_t x_stride = 0;           // between tokens, as the next ones
  const float* before = nullptr;  // [m, n], if desc.gated
  int64_t before_stride = 0;
  const float* after = nullptr;  // [m, n], if desc.gated
  int64_t after_stride = 0;
  const float* w = nullptr;     // [n, taps]; the last tap applies to the token itself
  const float* bias = nullptr;  // [n]
  float* state = nullptr;       // [slots, taps - 1, n], the oldest input first
  int64_t slot_positions = 0;   // ctx
  const SequenceRun* runs = nullptr;
  int32_t n_runs = 0;
  float* y = nullptr;  // [m, n], must not be an input
  int64_t y_stride = 0;
};

struct LinearAttentionArgs {
  const float* q = nullptr;  // [m, k_heads, dk]
  int64_t q_stride = 0;      // between tokens, as the next ones
  const float* k = nullptr;  // [m, k_heads, dk]
  int64_t k_stride = 0;
  const float* v = nullptr;  // [m, v_heads, dv]
  int64_t v_stride = 0;
  const float* step = nullptr;  // [m, v_heads], or [m, v_heads, dk] with desc.channel_decay
  int64_t step_stride = 0;
  const float* beta = nullptr;  // [m, v_heads], if desc.rule is delta
  int64_t beta_stride = 0;
  const float* decay = nullptr;      // [v_heads], negative
  const float* step_bias = nullptr;  // [v_heads], or [v_heads, dk] with desc.channel_decay
  const float* skip = nullptr;       // [v_heads], if desc.rule is additive
  float eps = 0;                     // for the norms of q and k, if desc.rule is delta
  float* state = nullptr;            // [slots, v_heads, dk, dv]
  int64_t slot_positions = 0;        // ctx
  const SequenceRun* runs = nullptr;
  int32_t n_runs = 0;
  float* out = nullptr;  // [m, v_heads, dv], must not be an input
  int64_t out_stride = 0;
};

struct SampleSettings;

struct SampleArgs {
  const float* logits = nullptr;                 // [m, n_vocab]
  const float* uniform = nullptr;                // [m] in [0, 1)
  float temperature = 1.0f;                      // 0 = greedy
  int32_t top_k = 0;                             // 0 = off
  float top_p = 1.0f;                            // 1 = off
  float min_p = 0.0f;                            // 0 = off
  const SampleSettings* row_settings = nullptr;  // [m], instead of the four above; null: these apply to every row
  // A row gives -1 if it has NaN or plus infinity, or only minus infinity. If false, NaN is only never drawn.
  bool finite_only = false;
  int32_t* out = nullptr;  // [m]
};

}  // namespace dyno::ops
