#include "model/builder.h"

#include <array>
#include <cmath>

#include "core/error.h"
#include "gguf/dequantize.h"
#include "gguf/text.h"

namespace dyno::model {
namespace {

// Far above any real model, and far below the size at which a product of two dimensions overflows.
constexpr int64_t kMaxDimension = int64_t{1} << 31;

}  // namespace

Builder::Builder(const GgufFile& file, ModelDesc& model_out, Part part) : model(model_out), file_(file), part_(part) {}

std::string Builder::key(std::string_view name) const { return str_cat(model.architecture, ".", name); }
std::string Builder::blk(int64_t layer, std::string_view what) { return str_cat("blk.", layer, ".", what); }

bool Builder::has_key(std::string_view name) const { return file_.metadata().contains(key(name)); }
bool Builder::is_array(std::string_view name) const {
  const Metadata::Entry* entry = file_.metadata().find(key(name));
  return entry != nullptr && entry->value.type == MetaType::array;
}
bool Builder::has_tensor(std::string_view name) const { return file_.find_tensor(name) != nullptr; }
int64_t Builder::rows_of(std::string_view name) const {
  const TensorInfo* tensor = file_.find_tensor(name);
  return tensor == nullptr ? 0 : tensor->dims[1];
}

int64_t Builder::integer(std::string_view name, int64_t least) const {
  DYNO_CHECK(ModelError, has_key(name), "[model] metadata key ", key(name), " is missing");
  return integer_or(name, 0, least);
}

int64_t Builder::integer_or(std::string_view name, int64_t fallback, int64_t least) const {
  const int64_t value = file_.metadata().find_i64(key(name)).value_or(fallback);
  DYNO_CHECK(ModelError, value >= least && value <= kMaxDimension, "[model] ", key(name), " is ", value,
             "; expected a value from ", least, " to ", kMaxDimension);
  return value;
}

double Builder::real(std::string_view name) const {
  DYNO_CHECK(ModelError, has_key(name), "[model] metadata key ", key(name), " is missing");
  return real_or(name, 0);
}

double Builder::real_or(std::string_view name, double fallback) const {
  const auto found = file_.metadata().find_f32(key(name));
  const double value = found ? static_cast<double>(*found) : fallback;
  DYNO_CHECK(ModelError, std::isfinite(value), "[model] ", key(name), " is ", value, "; expected a finite number");
  return value;
}

bool Builder::flag_or(std::string_view name, bool fallback) const {
  return file_.metadata().find_bool(key(name)).value_or(fallback);
}

std::optional<std::string> Builder::text(std::string_view name) const {
  const auto value = file_.metadata().find_string(key(name));
  if (!value) return std::nullopt;
  return std::string(*value);
}

const std::vector<int64_t>& Builder::integers(std::string_view name) const {
  const auto found = integers_.find(name);
  if (found != integers_.end()) return found->second;
  return integers_.emplace(name, file_.metadata().get_i64_array(key(name))).first->second;
}

const std::vector<bool>& Builder::flags(std::string_view name) const {
  const auto found = flags_.find(name);
  if (found != flags_.end()) return found->second;
  return flags_.emplace(name, file_.metadata().get_bool_array(key(name))).first->second;
}

int64_t Builder::per_layer(std::string_view name, int64_t index, std::optional<int64_t> fallback, int64_t least) const {
  if (is_array(name)) {
    const std::vector<int64_t>& values = integers(name);
    DYNO_CHECK(ModelError, index < static_cast<int64_t>(values.size()), "[model] ", key(name), " has ", values.size(),
               " entries; layer ", index, " needs one");
    const int64_t value = values[static_cast<size_t>(index)];
    DYNO_CHECK(ModelError, value >= least && value <= kMaxDimension, "[model] ", key(name), "[", index, "] is ", value,
               "; expected at least ", least);
    return value;
  }
  return fallback ? integer_or(name, *fallback, least) : integer(name, least);
}

const TensorInfo& Builder::expect_tensor(const std::string& name, std::initializer_list<int64_t> shape) const {
  const TensorInfo* tensor = file_.find_tensor(name);
  DYNO_CHECK(ModelError, tensor != nullptr, "[model] tensor ", name, " is missing (architecture ", model.architecture,
             ")");
  int64_t i = 0;
  bool same = true;
  std::string expected = "[";
  for (const int64_t dim : shape) {
    expected += str_cat(i > 0 ? ", " : "", dim);
    same = same && (i < 4) && tensor->dims[i] == dim;
    ++i;
  }
  for (; i < tensor->n_dims; ++i) same = same && tensor->dims[i] == 1;
  DYNO_CHECK(ModelError, same, "[model] tensor ", name, " has shape ", describe_shape(*tensor), "; expected ", expected,
             "] (contracted dimension first)");
  return *tensor;
}

WeightId Builder::add(const std::string& name, Transform transform, DType type, int64_t batch, int64_t rows,
                      int64_t cols) {
  used_.insert(name);
  const TensorInfo* tensor = file_.find_tensor(name);
  if (tensor != nullptr && dtype_info(tensor->type).kind == TypeClass::interleaved) {
    DYNO_CHECK(UnsupportedError, transform == Transform::none, "[model] tensor ", name, " is ",
               dtype_name(tensor->type), ", which cannot be taken apart per head; requantise it as ",
               dtype_name(dtype_info(tensor->type).plain));
  }
  model.weights.push_back({.name = name,
                           .tensor = tensor,
                           .transform = transform,
                           .type = dtype_info(type).plain,
                           .batch = batch,
                           .rows = rows,
                           .cols = cols});
  const auto id = static_cast<WeightId>(model.weights.size() - 1);
  if (tensor != nullptr && tensor->type == DType::nvfp4) add_scale(name, id);
  return id;
}

// Converters of ModelOpt checkpoints write <tensor>.scale. They also write <tensor>.input_scale, for engines that
// quantise activations to four bits, which this engine does not.
void Builder::add_scale(const std::string& name, WeightId id) {
  const std::string stem = name.substr(0, name.rfind('.'));
  used_.insert(stem + ".input_scale");
  const std::string factor = stem + ".scale";
  const TensorInfo* tensor = file_.find_tensor(factor);
  if (tensor == nullptr) return;
  const int64_t batch = model.weights.back().batch;
  if (batch > 1 && tensor->dims[0] != 1) {
    const WeightId scales = values(factor, batch);
    model.weights[static_cast<size_t>(id)].scales = scales;
  } else {
    const double scale = number(factor);
    DYNO_CHECK(ModelError, scale != 0, "[model] tensor ", factor, " is 0");
    model.weights[static_cast<size_t>(id)].scale = scale;
  }
  scaled_[name] = id;
}

WeightId Builder::matrix(const std::string& name, int64_t rows, int64_t cols) {
  const TensorInfo& tensor = expect_tensor(name, {cols, rows});
  return add(name, Transform::none, tensor.type, 1, rows, cols);
}

WeightId Builder::matrix_optional(const std::string& name, int64_t rows, int64_t cols) {
  return has_tensor(name) ? matrix(name, rows, cols) : kNone;
}

WeightId Builder::stack(const std::string& name, int64_t batch, int64_t rows, int64_t cols) {
  const TensorInfo& tensor = expect_tensor(name, {cols, rows, batch});
  return add(name, Transform::none, tensor.type, batch, rows, cols);
}

WeightId Builder::vector(const std::string& name, int64_t n) {
  const TensorInfo& tensor = expect_tensor(name, {n});
  DYNO_CHECK(ModelError, is_float(tensor.type), "[model] tensor ", name, " is ", dtype_name(tensor.type),
             "; expected f32, f16 or bf16");
  return add(name, Transform::to_f32, DType::f32, 1, 1, n);
}

WeightId Builder::values(const std::string& name, int64_t n, int64_t first) {
  const TensorInfo* tensor = file_.find_tensor(name);
  DYNO_CHECK(ModelError, tensor != nullptr, "[model] tensor ", name, " is missing (architecture ", model.architecture,
             ")");
  DYNO_CHECK(ModelError, is_float(tensor->type), "[model] tensor ", name, " is ", dtype_name(tensor->type),
             "; expected f32, f16 or bf16");
  int64_t count = 1;
  for (int64_t i = 0; i < tensor->n_dims; ++i) count *= tensor->dims[i];
  DYNO_CHECK(ModelError, count == n && (first == 0 || tensor->dims[0] == first), "[model] tensor ", name, " has shape ",
             describe_shape(*tensor), "; expected ", n, " numbers",
             first == 0 ? std::string() : str_cat(", ", first, " in its first dimension"));
  return add(name, Transform::to_f32, DType::f32, 1, 1, n);
}

WeightId Builder::vector_optional(const std::string& name, int64_t n, int64_t batch) {
  if (!has_tensor(name)) return kNone;
  const auto scaled =
      name.ends_with(".bias") ? scaled_.find(name.substr(0, name.size() - 4) + "weight") : scaled_.end();
  if (scaled != scaled_.end()) {
    // The product is multiplied by the factor after the bias was added, so the bias is divided by it.
    const Weight& matrix = model.weight(scaled->second);
    DYNO_CHECK(UnsupportedError, batch == 1, "[model] tensor ", name,
               ": biases of experts whose matrices have factors (", matrix.name, ") are not supported");
    const double scale = matrix.scale;
    const WeightId id = vector(name, n);
    model.weights.back().scale = 1.0 / scale;
    return id;
  }
  if (batch == 1) return vector(name, n);
  const TensorInfo& tensor = expect_tensor(name, {n, batch});
  DYNO_CHECK(ModelError, is_float(tensor.type), "[model] tensor ", name, " is ", dtype_name(tensor.type),
             "; expected f32, f16 or bf16");
  return add(name, Transform::to_f32, DType::f32, batch, 1, n);
}

int64_t Builder::conv_taps(std::string_view name) const {
  const int64_t taps = integer(name, 2);
  DYNO_CHECK(UnsupportedError, taps <= kMaxConvTaps, "[model] ", key(name), " is ", taps, "; supported: 2 to ",
             kMaxConvTaps);
  return taps;
}

WeightId Builder::half(const std::string& name, bool second, int64_t parts, int64_t rows, int64_t cols, bool stacked) {
  DYNO_CHECK(ModelError, rows <= kMaxDimension / 4, "[model] tensor ", name, ": ", rows,
             " rows in each part; expected at most ", kMaxDimension / 4);
  const TensorInfo& tensor =
      stacked ? expect_tensor(name, {cols, 2 * rows, parts}) : expect_tensor(name, {cols, parts * 2 * rows});
  const WeightId id = add(name, second ? Transform::second_half : Transform::first_half, tensor.type,
                          stacked ? parts : 1, stacked ? rows : parts * rows, cols);
  model.weights.back().name += second ? " (second half)" : " (first half)";
  model.weights.back().parts = parts;
  return id;
}

double Builder::number(const std::string& name) {
  const TensorInfo& tensor = expect_tensor(name, {1});
  DYNO_CHECK(ModelError, is_float(tensor.type), "[model] tensor ", name, " is ", dtype_name(tensor.type),
             "; expected f32, f16 or bf16");
  float value = 0;
  dequantize_row(tensor.type, tensor.data, &value, 1);
  DYNO_CHECK(ModelError, std::isfinite(value), "[model] tensor ", name, " holds ", value, "; expected a finite number");
  used_.insert(name);
  return static_cast<double>(value);
}

WeightId Builder::derived(const std::string& name, const std::string& suffix, Transform transform, DType type,
                          int64_t batch, int64_t rows, int64_t cols) {
  const WeightId id = add(name, transform, type, batch, rows, cols);
  model.weights.back().name += suffix;
  return id;
}

void Builder::common(const CommonFacts& facts) {
  ModelDesc& m = model;
  const int64_t blocks = integer("block_count", 1);
  DYNO_CHECK(ModelError, blocks <= 4096, "[model] ", key("block_count"), " is ", blocks, "; expected at most 4096");
  // Next-token prediction blocks come last and are not part of decoding.
  const int64_t next_token = integer_or("nextn_predict_layers", 0);
  DYNO_CHECK(ModelError, next_token < blocks, "[model] ", key("nextn_predict_layers"), " is ", next_token,
             "; expected fewer than the ", blocks, " blocks of the model");
  trunk_layers_ = blocks - next_token;
  m.draft_blocks = next_token;
  m.n_layers = is_head() ? 1 : trunk_layers_;
  m.layers.resize(static_cast<size_t>(m.n_layers));
  m.n_embd = integer("embedding_length", 1);
  m.n_ctx_train = integer("context_length", 1);
  DYNO_CHECK(UnsupportedError, flag_or("attention.causal", true), "[model] ", key("attention.causal"),
             " is false: each token attends to later ones, too; supported: causal attention");
  m.norm_eps = real(facts.eps);
  DYNO_CHECK(ModelError, m.norm_eps > 0 && m.norm_eps < 1, "[model] ", key(facts.eps), " is ", m.norm_eps,
             "; expected a number between 0 and 1");

  if (is_head()) return head_facts();
  const TensorInfo* table = file_.find_tensor("token_embd.weight");
  DYNO_CHECK(ModelError, table != nullptr, "[model] tensor token_embd.weight is missing");
  m.n_vocab = table->dims[1];
  m.token_embd = matrix("token_embd.weight", m.n_vocab, m.n_embd);
  m.weights.back().table = true;
  m.output_norm = vector(std::string(facts.output_norm), m.n_embd);
  m.tied_output = !has_tensor("output.weight");
  if (m.tied_output) {
    const TensorInfo& shared = expect_tensor("token_embd.weight", {m.n_embd, m.n_vocab});
    m.output = add("token_embd.weight", Transform::none, shared.type, 1, m.n_vocab, m.n_embd);
    m.weights.back().name += " (output)";
  } else {
    m.output = matrix("output.weight", m.n_vocab, m.n_embd);
  }
  m.output_bias = vector_optional("output.bias", m.n_vocab);
}

std::vector<Builder::Block> Builder::blocks() {
  std::vector<Block> out;
  for (size_t i = 0; i < model.layers.size(); ++i) {
    out.push_back({model.layers[i], is_head() ? trunk_layers_ : static_cast<int64_t>(i)});
  }
  return out;
}

// If the file has no embedding or output for the head, it uses the model's.
void Builder::head_facts() {
  ModelDesc& m = model;
  DYNO_CHECK(UnsupportedError, m.draft_blocks > 0, "[model] the file has no block that predicts a further token (",
             key("nextn_predict_layers"), " is 0), so there is no head to draft with");
  const auto own = [&](std::string_view what) { return blk(trunk_layers_, str_cat("nextn.", what, ".weight")); };
  const auto own_or = [&](std::string_view what, const std::string& shared) {
    return has_tensor(own(what)) ? own(what) : shared;
  };
  const std::string table = own_or("embed_tokens", "token_embd.weight");
  DYNO_CHECK(ModelError, has_tensor(table), "[model] tensor ", table, " is missing");
  m.n_vocab = rows_of(table);
  m.token_embd = matrix(table, m.n_vocab, m.n_embd);
  m.weights.back().table = true;
  m.output_norm = vector(own("shared_head_norm"), m.n_embd);
  m.tied_output = !has_tensor(own("shared_head_head")) && !has_tensor("output.weight");
  m.output =
      matrix(own_or("shared_head_head", m.tied_output ? "token_embd.weight" : "output.weight"), m.n_vocab, m.n_embd);
  m.draft_input = DraftInput{.embd_norm = vector(own("enorm"), m.n_embd),
                             .hidden_norm = vector(own("hnorm"), m.n_embd),
                             .projection = matrix(own("eh_proj"), m.n_embd, 2 * m.n_embd)};
}

RopeSpec Builder::rope(bool neox, int64_t rotary_dims) {
  RopeSpec r;
  r.neox = neox;
  const int64_t heads = per_layer("attention.head_count", 0, std::nullopt, 1);
  const int64_t head_dim = integer_or("attention.key_length", model.n_embd / heads, 1);
  r.n_rot = rotary_dims > 0 ? rotary_dims : integer_or("rope.dimension_count", head_dim, 2);
  DYNO_CHECK(ModelError, r.n_rot >= 2 && r.n_rot % 2 == 0, "[model] ", key("rope.dimension_count"), " is ", r.n_rot,
             "; expected an even number of at least 2");
  r.base = real_or("rope.freq_base", 10000.0);
  DYNO_CHECK(ModelError, r.base > 1, "[model] ", key("rope.freq_base"), " is ", r.base, "; expected more than 1");

  // A file with a factor but no type has linear scaling. The oldest files call the factor scale_linear.
  const std::string scaling = text("rope.scaling.type").value_or("linear");
  const std::string_view factor = has_key("rope.scaling.factor") ? "rope.scaling.factor" : "rope.scale_linear";
  r.factor = real_or(factor, 1.0);
  DYNO_CHECK(ModelError, r.factor >= 0, "[model] ", key(factor), " is ", r.factor, "; expected 0 or more");
  r.attention_factor = real_or("rope.scaling.attn_factor", 1.0);
  if (scaling == "linear") {
    r.scaling = RopeScaling::linear;
  } else if (scaling == "yarn") {
    r.scaling = RopeScaling::yarn;
    r.original_context = integer_or("rope.scaling.original_context_length", model.n_ctx_train, 1);
    r.beta_fast = real_or("rope.scaling.yarn_beta_fast", 32.0);
    r.beta_slow = real_or("rope.scaling.yarn_beta_slow", 1.0);
    DYNO_CHECK(ModelError, r.beta_fast > 0 && r.beta_slow > 0, "[model] YaRN betas of ", r.beta_fast, " and ",
               r.beta_slow, "; expected positive numbers");
  } else if (scaling == "none") {
    r.factor = 1.0;
  } else {
    throw UnsupportedError(
        str_cat("[model] ", key("rope.scaling.type"), " is ", in_quotes(scaling), "; supported: none, linear, yarn"));
  }
  if (r.factor == 0) r.factor = 1.0;
  if (r.factor == 1.0) r.scaling = RopeScaling::none;
  if (has_tensor("rope_freqs.weight")) r.frequency_factors = vector("rope_freqs.weight", r.n_rot / 2);
  for (const std::string_view name : {"rope_factors_long.weight", "rope_factors_short.weight"}) {
    DYNO_CHECK(UnsupportedError, !has_tensor(name), "[model] tensor ", name, ": long-rope scaling is not supported");
  }
  return r;
}

namespace {

// The queries, with or without a gate next to them, and the keys and values if the layer has them.
void read_projections(Builder& b, AttentionSpec& a, int64_t i, const Builder::GqaFacts& facts) {
  const int64_t n_embd = b.model.n_embd;
  const int64_t q_rows = a.heads * a.dk, k_rows = a.kv_heads * a.dk, v_rows = a.kv_heads * a.dv;
  const auto name = [&](const char* part) { return b.blk(i, part); };
  if (facts.gated) {
    a.q = b.half(name("attn_q.weight"), /*second=*/false, a.heads, a.dk, n_embd);
    a.gate = b.half(name("attn_q.weight"), /*second=*/true, a.heads, a.dk, n_embd);
    DYNO_CHECK(ModelError, a.dk == a.dv, "[model] layer ", i, ": a gate has ", a.dk, " dims and a value head ", a.dv,
               "; expected as many");
    a.k = b.matrix(name("attn_k.weight"), k_rows, n_embd);
    a.v = b.matrix(name("attn_v.weight"), v_rows, n_embd);
  } else if (facts.shared_kv >= 0) {
    a.q = b.matrix(name("attn_q.weight"), q_rows, n_embd);
  } else if (b.has_tensor(name("attn_qkv.weight"))) {
    a.qkv = b.matrix(name("attn_qkv.weight"), q_rows + k_rows + v_rows, n_embd);
    a.qkv_bias = b.vector_optional(name("attn_qkv.bias"), q_rows + k_rows + v_rows);
  } else {
    a.q = b.matrix(name("attn_q.weight"), q_rows, n_embd);
    a.k = b.matrix(name("attn_k.weight"), k_rows, n_embd);
    a.v_is_k = facts.v_may_be_k && !b.has_tensor(name("attn_v.weight"));
    DYNO_CHECK(ModelError, !a.v_is_k || a.dk == a.dv, "[model] layer ", i,
               ": attn_v.weight is missing, so keys are the values too, but a value has ", a.dv, " dims and a key ",
               a.dk);
    if (!a.v_is_k) a.v = b.matrix(name("attn_v.weight"), v_rows, n_embd);
    a.q_bias = b.vector_optional(name("attn_q.bias"), q_rows);
    a.k_bias = b.vector_optional(name("attn_k.bias"), k_rows);
    a.v_bias = b.vector_optional(name("attn_v.bias"), v_rows);
  }
}

}  // namespace

void Builder::gqa(LayerSpec& layer, int64_t i, const RopeSpec& rope_spec, const GqaFacts& facts) {
  const ModelDesc& m = model;
  AttentionSpec& a = layer.attention;
  a.kind = AttentionKind::gqa;
  a.heads = per_layer("attention.head_count", i, std::nullopt, 1);
  a.kv_heads = per_layer("attention.head_count_kv", i, a.heads, 1);
  a.dk = facts.key_length > 0 ? facts.key_length : integer_or("attention.key_length", m.n_embd / a.heads, 1);
  a.dv = facts.value_length > 0 ? facts.value_length : integer_or("attention.value_length", m.n_embd / a.heads, 1);
  a.rope = rope_spec;
  DYNO_CHECK(ModelError, a.heads % a.kv_heads == 0, "[model] layer ", i, ": ", a.heads, " heads and ", a.kv_heads,
             " key-value heads; expected a multiple");
  DYNO_CHECK(ModelError, rope_spec.n_rot <= a.dk, "[model] layer ", i, ": ", rope_spec.n_rot,
             " dims rotate, but a head has ", a.dk);
  a.scale = 1.0 / std::sqrt(static_cast<double>(a.dk));
  a.softcap = real_or("attn_logit_softcapping", 0);

  if (facts.norm) layer.attn_norm = vector(blk(i, "attn_norm.weight"), m.n_embd);
  a.shared_kv = facts.shared_kv;
  read_projections(*this, a, i, facts);
  a.qk_norm = facts.qk_norm;
  const bool whole = facts.qk_norm == QkNorm::projection;
  a.q_norm = vector_optional(blk(i, "attn_q_norm.weight"), whole ? a.heads * a.dk : a.dk);
  if (facts.shared_kv < 0) a.k_norm = vector_optional(blk(i, "attn_k_norm.weight"), whole ? a.kv_heads * a.dk : a.dk);
  a.output = matrix(blk(i, "attn_output.weight"), m.n_embd, a.heads * a.dv);
  a.output_bias = vector_optional(blk(i, "attn_output.bias"), m.n_embd);
}

void Builder::require_qk_norm(const LayerSpec& layer, int64_t i) const {
  DYNO_CHECK(ModelError, layer.attention.q_norm != kNone && layer.attention.k_norm != kNone, "[model] tensor ",
             blk(i, layer.attention.q_norm == kNone ? "attn_q_norm.weight" : "attn_k_norm.weight"), " is missing");
}

std::optional<bool> Builder::layer_flag(std::string_view name, int64_t i) const {
  if (!is_array(name)) return std::nullopt;
  const std::vector<bool>& values = flags(name);
  DYNO_CHECK(ModelError, i < static_cast<int64_t>(values.size()), "[model] ", key(name), " has ", values.size(),
             " entries; layer ", i, " needs one");
  return values[static_cast<size_t>(i)];
}

bool Builder::is_local_layer(int64_t i, int64_t default_pattern) const {
  constexpr std::string_view kPattern = "attention.sliding_window_pattern";
  if (const auto local = layer_flag(kPattern, i)) return *local;
  return (i + 1) % integer_or(kPattern, default_pattern, 1) != 0;
}

void Builder::dense_ffn(LayerSpec& layer, int64_t i, int64_t width, bool gated) {
  const int64_t n_embd = model.n_embd;
  FfnSpec& f = layer.ffn;
  f.kind = FfnKind::dense;
  f.dense_width = width;
  if (gated) f.gate = matrix(blk(i, "ffn_gate.weight"), width, n_embd);
  f.up = matrix(blk(i, "ffn_up.weight"), width, n_embd);
  f.down = matrix(blk(i, "ffn_down.weight"), n_embd, width);
  if (gated) f.gate_bias = vector_optional(blk(i, "ffn_gate.bias"), width);
  f.up_bias = vector_optional(blk(i, "ffn_up.bias"), width);
  f.down_bias = vector_optional(blk(i, "ffn_down.bias"), n_embd);
}

namespace {

void read_routing(Builder& b, FfnSpec& f, int64_t i, const Builder::MoeFacts& facts) {
  f.experts = b.integer("expert_count", 1);
  f.used = b.integer("expert_used_count", 1);
  f.groups = b.integer_or("expert_group_count", 1);
  f.groups_used = b.integer_or("expert_group_used_count", f.groups);
  DYNO_CHECK(ModelError, f.experts <= 65536 && f.used <= f.experts, "[model] a token uses ", f.used, " of ", f.experts,
             " experts; expected at most all of at most 65536");
  if (f.groups <= 1) f.groups = f.groups_used = 1;
  DYNO_CHECK(ModelError,
             f.experts % f.groups == 0 && f.groups_used >= 1 && f.groups_used <= f.groups &&
                 f.groups_used * (f.experts / f.groups) >= f.used,
             "[model] ", f.experts, " experts in ", f.groups, " groups, of which a token uses ", f.groups_used,
             ": it cannot choose ", f.used, " experts there");

  const std::array gatings = {facts.gating, ops::Gating::softmax, ops::Gating::sigmoid, ops::Gating::softmax_selected};
  const int64_t gating = b.integer_or("expert_gating_func", 0);
  DYNO_CHECK(UnsupportedError, gating >= 0 && gating < std::ssize(gatings), "[model] ", b.key("expert_gating_func"),
             " is ", gating, "; supported: 1 softmax, 2 sigmoid, 3 softmax over the selected");
  f.gating = gatings[static_cast<size_t>(gating)];
  f.normalize = b.flag_or("expert_weights_norm", facts.normalize);
  f.weights_scale = b.real_or("expert_weights_scale", 1.0);
  if (f.weights_scale == 0) f.weights_scale = 1.0;  // the format writes 0 for "none"

  f.router = b.matrix(b.blk(i, "ffn_gate_inp.weight"), f.experts, b.model.n_embd);
  f.router_bias = b.vector_optional(b.blk(i, "ffn_gate_inp.bias"), f.experts);
  f.selection_bias = b.vector_optional(b.blk(i, "exp_probs_b.bias"), f.experts);
}

void read_experts(Builder& b, FfnSpec& f, int64_t i, bool gated) {
  const int64_t n_embd = b.model.n_embd;
  if (const std::string merged = b.blk(i, "ffn_gate_up_exps.weight"); b.has_tensor(merged)) {
    f.experts_gate = b.half(merged, /*second=*/false, f.experts, f.width, n_embd, /*stacked=*/true);
    f.experts_up = b.half(merged, /*second=*/true, f.experts, f.width, n_embd, /*stacked=*/true);
  } else {
    if (gated) f.experts_gate = b.stack(b.blk(i, "ffn_gate_exps.weight"), f.experts, f.width, n_embd);
    f.experts_up = b.stack(b.blk(i, "ffn_up_exps.weight"), f.experts, f.width, n_embd);
  }
  f.experts_down = b.stack(b.blk(i, "ffn_down_exps.weight"), f.experts, n_embd, f.width);
  for (const WeightId id : {f.experts_gate, f.experts_up, f.experts_down}) {
    DYNO_CHECK(ModelError, id == kNone || b.model.weight(id).scale == 1.0, "[model] tensor ", b.model.weight(id).name,
               " has one scale; expected one for each of ", f.experts, " experts");
  }
  if (gated) f.experts_gate_bias = b.vector_optional(b.blk(i, "ffn_gate_exps.bias"), f.width, f.experts);
  f.experts_up_bias = b.vector_optional(b.blk(i, "ffn_up_exps.bias"), f.width, f.experts);
  f.experts_down_bias = b.vector_optional(b.blk(i, "ffn_down_exps.bias"), n_embd, f.experts);
}

void read_shared_expert(Builder& b, FfnSpec& f, int64_t i, const Builder::MoeFacts& facts) {
  const int64_t n_embd = b.model.n_embd;
  const std::string up = b.blk(i, "ffn_up_shexp.weight");
  if (facts.shared_width == 0 && !b.has_tensor(up)) return;
  DYNO_CHECK(ModelError, facts.shared_width > 0, "[model] tensor ", up, " exists, but ",
             b.key("expert_shared_feed_forward_length"), " is missing or 0");
  f.dense_width = facts.shared_width;
  if (facts.gated) f.gate = b.matrix(b.blk(i, "ffn_gate_shexp.weight"), facts.shared_width, n_embd);
  f.up = b.matrix(up, facts.shared_width, n_embd);
  f.down = b.matrix(b.blk(i, "ffn_down_shexp.weight"), n_embd, facts.shared_width);
  // Some files store the single row as a vector.
  f.shared_gate = b.matrix_optional(b.blk(i, "ffn_gate_inp_shexp.weight"), 1, n_embd);
}

}  // namespace

void Builder::moe_ffn(FfnSpec& f, int64_t i, const MoeFacts& facts) {
  DYNO_CHECK(ModelError, facts.width > 0, "[model] ", key("expert_feed_forward_length"), " is ", facts.width,
             "; expected 1 or more");
  f.kind = FfnKind::moe;
  f.width = facts.width;
  read_routing(*this, f, i, facts);
  read_experts(*this, f, i, facts.gated);
  read_shared_expert(*this, f, i, facts);
}

void Builder::finish() {
  constexpr std::string_view kBias = ".bias";
  for (const TensorInfo& tensor : file_.tensors()) {
    if (is_head()) break;  // only the trunk's description lists them
    if (used_.contains(tensor.name)) continue;
    model.unused_tensors.emplace_back(tensor.name);
    const std::string_view name = tensor.name;
    if (!name.ends_with(kBias)) continue;
    // Without the bias of a matrix that it uses, an answer would be wrong.
    const std::string matrix = str_cat(name.substr(0, name.size() - kBias.size()), ".weight");
    DYNO_CHECK(UnsupportedError, !used_.contains(matrix), "[model] tensor ", name,
               " is a bias, but models of architecture ", in_quotes(model.architecture),
               " have none there; supported: files without it");
  }
}

}  // namespace dyno::model
