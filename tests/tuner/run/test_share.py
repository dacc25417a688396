"""`tune share` and `tune import`: a row tells nothing of its owner, and no gain of it counts unmeasured."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from conftest_tuner import WORKLOAD
from dyno import profiles
from dyno_tuner.cli.commands import app
from dyno_tuner.core.errors import TuneError
from dyno_tuner.execution.inline_executor import InlineExecutor
from dyno_tuner.run.adopt import adopt
from dyno_tuner.run.session import Request, run
from dyno_tuner.run.share import FORMAT, digest, profile_of, read_row, row_of
from dyno_tuner.run.tune import Options
from dyno_tuner.run.verify import verify
from dyno_tuner.targets.simulated.surfaces import SimulatedOp, saturating
from dyno_tuner.targets.simulated.target import SimulatedTarget
from typer.testing import CliRunner

if TYPE_CHECKING:
    from collections.abc import Callable

SHIPPED = sorted((Path(__file__).resolve().parents[3] / "profiles").glob("*.yaml"))
PRIVATE = re.compile(r"/|\\|\.gguf|tune --|Xeon|H200|NVIDIA|@|~")


@pytest.mark.parametrize("path", SHIPPED, ids=[p.stem for p in SHIPPED])
def test_a_row_is_read_back_and_tells_nothing_of_its_owner(path: Path) -> None:
    profile = profiles.load_profile(path)
    text = json.dumps(row_of(profile))
    assert PRIVATE.search(text) is None
    again = profile_of(read_row(text))
    assert again.match.device == profile.match.device
    assert again.match.model == profile.match.model
    assert dict(again.entries()).keys() == dict(profile.entries()).keys()
    assert again.evidence is not None
    assert profile.evidence is not None
    assert again.evidence.gain == profile.evidence.gain


def test_paths_of_build_switches_stay_at_home() -> None:
    profile = profiles.load_profile(SHIPPED[0])
    engine = profile.match.engine.model_copy(update={"build": {"GGML_CUDA_PROFILE": "/home/me/p.yaml"}})
    match = profile.match.model_copy(update={"engine": engine})
    row = row_of(profile.model_copy(update={"match": match}))
    assert row["engine"]["build"] == {"GGML_CUDA_PROFILE": True}


def changed(row: dict[str, Any], sign: bool, **more: Any) -> str:
    other = {**row, **more}
    return json.dumps({**other, "sha256": digest(other)} if sign else other)


def test_bad_rows_are_errors() -> None:
    row = row_of(profiles.load_profile(SHIPPED[0]))
    for text, said in (
        ("", "not a row"),
        ("[]", "its format is 'list'"),
        ("{}", "its format is None"),
        ("[" * 100_000, "not a row"),
        (changed(row, False, gain={}), "was changed"),
        (changed(row, False, tuner="9"), "was changed"),
        (json.dumps(row).replace('"ratio": ', '"ratio": NaN, "x": ', 1), "that cannot be read|was changed"),
        (" " * (2 << 20), "at most"),
    ):
        with pytest.raises(TuneError, match=said):
            read_row(text)
    for text, said in (
        (changed(row, True, settings={"ubatchh": {"value": 1}}), "ubatchh"),
        (changed(row, True, device={"kind": "cuda"}), "device"),
        (changed(row, True, model=3), "model"),
        (json.dumps({"format": FORMAT, "sha256": digest({"format": FORMAT})}), "incomplete"),
    ):
        with pytest.raises(TuneError, match=said):
            profile_of(read_row(text))


def test_a_profile_without_gains_has_no_row() -> None:
    profile = profiles.load_profile(SHIPPED[0])
    with pytest.raises(TuneError, match="nothing to share"):
        row_of(profile.model_copy(update={"settings": {"ubatch": "default"}, "kernels": {}}))
    with pytest.raises(TuneError, match="no measured gain"):
        row_of(profile.model_copy(update={"evidence": None}))


# ---- import ----


def surface(tg: float) -> Any:
    import dataclasses

    op = SimulatedOp("matmul a", "tg", 1.6, lambda settings: {"tg": tg})
    return dataclasses.replace(saturating(), ops=(op,))


@pytest.fixture(scope="module")
def row(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a stranger's machine found: a u-batch and a kernel."""
    there = surface(1.15)
    options = Options(WORKLOAD, seed=1, max_trials=20, rounds=3, max_rounds=3, kernels=True)
    request = Request("m", options, out=tmp_path_factory.mktemp("s") / "p.yaml", quiet=True)
    result = run(request, InlineExecutor(SimulatedTarget(there, 1)), there.space())
    return json.dumps(row_of(profiles.load_profile(result.path)))


def measured_on(here: Any) -> Callable[[Path], Any]:
    return lambda path: verify(
        path, budget=None, quiet=True, executor=InlineExecutor(SimulatedTarget(here, 7)),
        options={"rounds": 3, "max_rounds": 4},
    )  # fmt: skip


def test_only_what_gains_here_is_kept(row: str, tmp_path: Path) -> None:
    claimed = profile_of(read_row(row))
    result = adopt(claimed, tmp_path / "row.yaml", claimed.match, "tune import", measured_on(surface(1.0)))
    assert result.profile is not None
    kept = dict(result.profile.entries())
    assert "settings.ubatch" in kept
    assert not any(name.startswith("kernels.") for name in kept), "that kernel gains nothing on this machine"
    entry = result.profile.settings["ubatch"]
    assert isinstance(entry, profiles.SettingEntry)
    (unit,) = [v for v in result.verdicts if v.entry == "settings.ubatch"]
    assert unit.measured is not None
    assert entry.ratio == pytest.approx(unit.measured.ratio, abs=1e-4), "the ratio is this machine's"
    profiles.save_profile(result.profile, tmp_path / "own.yaml")
    assert profiles.load_profile(tmp_path / "own.yaml") == result.profile


def test_a_row_of_another_model_or_device_is_refused(row: str, tmp_path: Path) -> None:
    claimed = profile_of(read_row(row))
    never: Callable[[Path], Any] = lambda path: pytest.fail("nothing may be measured")  # noqa: E731
    model = claimed.match.model.model_copy(update={"layers": 99})
    here = claimed.match.model_copy(update={"model": model})
    with pytest.raises(TuneError, match="another model: layers"):
        adopt(claimed, tmp_path / "r.yaml", here, "", never)
    cuda = profiles.load_profile(next(p for p in SHIPPED if p.stem.startswith("h200"))).match.device
    here = claimed.match.model_copy(update={"device": cuda})
    with pytest.raises(TuneError, match="not for this machine"):
        adopt(claimed, tmp_path / "r.yaml", here, "", never)


def test_the_commands(tmp_path: Path, trained_model: Path) -> None:
    cpu = next(p for p in SHIPPED if p.stem.startswith("xeon"))
    out = tmp_path / "row.json"
    assert CliRunner().invoke(app, ["share", str(cpu), "--out", str(out)]).exit_code == 0
    printed = CliRunner().invoke(app, ["share", str(cpu)])
    assert read_row(printed.stdout) == read_row(out.read_text())
    out.write_text(out.read_text().replace("1.16", "9.99"))
    done = CliRunner().invoke(app, ["import", str(out), "--model", str(trained_model)])
    assert done.exit_code == 1
    assert "was changed" in str(done.exception)
    there = tmp_path / "there.yaml"
    there.write_text("mine")
    done = CliRunner().invoke(
        app, ["import", "-", "--model", str(trained_model), "--out", str(there)], input=printed.stdout
    )
    assert "exists already" in str(done.exception)
    assert there.read_text() == "mine"
