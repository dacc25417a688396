"""One rule decides what is written: of a tune, of its kernels, of an interrupted tune, and of `--pareto`."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dyno_tuner
import pytest
from conftest_tuner import WORKLOAD, Simulated
from dyno_tuner.ab.compare import FASTER, SAME
from dyno_tuner.build.measure import Measured
from dyno_tuner.core.intervals import Estimate
from dyno_tuner.core.protocol import Measurement, TrialStatus
from dyno_tuner.decide.ablation import FULL, LeftOut, Part, left_out, rest_of, variants
from dyno_tuner.decide.acceptance import Choice, Evidence, accept
from dyno_tuner.decide.pareto import trade_memory, variant_outcome
from dyno_tuner.execution.inline_executor import InlineExecutor
from dyno_tuner.measure.comparison import Comparison
from dyno_tuner.measure.paired_rounds import Bar
from dyno_tuner.output.verdict import verdict
from dyno_tuner.record.recorder import Recorder
from dyno_tuner.run.tune import Options, Tune
from dyno_tuner.space.search_space import Space
from dyno_tuner.targets.simulated.surfaces import SURFACES, SimulatedOp, saturating
from dyno_tuner.targets.simulated.target import SimulatedTarget

if TYPE_CHECKING:
    from dyno_tuner.core.outcome import Outcome

GAIN = Estimate(1.1, 1.08, 1.12, 8)
PART = Part("ubatch", ("pp",), ("ubatch",))
HOLDS = LeftOut(PART, GAIN, missed=True)


def compared(rounds: int, **gains: float) -> Comparison:
    """Rounds of configurations that are so much faster than the default."""
    result = Comparison(["default", *gains])
    for _ in range(rounds):
        logs = [(name, "pp", [gain, gain]) for name, gain in gains.items()]
        rates = [(name, "pp", [100.0]) for name in ("default", *gains)]
        result.add_round(logs, rates)
    return result


def evidence(rounds: int = 2, *, gains: bool = True, saves: bool = False, parts: Any = (HOLDS,)) -> Evidence:
    return Evidence(compared(rounds, full=0.1), FULL, {"pp": 1.0}, gains, tuple(parts), saves)


def test_the_rule() -> None:
    assert accept(evidence())
    assert not accept(evidence(1)), "one round decides nothing"
    assert not accept(evidence(gains=False)), "the whole has to gain"
    assert accept(evidence(gains=False, saves=True)), "or to save memory"
    assert not accept(evidence(parts=())), "nothing was left out"
    weak = dataclasses.replace(HOLDS, missed=False)
    assert not accept(evidence(parts=(HOLDS, weak))), "each part has to hold"
    for reason in ("needed", "saves"):
        assert accept(evidence(parts=(HOLDS, dataclasses.replace(weak, **{reason: True}))))
    unknown = dataclasses.replace(evidence(), name="another")
    assert not accept(unknown), "it has to be what was measured"


def test_a_choice_takes_only_what_the_rule_accepts() -> None:
    choice = Choice((0,), baseline={"pp": 1.0})
    assert not choice.accept(evidence(1), (1,), [])
    assert (choice.point, choice.evidence, choice.stage) == ((0,), None, "")
    assert choice.accept(evidence(), (1,), [])
    assert choice.point == (1,)
    assert choice.evidence == evidence()
    assert not choice.clear((0,))
    assert (choice.point, choice.entries, choice.evidence) == ((0,), [], None)


def test_a_part_is_compared_with_the_rest_or_with_the_default() -> None:
    named = variants("", "ab", [PART, Part("a", ("pp",), ("a",))], lambda p: "" if p is PART else "b")
    assert named == {"default": "", "full": "ab", "without a": "b"}
    bar = Bar({"pp": 0.02})
    result = compared(2, **{"full": 0.1, "without ubatch": 0.09})
    assert rest_of(result, PART) == "without ubatch"
    assert not left_out(result, PART, bar, {"pp": 1.0}, rest_of(result, PART)).holds
    assert left_out(result, PART, bar, {"pp": 1.0}, None).missed


def test_a_part_without_which_the_rest_does_not_run_is_needed() -> None:
    result = compared(2, full=0.1)
    result.failed["without ubatch"] = Measurement(TrialStatus.CRASH)
    assert rest_of(result, PART) == "default"
    found = left_out(result, PART, Bar({"pp": 0.2}), {"pp": 1.0}, rest_of(result, PART))
    assert not found.missed
    assert found.needed
    assert found.holds


def proven(tune: Tune, outcome: Outcome) -> bool:
    """Whether all that is written has passed the rule, each entry as a part of its own or of a group."""
    if not outcome.entries and not outcome.kernels:
        return True
    assert tune.evidence is not None
    names = {name for p in tune.evidence.parts for name in p.part.names}
    groups = {p.part.label for p in tune.evidence.parts if p.part.group}
    written = {e.name for e in outcome.entries}, {k.group for k in outcome.kernels}
    return accept(tune.evidence) and written[0] <= names and written[1] <= groups


@pytest.mark.parametrize("surface", ["saturating", "cliff", "wide", "rugged", "faulty"])
@pytest.mark.parametrize("budget", [None, 100.0])
def test_everything_that_a_tune_writes_has_passed_the_rule(surface: str, budget: float | None) -> None:
    written = 0
    for seed in range(2):
        run = Simulated(surface, seed, budget=budget, max_trials=24)
        assert proven(run.tune, run.outcome)
        written += len(run.outcome.entries)
    assert written or budget


@pytest.mark.parametrize("budget", [None, 120.0])
def test_kernels_pass_the_same_rule_as_settings(budget: float | None) -> None:
    ops = (
        SimulatedOp("matmul a", "tg", 1.6, lambda settings: {"tg": 1.15}),
        SimulatedOp("matmul b", "pp", 1.5, lambda settings: {"pp": 1.1}),
    )
    run = Simulated(dataclasses.replace(saturating(), ops=ops), 3, kernels=True, budget=budget)
    assert run.outcome.kernels
    assert proven(run.tune, run.outcome)


class _Stopped(InlineExecutor):
    """Ctrl-C at the first operation of these keys."""

    keys: tuple[str, ...] = ()

    def measurement(self, *args: Any) -> Any:
        if args[4].key.startswith(self.keys):
            raise KeyboardInterrupt
        return super().measurement(*args)


@pytest.mark.parametrize("key", ["screen/t9", "screen/t15", "confirm/r0", "confirm/r1"])
def test_single_measurements_prove_nothing_if_an_interrupt_ends_a_tune(key: str) -> None:
    """The search has found faster settings, and no round has proven them: the profile keeps the default."""
    surface = SURFACES["saturating"]()
    executor = _Stopped(SimulatedTarget(surface, 3))
    executor.keys = (key,)
    recorder = Recorder(executor, WORKLOAD, identity=surface.space().identity, virtual_time=True)
    tune = Tune(recorder, surface.space(), Options(WORKLOAD, seed=3, max_trials=25))
    outcome = tune.run()
    assert outcome.status == "interrupted"
    assert outcome.entries == []
    assert outcome.settings == outcome.defaults
    assert outcome.gain == {}
    assert outcome.promises, "people are told what looked faster"
    assert outcome.judged == [], "no default has won against anything"
    said = verdict(outcome)
    assert "interrupted" in said
    assert "slower than the defaults" not in said
    assert not any("needed" in p for p in outcome.promises), "no longer budget is asked for"


def test_an_interrupt_writes_no_default_kernel_before_the_confirmation_has_ended() -> None:
    ops = (
        SimulatedOp("matmul a", "tg", 1.6, lambda settings: {"tg": 1.15}),
        SimulatedOp("matmul b", "pp", 1.5, lambda settings: {"pp": 1.1}),
    )
    surface = dataclasses.replace(saturating(), ops=ops)
    for keys, defaults in ((("whole/",), 0), ((), None)):
        executor = _Stopped(SimulatedTarget(surface, 3))
        executor.keys = keys
        space = surface.space()
        recorder = Recorder(executor, WORKLOAD, identity=space.identity, virtual_time=True)
        outcome = Tune(recorder, space, Options(WORKLOAD, seed=3, max_trials=14, kernels=True)).run()
        assert (outcome.status == "interrupted") == bool(keys)
        assert bool(outcome.kernels) == (not keys)
        assert defaults is None or len(outcome.kernel_defaults) == defaults
        assert outcome.judged, "settings were proven before kernels"


@pytest.mark.parametrize("knobs", [True, False])
def test_an_interrupt_among_kernels_is_not_called_a_loss(knobs: bool) -> None:
    """Settings gain nothing, or none is searched; Ctrl-C comes in the rounds of the kernels."""
    op = SimulatedOp("matmul a", "pp", 1.5, lambda settings: {"pp": 1.3})
    surface = dataclasses.replace(SURFACES["null"](), ops=(op,))
    executor = _Stopped(SimulatedTarget(surface, 3))
    executor.keys = ("whole/",)
    space = surface.space() if knobs else Space((), lambda settings: True)
    recorder = Recorder(executor, WORKLOAD, identity=space.identity, virtual_time=True)
    outcome = Tune(recorder, space, Options(WORKLOAD, seed=3, max_trials=8, kernels=True)).run()
    assert (outcome.status, outcome.entries, outcome.kernels) == ("interrupted", [], [])
    said = verdict(outcome)
    assert "interrupted" in said
    assert "--resume continues it" in said
    assert "slower than the defaults" not in said


def test_profiles_of_less_memory_pass_the_same_rule() -> None:
    surface = SURFACES["saturating"]()
    executor = InlineExecutor(SimulatedTarget(surface, 1))
    recorder = Recorder(executor, WORKLOAD, identity=surface.space().identity, virtual_time=True)
    tune = Tune(recorder, surface.space(), Options(WORKLOAD, seed=1, max_trials=28, pareto=True))
    tune.run()
    variants, _ = trade_memory(tune, lambda s: (100 + int(s["ubatch"])) << 20)
    assert {"fastest", "memory1"} <= {v.name for v in variants}
    for variant in variants:
        entries = {e.name for e in variant_outcome(tune, variant).entries}
        changed = {tune.space.knobs[n].name for n in tune.space.entries(variant.point)}
        assert entries == changed
        assert not changed or (variant.evidence is not None and accept(variant.evidence))


def test_nothing_writes_entries_around_the_rule() -> None:
    """`Choice` alone assigns what is written; `variant_outcome` hands over what a choice has accepted."""
    folder = Path(dyno_tuner.__file__).parent
    found = set()
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            targets = node.targets if isinstance(node, ast.Assign) else []
            flat = [t for target in targets for t in getattr(target, "elts", [target])]
            for target in flat:
                if isinstance(target, ast.Attribute) and target.attr in ("entries", "kernels"):
                    found.add((path.relative_to(folder).as_posix(), ast.unparse(target.value)))
    assert found == {
        ("decide/acceptance.py", "self"), ("decide/pareto.py", "outcome"), ("kernels/stage.py", "outcome"),
    }  # fmt: skip


def test_switches_of_a_build_pass_the_same_rule() -> None:
    measured = Measured({"pp512": GAIN}, {"pp512": FASTER}, {"pp512": 0.01}, rounds=4)
    assert accept(measured.proof("GGML_CUDA_F16=ON"))
    assert not accept(dataclasses.replace(measured, rounds=1).proof("GGML_CUDA_F16=ON"))
    assert not accept(dataclasses.replace(measured, verdicts={"pp512": SAME}).proof("GGML_CUDA_F16=ON"))
    assert not accept(dataclasses.replace(measured, changed="answers changed").proof("GGML_CUDA_F16=ON"))
