"""Drafts from a text's own n-grams: texts stay the same, counts add up, and drafts pause where they lose."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from chat_model import chat_model
from dyno import Engine, PlanError, Sampling, Scheduler
from dyno._drafts import DraftCounts, Drafter, Judge
from dyno.scheduler import Speculation

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PROMPTS = ["abcabcabcabcabc", "x = 1\n" * 6, "def main", "zz" * 20]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, device: str) -> Iterator[Engine]:
    path = chat_model(tmp_path_factory.mktemp("model") / "m.gguf", n_layers=2)
    # Exact, so that a token in a batch is the token alone to the last bit.
    settings = {"sequences": 3, "ctx": 128, "threads": 2, "numerics": "exact"}
    with Engine(path, device=device, profile=None, **settings) as opened:
        yield opened


class Always(Judge):
    """Never pauses, so that a test does not depend on speeds."""

    def wants(self, texts: int) -> bool:
        return True

    def stepped(self, *_: object, **__: object) -> None:
        return None


def drafting(engine: Engine, **options: float) -> Scheduler:
    scheduler = Scheduler(engine, speculation=Speculation(**options))  # type: ignore[arg-type]
    assert scheduler._drafting is not None
    scheduler._drafting.judge = Always()
    return scheduler


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.3, "seed": 5},
        {"temperature": 1.2, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 6},
        {"repeat_penalty": 1.1},
        {"regex": "[a-f]*"},
    ],
)
@pytest.mark.parametrize("most", [1, 8])
def test_texts_are_unchanged(
    engine: Engine, options: dict[str, object], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "regex" in options:
        pytest.importorskip("llguidance")

    def texts() -> list[str]:
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            return list(pool.map(lambda p: "".join(engine.generate(p, 60, **options)), PROMPTS))  # type: ignore[arg-type]

    with Scheduler(engine):
        alone = texts()
    with drafting(engine, most=most, min_p=0.0) as scheduler:
        assert texts() == alone
        # Drafts of any tokens, most of which are rejected; slots hold what was rejected before.
        monkeypatch.setattr(Drafter, "_likely", lambda _, tail: sum(tail) % 256)
        assert texts() == alone
        assert scheduler.drafts.tokens >= scheduler.drafts.drafts > 10
        assert scheduler.drafts.tokens > 2 * scheduler.drafts.accepted


def test_drafts_are_accepted_and_counted(engine: Engine) -> None:
    prompt = engine.tokenize("abcabcabcabcabc")
    bias = {token: 50.0 for token in set(prompt)}  # the model of random weights repeats itself then
    sampling = Sampling(logit_bias=bias)
    with Scheduler(engine) as scheduler:
        alone = [each.token for each in scheduler.drawn(prompt, sampling, 60)]
        steps = scheduler.totals()["steps"]
    with drafting(engine) as scheduler:
        assert [each.token for each in scheduler.drawn(prompt, sampling, 60)] == alone
        counts = scheduler.drafts
        assert counts.accepted > 0
        assert counts.accepted == sum(counts.accepted_at)
        assert counts.accepted_at == sorted(counts.accepted_at, reverse=True)
        # Each accepted token saves the step that would have drawn it.
        assert scheduler.totals()["steps"] == steps - counts.accepted
        assert scheduler.totals()["generated_tokens"] == len(alone)


def test_a_text_ends_within_a_draft_as_without(engine: Engine) -> None:
    prompt = engine.tokenize("abcabcabcabc")
    for count in (1, 2, 3, 7):
        with drafting(engine, min_p=0.0) as scheduler:
            assert len(list(scheduler.drawn(prompt, Sampling(logit_bias={97: 9.0}), count))) <= count
    full = engine.tokenize("ab" * 59)
    bias = Sampling(logit_bias=dict.fromkeys(set(full), 50.0))
    with Scheduler(engine) as scheduler:
        alone = [each.token for each in scheduler.drawn(full, bias, 100)]
    with drafting(engine, min_p=0.0) as scheduler:  # the context ends first
        assert [each.token for each in scheduler.drawn(full, bias, 100)] == alone
    assert len(alone) <= 128 - len(full) + 1


def test_a_drafter_says_what_followed() -> None:
    drafter = Drafter(Speculation(most=4, min_p=0.6))
    assert drafter.draft(4) == []
    drafter.extend([1, 2, 3, 4, 5, 1, 2])
    assert drafter.draft(4) == [3, 4, 5, 1]
    assert drafter.draft(2) == [3, 4]
    drafter.extend([9, 1, 2])  # after 1, 2 came 3 and 9: neither is certain
    assert drafter.draft(4) == []
    drafter.extend([9, 1, 2])  # but 9 came after 9, 1, 2
    assert drafter.draft(1) == [9]


def test_a_judge_counts_what_drafts_have_to_read() -> None:
    """A text's reading is won back by its drafts, or not; many that begin together are waited for."""
    judge = Judge()
    for _ in range(Judge.WINDOW):
        judge.stepped(1, False, 1, 0.01)
        judge.stepped(8, False, 8, 0.01)
    for _ in range(50):
        for step in range(20):
            assert not judge.stepped(1, True, 1, 0.05, behind=True, begun=step == 0)
        for _ in range(100):  # it wins a second, and the reading took 0.8
            assert not judge.stepped(1, True, 3, 0.02)
    lost = [
        judge.stepped(1, True, 1, 0.05, behind=True, begun=step == 0) for _ in range(5) for step in range(4)
    ]
    assert lost[:16] == [None] * 16
    assert lost[16] == (pytest.approx(20), pytest.approx(100))
    for _ in range(20):
        assert not judge.stepped(8, True, 8, 0.05, behind=True, begun=8 if _ == 0 else 0)
    for _ in range(200):
        assert not judge.stepped(8, True, 24, 0.02)


def test_a_judge_pauses_what_loses() -> None:
    judge = Judge()
    assert not judge.wants(1)  # the plain speed is not known yet
    for _ in range(Judge.WINDOW):
        judge.stepped(1, False, 1, 0.01)
    assert sum(judge.wants(1) for _ in range(160)) == 150
    for _ in range(100):
        assert not judge.stepped(1, True, 3, 0.02)  # 150 tokens a second instead of 100
    lost = [judge.stepped(1, True, 1, 0.02) for _ in range(Judge.WINDOW)]
    assert [each for each in lost if each is not None] == [(93.75, 100.0)]
    assert not any(judge.wants(1) for _ in range(Judge.PAUSE))
    assert any(judge.wants(1) for _ in range(2))  # it tries again
    assert not judge.wants(8)  # another number of texts is judged by itself


def test_counts_by_place() -> None:
    counts = DraftCounts()
    for drafted, accepted in ((3, 2), (5, 0), (1, 1)):
        counts.add(drafted, accepted)
    assert (counts.drafts, counts.tokens, counts.accepted) == (3, 9, 3)
    assert counts.accepted_at == [2, 1, 0, 0, 0]


@pytest.mark.parametrize("wrong", [{"most": 0}, {"most": 65}, {"min_p": -0.1}, {"min_p": 1.5}])
def test_impossible_values(wrong: dict[str, float]) -> None:
    with pytest.raises(PlanError, match=r"\[speculation\] spec_"):
        Speculation(**wrong)  # type: ignore[arg-type]


def test_the_engine_s_settings_say_how_tokens_are_drafted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = chat_model(tmp_path / "m.gguf")
    settings = {"sequences": 2, "ctx": 64, "threads": 1, "step_tokens": 12, "spec_max": 3, "spec_min_p": 0.25}
    with Engine(path, device="cpu", profile=None, spec="ngram", **settings) as engine:
        with Scheduler(engine) as scheduler:
            assert scheduler._room == 12
            assert scheduler._drafting is not None
            assert scheduler._drafting._speculation == Speculation(3, 0.25)
        with Scheduler(engine, step_tokens=20, speculation=Speculation(5)) as scheduler:
            assert scheduler._room == 20
            assert scheduler._drafting is not None
            assert scheduler._drafting._speculation == Speculation(5)
        with pytest.raises(PlanError, match="spec: must be one of off, ngram, draft"):
            Engine(path, spec="ngrams")
        with pytest.raises(PlanError, match="'spec' is a scheduler setting"):
            engine.set(spec="off")
    with (
        Engine(path, device="cpu", profile=None, spec="draft", threads=1, ctx=64) as engine,
        Scheduler(engine) as scheduler,
    ):
        assert scheduler._drafting is None
        assert "no draft model was given" in caplog.text
