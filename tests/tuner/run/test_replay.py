from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma
import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from dyno_tuner.cli.commands import app
from dyno_tuner.core.errors import TuneError
from dyno_tuner.run.replay import replay_many
from dyno_tuner.targets.replay.target import ReplayTarget, experts_of, load_sweep
from typer.testing import CliRunner

if TYPE_CHECKING:
    from collections.abc import Callable


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


def test_the_processes_of_a_code_are_told_apart() -> None:
    target = ReplayTarget(load_sweep(H200, model="gpt-oss-20b-MXFP4-uniform"), "pp")
    assert target.process_rates() == target.process_rates({"ubatch": 4096})
    fastest = pytest.approx([50949, 50562, 50516, 50269, 50246, 50156], rel=1e-4)
    assert target.process_rates() == fastest
    second = target.process_rates({"ubatch": 4096, "mmq_max_tokens": 0})
    assert second == pytest.approx([49444, 49279, 49221, 49202, 49152, 48870], rel=1e-4)


H200 = Path(__file__).parents[3] / "benchmarks" / "results" / "sweep_h200.jsonl.gz"
DENSE, EXPERTS = (
    ("llama-8b-Q4_K", "qwen3-8b-Q8_0"),
    ("qwen3moe-30b-a3b-Q4_0", "gpt-oss-20b-MXFP4", "deepseek2-lite-Q4_0"),
)


@pytest.mark.parametrize("model", [*DENSE, *EXPERTS, *(f"{name}-uniform" for name in EXPERTS)])
def test_the_shipped_sweep_of_five_models(model: str) -> None:
    sweep = load_sweep(H200, model=model)
    target = ReplayTarget(sweep, "pp")
    assert target.rate({}) == target.rate({"ubatch": 512, "mmq_max_tokens": 65536})
    paths = 1 if model in DENSE else 2
    assert len(target._by_class) == 6 * 2**paths
    result = replay_many(sweep, seeds=4, limit=12)
    assert result["within_2pct"] == 1.0
    assert result["chosen"]["settings"]["ubatch"] >= 1024


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
        ('{"n_prompt": 1, "n_gen": 0, "samples_ts": []}', "not rates"),
        ('{"n_prompt": 1, "n_gen": 0, "samples_ts": [-4]}', "not rates"),
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


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress, bz2.compress])
def test_a_damaged_archive_is_refused(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    whole = pack(b'{"n_prompt": 1, "n_gen": 0, "samples_ts": [1]}\n' * 50)
    path = tmp_path / "cut"
    for damaged in (whole[:-9], whole[:12] + b"\xff" * 8 + whole[20:]):
        path.write_bytes(damaged)
        with pytest.raises(TuneError, match="cannot be read"):
            load_sweep(path)


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


def _shuffled(sweep_path: Path, path: Path, how: str) -> Path:
    """The recorded sweep in another dress: other order of fields and records, holes, another container."""
    rng = random.Random(7)
    rows = [json.loads(line) for line in sweep_path.read_text().splitlines()]
    rng.shuffle(rows)
    rows = [dict(rng.sample(list(row.items()), len(row))) for row in rows]
    for row in rows:
        row["model"] = "a model that nobody knows"
        row["wall_s"] = rng.random()
        row["some_counter"] = rng.random()
        if row["mla_attn"] == 3:
            row["mla_attn"] = None
    if how == "csv":
        for row in rows:
            row["samples_ts"] = json.dumps(row["samples_ts"])
        names = sorted({n for row in rows for n in row})
        with path.open("w", newline="") as out:
            writer = csv.DictWriter(out, names)
            writer.writeheader()
            writer.writerows(rows)
        return path
    text = json.dumps(rows, indent=1) if how == "array" else "\n".join(map(json.dumps, rows))
    pack = {"gz": gzip.compress, "xz": lzma.compress, "bz2": bz2.compress}.get(how, bytes)
    path.write_bytes(pack(text.encode()))
    return path


@pytest.mark.parametrize("how", ["lines", "array", "csv", "gz", "xz", "bz2"])
def test_the_same_sweep_in_another_dress(sweep_path: Path, tmp_path: Path, how: str) -> None:
    """Neither names nor order tell anything: the paths are found from the rates."""
    target = ReplayTarget(load_sweep(_shuffled(sweep_path, tmp_path / "data", how)))
    assert target.name == "pp4096"
    assert target.experts["mmq_id_size"] == 128
    assert target.classes == 18
    assert target.rate({}) == pytest.approx(7430, rel=0.005)
    assert target.best()[0] == {"ubatch": 4096, "mmq_id_size": 64, "fused_moe": True, "fusion": 1}


def test_a_dense_model_has_no_paths_of_experts(tmp_path: Path) -> None:
    rng = random.Random(3)
    lines = [
        json.dumps({"n_ubatch": u, "cuda_params": f"mmq-id-size={m}", "n_prompt": 4096, "n_gen": 0,
                    "model": "d",
                    "samples_ts": [rng.gauss(1, 0.004) * 9000 * u / (u + 200) for _ in range(4)]})
        for u in (256, 512, 1024, 2048) for m in (0, 32)
    ]  # fmt: skip
    path = tmp_path / "dense.jsonl"
    path.write_text("\n".join(lines))
    assert ReplayTarget(load_sweep(path)).classes == 4


def test_failed_configurations_are_no_slow_ones(tmp_path: Path) -> None:
    rows = [{"n_ubatch": u, "n_prompt": 4096, "n_gen": 0, "model": "m", "samples_ts": [u, u, u]}
            for u in (128, 256, 512, 1024)]  # fmt: skip
    rows.append({"n_ubatch": 4096, "n_prompt": 4096, "n_gen": 0, "model": "m", "samples_ts": [],
                 "error": "CUDA out of memory"})  # fmt: skip
    path = tmp_path / "oom.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    result = replay_many(load_sweep(path), seeds=2)
    assert result["chosen"]["settings"] == {"ubatch": 1024}
    assert result["chosen"]["record"]["n_ubatch"] == 1024


def test_one_model_and_one_workload_of_several(tmp_path: Path) -> None:
    rows = [
        {"n_ubatch": u, "n_prompt": p, "n_gen": g, "n_depth": d, "model": m, "samples_ts": [r * u, r * u]}
        for m, r in (("a", 1.0), ("b", 2.0)) for p, g, d in ((512, 0, 0), (0, 64, 0), (0, 64, 4096))
        for u in ((256, 512) if m == "a" else (256, 512, 1024))
    ]  # fmt: skip
    path = tmp_path / "two.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    assert load_sweep(path).model == "b"
    assert load_sweep(path).models == ("b", "a")
    assert ReplayTarget(load_sweep(path, model="a")).name == "pp512"
    assert ReplayTarget(load_sweep(path), "tg", depth=4096).name == "tg64@d4096"
    with pytest.raises(TuneError, match="there are b, a"):
        load_sweep(path, model="c")
    with pytest.raises(TuneError, match="no records of pp4096"):
        ReplayTarget(load_sweep(path), "pp", 4096)


def test_no_more_configurations_than_allowed(sweep_path: Path) -> None:
    result = replay_many(load_sweep(sweep_path), seeds=4, limit=5)
    assert result["evaluations_max"] <= 5
