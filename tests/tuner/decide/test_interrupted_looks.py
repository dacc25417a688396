"""Ctrl-C and kills in the looks of the elimination: nothing is written that its rounds do not prove."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
from conftest_tuner import Simulated
from dyno_tuner.core.errors import DisturbedError
from dyno_tuner.core.protocol import Measurement, Quality, TrialStatus
from dyno_tuner.decide.ablation import without
from dyno_tuner.decide.acceptance import Choice
from dyno_tuner.decide.elimination import Elimination
from dyno_tuner.targets.simulated.surfaces import saturating
from dyno_tuner.targets.simulated.target import SimulationNoise

if TYPE_CHECKING:
    from dyno_tuner.core.protocol import Configuration

QUIET = SimulationNoise(within=0.001, process=0.002, layout=0.0005, outliers=0.0)
WHOLE = {"ubatch": 1024, "threads": 4, "threads_batch": 12}


def stopped(monkeypatch: pytest.MonkeyPatch, weak: list[str]) -> Choice:
    """The first look finds these entries weak; Ctrl-C comes before the first round of the second look."""
    run = Simulated("saturating", 1, QUIET, max_trials=12)
    space, choice = run.space, Choice(run.space.default)
    variants, look, looks = Elimination._variants, Elimination._left_out, []

    def interrupted(self: Elimination, point: Any) -> Any:
        looks.append(point)
        if len(looks) == 2:
            raise KeyboardInterrupt
        return variants(self, point)

    def left_out(self: Elimination, result: Any, point: Any) -> Any:
        parts, _ = look(self, result, point)
        return parts, [(1.0, n) for n in space.entries(point) if space.knobs[n].name in weak]

    monkeypatch.setattr(Elimination, "_variants", interrupted)
    monkeypatch.setattr(Elimination, "_left_out", left_out)
    point = space.point({**space.settings(space.default), **WHOLE})
    with pytest.raises(KeyboardInterrupt):
        Elimination(run.tune.context.judge()).run(point, choice, "w")
    assert len(looks) == 2
    return choice


@pytest.mark.parametrize("error", [KeyboardInterrupt, DisturbedError])
def test_what_rounds_have_proven_is_written_whatever_ends_them(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C, or others that do not leave the machine alone, in the fourth round of a look."""
    run = Simulated("saturating", 1, QUIET, max_trials=12)
    space, choice, recorder = run.space, Choice(run.space.default), run.tune.context.recorder
    measured = recorder.measurement

    def ended(key: str, *args: Any, **kwargs: Any) -> Any:
        if key.startswith("w/0/r3/"):
            raise error
        return measured(key, *args, **kwargs)

    monkeypatch.setattr(recorder, "measurement", ended)
    point = space.point({**space.settings(space.default), **WHOLE})
    with pytest.raises(error):
        Elimination(run.tune.context.judge()).run(point, choice, "w")
    assert {e.name: e.value for e in choice.entries} == WHOLE
    assert choice.evidence is not None
    assert choice.evidence.rounds == 3


def test_two_kills_do_not_prove_an_entry_that_rounds_have_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program fills the memory from the fourth round on, and the threads gain nothing."""
    usual = saturating()
    threads = next(k.default for k in usual.knobs if k.name == "threads")
    surface = dataclasses.replace(usual, rates=lambda s: usual.rates({**s, "threads": threads}))
    run = Simulated(surface, 1, QUIET, max_trials=12)
    space, choice, recorder = run.space, Choice(run.space.default), run.tune.context.recorder
    measured = recorder.measurement
    killed: list[str] = []

    def full(key: str, configuration: Configuration, *args: Any, **kwargs: Any) -> Any:
        rest = {**WHOLE, "threads": threads}.items() <= configuration.settings.items()
        if rest and key.startswith("w/0/r3/"):
            killed.append(key)
            return Measurement(TrialStatus.OOM, message="SIGKILL")
        return measured(key, configuration, *args, **kwargs)

    monkeypatch.setattr(recorder, "measurement", full)
    point = space.point({**space.settings(space.default), **WHOLE})
    elimination = Elimination(run.tune.context.judge())
    elimination.run(point, choice, "w")
    assert len(killed) == 2
    assert "threads" in elimination.weak
    assert "threads" not in {e.name for e in choice.entries}


@pytest.mark.parametrize("whose", ["measurements", "checks"])
def test_two_kills_before_any_round_do_not_prove_an_entry(
    monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    """Another program fills the memory while the rest without the threads is tried, and they gain nothing."""
    usual = saturating()
    threads = next(k.default for k in usual.knobs if k.name == "threads")
    surface = dataclasses.replace(usual, rates=lambda s: usual.rates({**s, "threads": threads}))
    run = Simulated(surface, 1, QUIET, max_trials=12)
    space, choice, recorder = run.space, Choice(run.space.default), run.tune.context.recorder
    killed: list[str] = []

    def fills(name: str, result: type) -> None:
        usual = getattr(recorder, name)

        def full(key: str, configuration: Configuration, *args: Any, **kwargs: Any) -> Any:
            rest = {**WHOLE, "threads": threads}.items() <= configuration.settings.items()
            if rest and len(killed) < 2:
                killed.append(key)
                return result(TrialStatus.OOM, message="SIGKILL")
            return usual(key, configuration, *args, **kwargs)

        monkeypatch.setattr(recorder, name, full)

    if whose == "checks":
        gate = run.tune.context.gate
        for known in (gate._verdicts, gate._qualities, gate._repeated, gate._tried_again):
            known.clear()
        fills("quality", Quality)
    else:
        fills("measurement", Measurement)
    point = space.point({**space.settings(space.default), **WHOLE})
    elimination = Elimination(run.tune.context.judge())
    elimination.run(point, choice, "w")
    assert len(killed) == 2
    assert "threads" not in elimination.needed
    assert {e.name for e in choice.entries} == set(WHOLE) - {"threads"}, "the others are proven all the same"


def test_a_point_that_was_never_measured_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = stopped(monkeypatch, ["threads", "threads_batch"])
    assert choice.entries == []
    assert choice.evidence is None


def test_a_point_is_written_with_the_rounds_in_which_it_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = stopped(monkeypatch, ["threads"])
    assert [e.name for e in choice.entries] == ["ubatch", "threads_batch"]
    assert choice.evidence is not None
    assert choice.evidence.name == without("threads")
    assert {e.note for e in choice.entries} == {
        "the ratio was measured together with threads, which is now at its default"
    }
