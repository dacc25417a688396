"""Two profiles entry by entry: what counts as agreement."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from dyno import profiles
from dyno_tuner.cli.commands import app
from dyno_tuner.output.diff import apart, compare_profiles
from typer.testing import CliRunner

SHIPPED = Path(__file__).parents[3] / "profiles" / "h200-qwen3moe-30b-a3b-q4_0.yaml"
NORM, PRODUCT = "norm n=2048", "matmul q4_0 n=2048 k=4096 layout=gpu"


def _chosen(ratio: float, half: float, **params: int) -> profiles.KernelEntry:
    gained = {"ratio": ratio, "ci95": (ratio - half, ratio + half), "n": 6, "group": "kernels_tg"}
    return profiles.KernelEntry.model_validate({"variant": "block", **gained, **params})


def _write(path: Path, norm: object, product: object, prompt: int = 4096) -> Path:
    of = profiles.load_profile(SHIPPED)
    assert of.evidence
    assert of.evidence.workload
    workload = of.evidence.workload.model_copy(update={"pp": [prompt]})
    evidence = of.evidence.model_copy(update={"workload": workload})
    kernels = {NORM: {"m1": norm}, PRODUCT: {"m1": product}}
    profiles.save_profile(of.model_copy(update={"kernels": kernels, "evidence": evidence}), path)
    return path


def _verdicts(a: Path, b: Path) -> list[str]:
    return [row.verdict for row in compare_profiles(a, b) if row.entry.startswith("kernels.")]


@pytest.mark.parametrize(
    ("second", "half", "verdict"),
    [(1.020, 0.0015, "tie"), (1.014, 0.0015, "tie"), (1.026, 0.0015, "differs"), (1.020, 0.008, "differs")],
)
def test_groups_of_kernels_that_gained_the_same_agree(
    tmp_path: Path, second: float, half: float, verdict: str
) -> None:
    a = _write(tmp_path / "a.yaml", _chosen(1.0148, 0.0018, threads=512), "default")
    b = _write(tmp_path / "b.yaml", _chosen(second, half, threads=256), _chosen(second, half, stripes=2))
    assert _verdicts(a, b) == [verdict, verdict] == _verdicts(b, a)


def test_a_group_that_only_one_profile_has(tmp_path: Path) -> None:
    a = _write(tmp_path / "a.yaml", "default", "default")
    b = _write(tmp_path / "b.yaml", _chosen(1.03, 0.002, threads=256), "default")
    assert _verdicts(a, b) == ["differs", "equal"]
    b = _write(tmp_path / "b.yaml", _chosen(1.009, 0.002, threads=256), "default")
    assert _verdicts(a, b) == ["tie", "equal"], "less than the margin"


def test_gains_on_different_workloads_are_not_compared(tmp_path: Path) -> None:
    a = _write(tmp_path / "a.yaml", _chosen(1.0148, 0.0018, threads=512), "default")
    b = _write(tmp_path / "b.yaml", _chosen(1.0148, 0.0018, threads=256), "default", prompt=512)
    assert _verdicts(a, b) == ["differs", "equal"]


@pytest.mark.parametrize(
    ("moves", "by_measure", "verdict"),
    [
        ("pp", {"pp4096": 0.01, "tg128": 0.06}, "differs"),
        ("tg", {"pp4096": 0.01, "tg128": 0.06}, "tie"),
        (["pp", "tg"], {"pp4096": 0.01, "tg128": 0.06}, "tie"),
        ("pp", {}, "tie"),  # an older profile: its margin is the largest of all
    ],
)
def test_a_noisy_metric_makes_no_tie_of_a_gain_in_another(
    tmp_path: Path, moves: object, by_measure: dict[str, float], verdict: str
) -> None:
    of = profiles.load_profile(SHIPPED)
    assert of.evidence
    noise = profiles.Noise(margin=0.06, by_measure=by_measure)
    evidence = of.evidence.model_copy(update={"noise": noise})
    entry = {"value": 2048, "default": 512, "ratio": 1.05, "ci95": (1.045, 1.055), "n": 6, "moves": moves}
    for name, setting in (("a", profiles.SettingEntry.model_validate(entry)), ("b", "default")):
        made = of.model_copy(update={"settings": {"ubatch": setting}, "kernels": {}, "evidence": evidence})
        profiles.save_profile(made, tmp_path / f"{name}.yaml")
    assert ("by_measure" in (tmp_path / "a.yaml").read_text()) == bool(by_measure)
    a, b = tmp_path / "a.yaml", tmp_path / "b.yaml"
    assert [row.verdict for row in compare_profiles(a, b)] == [verdict]
    assert [row.verdict for row in compare_profiles(b, a)] == [verdict]


def test_profiles_of_other_models_and_devices_are_told_apart() -> None:
    folder = SHIPPED.parent
    (cpu,) = folder.glob("xeon-*.yaml")
    llama = folder / "h200-llama-8b-q4_k.yaml"
    assert apart(llama, llama) == []
    assert apart(llama, cpu) == ["it is for cuda devices, here cpu"]
    assert "architecture llama, here qwen3moe" in apart(llama, SHIPPED)
    done = CliRunner().invoke(app, ["diff", str(llama), str(cpu), "--json"])
    assert done.exit_code == any(row["verdict"] == "differs" for row in json.loads(done.stdout))
    assert done.stderr.count("\n") == 1
    assert "are not for the same model and device" in done.stderr
    assert CliRunner().invoke(app, ["diff", str(llama), str(llama)]).stderr == ""
