"""`--resume` with a longer budget goes on with what was measured."""

from __future__ import annotations

import json
from typing import Any

import pytest
from dyno_tuner.core.options import MeasurementPolicy, Options
from dyno_tuner.core.protocol import Configuration, Workload
from dyno_tuner.execution.inline_executor import InlineExecutor
from dyno_tuner.record.recorder import Recorder
from dyno_tuner.run.tune import Tune
from dyno_tuner.targets.simulated.surfaces import saturating
from dyno_tuner.targets.simulated.target import SimulatedTarget, SimulationNoise

QUIET = SimulationNoise(within=0.001, process=0.002, layout=0.0005, outliers=0.002)
NOISY = SimulationNoise(within=0.02, process=0.02, layout=0.005, outliers=0.01)
POLICY = MeasurementPolicy()


class Book(list[dict[str, Any]]):
    """A journal in memory."""

    def append(self, record: Any) -> None:
        super().append(json.loads(json.dumps(record)))


class Spied(InlineExecutor):
    """Keeps the keys of what is measured."""

    def __init__(self, target: SimulatedTarget) -> None:
        super().__init__(target)
        self.measured: list[str] = []

    def measurement(self, *args: Any) -> Any:
        self.measured.append(next(a.key for a in args if hasattr(a, "key")))
        return super().measurement(*args)


def tuned(
    noise: SimulationNoise, budget: float, past: list[dict[str, Any]], begun: float | None = None
) -> tuple[Tune, Book, list[str]]:  # fmt: skip
    """A tune that is continued, its journal, and the keys of what it measured."""
    surface = saturating()
    rates = surface.rates({k.name: k.default for k in surface.knobs})
    workload = Workload(pp=round(0.15 * rates["pp"]), tg=round(0.1 * rates["tg"]))
    space, executor, book = surface.space(), Spied(SimulatedTarget(surface, 1, noise)), Book(past)
    recorder = Recorder(
        executor, workload, identity=space.identity, virtual_time=True, journal=book,  # type: ignore[arg-type]
        past=past, budget=budget, begun_with=begun,
    )  # fmt: skip
    tune = Tune(recorder, space, Options(workload, seed=1, budget=budget))
    tune.run()
    return tune, book, executor.measured


def test_a_longer_budget_keeps_the_samples_of_a_quiet_machine() -> None:
    """With the three samples that it has room for, no record of the first run would count."""
    first, book, _ = tuned(QUIET, 20.0, [])
    assert first.context.policy.prompts == 1
    again, longer, measured = tuned(QUIET, 120.0, list(book), 20.0)
    assert again.context.policy.prompts == 1
    assert again.context.recorder.replayed > 10
    assert not {"aa/first", "aa/p0/v0", "aa/p0/v1"} & set(measured), "the noise is known from before"
    assert again.context.choice.entries
    assert again.context.recorder.now <= 120.0
    third, _, measured = tuned(QUIET, 120.0, list(longer), 20.0)
    assert measured == [], "the longer run is replayed as it was"
    assert third.outcome().to_dict() == again.outcome().to_dict()


def test_a_longer_budget_measures_longer_in_noise() -> None:
    first, book, _ = tuned(NOISY, 20.0, [])
    assert first.context.policy.prompts < 3
    again, longer, measured = tuned(NOISY, 120.0, list(book), 20.0)
    assert again.context.policy.prompts == 3
    assert "aa/p0/v0" in measured
    third, _, measured = tuned(NOISY, 120.0, list(longer), 20.0)
    assert measured == [], "the longer run is replayed as it was"
    assert third.outcome().to_dict() == again.outcome().to_dict()


def test_the_same_budget_measures_nothing_again() -> None:
    first, book, _ = tuned(QUIET, 40.0, [])
    again, _, measured = tuned(QUIET, 40.0, list(book), 40.0)
    assert measured == []
    assert again.outcome().to_dict() == first.outcome().to_dict()


DEFAULT, OTHER, THIRD = (
    Configuration({"ubatch": u, "threads": 8, "threads_batch": 8}) for u in (512, 1024, 64)
)


@pytest.fixture
def book() -> Book:
    """A journal with a measurement and a round of two configurations, both in process 4."""
    target = SimulatedTarget(saturating(), 1, QUIET)
    kept = Book()
    recorder = Recorder(InlineExecutor(target), Workload(pp=64, tg=8), journal=kept, virtual_time=True)  # type: ignore[arg-type]
    recorder.measurement("screen/t1", OTHER, ["pp"], POLICY, process=3)
    for place, one in enumerate((DEFAULT, OTHER, DEFAULT, OTHER, DEFAULT)):
        recorder.measurement(f"confirm/r0/{place}", one, ["pp"], POLICY, process=4)
    return kept


def continued(book: Book) -> Recorder:
    target = SimulatedTarget(saturating(), 1, QUIET)
    return Recorder(
        InlineExecutor(target), Workload(pp=64, tg=8), past=list(book), virtual_time=True, budget=900.0,
        begun_with=60.0,
    )  # fmt: skip


@pytest.mark.parametrize(("others", "replayed"), [((OTHER,), 5), ((THIRD,), 0), ((OTHER, THIRD), 0)])
def test_a_round_is_taken_from_the_journal_as_a_whole_or_not_at_all(
    book: Book, others: tuple[Configuration, ...], replayed: int
) -> None:
    """Half a round of another process and time beside the other half would compare the two times."""
    recorder = continued(book)
    recorder.measurement("screen/t9", THIRD, ["pp"], POLICY, process=5)
    recorder.begin_round("confirm/r0", 7, [DEFAULT, *others])
    for place, one in enumerate((DEFAULT, *others, DEFAULT, *reversed(others), DEFAULT)):
        recorder.measurement(f"confirm/r0/{place}", one, ["pp"], POLICY, process=7)
    assert recorder.replayed == replayed


def test_a_round_that_a_kill_cut_goes_on(book: Book) -> None:
    del book[-2:]
    recorder = continued(book)
    recorder.measurement("screen/t1", OTHER, ["pp"], POLICY, process=3)
    recorder.begin_round("confirm/r0", 4, [DEFAULT, OTHER])
    for place, one in enumerate((DEFAULT, OTHER, DEFAULT, OTHER, DEFAULT)):
        recorder.measurement(f"confirm/r0/{place}", one, ["pp"], POLICY, process=4)
    assert (recorder.replayed, recorder.performed) == (4, 2)


def test_what_is_taken_from_the_journal_costs_its_time_behind_new_work(book: Book) -> None:
    """Else the next measurement would seem to take no time, and the plan of the budget would follow that."""
    recorder = continued(book)
    recorder.measurement("screen/t9", THIRD, ["pp"], POLICY, process=2)
    before = recorder.now
    recorder.measurement("screen/t1", OTHER, ["pp"], POLICY, process=3)
    assert recorder.replayed == 1
    assert recorder.now - before == pytest.approx(book[0]["t"])


def test_one_process_is_not_made_of_old_and_new_work(book: Book) -> None:
    recorder = continued(book)
    recorder.measurement("screen/t9", THIRD, ["pp"], POLICY, process=3)
    recorder.measurement("screen/t1", OTHER, ["pp"], POLICY, process=3)
    assert (recorder.replayed, recorder.performed) == (0, 2)
