"""If a hypervisor moves the CPUs apart during a measurement, it is made again, and a run does not end."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
from dyno import _core, profiles
from dyno_tuner.ab.render import _machine
from dyno_tuner.core.options import MeasurementPolicy
from dyno_tuner.core.protocol import Configuration, Workload
from dyno_tuner.execution.inline_executor import InlineExecutor
from dyno_tuner.measure import cpu_distance, machine_monitor
from dyno_tuner.measure.cpu_distance import FAR_SHARE, Distance, probe
from dyno_tuner.measure.cpu_monitor import Load
from dyno_tuner.measure.machine_monitor import REST, Careful, Conditions, Machine, Window
from dyno_tuner.record import journal
from dyno_tuner.record.recorder import Recorder
from dyno_tuner.run.tune import Options, Tune
from dyno_tuner.targets.simulated.target import SimulatedTarget

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

ONE_CORE, NEAR, NEARER, FAR, FARTHER = 52.0, 120.0, 105.0, 560.0, 1300.0
PATIENCE = 10.0
WORKLOAD = Workload(pp=64, tg=8)


@pytest.fixture(autouse=True)
def quiet_machine() -> None:
    """Nothing is overridden here: the watches below read nothing of this machine."""


class _Script:
    """A watch that takes the distances from a list; None: unknown. The last one repeats.

    Each window takes two of them, and a rest moves on as well.
    """

    def __init__(self, distances: Sequence[float | None]) -> None:
        self.distances = list(distances)

    def next(self) -> list[Distance]:
        ns = self.distances.pop(0) if len(self.distances) > 1 else self.distances[0]
        return [] if ns is None else [Distance(ns, ns, (0, 1))]

    @contextlib.contextmanager
    def window(self) -> Iterator[Window]:
        window = Window(load=Load(needed=2.0, seconds=1.0))
        before = self.next()
        yield window
        assert window.load is not None
        window.load.between = [*before, *self.next()]


class _Setup:
    def __init__(
        self, *distances: float | None, patience: float | None = PATIENCE, left: float = 1e9,
    ) -> None:  # fmt: skip
        self.messages: list[str] = []
        self.slept = 0.0
        self.made = 0
        self.watch = _Script(distances)
        self.careful = Careful(self.watch, self._note, lambda seen: None, self._sleep, patience, lambda: left)

    def _note(self, kind: str, **data: Any) -> None:
        assert kind == "moved_cpus"
        self.messages.append(data["message"])

    def _sleep(self, seconds: float) -> None:
        self.slept += seconds

    def _work(self) -> int:
        self.made += 1
        return self.made

    def measure(self, good: Callable[[int], bool] = lambda found: True) -> dict[str, Any]:
        found, seen = self.careful.measure("key", self._work, good)
        assert found == self.made
        self.careful.conditions.add_load(seen["cpu"])
        return dict(seen["cpu"])

    def long_after(self) -> None:
        """The run has taken so long that its earlier waits do not matter."""
        self.careful._approach._begun -= 1e6

    @property
    def told(self) -> dict[str, Any]:
        return self.careful.conditions.to_dict()


def test_near_cpus_are_recorded_and_nothing_else_happens() -> None:
    setup = _Setup(NEAR, NEAR, NEARER, NEAR)
    assert setup.measure()["between_ns"] == [[120.0, 120.0], [120.0, 120.0]]
    assert setup.measure()["between_ns"] == [[105.0, 105.0], [120.0, 120.0]]
    assert (setup.made, setup.slept, setup.messages, setup.told) == (2, 0.0, [], {})


@pytest.mark.parametrize("burst", [(FAR, FAR), (NEAR, FAR), (FAR, NEAR), (None, FAR), (FAR, None)])
def test_a_burst_makes_the_measurement_again(burst: tuple[float | None, float | None]) -> None:
    """It may have begun or ended within the window."""
    setup = _Setup(NEAR, NEAR, *burst, FAR, FAR, FAR, NEAR, NEAR, NEAR, NEAR)
    setup.measure()
    seen = setup.measure()
    assert setup.made == 3
    assert seen["dropped"] == 1
    assert seen["lost"] >= setup.slept == 3 * REST  # the wait that the CPUs came nearer in does not count
    assert setup.told == {"repeated": 1}
    (message,) = setup.messages
    assert message == (
        "the CPUs are far apart at the moment: a cache line takes 560 ns between cpu0 and cpu1, and 120 ns "
        "at best; a hypervisor moves virtual CPUs: such measurements are repeated"
    )


def test_a_second_burst_is_not_told_again() -> None:
    setup = _Setup(*([NEAR, NEAR] * 2 + [FAR, FAR, NEAR, NEAR]) * 2, NEAR)
    while len(setup.watch.distances) > 1:
        setup.measure()
    assert setup.told["repeated"] == 2
    assert len(setup.messages) == 1


def test_cpus_that_stay_far_apart_are_measured_as_they_are() -> None:
    setup = _Setup(NEAR, NEAR, FAR)
    setup.measure()
    seen = setup.measure()
    assert setup.made == 2, "the window was far throughout, so it counts"
    assert seen.get("dropped") == 0
    assert PATIENCE <= setup.slept <= PATIENCE + REST
    assert seen["lost"] >= setup.slept
    for _ in range(3):
        assert "lost" not in setup.measure(), "a run waits once, until nearer CPUs have come"
    assert setup.told == {"moved_cpus": 4}
    assert [m.rpartition(": ")[2] for m in setup.messages] == [
        "such measurements are repeated",
        "they stay so, and the tune measures them as they are",
    ]
    profiles.Environment(**setup.told)


def test_a_window_in_which_the_cpus_moved_is_measured_again_even_if_they_stay_far_apart() -> None:
    setup = _Setup(NEAR, NEAR, NEAR, FAR)
    setup.measure()
    seen = setup.measure()
    assert setup.made == 3
    assert seen["dropped"] == 1
    assert seen["between_ns"] == [[FAR, FAR], [FAR, FAR]]
    assert setup.told == {"repeated": 1, "moved_cpus": 1}


def test_after_nearer_cpus_a_run_waits_again() -> None:
    setup = _Setup(NEAR, NEAR, FAR)
    setup.measure()
    setup.measure()
    setup.watch.distances = [NEAR]
    setup.measure()
    waited = setup.slept
    setup.long_after()
    setup.watch.distances = [FAR, FAR, FAR, NEAR]
    assert setup.measure()["dropped"] == 1
    assert setup.slept > waited


@pytest.mark.parametrize("moved", [(NEAR, FAR), (FAR, NEAR)])
def test_cpus_that_came_nearer_for_a_part_of_a_window_spoil_it(moved: tuple[float, float]) -> None:
    """A run that has accepted far CPUs does not accept a mixture."""
    setup = _Setup(NEAR, NEAR, FAR)
    setup.measure()
    setup.measure()
    setup.long_after()
    setup.watch.distances = [*moved, NEAR]
    assert setup.measure()["dropped"] == 1


@pytest.mark.parametrize("moved", [(ONE_CORE, ONE_CORE), (NEAR, ONE_CORE), (ONE_CORE, NEAR)])
def test_cpus_that_share_a_core_spoil_a_window(moved: tuple[float, float]) -> None:
    """They are nearer than at best, and two threads are slower. The usual distance stays near."""
    setup = _Setup(*[NEAR] * 6, *moved, ONE_CORE, NEAR, NEAR, NEAR, NEARER, NEAR, FAR, FAR, NEAR)
    for _ in range(3):
        setup.measure()
    assert setup.measure()["dropped"] == 1
    assert (setup.made, setup.told) == (5, {"repeated": 1})
    assert setup.messages == [
        "CPUs share a core at the moment: a cache line takes 52 ns between them, and usually 120 ns; a "
        "hypervisor moves virtual CPUs: such measurements are repeated"
    ]
    while len(setup.watch.distances) > 1:
        setup.measure()
    assert setup.told == {"repeated": 2}, "near CPUs count as before, and far ones do not"


def test_cpus_that_stay_on_one_core_are_measured_as_they_are() -> None:
    setup = _Setup(*[NEAR] * 6, ONE_CORE)
    for _ in range(5):
        setup.measure()
    assert (setup.made, setup.told) == (5, {"moved_cpus": 2})
    assert PATIENCE <= setup.slept <= PATIENCE + REST


def test_a_run_whose_cpus_always_share_a_core_is_not_disturbed() -> None:
    setup = _Setup(ONE_CORE)
    for _ in range(5):
        setup.measure()
    assert (setup.made, setup.slept, setup.told) == (5, 0.0, {})


def test_a_measurement_gives_up_once() -> None:
    setup = _Setup(NEAR, NEAR, NEAR, FAR, NEAR, FAR, FAR, left=0.0)
    setup.measure()
    setup.measure()
    assert (setup.made, setup.told) == (3, {"repeated": 1, "moved_cpus": 1})


def test_cpus_that_move_even_farther_are_waited_for() -> None:
    setup = _Setup(NEAR, NEAR, FAR)
    setup.measure()
    setup.measure()
    setup.long_after()
    setup.watch.distances = [FARTHER, FARTHER, FAR, NEAR, NEAR]
    assert setup.measure()["dropped"] == 1


def test_a_run_that_begins_far_apart_takes_the_nearer_state_when_it_comes() -> None:
    setup = _Setup(FAR, FAR, FAR, FAR, NEAR, NEAR, FAR, FAR, NEAR)
    setup.measure()
    setup.measure()
    assert (setup.made, setup.told) == (2, {}), "nothing nearer is known"
    setup.measure()
    assert (setup.made, setup.told) == (3, {"moved_cpus": 2}), "both count, and are told"
    setup.measure()
    assert (setup.made, setup.told) == (5, {"moved_cpus": 2, "repeated": 1})


def test_cpus_that_come_nearer_within_the_first_window_spoil_it() -> None:
    setup = _Setup(FAR, NEAR)
    seen = setup.measure()
    assert (setup.made, seen["dropped"], seen["nearest_ns"]) == (2, 1, [NEAR, NEAR])


def test_a_nearer_state_of_a_window_that_does_not_count_is_known_later() -> None:
    setup = _Setup(FAR, NEAR, FAR)
    setup.measure()
    assert (setup.made, setup.told) == (2, {"repeated": 1, "moved_cpus": 1})


def test_an_unknown_distance_disturbs_nothing() -> None:
    setup = _Setup(NEAR, NEAR, None)
    setup.measure()
    for _ in range(3):
        assert "between_ns" not in setup.measure()
    assert (setup.made, setup.slept, setup.told) == (4, 0.0, {})


@pytest.mark.parametrize("ns", [205.0, 241.0, 270.0])
def test_small_changes_count(ns: float) -> None:
    setup = _Setup(NEAR, NEAR, ns)
    setup.measure()
    setup.measure()
    assert (setup.made, setup.slept) == (2, 0.0)


def test_a_few_nanoseconds_are_near_however_large_their_ratio() -> None:
    near = Distance(40.0, 40.0)
    assert not Distance(189.0, 189.0).beyond(near)
    assert Distance(191.0, 191.0).beyond(near)


def test_most_pairs_count_as_well_as_the_farthest() -> None:
    """On many CPUs two are far apart at best."""
    best = Distance(110.0, 540.0, (3, 4))
    assert "300 ns between most CPUs, and 110 ns at best" in Distance(300.0, 560.0, (3, 4)).beyond(best)
    assert "1200 ns between cpu3 and cpu4, and 540 ns at best" in Distance(110.0, 1200.0, (3, 4)).beyond(best)
    assert not Distance(150.0, 600.0, (3, 4)).beyond(best)


def test_force_measures_at_once_and_counts() -> None:
    """The profile is not disturbed by others, so its values are proven."""
    setup = _Setup(NEAR, NEAR, FAR, patience=None)
    setup.measure()
    setup.measure()
    assert (setup.made, setup.slept, setup.told) == (2, 0.0, {"moved_cpus": 1})


def test_a_failure_is_not_repeated_and_says_nothing_about_the_cpus() -> None:
    setup = _Setup(NEAR, NEAR, FAR)
    setup.measure()
    assert "between_ns" not in setup.measure(good=lambda found: False)
    assert (setup.made, setup.told) == (2, {})


def test_the_wait_leaves_most_of_the_budget() -> None:
    setup = _Setup(NEAR, NEAR, FAR, left=8.0)
    setup.measure()
    setup.measure()
    assert 8 * FAR_SHARE <= setup.slept <= 8 * FAR_SHARE + REST


def test_all_waits_together_take_a_share_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock stands still except in rests."""
    setup = _Setup(NEAR)
    clock = type("Clock", (), {"monotonic": lambda: setup.slept})
    monkeypatch.setattr(cpu_distance, "time", clock)
    monkeypatch.setattr(machine_monitor, "time", clock)
    setup.careful._approach._begun = 0.0
    for _ in range(20):
        setup.watch.distances = [NEAR, NEAR, *[FAR] * 12, NEAR]
        setup.measure()
        setup.measure()
    assert PATIENCE <= setup.slept <= PATIENCE / (1 - FAR_SHARE) + 4 * REST
    assert setup.told["moved_cpus"] > 0


# ---- the journal


@pytest.mark.parametrize("record", [{"others": 0.1, "steal": 0.0}, {"dropped": 2, "lost": 1.5}])
def test_an_old_journal_has_no_distances(record: dict[str, Any]) -> None:
    conditions = Conditions()
    conditions.add_load(record)
    assert conditions.moved_cpus == 0
    assert "moved_cpus" not in conditions.to_dict()


class _Engine(InlineExecutor):
    """A simulated engine."""

    def __init__(self) -> None:
        super().__init__(SimulatedTarget("saturating", 3))


def _tune(
    distances: Sequence[float | None],
    past: Sequence[dict[str, Any]] = (),
    book: journal.Journal | None = None,
) -> Tune:
    engine = _Engine()
    space = SimulatedTarget("saturating", 3).surface.space()
    recorder = Recorder(
        engine, WORKLOAD, journal=book, past=past, identity=space.identity, virtual_time=True,
        watch=_Script(distances), sleep=lambda seconds: None,
    )  # fmt: skip
    made = Tune(recorder, space, Options(WORKLOAD, seed=3, max_trials=10, rounds=2, max_rounds=2))
    made.run()
    return made


def test_a_tune_beside_bursts_proves_the_same_and_resumes_with_its_counts(tmp_path: Path) -> None:
    quiet = _tune([NEAR]).outcome()
    burst = [FAR, FAR, FAR, FAR, NEAR, NEAR]
    with journal.Journal(tmp_path / "j") as book:
        moved = _tune([FAR] * 4 + [NEAR] * 6 + burst + [NEAR] * 8 + burst + [NEAR], book=book).outcome()
    assert moved.conditions == {"repeated": 2, "moved_cpus": 2}
    assert {**moved.to_dict(), "conditions": None} == {**quiet.to_dict(), "conditions": None}
    records = journal.load(tmp_path / "j").records
    resumed = _tune([FARTHER], past=records).outcome()
    assert resumed.to_dict() == moved.to_dict()
    cut = _tune([NEAR], past=records[: len(records) // 2]).outcome()
    assert {**cut.to_dict(), "conditions": None} == {**quiet.to_dict(), "conditions": None}


def test_a_resumed_run_knows_the_nearest_state(tmp_path: Path) -> None:
    with journal.Journal(tmp_path / "j") as book:
        recorder = Recorder(_Engine(), WORKLOAD, journal=book, virtual_time=True, watch=_Script([NEAR]))
        recorder.measurement("v", Configuration({}), ["pp"], MeasurementPolicy(), process=0)
    again = Recorder(
        _Engine(), WORKLOAD, past=journal.load(tmp_path / "j").records, virtual_time=True,
        watch=_Script([FAR, FAR, FAR, NEAR]), sleep=lambda seconds: None,
    )  # fmt: skip
    again.measurement("v", Configuration({}), ["pp"], MeasurementPolicy(), process=0)
    assert again.conditions.repeated == 0
    again.measurement("w", Configuration({}), ["pp"], MeasurementPolicy(), process=0)
    assert again.conditions.repeated == 1


def test_conditions_of_several_devices_add_up() -> None:
    parts = []
    for figures in ([NEAR, FAR], [NEAR, FAR, FAR], [FAR]):
        parts.append(Conditions())
        for ns in figures:
            parts[-1].add_load({"between_ns": [[ns, ns]]})
    assert Conditions.of(parts).moved_cpus == 3, "another device may be far apart at best"
    assert "A hypervisor had moved the CPUs during 3 runs that count." in _machine(
        {"machine": Conditions.of(parts).to_dict()}
    )


# ---- the watch of this machine


@pytest.mark.parametrize(
    ("bus", "cores", "probes"), [(None, 2, 2), (None, 1, 0), ("0000:01:00.0", 2, 0)], ids=str
)
def test_only_several_threads_on_cpus_need_the_probe(
    bus: str | None, cores: int, probes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs right before and right after a window, and not during it."""
    limits = {**_core.cpu_limits(), "cores": cores}
    monkeypatch.setattr(_core, "cpu_limits", lambda root="/": limits)
    calls = []

    def fake() -> Distance:
        calls.append(inside)
        return Distance(NEAR + len(calls), NEAR + len(calls))

    monkeypatch.setattr(machine_monitor, "probe", fake)
    inside = False
    with Machine(bus, host_weights=False) as machine, machine.window() as window:
        inside = True
        assert len(calls) == probes // 2
        inside = False
    assert len(calls) == probes
    assert [d.median for d in window.between] == [NEAR + 1, NEAR + 2][:probes]


def test_a_probe_that_fails_is_tried_again_a_few_times() -> None:
    unknown = {"pairs": 0, "median_ns": 0.0, "farthest_ns": 0.0, "farthest": (0, 0), "unknown": "busy"}
    known = {"pairs": 3, "median_ns": 110.0, "farthest_ns": 540.0, "farthest": (3, 4), "unknown": ""}
    answers = [unknown, known]
    assert probe(lambda: answers.pop(0)) == Distance(110.0, 540.0, (3, 4))
    asked = []
    assert probe(lambda: asked.append(1) or unknown) is None
    assert len(asked) == cpu_distance.TRIES
