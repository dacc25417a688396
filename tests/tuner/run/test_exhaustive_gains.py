"""The comparison with an exhaustive run can be measured in pieces."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dyno_tuner.core.options import Options
from dyno_tuner.core.protocol import Configuration, KernelChoice, KernelOp, OpContext
from dyno_tuner.core.workload import Workload
from dyno_tuner.run.session import Request, space_for, target_of
from dyno_tuner.space.knobs import Knob
from dyno_tuner.space.search_space import Space

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

import exhaustive_gains  # noqa: E402
from exhaustive_gains import (  # noqa: E402
    WORKLOAD,
    Bench,
    beside,
    judge,
    make_model,
    sweep,
    verdict,
    with_change,
)
from job_notebook import Notebook, Stopped  # noqa: E402
from record_sweep import in_rounds  # noqa: E402
from slow_engine import SlowEngine, as_slow, slow_kernels  # noqa: E402

OPTIONS: dict[str, Any] = {"force": False, "budget": 120.0, "rounds": 6, "slow": []}
OTHERS: list[dict[str, Any]] = [{"force": True}, {"budget": 60.0}, {"rounds": 4}, {"slow": ["settings"]}]
SLOW = Configuration({"ubatch": 32, "threads": 1})


def test_a_piece_goes_on_where_the_one_before_has_stopped(tmp_path: Path) -> None:
    path = tmp_path / "x.model.0.part.json"
    first = Notebook(path, math.inf, OPTIONS)
    assert first.once("looks/pp/a/b", lambda: [1.01, 0.98]) == [1.01, 0.98]
    first.once("tune", lambda: {"profile": {"settings": {}, "kernels": []}})
    over = Notebook(path, -math.inf, OPTIONS)
    assert over.once("looks/pp/a/b", lambda: pytest.fail("measured again")) == [1.01, 0.98]
    assert over.once("tune", lambda: pytest.fail("measured again"))["profile"]["kernels"] == []
    assert set(over.seconds) == {"looks", "tune"}
    with pytest.raises(Stopped, match="judge/pp"):
        over.once("judge/pp", lambda: pytest.fail("measured although the time has ended"))
    over.close()
    assert not path.exists()


def test_a_tune_begins_only_if_its_budget_is_left() -> None:
    notebook = Notebook(None, time.monotonic() + 100.0, OPTIONS)
    with pytest.raises(Stopped, match="tune"):
        notebook.once("tune", lambda: pytest.fail("begun, and the end of the piece cuts it"), 120.0)
    assert notebook.once("judge/pp", lambda: 1.0, 20.0) == 1.0


def test_a_failure_leaves_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "part.json"
    notebook = Notebook(path, math.inf, OPTIONS)
    notebook.once("looks/pp/a/b", lambda: [1.0])
    with pytest.raises(ZeroDivisionError):
        notebook.once("tune", lambda: 1 // 0)
    assert set(json.loads(path.read_text())["results"]) == {"looks/pp/a/b"}


def test_pieces_of_another_machine_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "part.json"
    Notebook(path, math.inf, OPTIONS).once("looks/pp/a/b", lambda: [1.0])
    data = json.loads(path.read_text())
    data["of"]["cpu_info"] = "another CPU"
    path.write_text(json.dumps(data))
    with pytest.raises(SystemExit, match="another CPU"):
        Notebook(path, math.inf, OPTIONS)


@pytest.mark.parametrize("other", OTHERS)
def test_pieces_of_other_options_are_refused(tmp_path: Path, other: dict[str, Any]) -> None:
    path = tmp_path / "part.json"
    Notebook(path, math.inf, OPTIONS).once("tune", lambda: {"gain": 1.1})
    (name,) = other
    both = f"'{name}': {OPTIONS[name]}.* and this is .*'{name}': {other[name]}"
    with pytest.raises(SystemExit, match=both.replace("[", r"\[")):
        Notebook(path, math.inf, {**OPTIONS, **other})


@pytest.mark.parametrize("other", OTHERS)
def test_jobs_of_other_options_are_refused(tmp_path: Path, other: dict[str, Any]) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps({**OPTIONS, "jobs": []}))
    args = argparse.Namespace(json=path, lanes=["0"], models=[], seeds=0, **{**OPTIONS, **other})
    said = r"x\.json is of force False, budget 120\.0, rounds 6, slow \[\]; give the same options"
    with pytest.raises(SystemExit, match=said):
        sweep(args)


def test_the_result_says_what_ran_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    alone, busy = argparse.Namespace(beside=""), argparse.Namespace(beside="a test suite")
    assert beside([[4, 5]], alone) == "one job at a time, on 2 CPUs of a machine with 16 CPUs"
    assert beside([[0, 1], [2, 3]], busy) == (
        "2 jobs at a time, each on 2 CPUs of a machine with 16 CPUs; beside them: a test suite"
    )


def test_what_seems_best_gets_further_looks() -> None:
    """One look errs by tens of percent on a busy machine, so a single lucky one must not decide."""
    lucky, good = {"c3": 1.6}, {"c7": 1.08}
    seen: list[tuple[str, int]] = []

    class Looking(Bench):
        def __init__(self) -> None:
            """No engine."""

        def _looks_of(self, changes: Any, metric: str, phase: str) -> list[float]:
            seen.append((phase, len(changes)))
            luck = lucky if phase == "looks" else {}
            return [{**luck, **good}.get(name, 1.0) for name, _, _ in changes]

    changes: Any = [(f"c{i}", None, ("pp",)) for i in range(40)]
    found = Looking().looks(changes, "pp")
    assert seen == [("looks", 40), ("looks1", 10), ("looks2", 10)]
    assert (found[3], found[7]) == (1.0, 1.08)
    assert len(found) == 40


def kernel(place: str, rows: int) -> KernelChoice:
    return KernelChoice(place, "m1", {"variant": "matvec", "rows": rows})


def test_a_change_is_added_to_the_profile_in_place_of_its_own_choice() -> None:
    default = Configuration({"ubatch": 32, "threads": 1})
    profile = Configuration({"ubatch": 32, "threads": 2}, (kernel("a", 16), kernel("b", 16)))
    changed = with_change(profile, Configuration({"ubatch": 256, "threads": 1}), default)
    assert changed.settings == {"ubatch": 256, "threads": 2}
    assert changed.kernels == profile.kernels
    changed = with_change(profile, Configuration(default.settings, (kernel("a", 64),)), default)
    assert changed.settings == profile.settings
    assert set(map(str, changed.kernels)) == {str(kernel("b", 16)), str(kernel("a", 64))}


@pytest.mark.parametrize(
    ("on_top", "written", "why"),
    [
        ([1.02, 1.00, 1.05], True, "the profile gains no more than 5 % by it"),
        ([1.04, 0.90, 1.20], None, "the rounds cannot tell"),
        ([1.04, 1.01, 1.07], None, "the rounds cannot tell"),
        ([1.20, 1.10, 1.30], False, "the profile gains by it"),
        ([1.20, 0.90, 1.50], None, "the rounds cannot tell"),
        (None, False, "the profile does not run with it"),
    ],
)
def test_a_gain_is_written_or_missed_only_if_the_interval_shows_it(
    on_top: list[float] | None, written: bool | None, why: str
) -> None:
    assert verdict(False, on_top) == {"written": written, "why": why}


def test_only_gains_that_the_profile_lacks_race_on_top_of_it() -> None:
    raced: list[str] = []

    class Racing(Bench):
        def __init__(self) -> None:
            self.space = Space((Knob("ubatch", (32, 256), 32), Knob("threads", (1, 2), 1)))
            self.default = self.space.configuration(self.space.default)

        def race(self, key: str, base: Any, named: Any, metric: str) -> dict[str, list[float]]:
            assert base == profile
            raced.extend(named)
            return {name: [1.2, 1.1, 1.3] for name in named}

    bench = Racing()
    profile = Configuration({"ubatch": 32, "threads": 2}, (kernel("a", 16), kernel("b", 16)))
    named = {
        "threads=2": bench.default.replace(threads=2),
        "a 16": Configuration(bench.default.settings, (kernel("a", 16),)),
        "a 64": Configuration(bench.default.settings, (kernel("a", 64),)),
        "ubatch=256": bench.default.replace(ubatch=256),
        "noise": bench.default,
    }
    rounds = {"threads=2": [1.9, 1.8, 2.0], "a 16": [1.3, 1.2, 1.4], "a 64": [1.2, 1.1, 1.3],
              "ubatch=256": [1.4, 1.3, 1.5], "noise": [1.1, 0.9, 1.3]}  # fmt: skip
    found = judge(bench, profile, "tg", {"rounds": rounds}, named)
    assert raced == ["a 64", "ubatch=256"]
    assert {gain["change"]: gain["written"] for gain in found} == {
        "threads=2": True, "a 16": True, "a 64": False, "ubatch=256": False,
    }  # fmt: skip


def test_the_journal_of_a_tune_stays_beside_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scratch folder is removed, and without the journal nobody learns why a gain was not written."""
    journal = tmp_path / "profile.yaml.journal.jsonl"
    journal.write_text("{}\n")
    outcome = SimpleNamespace(
        settings={"threads": 2}, kernels=[], entries=[], gain={}, promises=[{"ratio": 1.2}], missed={},
        status="budget", trials=3, margin={},
    )  # fmt: skip
    monkeypatch.setattr(exhaustive_gains, "run", lambda *_: SimpleNamespace(outcome=outcome, journal=journal))
    bench: Any = SimpleNamespace(start=SLOW, default=Configuration({"ubatch": 32, "threads": 1}))
    part = tmp_path / "gains.some-Q4_K_M.0.part.json"
    args = argparse.Namespace(budget=120.0, seed=0, force=False, part=part)
    found = exhaustive_gains.tune(bench, make_model("pycode-moe-20m-Q4_K_M", tmp_path), args, str(tmp_path))
    assert found["profile"]["settings"] == {"ubatch": 32, "threads": 2}
    assert found["promises"] == [{"ratio": 1.2}]
    assert (tmp_path / "gains.some-Q4_K_M.0.journal.jsonl").read_text() == "{}\n"


def test_a_slow_kernel_takes_about_twice_as_long() -> None:
    assert as_slow([[1.0, 1.4], [1.1], [3.0, 1.9], [2.5], []], 2.0) == 2
    assert as_slow([[1.0], [1.4], [4.1], [0.5]], 2.0) is None
    assert as_slow([[], [2.0]], 2.0) is None


def test_the_heaviest_ops_of_generation_get_a_slow_kernel() -> None:
    """Ops come with the heaviest first. One whose kernels are all about as fast is passed over."""
    seconds = {"fast": 1.0, "slow": 2.1, "slower": 9.0}

    class Timed:
        def kernel_ops(self, configuration: Configuration, workload: Workload) -> list[KernelOp]:
            kinds = [("pp", "slow"), ("tg", "slow"), ("tg", "slower"), ("tg", "slow"), ("tg", "slow")]
            return [
                KernelOp(f"op{n}", "m1", 1, 1, {"variant": "fast"},
                         ({"variant": "fast"}, {"variant": other}), metric)
                for n, (metric, other) in enumerate(kinds)
            ]  # fmt: skip

        def time_ops(self, request: Any, context: OpContext, deadline: float) -> list[list[float]]:
            assert request["threads"] == 3
            return [[seconds[config["variant"]]] for config in request["configs"]]

    engine: Any = Timed()
    found = slow_kernels(engine, Configuration({"threads": 3}), Workload.parse(WORKLOAD))
    assert [(choice.key, choice.config["variant"]) for choice in found] == [("op1", "slow"), ("op3", "slow")]
    seconds["slow"] = 9.0
    with pytest.raises(SystemExit, match="no kernel of generation is 1"):
        slow_kernels(engine, Configuration({"threads": 3}), Workload.parse(WORKLOAD))


def test_a_slow_engine_begins_from_slow_defaults_and_runs_what_is_named(tmp_path: Path) -> None:
    """The tuner has to see the slow values as defaults, or it would find no gain by leaving them."""
    model = make_model("pycode-moe-20m-Q4_K_M", tmp_path)
    workload = Workload.parse(WORKLOAD)
    request = Request(str(model), Options(workload, kernels=True), "cpu", quiet=True)
    target = target_of(request, "cpu", str(tmp_path))
    plain = SlowEngine(*target, Configuration({}))
    try:
        usual = space_for(plain.describe(), request)
        ops = plain.kernel_ops(usual.configuration(usual.default), workload)
    finally:
        plain.close()
    own = {(op.key, op.tokens): op for op in ops}
    slow = tuple(
        KernelChoice(op.key, op.tokens, next(c for c in op.candidates if c != op.default))
        for op in [op for op in ops if op.metric == "tg"][:2]
    )
    engine = SlowEngine(*target, Configuration(SLOW.settings, slow))
    try:
        space = space_for(engine.describe(), request)
        begun = space.settings(space.default)
        assert {name: begun[name] for name in SLOW.settings} == SLOW.settings
        assert begun.keys() == usual.settings(usual.default).keys()
        configuration = space.configuration(space.default)
        found = {(op.key, op.tokens): op for op in engine.kernel_ops(configuration, workload)}
        for choice in slow:
            place = (choice.key, choice.tokens)
            assert found[place].default == choice.config != own[place].default
            assert own[place].default in found[place].candidates
        named = KernelChoice(slow[0].key, slow[0].tokens, own[slow[0].key, slow[0].tokens].default)
        ops = engine.kernel_ops(Configuration(configuration.settings, (named,)), workload)
        assert next(op for op in ops if op.key == named.key and op.tokens == "m1").default == named.config
        measured = engine.measurement(
            configuration, workload, ["tg"], Options(workload).policy, OpContext("x"), 60.0
        )
        assert measured.status == "ok"
    finally:
        engine.close()


def test_a_sweep_records_every_path_in_each_round() -> None:
    order = in_rounds(["a", "b", "c", "d"], 5, 0)
    rounds = [order[i : i + 4] for i in range(0, 20, 4)]
    assert all(sorted(each) == ["a", "b", "c", "d"] for each in rounds)
    assert len({tuple(each) for each in rounds}) > 1
