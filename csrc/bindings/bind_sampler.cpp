// dyno._core.Sampler: draws from logits on the host.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <memory>

#include "bindings/gil_release.h"
#include "core/error.h"
#include "runtime/sampler.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace dyno {
namespace {

using Logits = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Tokens = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Reads settings from a dict; a missing one keeps its default. Counts the keys that were read, so that unknown ones are
// detected.
class Reader {
 public:
  explicit Reader(const nb::dict& dict) : dict_(dict) {}
  template <typename T>
  void read(const char* name, T& value) {
    if (!dict_.contains(name)) return;
    value = nb::cast<T>(dict_[name]);
    ++read_;
  }
  void finish() const {
    DYNO_CHECK(PlanError, read_ == dict_.size(), "[sample] ", dict_.size() - read_,
               " unknown settings; help(Sampler) lists the known ones");
  }

 private:
  const nb::dict& dict_;
  size_t read_ = 0;
};

runtime::SamplerSettings settings_from(const nb::dict& dict) {
  runtime::SamplerSettings s;
  Reader r(dict);
  r.read("temperature", s.base.temperature);
  r.read("top_k", s.base.top_k);
  r.read("top_p", s.base.top_p);
  r.read("min_p", s.base.min_p);
  r.read("typical_p", s.typical_p);
  r.read("xtc_probability", s.xtc_probability);
  r.read("xtc_threshold", s.xtc_threshold);
  r.read("repeat_penalty", s.repeat_penalty);
  r.read("repeat_last_n", s.repeat_last_n);
  r.read("presence_penalty", s.presence_penalty);
  r.read("frequency_penalty", s.frequency_penalty);
  r.read("dry_multiplier", s.dry_multiplier);
  r.read("dry_base", s.dry_base);
  r.read("dry_allowed_length", s.dry_allowed_length);
  r.read("dry_breakers", s.dry_breakers);
  r.read("logit_bias", s.bias);
  r.finish();
  return s;
}

// No lock is needed, because a sampler belongs to one generation.
int32_t draw(runtime::Sampler& sampler, const Logits& logits, float uniform, float xtc_uniform,
             const std::optional<Tokens>& mask) {
  const GilRelease unlocked;
  const std::span<const uint32_t> words =
      mask ? std::span(reinterpret_cast<const uint32_t*>(mask->data()), mask->size()) : std::span<const uint32_t>{};
  return sampler.draw({logits.data(), logits.size()}, uniform, xtc_uniform, words);
}

std::vector<std::pair<int32_t, float>> logprobs(const Logits& logits, int32_t token, int64_t top) {
  DYNO_CHECK(PlanError, logits.size() > 0,
             "[sample] logits is empty; expected one value for each token of the vocabulary");
  std::vector<std::pair<int32_t, float>> out;
  for (const runtime::TokenLogprob& each : runtime::logprobs({logits.data(), logits.size()}, token, top)) {
    out.emplace_back(each.token, each.logprob);
  }
  return out;
}

}  // namespace

void bind_sampler(nb::module_& m) {
  nb::class_<runtime::Sampler>(m, "Sampler",
                               "Draws the tokens of one generation from logits on the host, with penalties, biases, "
                               "masks and all filters. For one thread at a time.")
      .def(
          "__init__",
          [](runtime::Sampler* self, const nb::dict& settings, int64_t n_vocab) {
            new (self) runtime::Sampler(settings_from(settings), n_vocab);
          },
          "settings"_a, "n_vocab"_a,
          nb::sig("def __init__(self, settings: dict[str, typing.Any], n_vocab: int) -> None"),
          "settings: temperature, top_k, top_p, min_p, typical_p, xtc_probability, xtc_threshold, repeat_penalty, "
          "repeat_last_n, presence_penalty, frequency_penalty, dry_multiplier, dry_base, dry_allowed_length, "
          "dry_breakers (tokens), logit_bias (pairs of token and value). Raises PlanError.")
      .def(
          "begin", [](runtime::Sampler& self, const Tokens& prompt) { self.begin({prompt.data(), prompt.size()}); },
          "prompt"_a, nb::sig("def begin(self, prompt: numpy.ndarray) -> None"),
          "Tokens (int32) of the prompt, before the first draw.")
      .def("draw", &draw, "logits"_a, "uniform"_a, "xtc_uniform"_a = 0.0f, "mask"_a = nb::none(),
           nb::sig("def draw(self, logits: numpy.ndarray, uniform: float, xtc_uniform: float = 0.0, mask: "
                   "numpy.ndarray | None = None) -> int"),
           "Draws a token from float32 logits [n_vocab] and remembers it. uniform, xtc_uniform: in [0, 1). mask: int32 "
           "words with a bit for each token that may be drawn. Raises PlanError if none may be.");
  m.def("logprobs", &logprobs, "logits"_a, "token"_a, "top"_a = 0,
        nb::sig("def logprobs(logits: numpy.ndarray, token: int, top: int = 0) -> list[tuple[int, float]]"),
        "Token and log-probability under the model itself, before any setting: of `token`, then of the `top` most "
        "probable tokens.");
}

}  // namespace dyno
