"""Kernels of generation are chosen by what they do in the engine, not by their time alone."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
from conftest_tuner import WORKLOAD, Simulated
from dyno_tuner.core.intervals import Estimate
from dyno_tuner.core.protocol import Configuration, KernelOp, TrialStatus, Workload
from dyno_tuner.decide.quality_gate import QualityGate
from dyno_tuner.execution.inline_executor import InlineExecutor
from dyno_tuner.kernels.in_situ import Contest, frozen, shortened
from dyno_tuner.record import journal
from dyno_tuner.run.session import Request, run
from dyno_tuner.run.tune import Options
from dyno_tuner.targets.simulated.surfaces import SimulatedOp, Surface, null, overlap, with_ops
from dyno_tuner.targets.simulated.target import SimulatedTarget, SimulationNoise

if TYPE_CHECKING:
    from pathlib import Path

TRUTH = {("matmul a", "late"), ("attention", "split")}  # of `overlap`: what gains in situ


def _op(key: str, variant: str, alone: float, tg: float, **others: Any) -> SimulatedOp:
    return SimulatedOp(key, "tg", alone, lambda settings: {"tg": tg}, variant, **others)


def _tune(surface: Surface, seed: int, noise: SimulationNoise | None = None, **options: Any) -> Simulated:
    return Simulated(surface, seed, noise, kernels=True, **{"max_trials": 8, **options})


def _kernels(tuned: Simulated) -> set[tuple[str, str]]:
    return {(k.choice.key, str(k.choice.config["variant"])) for k in tuned.outcome.kernels}


def _tried(tuned: Simulated, key: str, variant: str) -> int:
    """Measurements in situ with this kernel."""
    named = {"key": key, "tokens": "m1", "config": {"variant": variant}}
    return sum(name.startswith("kernels/in_place/") and named in kernels for name, kernels in tuned.visited)


@pytest.mark.parametrize("seed", range(4))
def test_what_is_fast_alone_and_slow_in_place_is_not_taken(seed: int) -> None:
    """Alone the first kernel of each op wins, and costs generation 14 % and 3 %; the other one, slower
    alone, gains."""
    tuned = _tune(overlap(), seed)
    stage = tuned.tune._kernels
    assert stage is not None
    assert {key: dict(config)["variant"] for (key, _), config in stage.won.items()} == {
        "matmul a": "early", "attention": "wide"
    }  # fmt: skip
    assert _kernels(tuned) == TRUTH
    for kernel in tuned.outcome.kernels:
        assert kernel.screened.how == "in place"
        assert kernel.screened.alone is not None
        assert kernel.screened.alone.ratio < 1 < kernel.estimate.ratio
    assert tuned.outcome.gain["tg"].ratio == pytest.approx(1.04 * 1.03, abs=0.02)


@pytest.mark.parametrize("seed", range(3))
def test_by_times_alone_the_same_engine_gains_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dyno_tuner.kernels.stage.IN_SITU", -1.0)
    tuned = _tune(overlap(), seed)
    assert {kind for kind, _ in tuned.notes} >= {"kernels_alone", "kernels"}
    assert tuned.outcome.kernels == []


def test_a_wrong_kernel_does_not_take_the_others_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {"key": "attention", "tokens": "m1", "config": {"variant": "split"}}
    answers = QualityGate.why_not

    def why_not(gate: QualityGate, configuration: Configuration) -> str:
        found = answers(gate, configuration)
        return "wrong" if wrong in [k.to_dict() for k in configuration.kernels] else found

    monkeypatch.setattr(QualityGate, "why_not", why_not)
    assert _kernels(_tune(overlap(), 1)) == {("matmul a", "late")}


@pytest.mark.parametrize("seed", range(12))
def test_kernels_that_are_all_the_same_in_place_change_nothing(seed: int) -> None:
    ops = [_op(f"matmul {n}", f"v{i}", 0.8 + 0.1 * i, 1.0) for n in "abc" for i in range(6)]
    assert _tune(with_ops(null(), *ops), seed).outcome.kernels == []


@pytest.mark.parametrize("seed", range(3))
def test_drift_does_not_decide(seed: int) -> None:
    noise = SimulationNoise(drift=0.1, drift_seconds=100.0)
    assert _kernels(_tune(overlap(), seed, noise)) <= TRUTH


@pytest.mark.parametrize("status", [TrialStatus.CRASH, TrialStatus.OOM, TrialStatus.INVALID])
def test_a_kernel_that_fails_is_tried_once_and_costs_nothing_else(status: TrialStatus) -> None:
    surface = with_ops(overlap(), *overlap().ops, _op("matmul a", "broken", 1.2, 2.0, fault=status))
    tuned = _tune(surface, 1)
    assert _tried(tuned, "matmul a", "broken") == 1
    # A kernel that neither gains nor costs may ride along in the group.
    assert _kernels(tuned) - {("norm", "rows")} == TRUTH
    said = [d for kind, d in tuned.notes if kind == "kernel_trial" and d.get("status") == str(status)]
    assert [d["config"] for d in said] == [{"variant": "broken"}]


def test_what_is_hopeless_alone_is_not_tried() -> None:
    surface = with_ops(overlap(), *overlap().ops, _op("matmul a", "slow", 0.4, 1.5))
    assert _tried(_tune(surface, 0), "matmul a", "slow") == 0


def test_gains_that_several_kernels_have_together_are_tried_as_one_first() -> None:
    surface = with_ops(null(), *(_op(f"matmul {n}", "other", 1.3, 1.02) for n in "abcd"))
    tuned = _tune(surface, 2)
    assert len(_kernels(tuned)) == 4
    assert [d["kept"] for kind, d in tuned.notes if kind == "kernels_together"] == [True]


@pytest.mark.parametrize("budget", [20.0, 40.0, 80.0, 160.0])
def test_the_budget_holds_with_many_candidates(budget: float) -> None:
    many = [(name, i) for name in "abcdefgh" for i in range(10)]
    ops = [_op(f"matmul {name}", f"v{i}", 0.8 + 0.02 * i, 1.0 + 0.004 * i) for name, i in many]
    tuned = _tune(with_ops(null(), *ops), 3, budget=budget)
    assert tuned.outcome.seconds <= 1.1 * budget
    truth = math.prod(1.0 + 0.004 * int(v[1:]) for _, v in _kernels(tuned))
    assert truth >= 1


def _session(folder: Path, seed: int) -> Any:
    surface = with_ops(
        overlap(), *overlap().ops, _op("matmul a", "broken", 1.2, 2.0, fault=TrialStatus.CRASH)
    )
    options = Options(WORKLOAD, seed=seed, max_trials=8, rounds=3, max_rounds=3, kernels=True, budget=120.0)
    request = Request("simulated", options, out=folder / "p.yaml", resume=True, quiet=True)
    return run(request, InlineExecutor(SimulatedTarget(surface, seed)), surface.space())


def test_a_run_that_was_cut_while_screening_ends_as_one_that_was_not(tmp_path: Path) -> None:
    first = _session(tmp_path, 5)
    assert first.outcome.kernels
    records = journal.load(first.journal).records
    keys = [r["key"] for r in records if "op" in r]
    assert len(keys) == len(set(keys))
    data = first.journal.read_bytes()
    begin, end = data.index(b"kernels/in_place/0"), data.rindex(b"kernels/in_place/")
    for part in range(6):
        cut = begin + (end - begin) * part // 5 + 7 * part
        first.journal.write_bytes(data[:cut])
        first.path.unlink()
        again = _session(tmp_path, 5)
        assert again.outcome.to_dict() == first.outcome.to_dict(), cut
        crashed = [
            r for r in journal.load(first.journal).records
            if r.get("op") == "visit" and r["result"]["status"] == "crash"
        ]  # fmt: skip
        assert len(crashed) == 1
    note = again.profile.kernels["matmul a"]["m1"].note
    assert note.startswith("screened in situ: 1.0")
    assert "measured alone: 0.9" in note


def test_the_order_alternates_between_variants_fastest_first() -> None:
    configs = [{"variant": v, "n": n} for v in ("a", "b") for n in (1, 2)]
    alone = {frozen(c): Estimate(r, r, r, 5) for c, r in zip(configs, (1.3, 1.2, 0.8, 0.4), strict=True)}
    op = KernelOp("matmul", "m1", 1, 1, {"variant": "plain"}, ({"variant": "plain"}, *configs), "tg")
    assert Contest(op, alone, 1.0).order() == [frozen(configs[i]) for i in (0, 2, 1)]


def test_short_runs_generate_only_and_take_about_a_tenth_of_a_second() -> None:
    assert shortened(Workload(pp=4096, tg=128), {"pp": 9e4, "tg": 700.0}) == Workload(pp=0, tg=70)
    assert shortened(Workload(pp=512, tg=64, depth=100), {"tg": 3.0}) == Workload(pp=0, tg=8, depth=100)
    mix = Workload.parse("pp=512,depth=0,4096; tg=128,depth=512,4096,weight=3")
    short = shortened(mix, {"tg128@d512": 200.0, "tg128@d4096": 100.0})
    assert short.weights == {"tg20@d512": 3.0, "tg10@d4096": 3.0}
