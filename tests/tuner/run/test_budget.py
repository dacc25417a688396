"""Who gets which share of the budget."""

from __future__ import annotations

import pytest
from dyno_tuner.core.options import Options
from dyno_tuner.core.protocol import Workload
from dyno_tuner.run.budget import Schedule


class Clock:
    """What a schedule sees of a recorder."""

    now = 0.0
    expected_measurement = 0.0


def schedule(
    budget: float, *, kernels: bool = True, measurement: float = 1.0, prepared: float = 10.0
) -> Schedule:
    clock = Clock()
    made = Schedule(clock, Options(Workload(), budget=budget, kernels=kernels), kinds=2)  # type: ignore[arg-type]
    made.learn(measurement)
    assert clock.expected_measurement == measurement
    clock.now = prepared
    made.prepared()
    return made


def end(made: Schedule, stage: str) -> float:
    """Seconds from the end of the preparations to that of a stage."""
    made.until(stage)
    low, high = 0.0, 1e6
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if made.more_seconds(middle) else (low, middle)
    return low


STAGES = ("thresholds", "screen", "confirm", "walk", "leave_one_out")


@pytest.mark.parametrize("prepared", [5.0, 50.0])
def test_a_slow_start_starves_no_stage(prepared: float) -> None:
    made = schedule(100, kernels=False, prepared=prepared)
    ends = [end(made, stage) for stage in STAGES]
    assert ends == sorted(ends)
    assert ends[0] > 0.15 * (100 - prepared)
    assert ends[-1] == pytest.approx(0.97 * (100 - prepared), abs=0.1)


def test_kernels_get_the_time_that_proves_them_or_none() -> None:
    # 22 measurements make two rounds of the whole profile.
    fast = schedule(310, measurement=0.1)
    assert end(fast, "leave_one_out") == pytest.approx(0.71 * 300, abs=0.1)
    roomy = schedule(310, measurement=1.0)
    assert end(roomy, "leave_one_out") == pytest.approx((0.97 - 1.2 * 22 / 300 - 0.23) * 300, abs=0.1)
    busy = schedule(110, measurement=1.5)
    left = 100 - end(busy, "leave_one_out")
    assert 40 < left <= 53.1
    hopeless = schedule(70, measurement=2.0)
    assert end(hopeless, "leave_one_out") == pytest.approx(0.97 * 60, abs=0.1)


def test_without_a_budget_there_is_always_time() -> None:
    made = Schedule(Clock(), Options(Workload()), kinds=1)  # type: ignore[arg-type]
    made.prepared()
    made.until("screen")
    assert made.more_seconds(1e9)
    assert made.fits(10**9, 0.1)
    assert not made.used_up


def test_a_start_is_shared_by_the_visits_of_its_process() -> None:
    made = schedule(100)
    made.learn_from([5.0], [])
    assert made.measurement_cost == 5.0
    made.learn_from([5.0, 5.0], [1.0, 1.0])
    assert made.measurement_cost == 2.0
    made.learn_from([1.0], [1.2])  # nothing to load
    assert made.measurement_cost == 1.0


def test_a_load_within_a_process_is_no_slower_machine() -> None:
    made = schedule(100)
    made.learn_from([5.0, 5.0], [1.0, 1.0])
    made.loaded(4.0)
    assert made.measurement_cost == 2.0
    assert made.loading == pytest.approx(1 + 3 / 2), "3 s more than a warm measurement takes"
    for _ in range(2):
        made.loaded(5.0)
    assert made.measurement_cost > 2.0, "behind the next loads measurements are slower"
    made.learn(2.0)
    for _ in range(3):
        made.took_round(5, 12.0)
    assert made.loading == 1.0, "rounds that were seen have their loads"
    made.follow(3.0)
    assert made.measurement_cost == pytest.approx(2.3)


def test_slow_first_loads_leave_a_cost_to_plan_with() -> None:
    """The first loads read the disk, and later ones the page cache: a measurement still takes seconds."""
    made = schedule(300, measurement=5.0)
    for seconds in (30.0, 30.0, 5.0, 5.0, 5.0):
        made.loaded(seconds)
        assert 2.5 < made.measurement_cost < 10
        assert made.measurements_left < 300


def test_rounds_of_points_that_load_keep_their_loads() -> None:
    made = schedule(300, measurement=2.0)
    made.loaded(8.0)
    made.learn(2.0)
    for _ in range(3):
        made.took_round(5, 40.0)
    assert made.of_rounds(10) == pytest.approx(80), "8 s each, of which 6 are a load"


def test_rounds_say_what_rounds_take() -> None:
    """Until some have run, as much as measurements of the default; never more than these."""
    made = schedule(300, measurement=2.0)
    assert made.of_rounds(10) == 20
    for seconds in (7.0, 7.7):
        made.took_round(7, seconds)
    assert made.of_rounds(10) == 20
    made.took_round(7, 14.0)
    assert made.of_rounds(10) == pytest.approx(1.1 * 1.15 * 10)
    made.lengthen(0.5)
    assert made.of_rounds(10) == pytest.approx(1.6 * 1.15 * 10)
    for _ in range(5):
        made.took_round(7, 70.0)
    assert made.of_rounds(10) == 25
