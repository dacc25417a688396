// dyno._core.describe_model: the description of a model.
#include <nanobind/nanobind.h>
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <filesystem>
#include <map>

#include "bindings/convert.h"
#include "core/error.h"
#include "gguf/gguf_file.h"
#include "model/model_desc.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace dyno {
namespace {

std::string_view scaling_name(model::RopeScaling scaling) {
  switch (scaling) {
    case model::RopeScaling::none:
    case model::RopeScaling::still:
      return "none";
    case model::RopeScaling::linear:
      return "linear";
    case model::RopeScaling::yarn:
      return "yarn";
  }
  return "none";
}

nb::dict rope_dict(const model::RopeSpec& r) {
  nb::dict d;
  const bool still = r.scaling == model::RopeScaling::still;
  d["kind"] = still ? "none" : r.neox ? "neox" : "norm";
  d["dims"] = r.n_rot;
  d["base"] = r.base;
  d["scaling"] = std::string(scaling_name(r.scaling));
  d["factor"] = r.factor;
  d["frequency_factors"] = r.frequency_factors != model::kNone;
  return d;
}

nb::dict attention_dict(const model::AttentionSpec& a) {
  nb::dict d;
  d["kind"] = a.heads == 0 ? "none" : a.kind == model::AttentionKind::mla ? "mla" : "gqa";
  d["heads"] = a.heads;
  d["kv_heads"] = a.kv_heads;
  d["dk"] = a.dk;
  d["dv"] = a.dv;
  d["scale"] = a.scale;
  d["window"] = a.window;
  d["softcap"] = a.softcap;
  d["qk_norm"] = a.q_norm != model::kNone;
  d["biases"] = a.q_bias != model::kNone || a.qkv_bias != model::kNone;
  d["sinks"] = a.sinks != model::kNone;
  d["gated"] = a.gate != model::kNone;
  d["v_norm"] = a.v_norm;
  d["shared_kv"] = a.shared_kv < 0 ? nb::none() : nb::object(nb::int_(a.shared_kv));
  d["fused_qkv"] = a.qkv != model::kNone;
  d["rope"] = rope_dict(a.rope);
  return d;
}

nb::object recurrent_dict(const model::RecurrentSpec& r) {
  if (r.kind == model::RecurrentKind::none) return nb::none();
  nb::dict d;
  const bool linear = r.kind == model::RecurrentKind::linear;
  d["kind"] = linear ? "delta_rule" : "short_conv";
  d["taps"] = r.taps;
  if (linear) {
    d["k_heads"] = r.k_heads;
    d["v_heads"] = r.v_heads;
    d["dk"] = r.dk;
    d["dv"] = r.dv;
    d["grouped"] = r.grouped;
  }
  return nb::object(d);
}

nb::dict ffn_dict(const model::FfnSpec& f) {
  nb::dict d;
  const bool moe = f.kind == model::FfnKind::moe;
  d["kind"] = moe ? "moe" : f.kind == model::FfnKind::none ? "none" : "dense";
  d["activation"] = std::string(ops::activation_name(f.activation));
  d["width"] = moe ? f.width : f.dense_width;
  if (moe) {
    d["experts"] = f.experts;
    d["experts_used"] = f.used;
    d["gating"] = std::string(ops::gating_name(f.gating));
    d["selection_bias"] = f.selection_bias != model::kNone;
    d["groups"] = f.groups;
    d["groups_used"] = f.groups_used;
    d["normalize"] = f.normalize;
    d["weights_scale"] = f.weights_scale;
    d["shared_width"] = f.dense_width;
  }
  return d;
}

}  // namespace

// Share of each type in the elements of all matrices; vectors are not counted.
static std::map<std::string, double> type_shares(const model::ModelDesc& m) {
  std::map<std::string, double> types;
  double total = 0;
  for (size_t i = 0; i < m.weights.size(); ++i) {
    const model::Weight& w = m.weights[i];
    if (w.transform == model::Transform::to_f32 || (m.tied_output && static_cast<model::WeightId>(i) == m.output)) {
      continue;
    }
    const auto elements = static_cast<double>(w.batch) * static_cast<double>(w.rows) * static_cast<double>(w.cols);
    types[std::string(dtype_name(w.tensor->type))] += elements;
    total += elements;
  }
  for (auto& [name, share] : types) share /= total;
  return types;
}

nb::dict model_dict(const model::ModelDesc& m) {
  nb::dict d;
  d["architecture"] = m.architecture;
  d["name"] = m.name;
  d["n_layers"] = m.n_layers;
  d["n_embd"] = m.n_embd;
  d["n_vocab"] = m.n_vocab;
  d["n_ctx_train"] = m.n_ctx_train;
  d["chosen_positions"] = m.chosen_positions;
  d["norm_eps"] = m.norm_eps;
  d["embedding_scale"] = m.embedding_scale;
  d["residual_scale"] = m.residual_scale;
  d["logit_scale"] = m.logit_scale;
  d["logit_softcap"] = m.logit_softcap;
  d["tied_output"] = m.tied_output;
  d["parameters"] = m.parameters();
  nb::list layers;
  for (const model::LayerSpec& layer : m.layers) {
    nb::dict l;
    l["attention"] = attention_dict(layer.attention);
    l["recurrent"] = recurrent_dict(layer.recurrent);
    l["ffn"] = ffn_dict(layer.ffn);
    l["beside"] = layer.beside ? nb::object(ffn_dict(*layer.beside)) : nb::none();
    l["post_norms"] = layer.attn_post_norm != model::kNone;
    layers.append(l);
  }
  d["experts"] = m.experts();
  d["experts_used"] = m.experts_used();
  d["moe_layers"] = m.moe_layers();
  d["recurrent_layers"] = std::count_if(m.layers.begin(), m.layers.end(),
                                        [](const model::LayerSpec& layer) { return layer.is_recurrent(); });
  d["layers"] = layers;

  nb::dict fractions;
  for (const auto& [name, share] : type_shares(m)) fractions[name.c_str()] = share;
  d["types"] = fractions;
  nb::list unused;
  for (const std::string& name : m.unused_tensors) unused.append(nb::str(name.c_str()));
  d["unused_tensors"] = unused;
  return d;
}

// Weight types of the draft head; empty if the file has no head that this engine can load. The file itself is then
// still valid: load_draft_head() gives the reason.
nb::list draft_types(const GgufFile& file, const model::ModelDesc& trunk) {
  nb::list names;
  if (trunk.draft_blocks == 0) return names;
  try {
    for (const auto& [name, share] : type_shares(model::describe_model(file, model::Part::draft_head))) {
      names.append(nb::str(name.c_str()));
    }
  } catch (const UnsupportedError&) {  // the engine has no draft head for this architecture
  } catch (const ModelError&) {        // a tensor of the head is missing or has another shape
  }
  return names;
}

void bind_model(nb::module_& m) {
  m.def(
      "describe_model",
      [](const nb::object& file) {
        const auto opened = gguf_of(file);
        const model::ModelDesc model = model::describe_model(*opened);
        nb::dict d = model_dict(model);
        d["draft_types"] = draft_types(*opened, model);
        return d;
      },
      "file"_a, nb::sig("def describe_model(file: Gguf | str | os.PathLike[str]) -> dict[str, typing.Any]"),
      "Hyper-parameters, layer specs and weight types of a model. Raises GgufError, ModelError, UnsupportedError.");
  m.def(
      "describe_model_text", [](const nb::object& file) { return model::describe_model(*gguf_of(file)).describe(); },
      "file"_a, nb::sig("def describe_model_text(file: Gguf | str | os.PathLike[str]) -> str"), "The same for people.");
  m.def(
      "architectures",
      [] {
        std::vector<std::string> names;
        for (const std::string_view name : model::known_architectures()) names.emplace_back(name);
        return names;
      },
      "Names of the architectures this build can run.");
}

}  // namespace dyno
