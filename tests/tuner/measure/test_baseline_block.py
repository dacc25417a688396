"""Blocks between two measurements of a baseline: when they are void, repeated, and given up."""

from __future__ import annotations

from typing import Any

import pytest
from dyno_tuner.core.protocol import Measurement, Sample, TrialStatus
from dyno_tuner.measure.baseline_block import Baseline, Block, BlockPlan, rested_alike


class Machine:
    """A baseline of these rates in turn, and candidates of 100 tokens/s. Time counts measurements."""

    def __init__(self, *rates: float, room: int = 100, fails: str = "") -> None:
        self.rates = list(rates)
        self.room = room
        self.fails = fails
        self.made: list[str] = []
        self.voids: list[tuple[int, float]] = []
        self.rests = 99  # the number of measurements after which the GPU rests

    def one(self, name: str, rate: float) -> Measurement:
        self.made.append(name)
        if name.startswith(self.fails) and self.fails:
            return Measurement(TrialStatus.CRASH)
        return Measurement(TrialStatus.OK, (Sample("pp", 0, 100, 100 / rate, 100 / rate),))

    def baseline(self, voided: int) -> Baseline | None:
        if not self.rates:
            return None
        return float(len(self.made)), self.one(f"baseline{voided}", self.rates.pop(0))

    def plan(self, **how: Any) -> BlockPlan[str]:
        return BlockPlan(
            self.baseline, lambda name, repeat: self.one(f"{name}{repeat}", 100.0),
            lambda: float(len(self.made)), lambda n: len(self.made) + n <= self.room, ["pp"], 0.03,
            how.pop("repeats", 2), lambda: len(self.made) > self.rests,
            lambda repeat, moved: self.voids.append((repeat, round(moved, 2))), **how,
        )  # fmt: skip

    def run(self, **how: Any) -> Block[str]:
        plan = self.plan(**how)
        opening = plan.baseline(0)
        assert opening is not None
        block: Block[str] = Block(opening)
        block.taken = plan.measure_all(["a", "b"], 0)
        block.close(plan)
        return block


def test_a_steady_baseline_settles_a_block() -> None:
    machine = Machine(50.0, 50.5)
    block = machine.run()
    assert machine.made == ["baseline0", "a0", "b0", "baseline0"]
    assert (block.settled, block.voided) == (True, 0)
    assert [t.candidate for t in block.taken] == ["a", "b"]
    assert [when for when, _ in block.baselines()] == [0.0, 3.0]


def test_a_moved_baseline_makes_a_block_void_and_opens_its_repetition() -> None:
    machine = Machine(50.0, 60.0, 60.5)
    block = machine.run()
    assert machine.made == ["baseline0", "a0", "b0", "baseline0", "a0", "b0", "baseline1"]
    assert machine.voids == [(0, 0.2)]
    assert (block.settled, block.voided) == (True, 1)
    assert [m.rates("pp")[0] for _, m in block.baselines()] == [60.0, 60.5]


def test_a_baseline_that_moves_all_the_time_is_taken_as_it_is() -> None:
    machine = Machine(50.0, 60.0, 70.0, 80.0)
    block = machine.run(repeats=2)
    assert [repeat for repeat, _ in machine.voids] == [0, 1]
    assert (block.settled, block.voided) == (True, 2)


def test_a_void_block_that_there_is_no_time_to_repeat_is_not_settled() -> None:
    machine = Machine(50.0, 60.0, room=6)
    block = machine.run()
    assert (block.settled, block.voided) == (False, 0)
    assert block.after is not None


def test_a_gpu_that_begins_to_rest_makes_a_block_void() -> None:
    machine = Machine(50.0, 50.0, 50.0)
    machine.rests = 2
    block = machine.run()
    assert machine.voids == [(0, 0.0)]
    assert (block.settled, block.resting) == (True, True)


@pytest.mark.parametrize("ends", [True, False])
def test_a_failure_ends_a_block_if_it_ends_the_process(ends: bool) -> None:
    machine = Machine(50.0, 50.0, fails="a")
    block = machine.run(failure_ends=ends)
    assert machine.made == ["baseline0", "a0"] + ([] if ends else ["b0", "baseline0"])
    assert (block.after is None) == ends
    assert len(block.baselines()) == (1 if ends else 2)


def test_without_the_baseline_nothing_is_settled() -> None:
    block = Machine(50.0).run()
    assert block.after is None
    assert not block.settled


def test_a_result_within_which_the_gpu_begins_to_rest_is_measured_again() -> None:
    asked: list[bool] = []

    def measure(again: bool) -> str:
        asked.append(again)
        return f"measured {len(asked)}"

    assert rested_alike(measure, lambda: False) == "measured 1"
    assert rested_alike(measure, lambda: len(asked) > 1) == "measured 3"
    assert asked == [False, False, True]
