"""The search over builds with known truth: simulated builds whose rates are a function of their switches."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from dyno_tuner.ab.compare import Options, TooEarly, judge
from dyno_tuner.ab.run import Run
from dyno_tuner.build.builder import BuildFailed, BuildLate, Built
from dyno_tuner.build.commands import Commands
from dyno_tuner.build.measure import Loading, Measured, VariantFailed
from dyno_tuner.build.record import Record
from dyno_tuner.build.render import command_of, markdown, page, to_dict
from dyno_tuner.build.search import Clock, Search, search
from dyno_tuner.build.switches import Place, Switch
from dyno_tuner.cli.build_command import _fixed
from dyno_tuner.core.errors import DisturbedError, Interrupted, TuneError
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
    took: Callable[[float], None] = lambda seconds: None

    def _live(self, defines: Mapping[str, str], dead: Sequence[str]) -> str:
        return " ".join(f"{n}={v}" for n, v in sorted(defines.items()) if n not in dead)

    def configured(self, defines: Mapping[str, str], deadline: float = 1e9) -> Commands:
        return Commands({"a.o": f"cc {self._live(defines, self.dead_commands)} a.c"})

    def known(self, defines: Mapping[str, str]) -> Built | None:
        return None

    def build(self, defines: Mapping[str, str], name: str, link_mib: int = 0, deadline: float = 1e9) -> Built:
        if any(n in self.failing for n in defines):
            raise BuildFailed("pip install failed (1): error: no such register")
        if link_mib > 1000:
            raise TuneError(f"its link would take {link_mib} MiB")
        if deadline < 10.0:
            self.took(deadline)
            raise BuildLate(f"pip install did not finish within {deadline:.0f} s")
        self.took(10.0)
        self.made.append(name)
        live = self._live(defines, (*self.dead_code, *self.dead_commands))
        whole = " ".join(f"{n}={v}" for n, v in sorted(defines.items()))
        types = ["f32", "q4_k"] if "GGML_CUDA_PROFILE" in defines else []
        code = {"a.o": [live, "", 0]}
        return Built(whole or "default", whole, 10.0, 1.0, 200, 300, 1_000_000, code=code, gpu_types=types,
                     gpu_groups=["heads_128"] if types else [])  # fmt: skip


@dataclass
class FakeBench:
    """Rates by switch and u-batch, with the noise of processes; ABBA rounds judged as the real ones are."""

    truth: Callable[[str, Mapping[str, Any]], dict[str, float]]
    wrong: tuple[str, ...] = ()
    noise: float = 0.002
    compared: list[tuple[str, str]] = field(default_factory=list)
    workload: Workload = field(default_factory=lambda: Workload(pp=512, tg=64))
    fail_after: int | None = None
    took: Callable[[float], None] = lambda seconds: None
    busy: tuple[str, ...] = ()  # builds in whose rounds the machine does not come to rest
    broken: tuple[str, ...] = ()  # builds that do not run
    profiles: list[tuple[str, str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(3)

    def _run(self, build: Built, settings: Mapping[str, Any]) -> Run:
        drift = math.exp(self._random.gauss(0, self.noise))
        rates = self.truth(build.folder, settings)
        return Run({m: tuple(drift * rates[m] * math.exp(self._random.gauss(0, 0.001)) for _ in range(3))
                    for m in ("pp", "tg")})  # fmt: skip

    def compare(
        self, a: Built, b: Built, a_settings: Mapping[str, Any], b_settings: Mapping[str, Any],
        budget: float | None, *, answers: bool, profile: str = "",
    ) -> Measured:  # fmt: skip
        if any(name in b.folder for name in self.busy):
            raise DisturbedError("the machine did not become quiet in 30 s: others used 1.9 cores")
        if any(name in b.folder for name in self.broken):
            raise VariantFailed("side B: illegal instruction")
        self.took(9.0)
        self.profiles.append((a.folder, b.folder, profile))
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
        self.took(1.0)
        return self._run(build, settings).rates[metric][0]

    def loading(self, build: Built, profile: str = "") -> Loading:
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
    """A search whose clock moves by what builds and processes are made to take."""
    record, times = Record(tmp_path / "run.jsonl"), [0.0]

    def took(seconds: float) -> None:
        times[0] += seconds

    builds.took = bench.took = took
    clock = Clock(budget, lambda: times[0])
    return search(builds, bench, switches, clock, record, lambda line: None, **more)


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
            self, defines: Mapping[str, str], name: str, link_mib: int = 0, deadline: float = 1e9
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
    assert "new rounds do not confirm it" in result.outcomes[0].reason
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


def test_the_gain_of_a_knob_is_no_gain_of_two_switches_together(tmp_path: Path) -> None:
    """Both builds like the larger u-batch, and the gain of both switches is that of the switches alone."""

    def truth(name: str, settings: Mapping[str, Any]) -> dict[str, float]:
        pp = 1000.0 * (1.5 if settings.get("ubatch") == 1024 else 1.0)
        for switch_name in ("FAST", "QUICK"):
            pp *= 1.1 if switch_name in name else 1.0
        return {"pp": pp, "tg": 100.0}

    bench = FakeBench(truth)
    rows = [switch(name, knobs=("ubatch",)) for name in ("FAST", "QUICK")]
    result = run(FakeBuilds(), bench, rows, tmp_path, knob_values={"ubatch": (1024,)})
    assert [s.name for s in result.chosen] == ["FAST", "QUICK"]
    assert result.knobs == {"ubatch": 1024}
    for found in (result.together, result.confirmed):
        assert found is not None
        assert found.ratios["pp512"].ratio == pytest.approx(1.21, rel=0.03)


def test_the_gain_of_a_knob_is_no_gain_over_the_best_switch_alone(tmp_path: Path) -> None:
    """The best switch has no knob; the other one adds nothing to it but the larger u-batch."""

    def truth(name: str, settings: Mapping[str, Any]) -> dict[str, float]:
        pp = 1000.0 * (1.5 if settings.get("ubatch") == 1024 else 1.0)
        return {"pp": pp * (1.2 if "LTO" in name else 1.1 if "FAST" in name else 1.0), "tg": 100.0}

    rows = [switch("LTO"), switch("FAST", knobs=("ubatch",))]
    result = run(FakeBuilds(), FakeBench(truth), rows, tmp_path, knob_values={"ubatch": (1024,)})
    assert [s.name for s in result.chosen] == ["LTO"]
    assert "together with the others it gains no more than LTO=ON" in result.outcomes[1].reason


def test_the_best_switch_alone_runs_with_its_own_default(tmp_path: Path) -> None:
    """The default build and the other switch like the larger u-batch, and the best switch does not. The other
    one adds nothing to it but to undo that u-batch."""

    def truth(name: str, settings: Mapping[str, Any]) -> dict[str, float]:
        large = settings.get("ubatch") == 1024
        if "LTO" in name:
            return {"pp": 1400.0 * (0.9 if large else 1.0), "tg": 100.0}
        if "FAST" in name:
            return {"pp": 1250.0 * (0.9 if large else 1.0), "tg": 100.0}
        return {"pp": 1000.0 * (1.1 if large else 1.0), "tg": 100.0}

    rows = [switch(name, knobs=("ubatch",)) for name in ("LTO", "FAST")]
    result = run(FakeBuilds(), FakeBench(truth), rows, tmp_path, knob_values={"ubatch": (1024,)})
    tuned = result.outcomes[0].tuned
    assert tuned is not None
    assert (tuned.base, tuned.variant) == ({"ubatch": 1024}, {})
    assert [s.name for s in result.chosen] == ["LTO"]
    assert "together with the others it gains no more than LTO=ON" in result.outcomes[1].reason


def test_a_switch_that_the_budget_leaves_no_time_for_stays_default(tmp_path: Path) -> None:
    result = run(FakeBuilds(), FakeBench(factors(FAST=(1.2, 1.0))), [switch("FAST")], tmp_path, budget=15.0)
    (row,) = result.outcomes
    assert (row.verdict, row.tried) == ("default", False)
    assert (
        "not tried: the budget has 5 s left, and a build with its measurements takes about 10" in row.reason
    )
    assert row.built is None


def test_a_short_budget_gives_verdicts_for_some_switches(tmp_path: Path) -> None:
    """A build takes 10 s and a comparison 9 s: with 60 s two of six switches are tried, and the gain is
    confirmed; built without measuring, five builds would have taken all."""
    builds, bench = FakeBuilds(), FakeBench(factors(FAST=(1.2, 1.0), S1=(0.9, 1.0)))
    rows = [switch("FAST"), *(switch(f"S{n}") for n in range(1, 6))]
    result = run(builds, bench, rows, tmp_path, budget=60.0)
    tried = [row.switch.name for row in result.outcomes if row.tried]
    assert tried == ["FAST", "S1"]
    assert builds.made == ["default", "FAST=ON", "S1=ON"], "nothing is built that is not measured"
    assert bench.compared == [("", "FAST=ON"), ("", "S1=ON"), ("", "FAST=ON")]
    assert result.outcomes[0].verdict == "on"
    told = to_dict(result, "", FACTS)
    assert [told["verdicts"][f"S{n}"]["tried"] for n in range(1, 6)] == [True, False, False, False, False]
    assert "Not tried: S2=ON, S3=ON, S4=ON, S5=ON" in markdown(result, "", FACTS)


def test_a_build_that_its_deadline_ends_is_not_tried(tmp_path: Path) -> None:
    class Slow(FakeBuilds):
        def build(
            self, defines: Mapping[str, str], name: str, link_mib: int = 0, deadline: float = 1e9
        ) -> Built:
            return super().build(defines, name, link_mib, min(deadline, 1.0) if defines else deadline)

    result = run(Slow(), FakeBench(factors()), [switch("FAST")], tmp_path, budget=100.0)
    (row,) = result.outcomes
    assert (row.verdict, row.tried) == ("default", False)
    assert "the budget ended during its build" in row.reason


@pytest.mark.parametrize("budget", [None, 75.0])
def test_a_build_that_takes_too_long_does_not_blame_the_budget(tmp_path: Path, budget: float | None) -> None:
    class Slow(FakeBuilds):
        def build(
            self, defines: Mapping[str, str], name: str, link_mib: int = 0, deadline: float = 1e9
        ) -> Built:
            if not defines:
                return super().build(defines, name, link_mib, deadline)
            self.took(deadline)
            raise BuildLate(f"pip install did not finish within {deadline:.0f} s")

    result = run(Slow(), FakeBench(factors()), [switch("FAST")], tmp_path, budget=budget, longest_build=50.0)
    (row,) = result.outcomes
    assert (row.verdict, row.tried) == ("default", False)
    assert row.reason == "not tried: its build took too long: pip install did not finish within 50 s"


def test_a_variant_that_does_not_load_is_refused(tmp_path: Path) -> None:
    class Bench(FakeBench):
        def loading(self, build: Built, profile: str = "") -> Loading:
            if "BROKEN" in build.folder:
                raise TuneError("side A: exit code -11")
            return super().loading(build, profile)

    bench = Bench(factors(BROKEN=(1.5, 1.5), FAST=(1.2, 1.0)))
    result = run(FakeBuilds(), bench, [switch("BROKEN"), switch("FAST")], tmp_path)
    assert [row.verdict for row in result.outcomes] == ["refused", "on"]
    assert "it builds, but does not run: side A: exit code -11" in result.outcomes[0].reason
    assert [s.name for s in result.chosen] == ["FAST"]
    assert "side A: exit code -11" in markdown(result, "", FACTS)


def test_a_default_build_that_loads_no_more_ends_nothing(tmp_path: Path) -> None:
    class Bench(FakeBench):
        def loading(self, build: Built, profile: str = "") -> Loading:
            if build.folder == "":
                raise TuneError("side A: the file is gone")
            return super().loading(build, profile)

    result = run(FakeBuilds(), Bench(factors(FAST=(1.2, 1.0))), [switch("FAST")], tmp_path)
    assert result.base_loading is None
    assert [s.name for s in result.chosen] == ["FAST"]
    assert "default build" in markdown(result, "", FACTS)


@pytest.mark.parametrize("rows", [["FAST"], ["ONE", "TWO"]], ids=["confirming", "together"])
def test_an_interrupt_in_the_last_rounds_ends_the_run(tmp_path: Path, rows: list[str]) -> None:
    class Bench(FakeBench):
        def compare(self, *words: Any, **more: Any) -> Measured:
            if len(self.compared) == len(rows):
                raise TooEarly("interrupted after 1 rounds; a verdict needs 2")
            return super().compare(*words, **more)

    bench = Bench(factors(**dict.fromkeys(rows, (1.2, 1.1))))
    with pytest.raises(Interrupted, match="after 1 rounds"):
        run(FakeBuilds(), bench, [switch(name) for name in rows], tmp_path)


def test_a_busy_machine_ends_with_a_result(tmp_path: Path) -> None:
    """A comparison that others prevent costs its own verdict; after two in a row no further one is built."""
    bench = FakeBench(factors(FAST=(1.2, 1.0)), busy=("B1", "B2", "B3"))
    builds = FakeBuilds()
    rows = [switch("B1"), switch("FAST"), switch("B2"), switch("B3"), switch("LAST")]
    result = run(builds, bench, rows, tmp_path)
    reasons = {row.switch.name: row.reason for row in result.outcomes}
    assert "did not become quiet in 30 s" in reasons["B1"]
    assert "--force" in reasons["B1"]
    assert "other programs use this machine" in reasons["LAST"]
    assert {row.switch.name for row in result.outcomes if row.tried} == {"FAST"}
    assert "LAST=ON" not in builds.made
    assert result.chosen, "the gain was confirmed when the machine had come to rest"
    assert to_dict(result, "", FACTS)["verdicts"]["B1"]["verdict"] == "default"


def test_a_gain_that_a_busy_machine_leaves_unconfirmed_is_none(tmp_path: Path) -> None:
    class Later(FakeBench):
        def compare(self, *words: Any, **more: Any) -> Measured:
            self.busy = ("FAST",) if self.compared else ()
            return super().compare(*words, **more)

    result = run(FakeBuilds(), Later(factors(FAST=(1.2, 1.0))), [switch("FAST")], tmp_path)
    (row,) = result.outcomes
    assert (row.verdict, result.chosen) == ("default", [])
    assert "new rounds could not confirm it: the machine did not become quiet" in row.reason


def test_a_variant_that_does_not_run_is_refused(tmp_path: Path) -> None:
    bench = FakeBench(factors(FAST=(1.2, 1.0)), broken=("BROKEN",))
    result = run(FakeBuilds(), bench, [switch("BROKEN"), switch("FAST")], tmp_path)
    assert [row.verdict for row in result.outcomes] == ["refused", "on"]
    assert "it builds, but does not run: side B: illegal instruction" in result.outcomes[0].reason


def test_a_build_for_a_profile_is_compared_under_it(tmp_path: Path) -> None:
    """Both sides run under the profile, also in the rounds that confirm; other switches run without it."""
    pruned = Switch("GGML_CUDA_PROFILE", "", "/p/h200.yaml")
    bench = FakeBench(factors(GGML_CUDA_PROFILE=(1.2, 1.0), SLOW=(0.9, 1.0)))
    result = run(FakeBuilds(), bench, [pruned, switch("SLOW")], tmp_path)
    name = "GGML_CUDA_PROFILE=/p/h200.yaml"
    assert bench.profiles == [
        ("", name, "/p/h200.yaml"), ("", "SLOW=ON", ""), ("", name, "/p/h200.yaml"),
    ]  # fmt: skip
    assert "both builds under h200.yaml, 1.0 instead of 1.0 MiB" in result.outcomes[0].reason
    assert [s.name for s in result.chosen] == ["GGML_CUDA_PROFILE"]


@pytest.mark.parametrize("gain", [1.2, 1.0])
def test_a_verdict_names_the_models_that_a_build_for_a_profile_runs(tmp_path: Path, gain: float) -> None:
    """It may be the fastest for this model, and open no other one."""
    pruned = Switch("GGML_CUDA_PROFILE", "", "/p/h200.yaml")
    bench = FakeBench(factors(GGML_CUDA_PROFILE=(gain, 1.0)))
    result = run(FakeBuilds(), bench, [pruned, switch("SLOW")], tmp_path)
    only = "n a GPU this build runs only models with weights of type f32, q4_k"
    only += " and kernels of the groups heads_128"
    told = to_dict(result, "pip install .", FACTS)
    assert f"o{only}" in told["verdicts"]["GGML_CUDA_PROFILE"]["reason"]
    assert told["verdicts"]["GGML_CUDA_PROFILE"]["gpu_types"] == ["f32", "q4_k"]
    assert told["verdicts"]["GGML_CUDA_PROFILE"]["gpu_groups"] == ["heads_128"]
    assert only not in told["verdicts"]["SLOW"]["reason"]
    for text in (markdown(result, "pip install .", FACTS), page(result, "pip install .", FACTS)):
        assert f"o{only}" in text
        assert (f"O{only}. That holds for a draft model, too." in text) is (gain > 1)


def test_a_build_for_a_profile_goes_together_with_others_under_it(tmp_path: Path) -> None:
    pruned = Switch("GGML_CUDA_PROFILE", "", "/p/h200.yaml")
    bench = FakeBench(factors(GGML_CUDA_PROFILE=(1.1, 1.0), FAST=(1.2, 1.0)))
    result = run(FakeBuilds(), bench, [pruned, switch("FAST")], tmp_path)
    assert {s.name for s in result.chosen} == {"GGML_CUDA_PROFILE", "FAST"}
    assert [profile for _, _, profile in bench.profiles[2:]] == ["/p/h200.yaml"] * 3


def test_nothing_is_built_if_every_verdict_is_known_before(tmp_path: Path) -> None:
    """The tables alone decide, so the minutes of a default build would tell nothing."""
    rows = [Switch("A", "OFF", "ON", inert="it is dead"), Switch("B", "OFF", "ON", refused="no compiler")]
    builds, bench = FakeBuilds(), FakeBench(factors())
    result = run(builds, bench, [*rows, Switch("C", "OFF", "ON", pointless="on this chip")], tmp_path)
    assert (builds.made, bench.compared) == ([], [])
    assert [row.verdict for row in result.outcomes] == ["inert", "refused", "default"]
    told = to_dict(result, "pip install .", FACTS)
    assert (told["default"]["seconds"], told["verdicts"]["A"]["reason"]) == (None, "it is dead")
    assert "| default build |  |  |  |  |  |  |  |  |  |" in markdown(result, "pip install .", FACTS)
    assert "it is dead" in page(result, "pip install .", FACTS)
    assert "so nothing was built. Keep the default build." in markdown(result, "pip install .", FACTS)


def test_the_line_for_a_gpu_has_the_defines_of_a_gpu(tmp_path: Path) -> None:
    result = run(FakeBuilds(), FakeBench(factors(FAST=(1.2, 1.0))), [switch("FAST")], tmp_path)
    fixed = _fixed("llama.cpp", Place("cuda", "9.0"))
    assert command_of("llama.cpp", fixed, result) == (
        "cmake -B build -DGGML_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=90-real -DFAST=ON"
    )


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
