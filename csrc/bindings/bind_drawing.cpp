// dyno._core.Generation, sampling from the rows of a step, and hidden rows.
#include "bindings/gil_release.h"
#include "bindings/py_session.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "bindings/owned_array.h"

namespace dyno {

using namespace nb::literals;

namespace {

using UniformArray = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
// temperature, top_k, top_p, min_p and random number of a row.
using RowSettings = std::tuple<float, int32_t, float, float, float>;

// A generation and its session, which is kept alive with it.
class PyGeneration {
 public:
  PyGeneration(PySession& session, runtime::Generation generation)
      : session_(session), generation_(std::move(generation)) {}

  // Must not be called while another thread samples.
  int32_t token() {
    int32_t token = 0;
    session_.change([&](runtime::Session&) { token = generation_.tokens().back(); });
    return token;
  }
  size_t queued() {
    size_t queued = 0;
    session_.change([&](runtime::Session&) { queued = generation_.queued().size(); });
    return queued;
  }

  void queue(const UniformArray& uniform, const std::optional<IdArray>& forced) {
    DYNO_CHECK(PlanError, !forced || forced->size() == uniform.size(), "[generation] ", forced ? forced->size() : 0,
               " tokens in forced for ", uniform.size(), " draws; expected as many");
    std::vector<runtime::Draw> draws(uniform.size());
    for (size_t i = 0; i < draws.size(); ++i) {
      draws[i] = {.uniform = uniform.data()[i], .forced = forced ? forced->data()[i] : -1};
    }
    session_.change(
        [&](runtime::Session& session) { generation_.queue(draws, static_cast<int64_t>(session.model().n_vocab)); });
  }
  int32_t next() {
    int32_t token = 0;
    session_.change([&](runtime::Session& session) { token = session.next_token(generation_, SignalCheck(session_)); });
    return token;
  }

 private:
  PySession& session_;
  runtime::Generation generation_;
};

// The tokens of one sequence: an array, or one token, which a step of many sequences converts faster.
class Fed {
 public:
  Fed(int32_t slot, nb::handle tokens) : slot(slot) {
    if (PyLong_Check(tokens.ptr())) {
      int overflow = 0;
      const auto value = PyLong_AsLongLongAndOverflow(tokens.ptr(), &overflow);
      DYNO_CHECK(PlanError, overflow == 0 && std::in_range<int32_t>(value), "[session] token ", nb::str(tokens).c_str(),
                 " for sequence ", slot, "; expected a token id of 32 bits");
      one_ = static_cast<int32_t>(value);
    } else if (nb::ndarray_check(tokens) && nb::try_cast(tokens, many_)) {
      is_one_ = false;
    } else {
      throw nb::type_error(str_cat("[session] tokens for sequence ", slot, " are of type ",
                                   nb::type_name(tokens.type()).c_str(), "; expected an int, or an int32 array [n]")
                               .c_str());
    }
  }

  std::span<const int32_t> tokens() const {
    return is_one_ ? std::span(&one_, 1) : std::span(many_.data(), many_.size());
  }

  int32_t slot;

 private:
  int32_t one_ = 0;
  IdArray many_;
  bool is_one_ = true;
};

// (tokens, logits of the requested rows)
nb::tuple decode_and_draw(PySession& self, const std::vector<std::pair<int32_t, nb::object>>& sequences,
                          const std::vector<RowSettings>& draws, const std::vector<int32_t>& logits_of,
                          const std::vector<int64_t>& from) {
  std::vector<Fed> fed;
  fed.reserve(sequences.size());
  for (const auto& [slot, tokens] : sequences) fed.emplace_back(slot, tokens);
  return self.with([&](runtime::Session& session) {
    runtime::DecodeRequest request;
    request.rows = from.empty() ? runtime::LogitRows::last : runtime::LogitRows::all;
    DYNO_CHECK(PlanError, from.empty() || from.size() == fed.size(), "[session] ", from.size(), " first rows for ",
               fed.size(), " sequences; expected as many");
    request.sequences.reserve(fed.size());
    for (size_t i = 0; i < fed.size(); ++i) {
      request.sequences.push_back(
          {.slot = fed[i].slot, .tokens = fed[i].tokens(), .first_row = from.empty() ? 0 : from[i]});
    }
    std::vector<runtime::RowDraw> rows;
    rows.reserve(draws.size());
    for (const auto& [temperature, top_k, top_p, min_p, uniform] : draws) {
      rows.push_back({.settings = {temperature, top_k, top_p, min_p}, .uniform = uniform});
    }
    DYNO_CHECK(PlanError, !rows.empty(), "[session] draws is empty; expected one for each row");
    const auto n_vocab = static_cast<size_t>(session.model().n_vocab);
    std::shared_ptr<float[]> logits;
    auto tokens = std::make_unique<int32_t[]>(std::max<size_t>(rows.size(), 1));
    {
      const GilRelease release;
      if (!logits_of.empty()) logits = session.logits_memory(logits_of.size() * n_vocab);
      for (size_t i = 0; i < logits_of.size(); ++i) {
        const auto row = static_cast<size_t>(logits_of[i]);
        DYNO_CHECK(PlanError, logits_of[i] >= 0 && row < rows.size(), "[session] logits_of names row ", logits_of[i],
                   "; the decode has ", rows.size(), " rows");
        rows[row].logits = logits.get() + i * n_vocab;
      }
      request.row_draws = rows;
      request.drawn = tokens.get();
      request.between = SignalCheck(self);
      session.decode(request);
    }
    return nb::make_tuple(owned_array(std::move(tokens), {rows.size()}),
                          logits_of.empty() ? nb::none() : owned_array(std::move(logits), {logits_of.size(), n_vocab}));
  });
}

nb::object decode_hidden(PySession& self, const Sequences& sequences, std::string_view rows) {
  return self.with([&](runtime::Session& session) {
    DYNO_CHECK(PlanError, rows == "all" || rows == "last", "[session] rows is '", rows, "'; expected all or last");
    runtime::DecodeRequest request;
    request.rows = rows == "all" ? runtime::LogitRows::all : runtime::LogitRows::last;
    for (const auto& [slot, tokens] : sequences) {
      request.sequences.push_back({.slot = slot, .tokens = {tokens.data(), tokens.size()}});
    }
    const auto count = static_cast<size_t>(runtime::Session::row_count(request));
    const auto width = static_cast<size_t>(session.model().n_embd);
    auto hidden = std::make_unique_for_overwrite<float[]>(std::max<size_t>(count, 1) * width);
    {
      const GilRelease release;
      request.hidden = hidden.get();
      request.between = SignalCheck(self);
      session.decode(request);
    }
    return owned_array(std::move(hidden), {count, width});
  });
}

nb::object draft(PySession& self, const std::vector<std::pair<int32_t, int32_t>>& texts, bool further) {
  return self.with([&](runtime::Session& session) {
    const auto n_vocab = static_cast<size_t>(session.model().n_vocab);
    std::shared_ptr<float[]> logits;
    {
      const GilRelease release;
      logits = session.logits_memory(std::max<size_t>(texts.size(), 1) * n_vocab);
      if (!texts.empty()) session.draft(texts, further, logits.get());
    }
    return owned_array(std::move(logits), {texts.size(), n_vocab});
  });
}

nb::object draft_tokens(PySession& self, const std::vector<std::pair<int32_t, int32_t>>& texts, bool further,
                        float min_p) {
  return self.with([&](runtime::Session& session) {
    std::vector<runtime::Likely> likely(texts.size());
    auto tokens = std::make_unique<int32_t[]>(std::max<size_t>(texts.size(), 1));
    {
      const GilRelease release;
      if (!texts.empty()) session.draft(texts, further, likely.data());
    }
    for (size_t i = 0; i < likely.size(); ++i) tokens[i] = likely[i].probability >= min_p ? likely[i].token : -1;
    return owned_array(std::move(tokens), {texts.size()});
  });
}

}  // namespace

void bind_drawing(nb::module_& m, nb::class_<PySession>& session) {
  session
      .def_prop_ro(
          "draws_on_device",
          [](PySession& s) { return s.with([](const runtime::Session& real) { return real.draws_on_device(); }); },
          "Whether a generation's tokens are drawn on the device, without the host in between.")
      .def(
          "generation",
          [](PySession& s, int32_t token, int32_t slot, float temperature, int32_t top_k, float top_p, float min_p) {
            return s.with([&](const runtime::Session& real) {
              return PyGeneration(s, real.generation(slot, {&token, 1}, {temperature, top_k, top_p, min_p}));
            });
          },
          "token"_a, nb::kw_only(), "slot"_a = 0, "temperature"_a = 0.0f, "top_k"_a = 0, "top_p"_a = 1.0f,
          "min_p"_a = 0.0f, nb::keep_alive<0, 1>(),
          "Draws tokens behind what a sequence holds, where `token` is the next one fed. The settings are those of "
          "sample(). Raises PlanError.")
      .def(
          "generation",
          [](PySession& s, const IdArray& tokens, int32_t slot, float temperature, int32_t top_k, float top_p,
             float min_p) {
            return s.with([&](const runtime::Session& real) {
              return PyGeneration(
                  s, real.generation(slot, {tokens.data(), tokens.size()}, {temperature, top_k, top_p, min_p}));
            });
          },
          "tokens"_a, nb::kw_only(), "slot"_a = 0, "temperature"_a = 0.0f, "top_k"_a = 0, "top_p"_a = 1.0f,
          "min_p"_a = 0.0f, nb::keep_alive<0, 1>(),
          "The same behind a prompt (int32): the first next() feeds all of `tokens`, and where `draws_on_device`, no "
          "logits come to the host.")
      .def("decode_and_draw", &decode_and_draw, "sequences"_a, "draws"_a, "logits_of"_a = std::vector<int32_t>(),
           "first"_a = std::vector<int64_t>(),
           nb::sig("def decode_and_draw(self, sequences: collections.abc.Sequence[tuple[int, int | "
                   "numpy.typing.NDArray[numpy.int32]]], draws: collections.abc.Sequence[tuple[float, int, float, "
                   "float, float]], logits_of: collections.abc.Sequence[int] = [], "
                   "first: collections.abc.Sequence[int] = []) -> "
                   "tuple[numpy.typing.NDArray[numpy.int32], numpy.typing.NDArray[numpy.float32] | None]"),
           "Appends tokens (one as an int, or int32 arrays) to sequences and draws the token behind each sequence, "
           "where the logits are; with first, also behind each of its tokens from the index first on. draws, one for "
           "each token drawn: "
           "temperature, top_k, top_p, min_p as in sample(), and a random number in [0, 1). logits_of: indices of "
           "draws whose logits come to the host. Returns (tokens int32 [draws], logits float32 [logits_of, n_vocab] "
           "or None); a token is -1 if its logits are not finite. Raises PlanError.");
  session.def("decode_hidden", &decode_hidden, "sequences"_a, "rows"_a = "all",
              nb::sig("def decode_hidden(self, sequences: collections.abc.Sequence[tuple[int, "
                      "numpy.typing.NDArray[numpy.int32]]], rows: str = 'all') -> numpy.typing.NDArray[numpy.float32]"),
              "Appends tokens (int32) to sequences and returns the rows that the output matrix would read, after the "
              "last norm: float32 [rows, n_embd]. rows: all, or last (of each sequence). Logits are not computed. "
              "Raises PlanError.");
  session
      .def_prop_ro(
          "draft_blocks",
          [](PySession& s) { return s.with([](const runtime::Session& real) { return real.model().draft_blocks; }); },
          "Blocks of the file that predict further tokens (MTP).")
      .def(
          "load_draft_head", [](PySession& s) { s.change([](runtime::Session& real) { real.load_draft_head(); }); },
          "Loads the first of those blocks, for draft(). Raises UnsupportedError where there is none, or the model "
          "lies on a GPU and another device. Of a session without weights only the head's plan is made.")
      .def_prop_ro(
          "has_draft_head",
          [](PySession& s) { return s.with([](const runtime::Session& real) { return real.has_draft_head(); }); },
          "Whether it is loaded.")
      .def(
          "drop_draft_head", [](PySession& s) { s.change([](runtime::Session& real) { real.drop_draft_head(); }); },
          "Forgets it, and the rows that it needs.")
      .def(
          "can_draft",
          [](PySession& s, int32_t slot) {
            return s.with([&](const runtime::Session& real) { return real.can_draft(slot); });
          },
          "slot"_a = 0, "Whether a loaded head knows all that a sequence holds, and it holds something.")
      .def(
          "draft_lacks",
          [](PySession& s, int32_t slot) {
            return s.with([&](const runtime::Session& real) { return real.draft_lacks(slot); });
          },
          "slot"_a = 0,
          "Tokens of a sequence that a loaded head has still to read before a draft; 0 if it cannot draft.")
      .def(
          "read_for_draft",
          [](PySession& s, int32_t slot, int64_t tokens) {
            s.change([&](runtime::Session& real) { real.read_for_draft(slot, tokens); });
          },
          "slot"_a, "tokens"_a, "Has the head read up to so many of them now. Else the next draft reads all of them.")
      .def("draft", &draft, "texts"_a, "further"_a = false,
           nb::sig("def draft(self, texts: collections.abc.Sequence[tuple[int, int]], further: bool = False) -> "
                   "numpy.typing.NDArray[numpy.float32]"),
           "Logits float32 [texts, n_vocab] of the token behind each text: a slot, and the token that is about to "
           "follow its sequence, which is not decoded by this. further: the token is what was drafted last for the "
           "sequence, behind the token given then. Raises PlanError.")
      .def("draft_tokens", &draft_tokens, "texts"_a, "further"_a = false, "min_p"_a = 0.0f,
           nb::sig("def draft_tokens(self, texts: collections.abc.Sequence[tuple[int, int]], further: bool = False, "
                   "min_p: float = 0.0) -> numpy.typing.NDArray[numpy.int32]"),
           "The same, but of each text the most probable token (int32 [texts]), found where the logits are; -1 if it "
           "is less probable than min_p, or if the logits are not finite.");
  nb::class_<PyGeneration>(
      m, "Generation",
      "Tokens that a session draws one after the other; made by Session.generation(). On a GPU the next two are "
      "computed while Python still handles one. Any other call of the session ends that, and next() goes on behind "
      "whatever the sequence holds then.")
      .def(
          "queue", &PyGeneration::queue, "uniform"_a, "forced"_a = nb::none(),
          nb::sig("def queue(self, uniform: numpy.typing.NDArray[numpy.float32], forced: "
                  "numpy.typing.NDArray[numpy.int32] | None = None) -> None"),
          "Allows as many more draws, each with its random number in [0, 1) (float32). forced: the tokens (int32) that "
          "are fed instead of those drawn, where not -1.")
      .def(
          "next", &PyGeneration::next,
          "Feeds the next token, or the prompt, and returns the one drawn behind it; the sequence is that much longer "
          "then. Raises what a handler of a signal raises between two u-batches of a prompt, PlanError when no draw is "
          "queued or the context is full, ModelError when the logits are not finite; the sequence is as long as before "
          "then.")
      .def_prop_ro("token", &PyGeneration::token, "The token that is fed next; of a prompt the last one.")
      .def_prop_ro("queued", &PyGeneration::queued, "Draws that are queued and not yet made.");
}

}  // namespace dyno
