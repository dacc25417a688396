"""Something fails twice in rounds: others can have ended both tries, so no default has beaten it."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

import pytest
from dyno_tuner.core.protocol import Measurement, TrialStatus, Workload
from dyno_tuner.execution.inline_executor import InlineExecutor
from dyno_tuner.output.verdict import not_proven, verdict
from dyno_tuner.record.recorder import Recorder
from dyno_tuner.run.tune import Options, Tune
from dyno_tuner.targets.simulated.surfaces import SURFACES, SimulatedOp
from dyno_tuner.targets.simulated.target import SimulatedTarget, SimulationNoise

if TYPE_CHECKING:
    from collections.abc import Callable

    from dyno_tuner.core.outcome import Outcome
    from dyno_tuner.core.protocol import Configuration

WORKLOAD = Workload(pp=64, tg=8)
QUIET = SimulationNoise(within=0.001, process=0.002, layout=0.0005, outliers=0.0)


def _tuned(
    surface: Any, dies: Callable[[str, Configuration], bool], status: TrialStatus = TrialStatus.OOM,
    **options: Any,
) -> tuple[Outcome, list[str]]:  # fmt: skip
    """A tune in which these measurements die, and their keys."""
    space, died = surface.space(), list[str]()

    class Dies(InlineExecutor):
        def measurement(self, configuration: Configuration, *args: Any) -> Measurement:
            key = next(a.key for a in args if hasattr(a, "key"))
            if dies(key, configuration):
                died.append(key)
                return Measurement(status, message="SIGKILL")
            return super().measurement(configuration, *args)

    executor = Dies(SimulatedTarget(surface, 1, QUIET))
    recorder = Recorder(executor, WORKLOAD, identity=space.identity, virtual_time=True)
    return Tune(recorder, space, Options(WORKLOAD, seed=1, **options)).run(), died


@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_winner_that_failed_twice_is_not_called_slow(number: int) -> None:
    """In one round of the look another program fills the memory, for the winner and for its second try."""
    at = re.compile(rf"without/0/r{number}/1(/\w+)?(/retry)?")
    outcome, died = _tuned(
        SURFACES["saturating"](), lambda key, _: bool(at.fullmatch(key)), max_trials=14, rounds=5
    )
    assert len(died) == 2, died
    (failure,) = [f for f in outcome.failures if f.message == "SIGKILL"]
    knobs = {n for n, v in failure.settings.items() if v != outcome.defaults[n]}
    assert knobs
    assert (outcome.entries, outcome.status, outcome.unproven) == ([], "unproven", True)
    assert not knobs & set(outcome.judged), "no default has won"
    assert verdict(outcome) == (
        "Nothing is proven: some settings looked faster, but they failed twice in rounds: SIGKILL. Tune "
        "again."
    )
    assert any(line.startswith("Not proven: ") for line in not_proven(outcome))
    assert not any("needed" in p for p in outcome.promises), "a longer budget would not help"


def test_finalists_that_all_failed_twice_are_not_called_slow() -> None:
    outcome, died = _tuned(
        SURFACES["saturating"](),
        lambda key, c: key.startswith("confirm/") and c.settings["ubatch"] != 512,
        max_trials=14,
    )
    assert died
    assert outcome.entries == []
    assert "ubatch" not in outcome.judged
    assert "failed twice in rounds: SIGKILL. Tune again." in verdict(outcome)


def test_a_refusal_of_the_engine_is_final() -> None:
    outcome, died = _tuned(
        SURFACES["saturating"](), lambda key, _: key.startswith("without/0/r0/1"), TrialStatus.INVALID,
        max_trials=14,
    )  # fmt: skip
    assert died
    assert (outcome.entries, outcome.unanswered) == ([], "")


@pytest.mark.parametrize("whole", [True, False])
def test_more_time_is_no_remedy_for_kernels_that_failed_twice(
    whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The profile with the kernels, or the one without them, runs in a round and then fails twice."""
    op = SimulatedOp("matmul a", "tg", 1.6, lambda settings: {"tg": 1.15})
    surface = dataclasses.replace(SURFACES["saturating"](), ops=(op,))
    place = 1 if whole else 2
    at = re.compile(rf"whole/\d/r1/{place}(/\w+)?(/retry)?")
    outcome, died = _tuned(surface, lambda key, _: bool(at.fullmatch(key)), max_trials=14, kernels=True)
    assert len(died) == 2, died
    assert outcome.kernels == []
    assert outcome.unanswered_kernels == "the rounds with them failed twice: SIGKILL"
    assert any("kernels" in p for p in outcome.promises)
    assert not any("needed" in p for p in outcome.promises if "kernels" in p)
    assert "SIGKILL" in [f.message for f in outcome.failures]
    assert outcome.kernel_defaults == []
