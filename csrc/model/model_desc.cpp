#include "model/model_desc.h"

#include <algorithm>
#include <array>
#include <charconv>

#include "core/error.h"
#include "gguf/text.h"
#include "model/builder.h"

namespace dyno::model {
namespace {

constexpr bool has_head = true, no_head = false;

constexpr std::array kArchitectures = {
#define DYNO_ARCHITECTURE(name, builder, head, ...) Architecture{name, build_##builder, head},
#include "model/architectures.def"
};

void check_types(const ModelDesc& model) {
  for (const Weight& w : model.weights) {
    DYNO_CHECK(UnsupportedError, dtype_info(w.type).is_weight, "[model] tensor ", w.name, " is ", dtype_name(w.type),
               ", a type that no kernel here multiplies with");
  }
}

}  // namespace

std::vector<std::string_view> known_architectures() {
  std::vector<std::string_view> names;
  for (const Architecture& a : kArchitectures) names.push_back(a.name);
  return names;
}

ModelDesc describe_model(const GgufFile& file, Part part) {
  const auto architecture = file.metadata().find_string("general.architecture");
  DYNO_CHECK(ModelError, architecture.has_value(), "[model] metadata key general.architecture is missing");
  for (const Architecture& known : kArchitectures) {
    if (known.name != *architecture) continue;
    DYNO_CHECK(UnsupportedError, part == Part::trunk || known.has_head,
               "[model] a head that drafts tokens is not supported for architecture ", known.name);
    ModelDesc model;
    model.architecture = std::string(*architecture);
    const std::string_view name = file.metadata().find_string("general.name").value_or("");
    model.name = is_utf8(name) ? std::string(name) : in_quotes(name);
    Builder builder(file, model, part);
    known.build(builder);
    builder.finish();
    check_types(model);
    return model;
  }
  DYNO_CHECK(UnsupportedError, *architecture != "clip" && *architecture != "mmproj", "[model] the file holds only the ",
             "vision or audio part of a model (general.architecture ", in_quotes(*architecture),
             "); open the file with its text model");
  std::string names;
  for (const Architecture& known : kArchitectures) names += str_cat(names.empty() ? "" : ", ", known.name);
  throw UnsupportedError(
      str_cat("[model] architecture ", in_quotes(*architecture), " is not supported; known: ", names));
}

ModelDesc first_layers(ModelDesc model, int64_t count) {
  DYNO_CHECK(PlanError, count >= 0 && count <= model.n_layers, "[model] layers is ", count, "; the model has ",
             model.n_layers, ", so expected 1 to ", model.n_layers, ", or 0 for all");
  if (count == 0 || count == model.n_layers) return model;
  DYNO_CHECK(UnsupportedError, model.layer_input == 0, "[model] layers is ", count, ": the per-layer embeddings of ",
             model.architecture, " are computed for all layers at once, so only the whole model can run");
  const auto is_later = [&](const Weight& weight) {
    constexpr std::string_view kPrefix = "blk.";
    int64_t layer = -1;
    const std::string_view name = weight.name;
    if (name.starts_with(kPrefix)) std::from_chars(name.data() + kPrefix.size(), name.data() + name.size(), layer);
    return layer >= count;
  };
  // Weights are addressed by index, so later ones can only be removed from the end.
  const auto first = std::find_if(model.weights.begin(), model.weights.end(), is_later);
  DYNO_CHECK(UnsupportedError, std::all_of(first, model.weights.end(), is_later), "[model] layers is ", count, ": ",
             model.architecture, " has weights after its layers, so only the whole model can run");
  model.weights.erase(first, model.weights.end());
  model.layers.resize(static_cast<size_t>(count));
  model.n_layers = count;
  return model;
}

int64_t ModelDesc::moe_layers() const {
  int64_t n = 0;
  for (const LayerSpec& layer : layers) n += layer.mixture() != nullptr ? 1 : 0;
  return n;
}

int64_t ModelDesc::experts() const {
  int64_t n = 0;
  for (const LayerSpec& layer : layers) n = std::max(n, layer.mixture() == nullptr ? 0 : layer.mixture()->experts);
  return n;
}

int64_t ModelDesc::experts_used() const {
  int64_t n = 0;
  for (const LayerSpec& layer : layers) n = std::max(n, layer.mixture() == nullptr ? 0 : layer.mixture()->used);
  return n;
}

bool ModelDesc::has_state() const {
  return std::any_of(layers.begin(), layers.end(), [](const LayerSpec& layer) { return layer.is_recurrent(); });
}

int64_t ModelDesc::parameters() const {
  int64_t n = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    if ((tied_output && static_cast<WeightId>(i) == output) || !weights[i].picks.empty()) continue;
    n += weights[i].batch * weights[i].rows * weights[i].cols;
  }
  return n;
}

namespace {

std::string attention_text(const AttentionSpec& a) {
  std::string out = a.kind == AttentionKind::mla
                        ? str_cat("MLA ", a.heads, " heads, latent ", a.kv_lora, ", nope ", a.nope, ", v ", a.v_head)
                        : str_cat("GQA ", a.heads, "/", a.kv_heads, " heads of ", a.dk,
                                  a.dv != a.dk ? str_cat(" (v ", a.dv, ")") : std::string());
  if (a.q_norm != kNone) out += ", q/k norm";
  if (a.q_norm != kNone && a.qk_norm == QkNorm::projection) out += " over all heads";
  if (a.q_norm != kNone && a.qk_norm == QkNorm::heads_after_rope) out += " after rope";
  if (a.q_bias != kNone || a.qkv_bias != kNone) out += ", biases";
  if (a.qkv != kNone) out += ", fused qkv";
  if (a.sinks != kNone) out += ", sinks";
  if (a.gate != kNone) out += ", gated output";
  if (a.v_norm) out += ", v norm";
  if (a.v_is_k) out += ", values are keys";
  if (a.shared_kv >= 0) out += str_cat(", keys and values of layer ", a.shared_kv);
  if (a.window > 0) out += str_cat(", window ", a.window);
  if (a.softcap > 0) out += str_cat(", softcap ", a.softcap);
  if (a.rope.scaling == RopeScaling::still) return out + ", no rope";
  out += str_cat(", rope ", a.rope.neox ? "neox " : "norm ", a.rope.n_rot, " base ", a.rope.base);
  if (a.rope.scaling == RopeScaling::linear) out += str_cat(" linear x", a.rope.factor);
  if (a.rope.scaling == RopeScaling::yarn) out += str_cat(" yarn x", a.rope.factor);
  if (a.rope.frequency_factors != kNone) out += " with frequency factors";
  if (a.rope.position_scale != 0) out += str_cat(", queries grow by ", a.rope.position_scale, " with the position");
  return out;
}

std::string recurrent_text(const RecurrentSpec& r) {
  if (r.kind == RecurrentKind::short_conv) return str_cat("gated short convolution of ", r.taps, " taps");
  return str_cat(r.rule == ops::LinearRule::additive ? "Mamba-2, " : "gated delta rule, ", r.k_heads, " key heads of ",
                 r.dk, ", ", r.v_heads, " value heads of ", r.dv, r.grouped ? " (grouped)" : "", ", convolution of ",
                 r.taps, " taps");
}

std::string ffn_text(const FfnSpec& f) {
  if (f.kind == FfnKind::dense) return str_cat("dense ", f.dense_width, ", ", ops::activation_name(f.activation));
  std::string out = str_cat("MoE ", f.used, " of ", f.experts, " experts of ", f.width, ", ",
                            ops::activation_name(f.activation), ", gating ", ops::gating_name(f.gating));
  if (f.selection_bias != kNone) out += " + selection bias";
  if (f.groups > 1) out += str_cat(", ", f.groups_used, " of ", f.groups, " groups");
  if (f.normalize) out += ", normalised";
  if (f.weights_scale != 1.0) out += str_cat(", scale ", f.weights_scale);
  if (f.dense_width > 0) out += str_cat(", shared expert ", f.dense_width);
  if (f.shared_gate != kNone) out += " (gated)";
  return out;
}

std::string layer_text(const LayerSpec& layer) {
  std::string out;
  if (layer.is_recurrent()) out = recurrent_text(layer.recurrent);
  if (layer.has_attention()) out = attention_text(layer.attention);
  if (layer.ffn.kind != FfnKind::none) out += str_cat(out.empty() ? "" : "; ", ffn_text(layer.ffn));
  if (layer.beside) out += "; in parallel " + ffn_text(*layer.beside);
  if (layer.input_gate != kNone) out += "; per-layer embedding";
  return out;
}

}  // namespace

std::string ModelDesc::describe() const {
  std::string out = str_cat(architecture, name.empty() ? "" : " (" + in_quotes(name) + ")", "\n  layers ", n_layers,
                            ", embedding ", n_embd, ", vocabulary ", n_vocab, ", context ", n_ctx_train,
                            ", parameters ", parameters(), "\n  norm eps ", norm_eps);
  if (embedding_scale != 1.0) out += str_cat(", embedding scale ", embedding_scale);
  if (residual_scale != 1.0) out += str_cat(", residual scale ", residual_scale);
  if (logit_scale != 1.0) out += str_cat(", logit scale ", logit_scale);
  if (logit_softcap != 0) out += str_cat(", logit softcap ", logit_softcap);
  if (tied_output) out += ", output tied to the embedding";
  out += "\n";
  if (chosen_positions > 0) {
    out += str_cat("  sparse attention selects the best ", chosen_positions,
                   " positions; shorter contexts are read completely\n");
  }
  if (draft_blocks > 0) {
    out += str_cat("  after the trunk, ", draft_blocks, draft_blocks > 1 ? " blocks predict" : " block predicts",
                   " further tokens\n");
  }
  // Runs of equal layers share one line.
  for (size_t first = 0; first < layers.size();) {
    const std::string text = layer_text(layers[first]);
    size_t last = first;
    while (last + 1 < layers.size() && layer_text(layers[last + 1]) == text) ++last;
    out += str_cat("  layer ", first, last > first ? str_cat("-", last) : std::string(), ": ", text, "\n");
    first = last + 1;
  }
  const auto of_other_senses = std::count_if(unused_tensors.begin(), unused_tensors.end(), [](std::string_view tensor) {
    return tensor.starts_with("v.") || tensor.starts_with("a.") || tensor.starts_with("mm.");
  });
  if (of_other_senses > 0) out += str_cat("  vision and audio are left out: ", of_other_senses, " tensors\n");
  if (!unused_tensors.empty()) {
    out += str_cat("  not used: ", unused_tensors.size(), " tensors (", unused_tensors.front(),
                   unused_tensors.size() > 1 ? ", …)\n" : ")\n");
  }
  return out;
}

}  // namespace dyno::model
