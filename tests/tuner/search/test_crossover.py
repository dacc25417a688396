from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import pytest
from conftest_tuner import Simulated
from dyno_tuner.core.crossing import Verdict
from dyno_tuner.core.protocol import TrialStatus
from dyno_tuner.search.crossover import solve
from dyno_tuner.search.crossover_stage import ThresholdStage
from dyno_tuner.space.knobs import Fidelity, Knob
from dyno_tuner.targets.simulated.surfaces import Surface

if TYPE_CHECKING:
    from dyno_tuner.core.protocol import Settings, Value

GRID = [1 << p for p in range(0, 11)]


def _curves(crossing: float, slope: float = 0.12):
    """log(first / second) at every size: positive below the crossing (in steps of the grid)."""
    return [slope * (crossing - i) for i in range(len(GRID))]


def _measure(truth: list[float], sigma: float, seed: int):
    rng = np.random.default_rng(seed)
    return lambda index, repeat: (truth[index] + sigma * rng.standard_normal(), sigma)


def test_a_crossing_of_noisy_curves_is_located_to_one_step_in_twelve_measurements() -> None:
    good = total = 0
    for seed in range(120):
        crossing = 0.5 + seed % 10
        found = solve(GRID, _measure(_curves(crossing), 0.02, seed))
        assert found.measurements <= 12
        total += 1
        good += abs(found.below - math.ceil(crossing)) <= 1 and found.verdict is Verdict.CROSSING
    assert good / total >= 0.97


@pytest.mark.parametrize("sigma", [0.002, 0.01, 0.03])
def test_a_tie_is_called_a_tie(sigma: float) -> None:
    """Also where the noise of a measurement is larger than the margin."""
    ties = sum(
        solve(GRID, _measure([0.0] * len(GRID), sigma, seed)).verdict is Verdict.TIE for seed in range(60)
    )
    assert ties >= 56


@pytest.mark.parametrize(("steps", "slope", "sigma"), [(6, 0.06, 0.03), (14, 0.06, 0.02), (8, 0.3, 0.005)])
def test_other_grids_slopes_and_noise(steps: int, slope: float, sigma: float) -> None:
    good = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        crossing = rng.uniform(0.3, steps - 1.3)
        truth = [slope * (crossing - i) for i in range(steps)]
        found = solve(list(range(1, steps + 1)), _measure(truth, sigma, seed))
        assert found.measurements <= 12
        good += found.verdict is Verdict.CROSSING and abs(found.below - math.ceil(crossing)) <= 1
    assert good >= 57


def test_one_path_wins_everywhere() -> None:
    always = solve(GRID, _measure([0.3] * len(GRID), 0.01, 1))
    assert always.verdict is Verdict.ALWAYS
    assert always.below == len(GRID)
    never = solve(GRID, _measure([-0.3] * len(GRID), 0.01, 1))
    assert never.verdict is Verdict.NEVER
    assert never.below == 0


def test_small_grids_and_nonsense() -> None:
    assert solve([64], _measure([0.2], 0.01, 0)).verdict is Verdict.ALWAYS
    assert solve([64, 128], _measure([0.2, -0.2], 0.01, 0)).below == 1
    with pytest.raises(ValueError, match="ascending"):
        solve([2, 1], _measure([0, 0], 0.1, 0))
    with pytest.raises(ValueError, match="too few"):
        solve([1, 2], _measure([0, 0], 0.1, 0), limit=2)


def _bounded(crossing: int, *, gap: float = 0.3, dead: int = 1 << 30) -> Surface:
    """A first path that is better up to a u-batch, and gets slower beyond `dead` tokens: out of memory."""

    def path(value: Value, s: Settings) -> bool:
        return int(s["ubatch"]) <= int(value)

    sizes: tuple[Value, ...] = tuple(1 << p for p in range(6, 13))
    knobs = (
        Knob("ubatch", sizes, 512, moves=frozenset({"pp"}), fidelity=Fidelity.ROUNDING),
        Knob("mmq_id_max_tokens", (0, *sizes, 8192), 8192, moves=frozenset({"pp"}),
             fidelity=Fidelity.ROUNDING, code=path, threshold_of="ubatch"),
    )  # fmt: skip

    def rates(s: Settings) -> dict[str, float]:
        ubatch = int(s["ubatch"])
        advantage = gap * (math.log2(crossing) + 0.5 - math.log2(ubatch))
        pp = 900 * ubatch / (ubatch + 600.0) * math.exp(advantage if path(s["mmq_id_max_tokens"], s) else 0.0)
        return {"pp": pp, "tg": 40.0}

    def fault(s: Settings) -> TrialStatus | None:
        return TrialStatus.OOM if path(s["mmq_id_max_tokens"], s) and int(s["ubatch"]) > dead else None

    return Surface("bounded", knobs, rates, fault)


def _notes(run: Simulated) -> dict[str, Any]:
    found = [json.loads(n) for n in run.recorder._notes]
    return next(n for n in found if n["note"] == "threshold")


@pytest.mark.parametrize("crossing", [128, 512, 2048])
def test_the_stage_solves_before_the_search(crossing: int) -> None:
    """The solution is exact here: 30 % a step is far above the noise."""
    run = Simulated(_bounded(crossing), 3)
    note = _notes(run)
    assert note["verdict"] == "crossing"
    assert note["value"] == crossing
    assert note["measurements"] <= 12
    [solved] = run.outcome.crossings
    assert (solved.knob, solved.up_to) == ("mmq_id_max_tokens", crossing)
    assert all((ratio > 1) == (ubatch <= crossing) for ubatch, ratio in solved.ratios.items())
    assert run.regret < 0.02
    assert set(run.outcome.searched) == {"ubatch", "mmq_id_max_tokens"}
    values = {dict(t.items())["mmq_id_max_tokens"] for t in _tried(run)}
    assert values <= {8192, crossing}


def _tried(run: Simulated) -> list[dict[str, Any]]:
    assert run.tune._screen is not None
    return [run.tune.space.settings(t.point) for t in run.tune._screen.trials]


def test_paths_that_are_alike_leave_the_default() -> None:
    run = Simulated(_bounded(512, gap=0.0), 1)
    assert _notes(run)["verdict"] == "tie"
    assert run.outcome.settings["mmq_id_max_tokens"] == 8192
    assert "mmq_id_max_tokens" in run.outcome.searched


def test_a_path_that_does_not_run_loses() -> None:
    run = Simulated(_bounded(1 << 20, dead=1024), 2)
    assert _notes(run)["value"] == 1024
    assert run.surface.fault(run.outcome.settings) is None


def test_a_short_budget_leaves_the_threshold_to_the_search() -> None:
    run = Simulated(_bounded(512), 2, budget=20.0, max_trials=400)
    assert run.outcome.seconds <= 22.0
    assert _notes(run)["verdict"] == "budget"
    assert _tried(run)[1] == {"ubatch": 4096, "mmq_id_max_tokens": 8192}  # the largest matters most
    assert run.truly_slower_entries() == []


def test_no_bisection_begins_that_would_be_cut_off() -> None:
    """With room for one of the three measurements that it takes, none is made."""
    whole = _bounded(512).space()
    asked: list[int] = []

    def more(measurements: int) -> bool:
        asked.append(measurements)
        return measurements <= 4

    def measurement(key: str, *rest: object) -> NoReturn:
        raise AssertionError(f"{key} was visited")

    notes: list[tuple[str, dict[str, Any]]] = []
    context = SimpleNamespace(
        space=whole, weights={"pp": 1.0}, sigma=0.01, measure=measurement,
        budget=SimpleNamespace(more=more), note=lambda kind, **data: notes.append((kind, data)),
    )  # fmt: skip
    stage = ThresholdStage(context)  # type: ignore[arg-type]
    space = stage.run()
    assert space is whole
    assert notes == [("threshold", {"knob": "mmq_id_max_tokens", "verdict": "budget"})]
    assert asked == [6]  # of five to seven u-batches
    assert stage.seeds  # the search begins with the largest
