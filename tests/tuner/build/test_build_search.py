"""The search over builds with known truth: simulated builds whose rates are a function of their switches."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from dyno_tuner.ab.compare import Options, judge
from dyno_tuner.ab.run import Run
from dyno_tuner.build.builder import BuildFailed, Built
from dyno_tuner.build.commands import Commands
from dyno_tuner.build.measure import Loading, Measured
from dyno_tuner.build.record import Record
from dyno_tuner.build.render import command_of, markdown, page, to_dict
from dyno_tuner.build.search import Clock, Search, search
from dyno_tuner.build.switches import Switch
from dyno_tuner.core.errors import TuneError
from dyno_tuner.core.protocol import Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

FACTS = {"model": "m.gguf", "device": "a CPU", "workload": "pp=512,tg=64"}


@dataclass
class FakeBuilds:
    """Builds by name: objects follow the defines, unless a switch is listed as dead in code or commands."""

    dead_code: tuple[str, ...] = ()
    dead_commands: tuple[str, ...] = ()
    failing: tuple[str, ...] = ()
    made: list[str] = field(default_factory=list)

    def _live(self, defines: Mapping[str, str], dead: Sequence[str]) -> str:
        return " ".join(f"{n}={v}" for n, v in sorted(defines.items()) if n not in dead)

    def configured(self, defines: Mapping[str, str], deadline: float = 0) -> Commands:
        return Commands({"a.o": f"cc {self._live(defines, self.dead_commands)} a.c"})

    def known(self, defines: Mapping[str, str]) -> Built | None:
        return None

    def build(self, defines: Mapping[str, str], name: str, link_mib: int = 0, deadline: float = 0) -> Built:
        if any(n in self.failing for n in defines):
            raise BuildFailed("pip install failed (1): error: no such register")
        if link_mib > 1000:
            raise TuneError(f"its link would take {link_mib} MiB")
        self.made.append(name)
        live = self._live(defines, (*self.dead_code, *self.dead_commands))
        whole = " ".join(f"{n}={v}" for n, v in sorted(defines.items()))
        return Built(whole or "default", whole, 10.0, 1.0, 200, 300, 1_000_000, code={"a.o": [live, "", 0]})


@dataclass
class FakeBench:
    """Rates by switch and u-batch, with the noise of processes; ABBA rounds judged as the real ones are."""

    truth: Callable[[str, Mapping[str, Any]], dict[str, float]]
    wrong: tuple[str, ...] = ()
    noise: float = 0.002
    compared: list[tuple[str, str]] = field(default_factory=list)
    workload: Workload = field(default_factory=lambda: Workload(pp=512, tg=64))
    fail_after: int | None = None

    def __post_init__(self) -> None:
        self._random = random.Random(3)

    def _run(self, build: Built, settings: Mapping[str, Any]) -> Run:
        drift = math.exp(self._random.gauss(0, self.noise))
        rates = self.truth(build.folder, settings)
        return Run({m: tuple(drift * rates[m] * math.exp(self._random.gauss(0, 0.001)) for _ in range(3))
                    for m in ("pp", "tg")})  # fmt: skip

    def compare(
        self, a: Built, b: Built, a_settings: Mapping[str, Any], b_settings: Mapping[str, Any],
        budget: float | None, *, answers: bool,
    ) -> Measured:  # fmt: skip
        if self.fail_after is not None and len(self.compared) >= self.fail_after:
            raise KeyboardInterrupt
        self.compared.append((a.folder, b.folder))
        rounds = [
            {
                "A": [self._run(a, a_settings) for _ in range(2)],
                "B": [self._run(b, b_settings) for _ in range(2)],
            }
            for _ in range(4)
        ]
        changed = "answers changed: allowed is 1e-05" if any(w in b.folder for w in self.wrong) else ""
        return Measured.of(judge(rounds, Options(self.workload)), changed, (1e-6, 2e-6))

    def rate(self, build: Built, settings: Mapping[str, Any], metric: str) -> float:
        return self._run(build, settings).rates[metric][0]

    def loading(self, build: Built) -> Loading:
        return Loading(0.5, 300.0)


def factors(**by_switch: tuple[float, float]) -> Callable[[str, Mapping[str, Any]], dict[str, float]]:
    def truth(name: str, settings: Mapping[str, Any]) -> dict[str, float]:
        pp, tg = 1000.0, 100.0
        for switch, (first, second) in by_switch.items():
            if switch in name:
                pp, tg = pp * first, tg * second
        return {"pp": pp, "tg": tg}

    return truth


def run(
    builds: FakeBuilds, bench: FakeBench, switches: Sequence[Switch], tmp_path: Path,
    budget: float | None = None, **more: Any,
) -> Search:  # fmt: skip
    record = Record(tmp_path / "run.jsonl")
    return search(builds, bench, switches, Clock(budget), record, lambda line: None, **more)


def switch(name: str, **more: Any) -> Switch:
    return Switch(name, "OFF", "ON", **more)


def test_each_switch_gets_the_verdict_that_is_true(tmp_path: Path) -> None:
    builds = FakeBuilds(dead_code=("CODE",), dead_commands=("COMMANDS",), failing=("FAILS",))
    bench = FakeBench(
        factors(FAST=(1.2, 1.0), SLOW=(0.9, 1.0), SAME=(1.0, 1.0), MIXED=(1.2, 0.8), WRONG=(2.0, 2.0)),
        ("WRONG",),
    )
    rows = [
        *(switch(n) for n in ("FAST", "SLOW", "SAME", "MIXED", "WRONG", "CODE", "COMMANDS", "FAILS")),
        switch("LARGE", link_mib=20_000), switch("TOLD", inert="no code reads it"),
        switch("REFUSED", refused="no such GPU"), switch("POINTLESS", pointless="it is no faster here"),
    ]  # fmt: skip
    result = run(builds, bench, rows, tmp_path)
    verdicts = {row.switch.name: row.verdict for row in result.outcomes}
    assert verdicts == {
        "FAST": "on", "SLOW": "default", "SAME": "default", "MIXED": "default", "WRONG": "default",
        "CODE": "inert", "COMMANDS": "inert", "FAILS": "refused", "LARGE": "refused", "TOLD": "inert",
        "REFUSED": "refused", "POINTLESS": "default",
    }  # fmt: skip
    measured = {b for _, b in bench.compared}
    assert measured == {"FAST=ON", "SLOW=ON", "SAME=ON", "MIXED=ON", "WRONG=ON"}
    assert builds.made == ["default", "FAST=ON", "SLOW=ON", "SAME=ON", "MIXED=ON", "WRONG=ON", "CODE=ON"]
    assert [s.name for s in result.chosen] == ["FAST"]
    told = to_dict(result, command_of("dyno", {}, result), FACTS)
    assert told["command"] == "pip install . -C cmake.define.FAST=ON"
    assert told["verdicts"]["FAST"]["ratio"]["pp512"] == pytest.approx(1.2, rel=0.02)
    assert set(told["verdicts"]["FAST"]) >= {"verdict", "reason", "ratio", "ci95", "seconds", "bytes"}
    assert "| FAST | ON | on |" in markdown(result, told["command"], FACTS)
    assert "it is no faster here" in page(result, told["command"], FACTS)


def test_a_default_of_on_is_turned_off(tmp_path: Path) -> None:
    off = Switch("FAST", "ON", "OFF")
    result = run(FakeBuilds(), FakeBench(factors(FAST=(1.1, 1.1))), [off], tmp_path)
    assert result.outcomes[0].verdict == "off"


def test_two_builds_with_the_same_code_are_measured_once(tmp_path: Path) -> None:
    builds = FakeBuilds(dead_code=("ALIAS",))

    class Aliased(FakeBuilds):
        def build(
            self, defines: Mapping[str, str], name: str, link_mib: int = 0, deadline: float = 0
        ) -> Built:
            return builds.build({"FAST": "ON"} if "ALIAS" in defines else defines, name)

    bench = FakeBench(factors(FAST=(1.2, 1.0)))
    result = run(Aliased(), bench, [switch("FAST"), switch("ALIAS")], tmp_path)
    assert "that of FAST=ON" in result.outcomes[1].reason
    assert result.outcomes[1].verdict == "inert"


def test_gains_that_add_up_are_taken_together(tmp_path: Path) -> None:
    bench = FakeBench(factors(ONE=(1.1, 1.0), TWO=(1.1, 1.1)))
    result = run(FakeBuilds(), bench, [switch("ONE"), switch("TWO")], tmp_path)
    assert {s.name for s in result.chosen} == {"ONE", "TWO"}
    assert result.confirmed is not None
    assert result.confirmed.ratios["pp512"].ratio == pytest.approx(1.21, rel=0.02)
    line = command_of("dyno", {"CMAKE_CXX_FLAGS": "-g -O1"}, result)
    assert line == (
        "pip install . -C 'cmake.define.CMAKE_CXX_FLAGS=-g -O1' -C cmake.define.ONE=ON -C cmake.define.TWO=ON"
    )


def test_gains_that_exclude_each_other_leave_the_better_one(tmp_path: Path) -> None:
    def truth(name: str, settings: Mapping[str, Any]) -> dict[str, float]:
        gain = (
            1.15
            if "ONE" in name and "TWO" in name
            else 1.2
            if "TWO" in name
            else 1.1
            if "ONE" in name
            else 1.0
        )
        return {"pp": 1000 * gain, "tg": 100.0}

    result = run(FakeBuilds(), FakeBench(truth), [switch("ONE"), switch("TWO")], tmp_path)
    assert [s.name for s in result.chosen] == ["TWO"]
    one = result.outcomes[0]
    assert one.verdict == "default"
    assert "together with the others it gains no more than TWO=ON" in one.reason


def test_a_gain_that_fresh_rounds_do_not_confirm_is_none(tmp_path: Path) -> None:
    calls = iter([1.1] * 8 + [1.0] * 100)

    def truth(name: str, settings: Mapping[str, Any]) -> dict[str, float]:
        return {"pp": 1000 * (next(calls) if name else 1.0), "tg": 100.0}

    result = run(FakeBuilds(), FakeBench(truth), [switch("LUCKY")], tmp_path)
    assert result.chosen == []
    assert result.outcomes[0].verdict == "default"
    assert "fresh rounds do not confirm it" in result.outcomes[0].reason
    assert command_of("dyno", {}, result) == "pip install ."


def test_a_knob_that_interacts_is_set_anew_in_both_builds(tmp_path: Path) -> None:
    """At the default u-batch the switch loses; each with its own best one, it wins."""

    def truth(name: str, settings: Mapping[str, Any]) -> dict[str, float]:
        ubatch = settings.get("ubatch", 512)
        pp = (
            {512: 900.0, 1024: 1500.0, 2048: 1000.0}
            if "FAST" in name
            else {512: 1000, 1024: 1050, 2048: 1200.0}
        )
        return {"pp": pp[ubatch], "tg": 100.0}

    result = run(
        FakeBuilds(), FakeBench(truth), [switch("FAST", knobs=("ubatch",))], tmp_path,
        knob_values={"ubatch": (1024, 2048)},
    )  # fmt: skip
    row = result.outcomes[0]
    assert row.tuned is not None
    assert (row.tuned.base, row.tuned.variant) == ({"ubatch": 2048}, {"ubatch": 1024})
    assert row.verdict == "on"
    assert result.knobs == {"ubatch": 1024}
    assert result.confirmed is not None
    assert result.confirmed.ratios["pp512"].ratio == pytest.approx(1.25, rel=0.03)
    told = to_dict(result, "", FACTS)
    assert told["settings"] == {"ubatch": 1024}
    assert told["verdicts"]["FAST"]["ratio"]["pp512"] == pytest.approx(0.9, rel=0.03)


def test_a_switch_that_the_budget_leaves_no_time_for_stays_default(tmp_path: Path) -> None:
    result = run(FakeBuilds(), FakeBench(factors(FAST=(1.2, 1.0))), [switch("FAST")], tmp_path, budget=5.0)
    (row,) = result.outcomes
    assert row.verdict == "default"
    assert "a build takes about 10 s: not measured" in row.reason
    assert row.built is None


def test_a_run_that_was_interrupted_measures_nothing_twice(tmp_path: Path) -> None:
    rows = [switch("FAST"), switch("SLOW"), switch("SAME")]
    truth = factors(FAST=(1.2, 1.0), SLOW=(0.9, 1.0), SAME=(1.0, 1.0))
    first = FakeBench(truth, fail_after=2)
    with pytest.raises(KeyboardInterrupt):
        run(FakeBuilds(), first, rows, tmp_path)
    with (tmp_path / "run.jsonl").open("ab") as file:
        file.write(b'{"key": "cut by a ki')
    second = FakeBench(truth)
    result = run(FakeBuilds(), second, rows, tmp_path)
    assert first.compared == [("", "FAST=ON"), ("", "SLOW=ON")]
    assert second.compared == [("", "SAME=ON"), ("", "FAST=ON")]  # and the rounds that confirm
    assert [row.verdict for row in result.outcomes] == ["on", "default", "default"]


def test_no_verdict_of_a_switch_without_effect_is_a_gain(tmp_path: Path) -> None:
    """Forty switches that do nothing on a noisy machine: the rounds that confirm leave none of them."""
    rows = [switch(f"S{n}") for n in range(40)]
    result = run(FakeBuilds(), FakeBench(factors(), noise=0.02), rows, tmp_path)
    assert result.chosen == []
    assert {row.verdict for row in result.outcomes} == {"default"}
