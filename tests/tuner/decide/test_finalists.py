"""What is proven when the budget is small: the settings before kernels."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from conftest_tuner import WORKLOAD, Simulated, SlowToStart, short_measurements
from dyno_tuner.core.protocol import TrialStatus
from dyno_tuner.decide import finalists as finalists_module
from dyno_tuner.decide.acceptance import Choice
from dyno_tuner.decide.elimination import Elimination
from dyno_tuner.decide.unproven import left_open
from dyno_tuner.execution.inline_executor import InlineExecutor
from dyno_tuner.measure.comparison import Comparison
from dyno_tuner.output.report import print_outcome
from dyno_tuner.record.recorder import Recorder
from dyno_tuner.run.tune import Options, Tune
from dyno_tuner.search.observation import Trial
from dyno_tuner.targets.simulated.surfaces import SURFACES
from dyno_tuner.targets.simulated.target import SimulatedTarget, SimulationNoise
from rich.console import Console

if TYPE_CHECKING:
    from collections.abc import Sequence

POINT = (1,)


class _Judge:
    """Of one knob, with room for so many measurements before kernels begin and before the tune ends."""

    def __init__(self, before_kernels: int, before_the_end: int) -> None:
        self._room = {"confirm": 0, "leave_one_out": before_kernels, "kernels": before_the_end}
        self.stages: list[str] = []
        self.rounds = SimpleNamespace(
            affordable=lambda measurements: measurements <= self._room[self.stages[-1]]
        )
        self.space = SimpleNamespace(
            entries=lambda point: [0],
            code_class=lambda point: point,
            settings=lambda point: {},
            without=lambda point, knob: (0,),
            legal=lambda point: True,
            features=lambda point: [0.0],
        )

    def until(self, stage: str) -> None:
        self.stages.append(stage)

    def affordable(self, stage: str, measurements: int, checked: Sequence[Any] = ()) -> bool:
        self.until(stage)
        return self.fits(measurements, checked)

    def fits(self, measurements: int, checked: Sequence[Any] = ()) -> bool:
        return bool(self.rounds.affordable(measurements))

    def compared(self, point: Any) -> list[Any]:
        return [point]

    def ablation_measurements(self, point: Any, rounds: int = 2, faster: float = 1.0) -> float:
        return rounds * 4

    def proving_rounds(self, least: int, metrics: Sequence[str]) -> int:
        return 2

    def moved(self, point: Any) -> list[str]:
        return ["pp"]

    def history(self, trials: Sequence[Any]) -> list[Any]:
        return []

    def note(self, kind: str, **data: Any) -> None:
        """Nobody reads it."""

    def admit(self, point: Any) -> None:
        """Every point may be taken."""


@pytest.mark.parametrize(
    ("before_kernels", "before_the_end", "proven_until"),
    [(8, 100, "leave_one_out"), (7, 100, "kernels"), (7, 8, "kernels"), (7, 7, None)],
)
def test_where_no_entry_fits_before_kernels_its_proof_takes_their_time(
    before_kernels: int, before_the_end: int, proven_until: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = _Judge(before_kernels, before_the_end)
    proven: list[str] = []

    class Elimination:
        cut = True
        apart = False
        failed = None

        def standing_apart(self) -> list[Any]:
            return []

        def __init__(self, judge: _Judge, last: str) -> None:
            assert last == "kernels"
            self._judge = judge

        def run(self, point: Any, choice: Any) -> bool:
            assert point == POINT
            proven.append(self._judge.stages[-1])
            return False

    monkeypatch.setattr(finalists_module, "Elimination", Elimination)
    monkeypatch.setattr(finalists_module.Chooser, "pick", lambda self, trials: [POINT])
    chooser = finalists_module.Chooser(judge, lambda points: [])  # type: ignore[arg-type]
    chooser.run([], SimpleNamespace(entries=[]))  # type: ignore[arg-type]
    assert proven == ([] if proven_until is None else [proven_until])
    assert chooser.unproven


def test_what_was_weak_is_not_written_where_there_is_no_time_to_look_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One look finds several entries weak and drops one; the rest of them were not missed either."""
    look = Elimination._look

    def once(self: Elimination, key: str, point: Any, choice: Any, known: Any) -> Any:
        return look(self, key, point, choice, known) if key.endswith("/0") else (Comparison([]), [], [])

    monkeypatch.setattr(Elimination, "_look", once)
    run = Simulated("rugged", 1, SimulationNoise(within=0.001, process=0.002, layout=0.0005), max_trials=15)
    judge, space = run.tune.context.judge(), run.space

    def cost(point: Any, n: int) -> float:
        return run.truth(space.settings(space.without(point, n))) - run.truth(space.settings(point))

    default = run.truth(space.settings(space.default))
    points = [
        p for p in space.points()
        if run.truth(space.settings(p)) - default > 0.04
        and sum(cost(p, n) > 0.015 for n in space.entries(p)) > 1
    ]  # fmt: skip
    assert points
    for number, point in enumerate(points[:6]):
        choice = Choice(space.default)
        assert not Elimination(judge).run(point, choice, f"w{number}")
        assert choice.entries == []


def test_what_did_not_run_without_an_entry_may_run_without_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six copies leave room for a u-batch of 32 alone; without them, 512 run and are faster."""
    look = Elimination._look

    def once(self: Elimination, key: str, point: Any, choice: Any, known: Any) -> Any:
        return look(self, key, point, choice, known) if key.endswith("/0") else (Comparison([]), [], [])

    monkeypatch.setattr(Elimination, "_look", once)
    run = Simulated("cliff", 1, SimulationNoise(within=0.05, process=0.05), max_trials=15)
    # This noise hides the 3 % of the copies with seed 1. The retry of the rest that fails moves all later
    # draws, so with seed 4, as before there were retries, it hides them no longer.
    space = run.space
    settings = {"ubatch": 32, "layers_on_gpu": 48, "copies": 6}
    assert run.surface.fault({**settings, "ubatch": 512}) is not None
    assert run.surface.fault({**settings, "ubatch": 512, "copies": 1}) is None
    choice = Choice(space.default)
    elimination = Elimination(run.tune.context.judge())
    assert not elimination.run(space.point(settings), choice)
    assert elimination.weak == {"copies"}
    assert choice.entries == []
    assert elimination.cut


def test_a_group_keeps_nothing_that_was_needed_beside_what_has_gone() -> None:
    """The same at the end of all looks: 48 layers stand for themselves, 32 tokens would cost."""
    run = Simulated("cliff", 1, SimulationNoise(within=0.001, process=0.002, layout=0.0005), max_trials=15)
    space, judge = run.space, run.tune.context.judge()
    elimination, choice = Elimination(judge), Choice(space.default)
    whole = space.point({"ubatch": 32, "layers_on_gpu": 48, "copies": 6})
    _, entries, _ = elimination._look("whole", whole, choice)
    assert elimination.needed == {"ubatch"}
    copies = next(n for n, k in enumerate(space.knobs) if k.name == "copies")
    assert elimination._as_one(space.without(whole, copies), entries, choice, "end")
    assert [e.name for e in choice.entries] == ["layers_on_gpu"]


class _Stopped(InlineExecutor):
    """Ctrl-C in the finals."""

    def measurement(self, *args: Any) -> Any:
        if args[4].key.startswith(("confirm/", "without/")):
            raise KeyboardInterrupt
        return super().measurement(*args)


def test_what_looked_faster_when_it_was_interrupted_is_said() -> None:
    surface = SURFACES["saturating"]()
    recorder = Recorder(
        _Stopped(SimulatedTarget(surface, 1)), WORKLOAD, identity=surface.space().identity, virtual_time=True
    )
    tune = Tune(recorder, surface.space(), Options(WORKLOAD, seed=1, max_trials=25))
    outcome = tune.run()
    assert outcome.status == "interrupted"
    assert outcome.entries == []
    assert outcome.unproven
    assert outcome.promises


def test_all_that_looked_faster_is_left_open() -> None:
    run = Simulated("saturating", 1, max_trials=2)
    space = run.space

    def trial(number: int, log_ratio: float, **settings: int) -> Any:
        point = space.point({**space.settings(space.default), **settings})
        score = SimpleNamespace(log_ratio=lambda metric: log_ratio)
        return Trial(number, point, TrialStatus.OK, log_ratio, score=score)  # type: ignore[arg-type]

    trials = [trial(0, 0.5, ubatch=2048), trial(1, 0.2, threads=4), trial(2, 0.001, threads_batch=12)]
    assert left_open(run.tune.context.judge(), trials) == ["ubatch", "threads"]


def test_a_smaller_point_is_proven_where_comparing_answers_took_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two rounds of all entries were affordable until the answers of what is left out had been compared."""
    judge = _Judge(100, 100)
    whole, part = (1, 1), (1, 0)
    judge.space.entries = lambda point: [n for n, i in enumerate(point) if i]
    proven: list[tuple[Any, str]] = []

    class Elimination:
        apart = False

        def __init__(self, judge: _Judge, last: str) -> None:
            self.cut = False

        def standing_apart(self) -> list[Any]:
            return []

        def rounds_of(self, point: Any, key: str) -> None:
            """No round tells of the smaller point."""

        def run(self, point: Any, choice: Any, key: str = "without", known: Any = None) -> bool:
            assert known is None
            proven.append((point, key))
            self.cut = point == whole
            if not self.cut:
                choice.entries.append("an entry")
            return not self.cut

    monkeypatch.setattr(finalists_module, "Elimination", Elimination)
    monkeypatch.setattr(finalists_module.Chooser, "pick", lambda self, trials: [whole])
    monkeypatch.setattr(finalists_module.Chooser, "_race", lambda self, finalists, choice: whole)
    monkeypatch.setattr(finalists_module.Chooser, "_towards_default", lambda self, point, choice: point)
    monkeypatch.setattr(finalists_module.Chooser, "_provable", lambda self, point, trials, learned: part)
    monkeypatch.setattr(finalists_module.Challengers, "run", lambda self, choice: None)
    chooser = finalists_module.Chooser(judge, lambda points: [])  # type: ignore[arg-type]
    chooser.run([], SimpleNamespace(entries=[]))  # type: ignore[arg-type]
    assert proven == [(whole, "without"), (part, "again")]
    assert not chooser.unproven


class _Careful(_Judge):
    """Three finalists and so many seconds; a measurement takes one second, and a check of answers takes
    three."""

    def __init__(self, seconds: float, wrong: Sequence[Any] = ()) -> None:
        super().__init__(0, 0)
        self.left, self.wrong = seconds, wrong
        self.checked: list[Any] = []
        self.space.default = (0,)
        self.space.distance = lambda point: point
        self.weights = {"tg": 1.0}

    def fits(self, measurements: int, checked: Sequence[Any] = ()) -> bool:
        return measurements + 3 * len(set(checked) - set(self.checked)) <= self.left

    def admit(self, point: Any) -> str | None:  # type: ignore[override]
        if point not in self.checked:
            self.checked.append(point)
            self.left -= 3
        return "wrong answers" if point in self.wrong else None

    def faithful(self, point: Any) -> Any:
        return point

    def bar(self, rounds: int) -> None:
        """The trials are worth proving."""

    def wanted(self) -> int:
        return 2


@pytest.mark.parametrize(
    ("seconds", "wrong", "checked"),
    [
        (100, [], [(3,), (2,), (1,)]),
        (20, [], [(3,)]),  # it compared the answers of all three first, which took the time of the proof
        (20, [(3,)], [(3,), (2,)]),
        (27, [], [(3,), (2,)]),
    ],
)
def test_no_answers_are_compared_of_finalists_that_have_no_time_to_race(
    seconds: float, wrong: list[Any], checked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finalists_module, "worth_proving", lambda trials, bar, weights: list(trials))
    monkeypatch.setattr(finalists_module.Chooser, "_join", lambda self, trials: None)
    judge = _Careful(seconds, wrong)
    trials = [SimpleNamespace(point=(i,), log_ratio=i / 10) for i in (1, 2, 3)]
    picked = finalists_module.Chooser(judge, lambda points: []).pick(trials)  # type: ignore[arg-type]
    assert judge.checked == checked
    assert picked == [p for p in checked if p not in wrong]


@pytest.mark.parametrize(("budget", "part"), [(42.0, True), (280.0, False)])
def test_settings_that_gain_together_and_are_proven_in_part_are_named(budget: float, part: bool) -> None:
    surface = SURFACES["saturating"]()
    noise = SimulationNoise(within=0.001, process=0.002, layout=0.0005, outliers=0.002)
    workload = short_measurements(surface)
    executor = InlineExecutor(SlowToStart(surface, 0, noise))
    recorder = Recorder(executor, workload, identity=surface.space().identity, virtual_time=True)
    notes: list[str] = []
    recorder.on_note = lambda kind, data: notes.append(kind)
    options = Options(workload, seed=0, weights=dict(surface.weights), budget=budget, max_trials=400)
    outcome = Tune(recorder, surface.space(), options).run()
    assert outcome.entries
    assert bool(outcome.missed) == part
    assert ("few_visits" in notes) == part
    printed = io.StringIO()
    print_outcome(outcome, workload, Console(file=printed, width=300))
    if part:
        assert outcome.status == "budget"
        assert set(outcome.missed["settings"]) > {e.name for e in outcome.entries}
        both = {**outcome.defaults, **outcome.missed["settings"]}
        assert surface.truth(both) > surface.truth(outcome.settings) + 0.02
        assert f"together looked {outcome.missed['ratio']:.3f} ×" in printed.getvalue()
    else:
        assert "together looked" not in printed.getvalue()


def test_a_search_of_few_trials_begins_with_the_largest_ubatch() -> None:
    """A loader that takes a third of a short budget: what is tried first is all that is tried."""
    surface = SURFACES["saturating"]()
    first = {}
    for budget in (60.0, 400.0):
        executor = InlineExecutor(SlowToStart(surface, 0))
        recorder = Recorder(executor, WORKLOAD, identity=surface.space().identity, virtual_time=True)
        tune = Tune(recorder, surface.space(), Options(WORKLOAD, seed=0, budget=budget, max_trials=5))
        tune.run()
        first[budget] = tune.space.settings(tune.trials[1].point)
    largest = max(next(k for k in surface.knobs if k.name == "ubatch").values)
    assert first[60.0] == {**{k.name: k.default for k in surface.knobs}, "ubatch": largest}
    assert first[400.0] != first[60.0]
