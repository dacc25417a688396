"""A draft model: texts and distributions stay the same, drafts are counted, and models have to fit."""

from __future__ import annotations

import itertools
import logging
import re
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest
from chat_model import chat_model
from dyno import Engine, PlanError, Sampling, Scheduler
from dyno._draft_model import DraftModel
from dyno._drafts import Judge
from dyno._requests import Handling, SchedulerEvents
from dyno.scheduler import Speculation
from waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dyno._requests import Step
    from numpy.typing import NDArray

PROMPTS = ["abcabcabcabcabc", "x = 1\n" * 6, "def main", "zz" * 20, "class Shape:"]
EXACT: dict[str, Any] = {"sequences": 3, "ctx": 128, "threads": 1, "numerics": "exact"}


ON_THE_HOST = pytest.mark.parametrize("device", ["cpu"], indirect=True)
"""The part of the host, which does not depend on the device."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("model") / "m.gguf", n_layers=2)


def opened(path: Path, device: str = "cpu", **settings: Any) -> Engine:
    return Engine(path, device=device, profile=None, **{**EXACT, **settings})


@pytest.fixture(scope="module")
def engine(path: Path, device: str) -> Iterator[Engine]:
    with opened(path, device) as made:
        yield made


@pytest.fixture(scope="module")
def twin(path: Path, device: str) -> Iterator[Engine]:
    """The large model once more: all its drafts are right, but for rounding."""
    with opened(path, device) as made:
        yield made


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory, device: str) -> Iterator[Engine]:
    """Other weights, a shorter context and default numerics: most of its drafts are wrong."""
    path = chat_model(tmp_path_factory.mktemp("draft") / "m.gguf", n_layers=1, seed=9)
    with opened(path, device, ctx=64, numerics="default", sequences=4) as made:
        yield made


class Always(Judge):
    """Never pauses, so that a test does not depend on speeds."""

    def wants(self, texts: int) -> bool:
        return True

    def stepped(self, *_: object, **__: object) -> None:
        return None


def drafting(engine: Engine, draft: Engine, **options: Any) -> Scheduler:
    scheduler = Scheduler(engine, speculation=Speculation(draft=draft, **options))
    assert scheduler._drafting is not None
    scheduler._drafting.judge = Always()
    return scheduler


def texts(engine: Engine, options: dict[str, Any]) -> list[str]:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(lambda p: "".join(engine.generate(p, 60, **options)), PROMPTS))


@pytest.mark.parametrize("min_p", [0.0, 0.3])
@pytest.mark.parametrize("most", [1, 8])
@pytest.mark.parametrize("who", ["twin", "stranger"])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.1, "seed": 5}, {"repeat_penalty": 1.2}])
def test_texts_are_unchanged(
    engine: Engine, who: str, most: int, min_p: float, options: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    with Scheduler(engine):
        alone = texts(engine, options)
    with drafting(engine, request.getfixturevalue(who), most=most, min_p=min_p) as scheduler:
        assert texts(engine, options) == alone
        assert texts(engine, options) == alone  # in sequences that held other texts
        counts = scheduler.drafts
    if min_p == 0.0:
        assert counts.tokens > 50
    if who == "twin" and not options and min_p == 0.0:
        assert counts.accepted == counts.tokens  # the same model, the same numerics
        assert len(counts.accepted_at) == most
    if who == "stranger":
        assert counts.accepted < counts.tokens or counts.tokens == 0
    assert counts.accepted == sum(counts.accepted_at)


def most_probable(logits: NDArray[np.float32], count: int) -> dict[int, float]:
    """Probabilities of the tokens that may be drawn, in float64."""
    scores = logits.astype(np.float64)
    kept = np.argsort(-scores)[:count]
    weights = np.exp(scores[kept] - scores[kept].max())
    return dict(zip(map(int, kept), weights / weights.sum(), strict=True))


@ON_THE_HOST
def test_the_distribution_of_texts_is_unchanged(engine: Engine, twin: Engine) -> None:
    """Pairs of tokens, the second checked against a draft: a chi-square test of fixed seeds."""
    from scipy import stats  # not where the tests of a GPU run

    prompt, kept, count = engine.tokenize("def main"), 4, 3000
    expected: dict[tuple[int, int], float] = {}
    for first, p in most_probable(engine.logits(prompt)[-1], kept).items():
        for second, q in most_probable(engine.logits([*prompt, first])[-1], kept).items():
            expected[first, second] = p * q
    handling = Handling(ignore_end=True)

    def pair(seed: int) -> tuple[int, int]:
        sampling = Sampling(temperature=1.0, top_k=kept, top_p=1.0, min_p=0.0, seed=seed)
        first, second, _ = scheduler.drawn(prompt, sampling, 3, handling=handling)
        return first.token, second.token

    # One text at a time: a step that reads the prompt of another one has no drafts.
    with drafting(engine, twin, min_p=0.0) as scheduler:
        counts = Counter(map(pair, range(count)))
        assert scheduler.drafts.drafts == count
        assert 0 < scheduler.drafts.accepted < scheduler.drafts.tokens
    assert set(counts) <= set(expected)
    observed = np.array([counts[each] for each in expected])
    wanted = count * np.array(list(expected.values()))
    assert wanted.min() > 5
    assert stats.chisquare(observed, wanted).pvalue > 0.001
    # The test would see a bias to the most probable second token, as a wrong way to take drafts has it.
    best = {first: max(q for (f, _), q in expected.items() if f == first) for first, _ in expected}
    likely = np.array([q == best[first] for (first, _), q in expected.items()])
    biased = wanted * np.where(likely, 1.3, 1.0)
    assert stats.chisquare(biased * count / biased.sum(), wanted).pvalue < 0.001


@ON_THE_HOST
def test_it_pauses_where_it_loses_and_says_so(
    engine: Engine, stranger: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    with Scheduler(engine, speculation=Speculation(min_p=0.0, draft=stranger)) as scheduler:
        drafting_ = scheduler._drafting
        assert drafting_ is not None
        ticks = itertools.count()

        def told(texts_: int, drafted: bool, tokens: int, seconds: float) -> None:
            next(ticks)  # of a machine on which a draft doubles the time of a step
            seen(texts_, drafted, tokens, 2.0 if drafted else 1.0)

        seen, drafting_.stepped = drafting_.stepped, told  # type: ignore[method-assign]
        with caplog.at_level(logging.WARNING, "dyno.scheduler"):
            for _ in range(2):
                list(scheduler.drawn([1, 2, 3], Sampling(), 100, handling=Handling(ignore_end=True)))
        made = scheduler.drafts.drafts
    lines = [r.message for r in caplog.records if r.name == "dyno.scheduler"]
    assert len(lines) == 1
    assert "speculation slows decoding with 1 text at a time" in lines[0]
    assert 16 <= made < 40
    assert next(ticks) > 150


@ON_THE_HOST
def test_a_prompt_is_read_in_parts_that_a_step_has_room_for(
    engine: Engine, twin: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [list(range(10 + i, 90 + i)) for i in range(2)]

    def drawn(prompt: list[int]) -> list[int]:
        return [
            each.token for each in scheduler.drawn(prompt, Sampling(), 30, handling=Handling(ignore_end=True))
        ]

    with Scheduler(engine) as scheduler:
        alone = [drawn(prompt) for prompt in prompts]
    fed: list[int] = []
    proposed = DraftModel._proposed

    def watched(model: DraftModel, session: Any, batch: list[tuple[int, NDArray[np.int32]]]) -> list[int]:
        fed.append(sum(len(tokens) for _, tokens in batch))
        return proposed(model, session, batch)

    monkeypatch.setattr(DraftModel, "_proposed", watched)
    with drafting(engine, twin, most=4, min_p=0.0) as scheduler, ThreadPoolExecutor(2) as pool:
        scheduler._room = 40
        assert list(pool.map(drawn, prompts)) == alone
        assert scheduler.drafts.accepted > 10
    assert 40 <= max(fed) <= 40 + 5  # beside it, the other text as far as it is known
    assert sum(fed) >= 2 * 80


@ON_THE_HOST
def test_time_for_drafts_that_came_to_nothing_is_held_against_them(
    engine: Engine, twin: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[bool] = []
    monkeypatch.setattr(Judge, "stepped", lambda _, texts, drafted, *__, **___: judged.append(drafted))
    monkeypatch.setattr(Judge, "wants", lambda *_: True)
    with Scheduler(
        engine, speculation=Speculation(min_p=1.0, draft=twin)
    ) as scheduler:  # it is never certain
        list(scheduler.drawn(list(range(10, 60)), Sampling(), 20, handling=Handling(ignore_end=True)))
        assert scheduler.drafts.drafts == 0
    assert judged == [True] * 18 + [False]  # the last token has no draft behind it


@ON_THE_HOST
def test_prompts_of_short_answers_are_held_against_drafts(
    engine: Engine, twin: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No draft ever comes: the draft model reads each prompt in as many steps as its answer has tokens."""
    judge = Judge()
    learn, pauses, paused = judge.stepped, judge.pause, []

    def costly(texts: int, drafted: bool, tokens: int, seconds: float, **more: Any) -> Any:
        return learn(texts, drafted, tokens, tokens * (0.02 if drafted else 0.01), **more)

    class Ends(SchedulerEvents):
        """Ends each text with its third token, however late its reader is."""

        def stepped(self, step: Step) -> None:
            for request in scheduler._running:
                if request.drawn == 2:
                    request.cancelled.set()

    fed = []
    proposed = DraftModel._proposed
    monkeypatch.setattr(DraftModel, "_proposed", lambda *args: fed.append(1) or proposed(*args))
    with drafting(engine, twin, most=4, min_p=0.0) as scheduler:
        assert scheduler._drafting is not None
        scheduler._room = 10
        ends = Handling(ignore_end=True)
        prompts = [[10 + i, *range(20, 99)] for i in range(12)]
        for prompt in prompts:  # a reading takes three steps, and two are left
            list(scheduler.drawn(prompt, Sampling(), 3, handling=ends))
        assert fed == []
        scheduler._drafting.judge, scheduler._events = judge, Ends()
        monkeypatch.setattr(judge, "stepped", costly)
        monkeypatch.setattr(judge, "pause", lambda texts: (paused.append(texts), pauses(texts)))
        for prompt in prompts * 2:
            assert len(list(scheduler.drawn(prompt, Sampling(), 60, handling=ends))) == 3
        assert paused == [1]


@ON_THE_HOST
def test_models_have_to_fit(engine: Engine, twin: Engine, path: Path, tmp_path: Path) -> None:
    other = chat_model(tmp_path / "o.gguf", vocabulary={5: "other"})
    with opened(other) as draft, pytest.raises(PlanError, match="another vocabulary, from token 5 on"):
        Scheduler(engine, speculation=Speculation(draft=draft))
    with (
        opened(path, sequences=2) as draft,
        pytest.raises(PlanError, match="has 2 sequences; open it with sequences=3"),
    ):
        Scheduler(engine, speculation=Speculation(draft=draft))
    with Scheduler(twin), pytest.raises(PlanError, match="has its own scheduler"):
        Scheduler(engine, speculation=Speculation(draft=twin))
    assert engine._scheduler is None
    with drafting(engine, twin) as scheduler:  # nothing is left of the refused ones
        assert len(list(scheduler.drawn([1, 2], Sampling(), 3, handling=Handling(ignore_end=True)))) == 3


def test_the_command_takes_a_draft_model(path: Path, tmp_path: Path) -> None:
    port = tmp_path / "port"
    command = [sys.executable, "-m", "dyno", "serve", str(path), "--port", "0", "--port-file", str(port)]
    alone = subprocess.run([*command, "--spec", "draft"], capture_output=True, text=True, check=False)
    assert alone.returncode != 0
    assert "--model-draft FILE" in " ".join(alone.stderr.replace("│", " ").split())
    more = [
        "--model-draft",
        str(path),
        "--device",
        "cpu",
        "--no-profile",
        "--set",
        "numerics=exact",
        "-t",
        "1",
    ]
    with subprocess.Popen([*command, *more, "--draft-max", "3", "--draft-p-min", "0"]) as server:
        try:
            until(lambda: port.is_file() or server.poll() is not None)
            address = f"http://127.0.0.1:{int(port.read_text())}"
            body = {"prompt": "def main", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
            made = httpx.post(f"{address}/v1/completions", json=body, timeout=300)
            assert made.json()["usage"]["completion_tokens"] == 60
            metrics = httpx.get(f"{address}/metrics", timeout=300).text
        finally:
            server.terminate()
    drafts = re.search(r"^vllm:spec_decode_num_drafts_total\{.*\} (.*)$", metrics, re.MULTILINE)
    assert drafts is not None
    assert float(drafts[1]) > 0
    places = re.findall(r'accepted_tokens_per_pos_total\{model_name="m",position="(.)"\}', metrics)
    assert places == ["0", "1", "2"]
