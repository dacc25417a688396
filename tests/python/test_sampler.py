"""Draws with penalties, biases, masks and all filters, against a reference in float64."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import dyno
import numpy as np
import pytest
from dyno import _core
from dyno._sampling import HostSampler, Sampling, _breakers, _holding
from dyno._writing import drawn_tokens
from dyno.errors import PlanError
from dyno.testing import tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

N = 60
UNIFORMS = [float(np.float32(u)) for u in np.random.default_rng(7).random(60)]
GPUS = [d for d in _core.devices() if d["kind"] == "cuda" and not _core.device_problem(d)]


def longest_repeat(tokens: Sequence[int], token: int, breakers: frozenset[int]) -> int:
    """Length of the longest end of `tokens` that stood before an earlier `token`; the slow way."""
    best = 0
    for place in (i for i, t in enumerate(tokens) if t == token):
        length = 0
        while (
            length < place
            and tokens[-1 - length] not in breakers
            and tokens[place - 1 - length] == tokens[-1 - length]
        ):
            length += 1
        best = max(best, length)
    return best


def changed(
    logits: NDArray[np.float32], s: dict[str, Any], prompt: list[int], text: list[int]
) -> NDArray[np.float64]:
    """Logits after bias, penalties and DRY."""
    x = logits.astype(np.float64)
    for token, value in s.get("logit_bias", []):
        x[token] += value
    everything = prompt + text
    last = s.get("repeat_last_n", 64)
    recent = everything if last < 0 else everything[len(everything) - min(last, len(everything)) :]
    for token in set(recent):
        penalty = s.get("repeat_penalty", 1.0)
        x[token] = x[token] / penalty if x[token] > 0 else x[token] * penalty
    for token in set(text):
        x[token] -= s.get("presence_penalty", 0.0) + s.get("frequency_penalty", 0.0) * text.count(token)
    if s.get("dry_multiplier"):
        for token in set(recent):
            length = longest_repeat(recent, token, frozenset(s.get("dry_breakers", [])))
            allowed = s.get("dry_allowed_length", 2)
            if length and length >= allowed:
                x[token] -= s["dry_multiplier"] * s.get("dry_base", 1.75) ** (length - allowed)
    return x


def probabilities(x: NDArray[np.float64], s: dict[str, Any], xtc: bool) -> NDArray[np.float64]:
    """The distribution that is drawn from, float64 [n]."""
    kept = sorted((i for i in range(len(x)) if x[i] > -math.inf), key=lambda i: (-x[i], i))
    result = np.zeros(len(x))
    if s.get("temperature", 1.0) == 0:
        result[kept[0]] = 1
        return result
    if s.get("top_k"):
        kept = kept[: s["top_k"]]

    def softmax(ids: list[int]) -> NDArray[np.float64]:
        e = np.exp(x[ids] - x[ids].max())
        return np.asarray(e / e.sum())

    if s.get("typical_p", 1.0) < 1:
        p = softmax(kept)
        entropy = -(p * np.log(p)).sum()
        order = sorted(range(len(kept)), key=lambda i: abs(-math.log(p[i]) - entropy))
        count = int(np.searchsorted(np.cumsum(p[order]), s["typical_p"])) + 1
        kept = [kept[i] for i in sorted(order[:count])]
    if s.get("top_p", 1.0) < 1:
        p = softmax(kept)
        kept = kept[: int(np.searchsorted(np.cumsum(p), s["top_p"])) + 1]
    if s.get("min_p"):
        p = softmax(kept)
        kept = [i for i, each in zip(kept, p, strict=True) if each >= s["min_p"] * p[0]]
    if xtc:
        top = int((softmax(kept) >= s["xtc_threshold"]).sum())
        kept = kept[max(top - 1, 0) :]
    weights = np.exp((x[kept] - x[kept].max()) / s.get("temperature", 1.0))
    result[kept] = weights / weights.sum()
    return result


def rows(seed: int, count: int = 1) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=(count, N)).astype(np.float32) * 3


def draws(settings: dict[str, Any], logits: NDArray[np.float32], xtc: float = 0.99) -> list[int]:
    """The token for each of UNIFORMS, each from a sampler without a past."""
    return [int(_core.Sampler(settings, N).draw(logits, u, xtc)) for u in UNIFORMS]


FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6, "top_k": 8},
    {"typical_p": 0.5},
    {"typical_p": 0.9, "top_k": 20, "top_p": 0.8, "min_p": 0.05, "temperature": 1.4},
    {"xtc_probability": 0.5, "xtc_threshold": 0.05},
    {"xtc_probability": 1.0, "xtc_threshold": 0.0},
    {"xtc_probability": 0.5, "xtc_threshold": 0.02, "top_p": 0.95, "temperature": 0.8},
    {"logit_bias": [(3, 5.0), (4, -math.inf), (5, -2.5)], "top_k": 10},
    {"temperature": 0.0, "typical_p": 0.2, "xtc_probability": 1.0, "logit_bias": [(9, 100.0)]},
]


@pytest.mark.parametrize("settings", FILTERS, ids=str)
@pytest.mark.parametrize("seed", [1, 2])
def test_filters_give_the_distribution_of_the_reference(settings: dict[str, Any], seed: int) -> None:
    logits = rows(seed)[0]
    for xtc in (0.25, 0.75):
        drawn = draws(settings, logits, xtc)
        p = probabilities(
            changed(logits, settings, [], []), settings, xtc < settings.get("xtc_probability", 0)
        )
        edges = np.cumsum(p)
        assert drawn == [int(np.searchsorted(edges, u * edges[-1], side="right")) for u in UNIFORMS]


@pytest.mark.parametrize(
    "settings",
    [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2, "temperature": 2.0}, {"temperature": 0.0}],
    ids=str,
)
def test_neutral_settings_draw_as_the_device_does(settings: dict[str, Any]) -> None:
    base = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **settings}
    for logits in rows(3, 4):
        want = [int(_core.sample(logits, *base.values(), u)) for u in UNIFORMS]
        assert draws(base, logits) == want
        # The path with all filters, each of them neutral.
        assert draws({**base, "xtc_probability": 0.01}, logits) == want


PENALTIES: list[dict[str, Any]] = [
    {"repeat_penalty": 1.5},
    {"repeat_penalty": 1.5, "repeat_last_n": 3},
    {"repeat_penalty": 0.8, "repeat_last_n": -1},
    {"repeat_penalty": 2.0, "repeat_last_n": 0},
    {"presence_penalty": 2.0},
    {"frequency_penalty": 0.7},
    {"presence_penalty": -1.0, "frequency_penalty": 0.5, "repeat_penalty": 1.1},
    {"dry_multiplier": 1.5, "repeat_last_n": -1},
    {"dry_multiplier": 1.5, "dry_base": 3.0, "dry_allowed_length": 1, "repeat_last_n": 12},
    {"dry_multiplier": 4.0, "dry_allowed_length": 1, "dry_breakers": [2, 5], "repeat_last_n": -1},
    {"dry_multiplier": 2.0, "dry_allowed_length": 0, "repeat_last_n": -1},
]


@pytest.mark.parametrize("settings", PENALTIES, ids=str)
def test_penalties_follow_the_text_as_the_reference_does(settings: dict[str, Any]) -> None:
    settings = {"temperature": 0.9, **settings}
    prompt = [1, 2, 3, 1, 2, 3, 4, 1, 2]
    sampler = _core.Sampler(settings, N)
    sampler.begin(np.array(prompt, np.int32))
    few = rows(5, 40)
    few[:, 8:] -= 12  # few tokens, so that sequences repeat
    text: list[int] = []
    for logits, u in zip(few, itertools.cycle(UNIFORMS), strict=False):
        edges = np.cumsum(probabilities(changed(logits, settings, prompt, text), settings, False))
        token = int(sampler.draw(logits, u, 0.0))
        assert token == int(np.searchsorted(edges, u * edges[-1], side="right")), text
        text.append(token)


def test_dry_sees_a_repeated_sequence() -> None:
    """After 7 8 9 and again 7 8, the token 9 costs; with a breaker between, it does not."""
    logits = np.zeros(N, np.float32)
    logits[9] = 1.0
    history = np.array([7, 8, 9, 1, 7, 8], np.int32)
    for breakers, want in (([], 0), ([8], 9), ([7], 9), ([1], 0)):
        sampler = _core.Sampler(
            {"temperature": 0.0, "dry_multiplier": 5.0, "dry_allowed_length": 2, "dry_breakers": breakers}, N
        )
        sampler.begin(history)
        assert sampler.draw(logits, 0.0) == want, breakers


def test_masks() -> None:
    logits = rows(9)[0]
    allowed = [3, 31, 32, 59]
    mask = np.zeros(2, np.uint32)
    for token in allowed:
        mask[token // 32] |= np.uint32(1 << (token % 32))
    sampler = _core.Sampler({"temperature": 1.0}, N)
    drawn = {int(sampler.draw(logits, u, 0.0, mask.view(np.int32))) for u in UNIFORMS}
    assert drawn <= set(allowed)
    greedy = _core.Sampler({"temperature": 0.0}, N)
    assert greedy.draw(logits, 0.0, 0.0, mask.view(np.int32)) == max(allowed, key=lambda t: logits[t])
    # A vocabulary of a model may be longer than that of its tokenizer.
    assert greedy.draw(logits, 0.0, 0.0, mask.view(np.int32)[:1]) in (3, 31)
    with pytest.raises(PlanError, match="exclude every token"):
        greedy.draw(logits, 0.0, 0.0, np.zeros(2, np.int32))
    with pytest.raises(PlanError, match="exclude every token"):
        _core.Sampler({"logit_bias": [(i, -math.inf) for i in range(N)]}, N).draw(logits, 0.0)


def test_penalties_that_overflow_exclude_no_token() -> None:
    logits = rows(4)[0]
    alone = np.array([1 << 5, 0], np.int32)
    for penalties in (
        {"presence_penalty": 3e38, "frequency_penalty": 3e38},
        {"repeat_penalty": 3e38, "logit_bias": [(5, -1e30)]},
    ):
        sampler = _core.Sampler({"temperature": 0.0, **penalties}, N)
        assert [sampler.draw(logits, 0.0, 0.0, alone) for _ in range(3)] == [5, 5, 5], penalties
    for rewards in (
        {"presence_penalty": -3e38, "frequency_penalty": -3e38},
        {"repeat_penalty": 1e-30, "logit_bias": [(7, 3e38), (9, 3e38)]},
    ):
        for more in ({}, {"typical_p": 0.99}):
            found = set()
            for u in UNIFORMS:
                sampler = _core.Sampler({**rewards, **more}, N)
                for token in (7, 9):
                    sampler.draw(logits, 0.0, 0.0, np.array([1 << token, 0], np.int32))
                found.add(sampler.draw(logits, u, 0.0))
            assert found == {7, 9}, (rewards, more)
    # An excluded token stays excluded.
    settings = {"logit_bias": [(int(logits.argmax()), -math.inf)], "presence_penalty": -3e38}
    assert _core.Sampler({"temperature": 0.0, **settings}, N).draw(logits, 0.0) != logits.argmax()


def test_logprobs_are_those_of_the_model() -> None:
    logits = rows(11)[0]
    x = logits.astype(np.float64)
    want = x - (x.max() + np.log(np.exp(x - x.max()).sum()))
    (token, own), *top = _core.logprobs(logits, 7, 5)
    assert (token, len(top)) == (7, 5)
    assert own == pytest.approx(want[7], abs=1e-6)
    assert [t for t, _ in top] == np.argsort(-x, kind="stable")[:5].tolist()
    assert [p for _, p in top] == pytest.approx(sorted(want, reverse=True)[:5], abs=1e-6)
    assert len(_core.logprobs(logits, 7, 1000)) == N + 1
    logits[3] = -np.inf
    assert _core.logprobs(logits, 3, 0) == [(3, -math.inf)]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("typical_p", 0.0),
        ("typical_p", 1.5),
        ("xtc_probability", -0.1),
        ("xtc_threshold", float("nan")),
        ("repeat_penalty", 0.0),
        ("repeat_last_n", -2),
        ("presence_penalty", float("inf")),
        ("frequency_penalty", float("nan")),
        ("dry_multiplier", -1.0),
        ("dry_base", 0.5),
        ("dry_allowed_length", -1),
        ("logprobs", -1),
    ],
)
def test_impossible_settings(name: str, value: float) -> None:
    with pytest.raises(PlanError, match=f"{name} must be .*{value}"):
        Sampling(**{name: value})  # type: ignore[arg-type]
    if name not in ("logprobs", "typical_p"):
        with pytest.raises(PlanError, match=name):
            _core.Sampler({name: value}, N)


def test_impossible_biases_and_breakers() -> None:
    for bias, words in (
        ({1: float("inf")}, "logit_bias of token 1 is inf; expected a number below infinity"),
        ({1: float("nan")}, "logit_bias of token 1 is nan"),
        ({1: "a"}, "logit_bias of token 1 is 'a'"),
        ({"a": 1.0}, "logit_bias names token 'a'; expected a token id, 0 or more"),
        ({-1: 1.0}, "logit_bias names token -1"),
        ([1], "logit_bias must be numbers by token id"),
    ):
        with pytest.raises(PlanError, match=words):
            Sampling(logit_bias=bias)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="logit_bias names token 60; the vocabulary has 60"):
        _core.Sampler({"logit_bias": [(60, 1.0)]}, N)
    with pytest.raises(PlanError, match="dry_sequence_breakers has an empty string; leave it out"):
        Sampling(dry_sequence_breakers=["a", ""])
    for breakers in ("\n", [1]):
        with pytest.raises(PlanError, match="dry_sequence_breakers must be a list"):
            Sampling(dry_sequence_breakers=breakers)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="dry_sequence_breakers has 33 strings; expected at most 32"):
        Sampling(dry_sequence_breakers=["a"] * 33)
    with pytest.raises(PlanError, match="1 unknown settings"):
        _core.Sampler({"temprature": 1.0}, N)


def test_only_settings_of_the_host_need_logits() -> None:
    assert not Sampling(0.8, 10, 0.9, 0.1, 3).needs_logits
    assert not Sampling(xtc_threshold=0.3, dry_base=2.0, repeat_last_n=8).needs_logits  # of what is off
    for more in ({"typical_p": 0.9}, {"logit_bias": {1: 1.0}}, {"logprobs": 0}, {"dry_multiplier": 0.8}):
        assert Sampling(**more).needs_logits, more  # type: ignore[arg-type]


# ---- in generations ----


@pytest.fixture(
    params=[
        "cpu",
        pytest.param("cuda:0", marks=[pytest.mark.gpu, pytest.mark.skipif(not GPUS, reason="no GPU")]),
    ]
)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dyno.Engine]:
    model = tiny_model(tmp_path / "m.gguf", n_ctx=128, n_layers=1)
    with dyno.Engine(model, device=request.param, profile=None, ctx=128) as opened:
        yield opened


def text(engine: dyno.Engine, **options: Any) -> str:
    return "".join(engine.generate([1, 5, 9], 40, **options))


def test_a_generation_with_penalties_is_what_drawing_by_hand_gives(engine: dyno.Engine) -> None:
    options = {"repeat_penalty": 1.4, "frequency_penalty": 0.5, "dry_multiplier": 0.8, "xtc_probability": 0.3}
    sampling = Sampling(0.9, 30, 0.95, 0.02, 4, **options, logprobs=2)  # type: ignore[arg-type]
    prompt = [1, 5, 9]
    found = list(drawn_tokens(engine, prompt, sampling, 30, None))
    sampler = HostSampler(sampling, engine.tokenizer, engine.model["n_vocab"], prompt)
    row = engine.logits(prompt, rows="last")[-1]
    for each in found:
        assert (each.token, each.logprobs) == (sampler.draw(row), sampler.logprobs)
        assert each.logprobs is not None
        assert len(each.logprobs.top) == 2
        row = engine.logits([each.token], reset=False, rows="last")[-1]
    assert len(found) == 30


def test_the_same_seed_gives_the_same_text(engine: dyno.Engine) -> None:
    warm = {"temperature": 1.0, "typical_p": 0.9, "xtc_probability": 0.5, "xtc_threshold": 0.01}
    assert text(engine, seed=3, **warm) == text(engine, seed=3, **warm)
    assert text(engine, seed=3, **warm) != text(engine, seed=4, **warm)


def test_penalties_end_a_repetition(engine: dyno.Engine) -> None:
    def tokens(**options: Any) -> list[int]:
        return [d.token for d in drawn_tokens(engine, [1, 5, 9], Sampling(0.0, **options), 60, None)]

    plain = tokens()
    assert len(set(tokens(frequency_penalty=50.0))) > len(set(plain))
    banned = plain[0]
    assert banned not in tokens(logit_bias={banned: -math.inf})


def test_breakers_are_tokens_that_hold_a_word(engine: dyno.Engine) -> None:
    """Searched for once, and no token past the logits: a vocabulary may be longer than they are."""
    wanted = [ord("\n"), ord("b")]
    for n_vocab, want in ((288, wanted), (50, wanted[:1]), (288, wanted)):
        assert _holding(engine.tokenizer, ("\n", "b"), n_vocab) == want
    for i in range(50):  # as many lists as clients choose, of which the last ones stay
        _holding(engine.tokenizer, ("\n", "b"), 288)
        _holding(engine.tokenizer, (f"b{i}",), 288)
    kept = list(_breakers[engine.tokenizer])
    assert len(kept) == 16
    assert kept[-2:] == [("\n", "b"), ("b49",)]
    logits = np.zeros(288, np.float32)
    logits[[ord("d"), ord("x")]] = 2.0, 1.0
    for breaker, drawn in (("b", "x"), ("c", "d")):  # after bcd and bc, the d costs unless c breaks
        settings = Sampling(0.0, dry_multiplier=5.0, dry_allowed_length=1, dry_sequence_breakers=[breaker])
        assert HostSampler(settings, engine.tokenizer, 288, [*b"bcdbc"]).draw(logits) == ord(drawn)
