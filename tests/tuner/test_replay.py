from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from dyno_tuner.cli import app
from dyno_tuner.errors import TuneError
from dyno_tuner.replay import replay_many
from dyno_tuner.targets.replay import ReplayTarget, experts_of, load_sweep
from typer.testing import CliRunner

if TYPE_CHECKING:
    from pathlib import Path


def test_configurations_that_run_the_same_code_are_one(sweep_path: Path) -> None:
    target = ReplayTarget(load_sweep(sweep_path), "pp")
    plain = [r for r in target._records if r.settings.get("fused_moe") and "fusion" not in r.settings]
    space = target.space()
    points = {target._key(r.settings) for r in plain}
    kinds = {space.code_class(space.point(target._full(r.settings))) for r in plain}
    assert len(points) == 42
    assert len(kinds) == 12


def test_the_default_and_the_best(sweep_path: Path) -> None:
    target = ReplayTarget(load_sweep(sweep_path), "pp", 4096)
    assert target.rate({}) == pytest.approx(7430, rel=0.005)
    settings, rate = target.best()
    assert (settings["ubatch"], settings["mmq_id_size"]) == (4096, 64)
    assert rate == pytest.approx(12220, rel=0.005)
    generation = ReplayTarget(load_sweep(sweep_path), "tg")
    assert generation.rate({}) == pytest.approx(270, rel=0.005)


def test_a_search_finds_the_best_in_twelve_configurations(sweep_path: Path) -> None:
    result = replay_many(load_sweep(sweep_path), metric="pp", seeds=12, limit=12)
    assert result["runs"] == 12
    assert result["within_2pct"] >= 0.95
    assert result["evaluations_max"] <= 12
    assert result["chosen"]["settings"]["ubatch"] >= 2048


def _sweep(path: Path, best_needs_threshold: bool) -> Path:
    """Another model, where the default's threshold leaves the fast path at the u-batch that would be best."""
    fast = {128: 3515, 256: 6520, 512: 10840, 1024: 14840, 2048: 17400, 4096: 18430}
    slow = {128: 1278, 256: 2208, 512: 3556, 1024: 5742, 2048: 9115, 4096: 13240}
    lines = []
    for size in (32, 0, 8, 16, 64):
        for ubatch, rate in fast.items():
            level = rate if ubatch <= size * 64 else slow[ubatch]
            samples = [level * f for f in (0.95, 1.001, 0.999, 1.0)]
            record = {"n_ubatch": ubatch, "cuda_params": f"mmq-id-size={size}", "n_prompt": 4096, "n_gen": 0}
            lines.append(json.dumps({**record, "samples_ts": samples, "model": "deepseek2-lite-Q4_0"}))
    path.write_text("\n".join(lines))
    return path


def test_a_file_of_another_model(tmp_path: Path) -> None:
    result = replay_many(load_sweep(_sweep(tmp_path / "s.jsonl", True)), seeds=6, limit=12)
    assert result["within_2pct"] == 1.0
    assert result["best"]["settings"] == {"ubatch": 4096, "mmq_id_size": 64}
    assert result["chosen"]["settings"] == {"ubatch": 4096, "mmq_id_size": 64}


def test_cold_samples_do_not_fool_it(tmp_path: Path) -> None:
    """A configuration whose cold sample is its fastest is no faster for it."""
    lines = []
    for ubatch, samples in (
        (512, [90, 100, 100, 100]),
        (1024, [300, 101, 101, 101]),
        (2048, [50, 120, 120, 120]),
    ):
        lines.append(
            json.dumps({"n_ubatch": ubatch, "n_prompt": 64, "n_gen": 0, "samples_ts": samples, "model": "m"})
        )
    path = tmp_path / "s.jsonl"
    path.write_text("\n".join(lines))
    result = replay_many(load_sweep(path), seeds=3, limit=12)
    assert result["chosen"]["settings"] == {"ubatch": 2048}


def test_experts_by_name() -> None:
    assert experts_of("qwen3moe-30b-a3b-Q4_0") == 128
    assert experts_of("deepseek2-lite-Q4_0") == 64
    assert experts_of("somebody's model") is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no records"),
        ("{", "line 1"),
        ("[]", "not a JSON object"),
        ('{"n_prompt": 1, "n_gen": 0}', "no field 'samples_ts'"),
        ('{"n_prompt": 1, "n_gen": 1, "samples_ts": [1]}', "exactly one"),
        ('{"n_prompt": 1, "n_gen": 0, "samples_ts": []}', "no rates"),
        ('{"n_prompt": 1, "n_gen": 0, "samples_ts": [-4]}', "no rates"),
        ('{"n_prompt": 1, "n_gen": 0, "samples_ts": [1], "cuda_params": "fusion"}', "key=value"),
        ('{"n_prompt": "x", "n_gen": 0, "samples_ts": [1]}', "line 1"),
    ],
)
def test_what_is_no_sweep_is_refused_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(TuneError, match=words):
        load_sweep(path)
    with pytest.raises(TuneError, match="cannot be read"):
        load_sweep(tmp_path / "absent")


def test_the_command(sweep_path: Path) -> None:
    done = CliRunner().invoke(
        app, ["replay", str(sweep_path), "--seeds", "2", "--sampler", "random", "--json"]
    )
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert {"runs", "within_2pct", "evaluations_median", "best", "chosen"} <= set(result)
    done = CliRunner().invoke(app, ["replay", str(sweep_path), "--seeds", "1", "--metric", "tg128"])
    assert "within 2 %" in done.stdout
    assert CliRunner().invoke(app, ["replay", str(sweep_path), "--metric", "xx"]).exit_code == 2
    assert CliRunner().invoke(app, ["replay", str(sweep_path), "--sampler", "psychic"]).exit_code == 2
