"""The same journals replay to the same profiles: complete runs that an earlier version has recorded.

Nothing is measured here. Today's code makes every decision again from the measurements of the journal. If a
decision changes on purpose, record them again: `python tests/tuner/run/test_recorded_journals.py`.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from dyno import profiles
from dyno_tuner.core.protocol import Workload
from dyno_tuner.execution.inline_executor import InlineExecutor
from dyno_tuner.record import journal
from dyno_tuner.run.session import Request, run
from dyno_tuner.run.tune import Options
from dyno_tuner.targets.simulated.surfaces import SURFACES, SimulatedOp, Surface
from dyno_tuner.targets.simulated.target import SimulatedTarget, SimulationNoise

if TYPE_CHECKING:
    from collections.abc import Mapping

DATA = Path(__file__).parents[2] / "data" / "journals"
OPS = (
    SimulatedOp("matmul a", "tg", 1.6, lambda settings: {"tg": 1.15}),
    SimulatedOp("matmul b", "pp", 1.5, lambda settings: {"pp": 1.1}),
    SimulatedOp("matmul c", "tg", 1.3, lambda settings: {"tg": 0.95}),
)
NOISY = SimulationNoise(within=0.01, process=0.01, layout=0.005, outliers=0.02)


@dataclasses.dataclass(frozen=True)
class Case:
    surface: str
    seed: int
    options: Mapping[str, Any]
    kernels: bool = False
    noise: SimulationNoise | None = None


CASES = {
    "entries": Case("saturating", 1, {"max_trials": 12}),
    "entries-and-kernels": Case("saturating", 2, {"max_trials": 12, "kernels": True}, kernels=True),
    "kernels-in-a-budget": Case("saturating", 3, {"budget": 120.0, "kernels": True}, kernels=True),
    "noisy": Case("saturating", 83, {"max_trials": 14, "max_rounds": 5}, noise=NOISY),
    "short-budget": Case("saturating", 7, {"budget": 60.0}),
    "wrong-answers": Case("faulty", 6, {"max_trials": 12}),
    "kernels-alone": Case("null", 1, {"max_trials": 12, "kernels": True}, kernels=True),
    "memory": Case("saturating", 1, {"max_trials": 12, "pareto": True}),
}


class Planned(SimulatedTarget):
    """A simulated engine whose memory grows with the u-batch."""

    def memory(self, settings: Mapping[str, Any]) -> int:
        return (100 + int(settings.get("ubatch", 0))) << 20


class Silent(InlineExecutor):
    """An executor that measures nothing: whatever is not in the journal is an error."""

    def _refuse(self, *arguments: Any) -> Any:
        raise AssertionError(f"not in the journal: {arguments}")

    measurement = quality = kernel_ops = time_ops = routing = _refuse


def tuned(case: Case, out: Path, executor: type[InlineExecutor]) -> Any:
    surface: Surface = SURFACES[case.surface]()
    if case.kernels:
        surface = dataclasses.replace(surface, ops=OPS)
    options = Options(Workload(pp=64, tg=8), seed=case.seed, weights=dict(surface.weights), **case.options)
    request = Request("simulated", options, out=out, quiet=True, resume=True)
    return run(request, executor(Planned(surface, case.seed, case.noise)), surface.space())


def rounded(value: Any) -> Any:
    """Numbers to ten digits: releases of SciPy and NumPy differ in the last ones."""
    if isinstance(value, float):
        return float(f"{value:.10g}")
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    return [rounded(v) for v in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", CASES)
def test_a_recorded_journal_gives_the_profile_that_it_gave(name: str, tmp_path: Path) -> None:
    out = tmp_path / "p.yaml"
    recorded = gzip.decompress((DATA / f"{name}.jsonl.gz").read_bytes())
    path = tmp_path / "p.yaml.journal.jsonl"
    path.write_bytes(recorded)
    notes = journal.load(path).records
    result = tuned(CASES[name], out, Silent)
    wanted = next(n for n in notes if n.get("note") == "outcome")
    made = json.loads(json.dumps(result.outcome.to_dict()))
    both = [k for k in made if k in wanted]
    assert len(both) > 10
    assert rounded({k: made[k] for k in both}) == rounded({k: wanted[k] for k in both})
    expected = profiles.load_profile(DATA / f"{name}.yaml")
    assert (result.profile.settings, result.profile.kernels) == (expected.settings, expected.kernels)
    front = [(n["name"], n["settings"], n["size"]) for n in notes if n.get("note") == "pareto"]
    folder = sorted(p.stem for p in result.pareto.glob("*.yaml")) if result.pareto else []
    assert folder == sorted(name for name, _, _ in front)


def test_the_cases_hold_what_they_are_named_for() -> None:
    held = {name: profiles.load_profile(DATA / f"{name}.yaml") for name in CASES}
    assert all(held[n].settings for n in ("entries", "entries-and-kernels", "noisy"))
    assert held["entries-and-kernels"].kernels
    assert held["kernels-in-a-budget"].kernels
    assert {p.name.removesuffix(".jsonl.gz") for p in DATA.glob("*.gz")} == set(CASES)


def record() -> None:
    import tempfile

    DATA.mkdir(exist_ok=True)
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "p.yaml"
            result = tuned(case, out, InlineExecutor)
            (DATA / f"{name}.yaml").write_bytes(out.read_bytes())
            compressed = gzip.compress(result.journal.read_bytes(), 9, mtime=0)
            (DATA / f"{name}.jsonl.gz").write_bytes(compressed)
            print(name, result.outcome.describe(), len(compressed))


if __name__ == "__main__":
    record()
