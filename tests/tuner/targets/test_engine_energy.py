"""Energy beside the rates of other engines: counters are read while a process of llama-bench runs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from dyno import _energy
from dyno_tuner.ab.ggml_side import GgmlSide
from dyno_tuner.core.options import BESIDE, DECIDES
from dyno_tuner.core.protocol import Workload
from dyno_tuner.targets.ggml.energy import LEAST_SECONDS, Readings
from dyno_tuner.targets.ggml.target import GgmlTarget
from fake_engines import fake

if TYPE_CHECKING:
    from pathlib import Path

ENGINE, WATTS = "llama.cpp-0c1e570", 40.0
# Seconds, watts, and what is printed at the end of each phase.
PHASES = (
    (2.0, 100.0, b"a log line\n"),  # loading
    (1.0, 50.0, b'[\n{"n_prompt": 64, "samples_ns": [1]}'),
    (0.5, 100.0, b""),  # warming up
    (2.0, 20.0, b',\n{"n_gen": 16, "samples_ns": [1]}'),
    (1.0, 100.0, b"\n]\n"),  # freeing
)
OUTPUT = b"".join(text for _, _, text in PHASES)


class Clock:
    """Time, and a counter of the process of PHASES that starts again from zero at `most` joules."""

    sources = ("cpu",)

    def __init__(self, most: float = 1e9) -> None:
        self.time, self.most = 0.0, most

    def joules(self) -> float:
        left, total = self.time, 0.0
        for seconds, watts, _ in PHASES:
            total += watts * min(seconds, max(0.0, left))
            left -= seconds
        return total

    def printed(self) -> int:
        left, size = self.time, 0
        for seconds, _, text in PHASES:
            left -= seconds
            size += len(text) if left >= -1e-9 else 0
        return size

    def read(self) -> dict[str, float]:
        return {"cpu": self.joules() % self.most}

    def spent(self, before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
        return {"cpu": (after["cpu"] - before["cpu"]) % self.most}


def readings(clock: Clock, step: float = 0.01) -> Readings:
    counters: Any = clock
    found = Readings(counters, now=lambda: clock.time)
    for n in range(round(sum(s for s, _, _ in PHASES) / step) + 1):
        clock.time = n * step
        found.look(clock.printed())
    return found


@pytest.mark.parametrize("most", [1e9, 75.0])
def test_each_test_has_the_joules_of_its_own_time(most: float) -> None:
    """Not the 250 and 100 J of loading and freeing; a counter that overflows is made whole."""
    found = readings(Clock(most)).of_tests(OUTPUT, [1.0, 2.0])
    assert found == [{"cpu": pytest.approx(50, abs=1.5)}, {"cpu": pytest.approx(40, abs=1.5)}]


def test_a_test_that_cannot_be_told_has_no_joules() -> None:
    whole = readings(Clock())
    assert whole.of_tests(OUTPUT, [1.0]) == [{}], "another number of rows"
    assert whole.of_tests(OUTPUT, [LEAST_SECONDS / 2, 2.0])[0] == {}
    assert whole.of_tests(OUTPUT, [1.0, 2.8])[1] == {}, "it would have begun before the first one ended"
    assert whole.of_tests(OUTPUT, [1.0, 2.6])[1] == {"cpu": pytest.approx(2.6 / 2.5 * 90, abs=2)}, (
        "a look late"
    )
    assert whole.of_tests(OUTPUT, [3.5, 2.0])[0] == {}, "it would have begun before the process"
    whole.printed = [len(OUTPUT) if n == len(whole.printed) - 1 else 0 for n in range(len(whole.printed))]
    assert whole.of_tests(OUTPUT, [1.0, 2.0])[1] == {}, "both rows appeared at the end"


def test_a_counter_that_fails_costs_no_run() -> None:
    class Lost(Clock):
        def read(self) -> dict[str, float]:
            if self.time > 3:
                raise OSError("NVML: the GPU is lost")
            return super().read()

    found = readings(Lost())
    assert found.failed == "NVML: the GPU is lost"
    assert found.of_tests(OUTPUT, [1.0, 2.0]) == [{}, {}]


class Steady:
    """A counter that draws WATTS by the clock. `time` is when it was read."""

    sources = ("cpu",)
    time = 0.0

    def read(self) -> dict[str, float]:
        self.time = time.monotonic()
        return {"cpu": WATTS * self.time}

    def spent(self, before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
        return {"cpu": after["cpu"] - before["cpu"]}


def test_a_side_tells_joules_per_token(
    tmp_path: Path, trained_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = Steady()
    monkeypatch.setattr(_energy, "Counters", lambda bus, powercap: counter)
    binaries = fake(tmp_path / "bin", ENGINE, seconds=0.25)
    look = Readings.look

    def told(readings: Readings, printed: int) -> None:
        """A late look would make two tests overlap, so the process waits for it."""
        readings.now = lambda: counter.time
        look(readings, printed)
        (binaries / "told").write_text(str(printed))
        (binaries / "told").replace(binaries / "seen")

    monkeypatch.setattr(Readings, "look", told)
    side = GgmlSide("A", "llama.cpp", str(trained_model), str(binaries))
    run = side.run(Workload(pp=64, tg=16))
    side.close()
    assert set(run.energy) == {"pp", "tg"}
    for metric, tokens in (("pp", 64), ("tg", 16)):
        found = run.energy[metric]["cpu"]
        assert found.watts == pytest.approx(WATTS, rel=0.02)
        assert found.watts / found.joules_per_token == pytest.approx(tokens / 0.25, rel=0.01)


def test_without_a_counter_nothing_is_told(
    tmp_path: Path, trained_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_energy, "POWERCAP", str(tmp_path / "absent"))
    binaries = str(fake(tmp_path / "bin", ENGINE))
    side = GgmlSide("A", "llama.cpp", str(trained_model), binaries)
    assert side.run(Workload(pp=64, tg=16)).energy == {}
    side.close()
    target = GgmlTarget("llama.cpp", str(trained_model), binaries)
    assert "the energy of the CPU cannot be read" in target.count_energy(BESIDE)
    assert "does not decide a tune" in target.count_energy(DECIDES)
    assert target.count_energy(None) == ""
    target.close()
