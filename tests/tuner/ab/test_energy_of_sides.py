"""Energy beside the rates of `tune ab`: a real process reads counters that the test turns."""

from __future__ import annotations

import contextlib
import math
import threading
from typing import TYPE_CHECKING, Any

import pytest
from dyno import _energy
from dyno_tuner.ab import child
from dyno_tuner.ab.compare import Options, judge
from dyno_tuner.ab.dyno_side import DynoSide
from dyno_tuner.ab.render import markdown, to_dict
from dyno_tuner.ab.run import Energy, Run
from dyno_tuner.core.protocol import Workload

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WATTS = 40.0


@contextlib.contextmanager
def turning(folder: Path) -> Iterator[None]:
    """A package that draws a constant power, as its counter shows."""
    place = folder / "intel-rapl:0"
    place.mkdir(parents=True)
    (place / "name").write_text("package-0\n")
    (place / "max_energy_range_uj").write_text("262143000000\n")
    counter, partial = place / "energy_uj", place / "partial"
    counter.write_text("0\n")
    ended = threading.Event()

    def turn() -> None:
        import time

        begun = time.monotonic()
        while not ended.wait(0.002):
            partial.write_text(f"{(time.monotonic() - begun) * WATTS * 1e6:.0f}\n")
            partial.replace(counter)

    thread = threading.Thread(target=turn)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_a_process_tells_joules_per_token(
    tmp_path: Path, trained_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_energy, "POWERCAP", str(tmp_path))
    with turning(tmp_path):
        run = DynoSide("A", str(trained_model)).run(Workload(pp=32, tg=8))
    assert set(run.energy) == {"pp", "tg"}
    # On a busy machine, the counter may stand still for a while.
    found = [run.energy[metric]["cpu"] for metric in ("pp", "tg")]
    assert max(told.joules_per_token for told in found) > 0
    assert all((told.watts > 0) == (told.joules_per_token > 0) for told in found)


def test_without_a_counter_nothing_is_told(
    tmp_path: Path, trained_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_energy, "POWERCAP", str(tmp_path / "absent"))
    assert DynoSide("A", str(trained_model)).run(Workload(pp=16, tg=4)).energy == {}


class _Engine:
    """An engine that draws 50 W on a clock of its own: a run takes a second, a reset three."""

    draws_on_device = False

    def __init__(self) -> None:
        self.now = 0.0

    def reset(self) -> None:
        self.now += 3.0

    def logits(self, tokens: Any, **how: Any) -> None:
        self.now += 0.25 * len(tokens)


class _Meter:
    """The counter of that engine, which fails from some look on."""

    def __init__(self, engine: _Engine, looks: float) -> None:
        self.engine, self.looks = engine, looks

    def read(self) -> dict[str, float]:
        self.looks -= 1
        if self.looks < 0:
            raise OSError("NVML: the GPU is lost")
        return {"gpu": 50 * self.engine.now}

    def spent(self, before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
        return {"gpu": after["gpu"] - before["gpu"]}


@pytest.mark.parametrize("looks", [0, 2, math.inf])
def test_a_counter_that_fails_costs_no_run(looks: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates are the same with and without it; joules are of the time that is measured, not of resets."""
    engine = _Engine()
    monkeypatch.setattr(child, "counters", lambda ask: _Meter(engine, looks))
    monkeypatch.setattr(child.time, "perf_counter", lambda: engine.now)
    parts = [{"metric": "tg", "kind": "tg", "tokens": 4, "depth": 0}]
    found = child.speed(engine, {"parts": parts, "prompts": 2, "vocab": 100})
    assert found["rates"] == {"tg": [4.0, 4.0]}
    if looks < math.inf:
        assert found["energy"] == {}
        return
    tokens, seconds, joules = found["energy"]["tg"]["gpu"]
    assert (tokens, seconds) == (8, 2.0)
    assert joules == pytest.approx(100.0)


def test_the_table_has_both_sides() -> None:
    def side(rate: float, joules: float) -> Run:
        told = {"pp": {"gpu": Energy(joules, 500.0)}, "tg": {"gpu": Energy(2 * joules, 300.0)}}
        return Run({"pp": (rate,) * 3, "tg": (10.0,) * 3}, energy=told)

    rounds = [{"A": [side(100.0, 0.5)] * 2, "B": [side(120.0, 0.4)] * 2} for _ in range(2)]
    result = judge(rounds, Options(Workload(pp=512, tg=64)))
    assert result.energy["pp512"]["gpu"] == (Energy(0.5, 500.0), Energy(0.4, 500.0))
    facts = {"a": {"engine": "dyno"}, "b": {"engine": "dyno"}, "model": "m", "device": "d", "workload": "w",
             "command": "tune ab"}  # fmt: skip
    assert "| pp512, GPU (J/token; W) | 0.5; 500 | 0.4; 500 | 0.800 |" in markdown(result, None, facts, "")
    told = to_dict(result, None, facts)["energy"]["tg64"]["gpu"]
    assert told == {
        "a": {"joules_per_token": 1.0, "watts": 300.0},
        "b": {"joules_per_token": 0.8, "watts": 300.0},
    }
    partly = [{"A": [side(100.0, 0.5)] * 2, "B": [Run({"pp": (1.0,) * 3, "tg": (1.0,) * 3})] * 2}] * 2
    assert judge(partly, Options(Workload(pp=512, tg=64))).energy == {}
