"""A tune on a slice of the layers: scaled memory, one confirmation, and evidence that says so."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dyno import profiles
from dyno_tuner.cli.commands import app
from dyno_tuner.core.errors import Interrupted, TuneError
from dyno_tuner.core.protocol import Configuration, Measurement, TrialStatus, Workload
from dyno_tuner.execution.inline_executor import InlineExecutor
from dyno_tuner.output.verdict import verdict
from dyno_tuner.record.journal import load
from dyno_tuner.run import slice as slice_module
from dyno_tuner.run.session import Request, Result, run, target_of
from dyno_tuner.run.slice import narrowed, on_whole, run_on_slice
from dyno_tuner.run.tune import Options, Tune
from dyno_tuner.space.knobs import Knob
from dyno_tuner.space.search_space import Space
from dyno_tuner.targets.dyno.target import DynoTarget
from dyno_tuner.targets.simulated.surfaces import Surface, saturating
from dyno_tuner.targets.simulated.target import SimulatedTarget
from typer.testing import CliRunner

MODEL = Path(__file__).parents[2] / "data" / "tiny" / "llama-tiny.gguf"
HELD = {"cpu_repack": True, "threads": 1, "threads_batch": 1}


def request(tmp_path: Path, **given: Any) -> Request:
    options = Options(
        Workload(pp=64, tg=2), seed=1, max_trials=2, rounds=2, max_rounds=2, aa_processes=2, aa_measurements=1
    )
    made = {"ctx": 128, "out": tmp_path / "p.yaml", "quiet": True, "force": True, "held": dict(HELD), **given}
    return Request(str(MODEL), options, **made)


def inline(asked: Request) -> InlineExecutor:
    return InlineExecutor(DynoTarget(**target_of(asked, "cpu", None)[1]))


class Scripted(InlineExecutor):
    """The engine, in which a u-batch of less than the prompt takes `factor` times the time of others."""

    def __init__(self, target: DynoTarget, factor: float) -> None:
        super().__init__(target)
        self._factor = factor

    def measurement(self, configuration: Configuration, *args: Any) -> Measurement:
        found = super().measurement(configuration, *args)
        # Slow enough for the roofline of every machine.
        seconds = 2e-4 * (self._factor if configuration.settings["ubatch"] < 64 else 1.0)
        samples = [
            tuple(replace(s, seconds=seconds, clock_seconds=seconds) for s in of)
            for of in (found.samples, found.warmup)
        ]
        return replace(found, samples=samples[0], warmup=samples[1])


def test_a_slice_is_tuned_and_the_whole_confirms(tmp_path: Path) -> None:
    opened: list[DynoTarget] = []

    def watched(asked: Request) -> InlineExecutor:
        opened.append(DynoTarget(**target_of(asked, "cpu", None)[1]))
        return Scripted(opened[-1], 0.5)

    result = run_on_slice(request(tmp_path, memory_limit=1 << 30), 1, watched)
    evidence = result.profile.evidence
    assert evidence is not None
    assert evidence.slice is not None
    assert (evidence.slice.layers, evidence.slice.of) == (1, 3)
    assert 0 < evidence.slice.memory_share < 1
    assert profiles.load_profile(result.path).evidence == evidence
    assert [t._fixed.get("layers") for t in opened] == [None, 1]
    # The tune keeps both journals and writes no unproven value of the slice into the profile.
    first = load(tmp_path / "p.yaml.slice.journal.jsonl").records[0]
    assert first["held"]["layers"] == 1
    assert first["memory_limit"] == pytest.approx((1 << 30) * evidence.slice.memory_share, rel=1e-3)
    assert "layers" not in result.profile.settings
    assert load(result.journal).records[0]["held"] == HELD


def test_where_the_defaults_win_on_the_slice_nothing_is_written(tmp_path: Path) -> None:
    """A profile without an entry would hide a proven one, and the whole model has nothing to confirm."""
    opened: list[Request] = []

    def slower(asked: Request) -> InlineExecutor:
        opened.append(asked)
        return Scripted(DynoTarget(**target_of(asked, "cpu", None)[1]), 2.0)

    result = run_on_slice(request(tmp_path), 1, slower)
    assert (result.path, result.outcome.status) == (None, "complete")
    assert result.why_none == ("no profile was written, because the defaults won on the first 1 layers")
    assert result.journal == tmp_path / "p.yaml.slice.journal.jsonl"
    assert [path.name for path in tmp_path.iterdir()] == [result.journal.name]


def _simulated(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    kind: type[InlineExecutor],
    surface: Surface | None = None,
    **options: Any,
) -> Result:
    """A tune whose slice is tuned on the simulated engine, in virtual time."""

    def simulated(asked: Request, executor: Any, *_: Any) -> Result:
        target = SimulatedTarget(surface or SURFACE, 5)
        return run(replace(asked, held={}), kind(target), target.surface.space())

    monkeypatch.setattr(slice_module, "run", simulated)
    given = Options(Workload(pp=64, tg=8), seed=5, **options)
    return run_on_slice(replace(request(tmp_path), options=given), 1, inline)


def _of(*names: str) -> Surface:
    """A surface with these knobs alone. Other values of ubatch gain."""
    surface = saturating()
    usual = {k.name: k.default for k in surface.knobs}
    knobs = tuple(k for k in surface.knobs if k.name in names)
    return replace(surface, knobs=knobs, rates=lambda s: surface.rates({**usual, **s}))


SURFACE = _of("ubatch")


def test_a_budget_too_short_for_the_slice_names_one_for_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slice has a part of the budget, so its own need would be refused again."""
    result = _simulated(monkeypatch, tmp_path, InlineExecutor, budget=4.0)
    needed = result.outcome.too_short["needed"]
    assert (result.path, result.outcome.status) == (None, "budget")
    assert result.why_none == (
        f"no profile was written, because this tune judged no setting; give --budget {needed}s"
    )
    assert verdict(result.outcome) == (
        "Nothing was measured: the search on the first layers has 60 % of the budget, which is too short "
        f"to prove anything; give at least --budget {needed}s."
    )
    # With two thirds of that budget the slice has enough, and the proof behind it has not.
    proof = _simulated(monkeypatch, tmp_path, InlineExecutor, budget=float(needed * 2 // 3))
    told = proof.outcome.too_short
    assert told["message"].startswith("the proof on the whole model has 40 % of the budget, ")
    assert proof.why_none.endswith(f"judged no setting; give --budget {told['needed']}s")
    again = _simulated(monkeypatch, tmp_path, InlineExecutor, budget=float(needed))
    assert again.outcome.noise, "the budget that was named is too short again"


class Dies(InlineExecutor):
    """Others end each measurement in rounds that is not of the default."""

    def measurement(self, configuration: Configuration, *args: Any) -> Measurement:
        key = next(a.key for a in args if hasattr(a, "key"))
        if re.search(r"/r\d+/", key) and configuration.settings.get("ubatch", 512) != 512:
            return Measurement(TrialStatus.OOM, message="SIGKILL")
        return super().measurement(configuration, *args)


def test_a_winner_that_failed_twice_on_the_slice_is_no_win_of_the_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = _simulated(monkeypatch, tmp_path, Dies, max_trials=8, rounds=3)
    assert (result.path, result.outcome.status) == (None, "unproven")
    assert result.why_none == "no profile was written, because this tune judged no setting"


@pytest.mark.parametrize(
    ("names", "code", "why"),
    [(("ubatch", "threads"), 1, "nothing was proven"), (("threads",), 0, "the defaults won")],
)
def test_a_slice_that_proves_nothing_ends_with_an_error_code(
    names: tuple[str, ...], code: int, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other threads lose, so the slice has judged something. A u-batch that looked faster failed twice."""
    surface = _of(*names)
    knobs = [replace(k, values=(8, 12)) if k.name == "threads" else k for k in surface.knobs]
    surface = replace(surface, knobs=tuple(knobs))
    result = _simulated(monkeypatch, tmp_path, Dies, surface, max_trials=8, rounds=3)
    assert "threads" in result.outcome.judged
    assert (result.path, result.outcome.judges_nothing) == (None, False)
    assert result.why_none == f"no profile was written, because {why} on the first 1 layers"
    monkeypatch.setattr(slice_module, "run_on_slice", lambda *_: result)
    done = CliRunner().invoke(app, [str(MODEL), "--device", "cpu", "--layers", "1", "--json"])
    assert done.exit_code == code, done.output
    assert json.loads(done.stdout)["why_none"] == result.why_none


@pytest.mark.parametrize(("dies", "code"), [(True, 1), (False, 0)])
def test_a_tune_without_a_verdict_ends_with_an_error_code(
    dies: bool, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that looked faster failed twice: there is no profile that a script could go on with."""

    def simulated(asked: Request) -> Result:
        target = SimulatedTarget(SURFACE, 5)
        options = Options(Workload(pp=64, tg=8), seed=5, max_trials=8, rounds=3)
        made = Request("simulated", options, out=tmp_path / "p.yaml", quiet=True)
        return run(made, (Dies if dies else InlineExecutor)(target), target.surface.space())

    monkeypatch.setattr("dyno_tuner.run.session.run", simulated)
    done = CliRunner().invoke(app, [str(MODEL), "--device", "cpu", "--json"])
    assert done.exit_code == code, done.output
    told = json.loads(done.stdout)
    assert told["status"] == ("unproven" if dies else "complete")
    assert (told["profile"] is None) == dies
    assert told.get("why_none", "").endswith("judged no setting") == dies


@pytest.mark.parametrize("proven", [False, True])
def test_an_interrupt_on_the_slice_ends_the_tune(
    proven: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, stages = Tune.stage, []

    def stopped(self: Tune, name: str) -> None:
        stages.append(name)
        if name == ("done" if proven else "screen"):
            raise KeyboardInterrupt
        stage(self, name)

    monkeypatch.setattr(Tune, "stage", stopped)
    with pytest.raises(
        Interrupted, match=r"interrupted on the first 1 layers.*the same command starts from the beginning"
    ):
        run_on_slice(
            request(tmp_path), 1, lambda asked: Scripted(DynoTarget(**target_of(asked, "cpu", None)[1]), 0.5)
        )
    assert stages.count("noise") == 1, "the whole model was tuned all the same"
    assert not (tmp_path / "p.yaml").exists()


def test_the_whole_has_more_layers_than_the_slice(tmp_path: Path) -> None:
    with pytest.raises(TuneError, match="--layers 3: the model has 3; give 1 to 2"):
        run_on_slice(request(tmp_path), 3, inline)


def space(legal: Any = None) -> Space:
    knobs = (
        Knob("ubatch", (256, 512, 1024), 512),
        Knob("n_cpu_moe", tuple(range(49)), 20),
        Knob("offload_min_tokens", (0, 32, 64), 32, threshold_of="ubatch"),
    )
    return Space(knobs, legal)


def test_counts_of_layers_grow_with_the_model() -> None:
    found = on_whole({"ubatch": 1024, "n_cpu_moe": 1, "offload_min_tokens": 41}, space(), 4, 48)
    assert found == {"ubatch": 1024, "n_cpu_moe": 12, "offload_min_tokens": 41}
    # Of the whole model, one more layer has to stay on the CPU.
    found = on_whole({"n_cpu_moe": 1}, space(lambda s: int(s["n_cpu_moe"]) >= 13), 4, 48)
    assert found["n_cpu_moe"] == 13
    narrow = narrowed(space(), {"ubatch": 1024, "n_cpu_moe": 20, "offload_min_tokens": 41})
    assert {k.name: k.values for k in narrow.knobs} == {"ubatch": (512, 1024), "offload_min_tokens": (32, 41)}
    assert all(k.threshold_of is None for k in narrow.knobs)


def test_the_command_says_what_does_not_go_together() -> None:
    done = CliRunner().invoke(app, ["--model", str(MODEL), "--layers", "1", "--pareto"])
    assert done.exit_code == 2
    told = " ".join(done.output.replace("│", " ").split())
    assert "tunes dyno twice on one device; it cannot be combined with --pareto" in told
    assert "--ray" not in told, "only what was given is named"
