"""Text by rules: JSON schemas, grammars and regular expressions, with a model that writes noise."""

from __future__ import annotations

import gc
import json
import re
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import dyno
import numpy as np
import pytest
from chat_model import chat_model
from dyno import _core, _grammar
from dyno._grammar import Grammar
from dyno._sampling import HostSampler, Sampling
from dyno.errors import NotInstalledError, PlanError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SCHEMA = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "n": {"type": "integer", "minimum": 10, "maximum": 99},
        "kind": {"enum": ["Zürich", "Bern 😀"]},
        "list": {"type": "array", "items": {"type": "null"}, "maxItems": 2},
    },
    "required": ["ok", "n", "kind", "list"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},  # noise would write blanks for ever
}
GBNF = 'root ::= "[" item ("," item)? "]"\nitem ::= "yes" | "no"'
LARK = 'start: "[" item ("," item)? "]"\nitem: "yes" | "no"'
USER = [{"role": "user", "content": "Hello"}]
GPUS = [d for d in _core.devices() if d["kind"] == "cuda" and not _core.device_problem(d)]


@pytest.fixture(
    scope="module",
    params=[
        "cpu",
        pytest.param("cuda:0", marks=[pytest.mark.gpu, pytest.mark.skipif(not GPUS, reason="no GPU")]),
    ],
)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dyno.Engine]:
    model = chat_model(tmp_path_factory.mktemp("chat") / "m.gguf")
    with dyno.Engine(model, device=request.param, profile=None, ctx=512, threads=1) as opened:
        yield opened


def texts(engine: dyno.Engine, **options: Any) -> list[str]:
    return [
        "".join(engine.generate([5, 9], 400, 1.0 + seed / 4, 0, 1.0, 0.0, seed, **options))
        for seed in range(6)
    ]


def test_json_follows_its_schema(engine: dyno.Engine) -> None:
    found = texts(engine, json_schema=SCHEMA)
    for text in found:
        value = json.loads(text)
        assert list(value) == ["ok", "n", "kind", "list"]
        assert isinstance(value["ok"], bool)
        assert 10 <= value["n"] <= 99
        assert value["kind"] in ("Zürich", "Bern 😀")
        assert value["list"] in ([], [None], [None, None])
    assert len(set(found)) > 1
    assert texts(engine, json_schema=json.dumps(SCHEMA)) == found


def test_blanks_do_not_fill_the_text(engine: dyno.Engine) -> None:
    """A model of noise writes any blank that is allowed, and a greedy one for ever."""
    plain = {name: value for name, value in SCHEMA.items() if name != "x-guidance"}
    for blank in (9, 10, 13, 32):
        given = {"json_schema": plain, "logit_bias": {blank: 50.0}}
        text = "".join(engine.generate([5, 9], 200, **given))
        assert list(json.loads(text)) == ["ok", "n", "kind", "list"]
        assert not re.search(r"[\t\n\r]|  ", text)
    own = {**plain, "x-guidance": {"whitespace_flexible": True}}
    text = "".join(engine.generate([5, 9], 200, json_schema=own, logit_bias={10: 50.0}))
    assert text.count("\n") > 100
    anything = engine.generate([5, 9], 8, json_schema="true", logit_bias={ord("7"): 50.0})
    assert "".join(anything) == "7" * 8


@pytest.mark.parametrize("grammar", [GBNF, LARK], ids=["gbnf", "lark"])
def test_text_follows_a_grammar(engine: dyno.Engine, grammar: str) -> None:
    found = texts(engine, grammar=grammar)
    assert all(re.fullmatch(r"\[(yes|no)(,(yes|no))?\]", text) for text in found)
    assert len(set(found)) > 1


def test_text_matches_an_expression(engine: dyno.Engine) -> None:
    for text in texts(engine, regex=r"[a-c]{3}-é[0-9]"):
        assert re.fullmatch(r"[a-c]{3}-é[0-9]", text)


def test_greedy_text_and_other_settings_keep_to_the_rules(engine: dyno.Engine) -> None:
    text = "".join(
        engine.generate(
            [5], 50, regex="[ab]{8}", repeat_penalty=3.0, dry_multiplier=2.0, logit_bias={97: 9.0}
        )
    )
    assert re.fullmatch("[ab]{8}", text)


def test_masks_leave_the_distribution_of_what_is_allowed(engine: dyno.Engine) -> None:
    """Drawing by rules is drawing from the same logits with everything else at minus infinity."""
    n = engine.model["n_vocab"]
    logits = np.random.default_rng(3).normal(size=n).astype(np.float32) * 2
    allowed = [ord(c) for c in "abcdef"]
    masked = np.full(n, -np.inf, np.float32)
    masked[allowed] = logits[allowed]
    for seed in range(40):
        sampling = {"temperature": 1.0, "top_k": 4, "top_p": 0.9, "min_p": 0.01, "seed": seed}
        rules = HostSampler(Sampling(**sampling, regex="[a-f]"), engine.tokenizer, n, [])
        assert rules.draw(logits) == Sampling(**sampling).sampler()(masked)


def test_an_answer_follows_rules_after_its_reasoning(engine: dyno.Engine, monkeypatch: Any) -> None:
    reply = engine.chat(USER, json_schema=SCHEMA, temperature=1.0, seed=1)
    assert 10 <= json.loads(reply.message()["content"])["n"] <= 99
    assert reply.finish_reason == "stop"
    # Inside a reasoning section the rules wait for its end, which noise would hardly write.
    forced = [*b"why" * 9, *b"</think>"]
    draw = HostSampler.draw
    searched: list[int] = []

    def begun(self: HostSampler, logits: Any) -> int:
        searched.append(len(self._seen))
        if forced:
            logits = np.full_like(logits, -100)
            logits[forced.pop(0)] = 100
        return draw(self, logits)

    monkeypatch.setattr(HostSampler, "draw", begun)
    reply = engine.chat(USER, regex="[ab]{4}", variables={"thinking": True})
    message = reply.message()
    assert message["reasoning_content"] == "why" * 9
    assert max(searched) <= len("</think>"), "each token searches all of a long reasoning"
    assert re.fullmatch("[ab]{4}", message["content"])


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"json_schema": "{"}, "json_schema cannot be read"),
        ({"json_schema": "[1]"}, r"json_schema cannot be read: \[1\] is not a JSON schema"),
        ({"json_schema": {"type": "wrong"}}, "json_schema cannot be used: .*wrong"),
        ({"json_schema": {"type": {1}}}, "json_schema cannot be read: .*set"),
        ({"grammar": "root ::= missing"}, "grammar cannot be (read|used): .*missing"),
        ({"grammar": "root ::= ("}, "grammar cannot be (read|used)"),
        ({"regex": "("}, r'regex cannot be used: invalid regex "\(": unclosed group$'),
        ({"grammar": "start: <|nope|>"}, r'line 1, column 8: unknown special token: "<\|nope\|>"$'),
        ({"grammar": "root ::= foo"}, "grammar cannot be read: Rule 'foo' not found$"),
        (
            {"json_schema": {"pattern": "("}},
            "json_schema cannot be used: a regular expression: unclosed group$",
        ),
        ({"grammar": "a" * 1048577}, "grammar has 1048577 characters; expected at most 1048576"),
        ({"regex": "a" * 1048577}, "regex has 1048577 characters"),
        ({"json_schema": {"enum": ["a" * 1048577]}}, "json_schema has 1048591 characters"),
        ({"grammar": 3}, "grammar must be text, not 3"),
        ({"json_schema": 5.0}, "json_schema must be an object or JSON text, not 5.0"),
        ({"grammar": GBNF, "regex": "x"}, "grammar and regex cannot both hold"),
    ],
)
def test_rules_that_can_not_be_used(engine: dyno.Engine, rules: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        "".join(engine.generate([5], 10, **rules))


@pytest.mark.parametrize(
    "rules", [{"json_schema": {"$ref": "#"}}, {"grammar": "root ::= root"}, {"regex": r"[^\x00-\U0010FFFF]"}]
)
def test_rules_that_no_text_follows(engine: dyno.Engine, rules: dict[str, Any]) -> None:
    """The message has nothing of the library's state, such as times and counts."""
    with pytest.raises(PlanError) as error:
        engine.complete("a", max_tokens=3, **rules)
    assert re.fullmatch(
        r"\[grammar\] \w+ cannot be used: no token can come next; expected rules that some text of this "
        "vocabulary follows",
        str(error.value),
    )


def test_a_vocabulary_without_an_end(engine: dyno.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = dyno.Tokenizer(engine.tokenizer.vocabulary)
    monkeypatch.setattr(dyno.Tokenizer, "end_of_generation", frozenset())
    with pytest.raises(PlanError, match="no token that ends a text"):
        Grammar(Sampling(regex="x"), tokenizer)


def test_without_the_library_the_error_says_what_to_install(
    engine: dyno.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(NotInstalledError, match=r"pip install 'gguf-dyno\[grammar\]'"):
        "".join(engine.generate([5], 10, regex="x"))


def test_a_broken_library_is_another_error(
    engine: dyno.Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "llguidance.py").write_text("import a_part_that_is_missing\n")
    monkeypatch.delitem(sys.modules, "llguidance", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_part_that_is_missing") as caught:
        "".join(engine.generate([5], 10, regex="x"))
    assert not isinstance(caught.value, NotInstalledError)


def test_requests_at_the_same_time_read_the_vocabulary_once(
    engine: dyno.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[None] = []
    second = threading.Event()

    class Counted(_grammar._Vocabulary):
        def __init__(self, tokenizer: Any) -> None:
            read.append(None)
            if len(read) > 1:
                second.set()
            second.wait(0.3)  # time for another one, which would be wrong
            super().__init__(tokenizer)

    monkeypatch.setattr(_grammar, "_Vocabulary", Counted)
    monkeypatch.setattr(_grammar, "_compiled", weakref.WeakKeyDictionary())
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: Grammar(Sampling(regex="a*"), engine.tokenizer), range(4)))
    assert len(read) == 1


def test_a_schema_counts_as_its_author_wrote_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As JSON with escapes, a Chinese text is six times as long."""
    monkeypatch.setattr(_grammar, "_LONGEST", 24)
    library = pytest.importorskip("llguidance")
    assert "長長長" in _grammar._source(library, "json_schema", {"enum": ["長長長"]})
    with pytest.raises(PlanError, match="json_schema has 27 characters; expected at most 24"):
        _grammar._source(library, "json_schema", {"enum": ["長" * 13]})


def test_rules_end_with_their_text(engine: dyno.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each client may send others, so a cache of them would need a bound."""
    made: list[weakref.ref[Grammar]] = []

    class Watched(Grammar):
        """Rules whose end is known."""

        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(weakref.ref(self))

    monkeypatch.setattr(_grammar, "Grammar", Watched)
    with dyno.Scheduler(engine):
        for i in range(5):
            assert "".join(engine.generate([5], 30, 1.0, grammar=f'root ::= "{i}" [a-c]')).startswith(f"{i}")
    gc.collect()
    assert len(made) == 5
    assert not [each for each in made if each() is not None]


def test_a_closed_engine_leaves_no_vocabulary(tmp_path: Path) -> None:
    with dyno.Engine(chat_model(tmp_path / "m.gguf"), device="cpu", profile=None) as engine:
        assert re.fullmatch("[ab]{3}", "".join(engine.generate([5], 10, regex="[ab]{3}")))
        known = weakref.ref(engine.tokenizer)
    assert known() in _grammar._compiled
    del engine
    gc.collect()
    assert known() is None
