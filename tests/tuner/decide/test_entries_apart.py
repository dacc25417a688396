"""Entries whose metrics no other entry moves are proven by the rounds of the whole."""

from __future__ import annotations

import math
from typing import Any

import pytest
from conftest_tuner import Simulated
from dyno_tuner.core.protocol import Settings, Workload
from dyno_tuner.decide.acceptance import Choice, Judge
from dyno_tuner.decide.elimination import Elimination
from dyno_tuner.measure.comparison import Comparison
from dyno_tuner.measure.paired_rounds import Bar
from dyno_tuner.measure.round_spread import RoundSpread
from dyno_tuner.space.knobs import Fidelity, Kind, Knob
from dyno_tuner.targets.simulated.surfaces import Surface
from dyno_tuner.targets.simulated.target import SimulationNoise

PP, TG = frozenset({"pp"}), frozenset({"tg"})
WHOLE = {"ubatch": 256, "threads": 2, "threads_batch": 2}
QUIET = SimulationNoise(within=0.001, process=0.002, layout=0.0005)
BUSY = SimulationNoise(within=0.0837, process=0.0277, layout=0.0277, outliers=0.02)
"""Four rounds give a margin of 10 %, as in `benchmarks/tuner_noisy.py`."""


def surface(gain: float, tg: float | None = None, u_batches: tuple[int, ...] = (32, 256)) -> Surface:
    """Each of three settings makes what it moves faster by `gain`, threads by `tg`."""
    knobs = (
        Knob("ubatch", u_batches, 32, moves=PP, fidelity=Fidelity.ROUNDING),
        Knob("threads", (1, 2), 1, Kind.LOAD, TG),
        Knob("threads_batch", (1, 2), 1, Kind.LOAD, PP),
    )

    def rates(s: Settings) -> dict[str, float]:
        prompts = gain ** (math.log2(int(s["ubatch"]) / 32) / 3) * (gain if s["threads_batch"] == 2 else 1.0)
        return {"pp": 400 * prompts, "tg": 60 * ((tg or gain) if s["threads"] == 2 else 1.0)}

    return Surface("apart", knobs, rates)


def _cut_after_one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    look = Elimination._look

    def once(self: Elimination, key: str, point: Any, choice: Any, known: Any) -> Any:
        return look(self, key, point, choice, known) if key.endswith("/0") else (Comparison([]), [], [])

    monkeypatch.setattr(Elimination, "_look", once)


def _eliminated(
    monkeypatch: pytest.MonkeyPatch, margin: dict[str, float], gain: float = 2.0, tg: float | None = None
) -> tuple[Choice, Elimination]:
    """One look at all three settings under these margins, and no time for another."""
    _cut_after_one_look(monkeypatch)
    run = Simulated(surface(gain, tg), 1, QUIET, max_trials=3)
    judge: Judge = run.tune.context.judge()
    judge.bar = lambda rounds: Bar(margin)
    choice = Choice(run.space.default)
    elimination = Elimination(judge)
    proven = elimination.run(run.space.point(WHOLE), choice, "look")
    assert proven == bool(choice.entries)
    return choice, elimination


def test_noise_in_prompts_does_not_cost_an_entry_of_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    choice, elimination = _eliminated(monkeypatch, {"pp": 0.2, "tg": 0.05})
    assert [e.name for e in choice.entries] == ["threads"]
    assert elimination.apart
    assert choice.gain["tg"].ratio == pytest.approx(2.0, rel=0.02)
    assert choice.gain["pp"].ratio == 1.0  # the profile is the default there
    assert choice.tuned["pp"] == choice.baseline["pp"]
    assert choice.tuned["tg"] == pytest.approx(2 * choice.baseline["tg"], rel=0.05)


def test_what_is_proven_for_prompts_stays_if_generation_is_noisy(monkeypatch: pytest.MonkeyPatch) -> None:
    choice, _ = _eliminated(monkeypatch, {"pp": 0.05, "tg": 0.2})
    assert [e.name for e in choice.entries] == ["ubatch", "threads_batch"]
    assert choice.gain["pp"].ratio == pytest.approx(4.0, rel=0.02)


def test_an_entry_that_holds_beside_a_weak_one_of_its_metric_does_not_stand_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Generation is too noisy, and one of the two prompt settings gains too little."""
    run = Simulated(surface(2.0), 1, QUIET, max_trials=3)
    judge: Judge = run.tune.context.judge()
    judge.bar = lambda rounds: Bar({"pp": 0.05, "tg": 0.2})
    elimination, choice = Elimination(judge), Choice(run.space.default)
    result, parts, _ = elimination._look("look", run.space.point(WHOLE), choice)
    weak = [p for p in parts if p.part.label != "threads_batch"]
    held = [p for p in parts if p.part.label == "threads_batch"]
    assert held[0].missed
    one_weak = [p.__class__(p.part, p.gain, False) for p in weak] + held
    elimination.looked = (result, run.space.point(WHOLE), one_weak)
    assert not elimination._split(choice)
    assert choice.entries == []


def test_nothing_stands_apart_where_nothing_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    for margin in ({"pp": 0.2, "tg": 0.02}, {"pp": 0.02, "tg": 0.2}):
        choice, elimination = _eliminated(monkeypatch, margin, gain=1.0)
        assert choice.entries == []
        assert not elimination.apart
        monkeypatch.undo()


def _whole() -> Comparison:
    found = Comparison(["default", "full", "without b"], "look")
    for round_ in range(3):
        found.add_round(
            [("full", "pp", [0.7 + 0.01 * round_]), ("full", "tg", [0.3]), ("without b", "pp", [0.7]),
             ("without b", "tg", [0.001 * round_])],
            [("full", "pp", [200.0]), ("full", "tg", [13.0]), ("default", "pp", [100.0]),
             ("default", "tg", [10.0]), ("without b", "pp", [200.0]), ("without b", "tg", [10.0])],
        )  # fmt: skip
    return found


def test_rounds_of_the_whole_are_rounds_of_an_entry_apart() -> None:
    alone = _whole().of_metrics({"full": "full"}, {"tg"}, "again")
    assert (alone.rounds, alone.carried, alone.names, alone.key) == (3, 3, ["default", "full"], "again")
    assert alone.ratio("full", ["tg"], {"pp": 1.0, "tg": 1.0}).ratio == pytest.approx(math.exp(0.3))
    assert alone.ratio("full", ["pp"], {"pp": 1.0, "tg": 1.0}).ratio == 1.0
    assert (alone.median_rate("full", "pp"), alone.median_rate("full", "tg")) == (100.0, 13.0)


def test_carried_rounds_tell_of_the_noise_once() -> None:
    spread, whole = RoundSpread(), _whole()
    spread.add(whole)
    known = spread.of_level("pp")
    again = whole.of_metrics({"full": "full"}, {"pp"})
    spread.add(again)
    assert spread.of_level("pp") == known
    for value in (0.6, 0.9):
        again.add_round([("full", "pp", [value]), ("full", "tg", [0.0])], [])
    assert spread.of_level("pp")[1] > known[1]


def test_a_large_gain_of_one_metric_is_written_on_a_noisy_machine() -> None:
    """Before entries stood apart, none of these tunes wrote anything: the proof of all three settings, or of
    one from its first round on, took longer than the budget."""
    tunes = [
        Simulated(
            surface(2.0, u_batches=(32, 64, 128, 256)), seed, BUSY, workload=Workload(pp=80, tg=12),
            budget=budget, check=False, max_trials=400,
        )
        for budget, seeds in ((90.0, (4, 5)), (105.0, (12, 13)), (120.0, (4, 8, 13)))
        for seed in seeds
    ]  # fmt: skip
    assert not [t for t in tunes if t.truly_slower_entries()]
    assert sum(bool(t.outcome.entries) for t in tunes) >= 4


@pytest.mark.parametrize("seed", range(6))
def test_short_noisy_tunes_write_nothing_where_nothing_gains(seed: int) -> None:
    """Noise in one metric must not pass for a gain that stands apart."""
    run = Simulated(
        surface(1.0), seed, BUSY, workload=Workload(pp=80, tg=12), budget=120.0, check=False, max_trials=400
    )
    assert not run.outcome.entries


def test_the_entries_of_a_metric_make_one_smaller_point() -> None:
    run = Simulated(surface(2.0), 1, QUIET, max_trials=3)
    elimination, whole = Elimination(run.tune.context.judge()), run.space.point(WHOLE)
    result, parts, _ = elimination._look("look", whole, Choice(run.space.default))
    elimination.looked = (result, whole, parts)
    points = [run.space.settings(p) for p in elimination.standing_apart()]
    assert points == [{"ubatch": 32, "threads": 2, "threads_batch": 1}, {**WHOLE, "threads": 1}]
    known = [elimination.rounds_of(run.space.point(p), "again") for p in points]
    assert [k.rounds for k in known if k is not None] == [result.rounds] * 2
    assert elimination.rounds_of(run.space.point({**WHOLE, "ubatch": 32}), "again") is None
