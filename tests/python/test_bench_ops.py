"""Op by op: what is counted, on the CPU with a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import dyno
import pytest
from dyno import _core, bench, bench_ops
from dyno._cli.bench import _per_op
from dyno.errors import PlanError

TINY = Path(__file__).resolve().parent.parent / "data" / "tiny"


def test_all_launches_of_a_prompt_are_counted() -> None:
    with dyno.Engine(
        TINY / "qwen3moe-tiny.gguf", "cpu", profile=None, ctx=64, ubatch=16, threads=1
    ) as engine:
        found = bench_ops.measure(engine, bench.BenchCase(40, 0, 8), {}, repetitions=1)
        layers = int(engine.model["n_layers"])
        rows = {op.key: op for op in found.ops}
        routes = next(op for op in rows.values() if op.family == "moe_route")
        assert routes.launches == 3 * layers  # u-batches of 16, 16 and 8
        head = next(op for op in rows.values() if f"n={engine.model['n_vocab']} " in op.key + " ")
        assert head.launches == 1
        assert head.flops == 2 * int(engine.model["n_vocab"]) * int(engine.model["n_embd"])
    assert found.op_seconds > 0
    assert not found.in_graph
    assert sum(op.share for op in found.ops) == pytest.approx(1.0)
    assert all(op.percent_of_peak is None for op in found.ops)
    assert [op.seconds for op in found.ops] == sorted((op.seconds for op in found.ops), reverse=True)


@pytest.mark.parametrize("case", [bench.BenchCase(8, 0, 0), bench.BenchCase(0, 3, 0)])
def test_ops_of_several_devices_are_timed_one_by_one(case: bench.BenchCase) -> None:
    with dyno.Engine(
        TINY / "qwen3moe-tiny.gguf", "cpu:1", profile=None, ctx=64, threads=1, virtual_devices=1, cpu_moe=True
    ) as engine:
        found = bench_ops.measure(engine, case, {}, repetitions=1)
    assert not found.in_graph
    assert {op.family for op in found.ops} >= {"transfer", "moe_up_gate", "attention"}


def test_attention_is_counted_with_its_history_and_its_window() -> None:
    key = "attention heads=4 kv_heads=2 dk=32 dv=32 k=f16 v=f16"
    desc = _core.ops.parse_key(key)[1]
    one = 4 * (2 * 32 + 2 * 32)  # operations of a query with one key and value
    row = 2 * (2 * 32 + 2 * 32)  # bytes of a position
    ends = 4 * 4 * (32 + 32)
    assert bench_ops._attention(key, desc, [0], 0, 3) == (3 * ends + 3 * row, (1 + 2 + 3) * one)
    assert bench_ops._attention(key, desc, [0], 100, 1) == (ends + 101 * row, 101 * one)
    windowed = key + " windowed"
    of_window = bench_ops._attention(windowed, _core.ops.parse_key(windowed)[1], [10], 100, 1)
    assert of_window == (ends + 10 * row, 10 * one)
    both = bench_ops._attention(key, desc, [0, 0], 100, 1)
    assert both == (ends + 101 * row, 101 * one)


@pytest.mark.parametrize(("family", "names"), [("attention", ""), ("rope_attention", " n_rot=32")])
def test_layers_with_a_window_are_not_averaged_with_those_without(family: str, names: str) -> None:
    key = f"{family} heads=4 kv_heads=2 dk=32 dv=32{names} k=f16 v=f16"
    row, one = 2 * (2 * 32 + 2 * 32), 4 * (2 * 32 + 2 * 32)
    full, windowed = (
        [bench_ops._attention(k, _core.ops.parse_key(k)[1], [0, 10, 0], depth, 1) for depth in (100, 1100)]
        for k in (key, key + " windowed")
    )
    assert full[1][0] - full[0][0] == 1000 * row
    assert full[1][1] - full[0][1] == 1000 * one
    assert windowed[1] == windowed[0]  # ten positions at any depth
    assert full[0][0] - windowed[0][0] == 91 * row
    assert full[0][1] - windowed[0][1] == 91 * one


def test_what_a_fused_op_stores_does_not_grow_with_the_depth() -> None:
    for kind, row, one in (
        ("heads=32 kv_heads=8 dk=128 dv=128 n_rot=128 k=f16 v=f16 neox", 2 * 8 * 256, 2 * 32 * 256),
        (
            "heads=16 kv_heads=1 dk=576 dv=512 n_rot=64 nope=128 k=f16 v=f16 k_norm latent",
            2 * 576,
            2 * 16 * 1088,
        ),
    ):
        key = f"rope_attention {kind}"
        family, desc = _core.ops.parse_key(key)
        first = bench_ops._attention(key, desc, [0], 0, 1)
        assert first == _core.ops.cost(family, desc)
        deep = bench_ops._attention(key, desc, [0], 4096, 1)
        assert deep[0] - first[0] == 4096 * row
        assert deep[1] - first[1] == 4096 * one


def test_ops_of_a_batch_that_is_not_captured_are_not_timed_in_a_graph() -> None:
    with (
        dyno.Engine(TINY / "qwen3moe-tiny.gguf", "cpu", profile=None, ctx=64, threads=1) as engine,
        pytest.raises(PlanError, match="this plan has no GPU"),
    ):
        engine.diagnostics.time_ops([1], in_graph=True)


def test_shares_of_the_peak() -> None:
    peaks = {"memory_gbps": 1000.0, "f16_tflops": 100.0}
    assert bench_ops._percent((500.0, 1.0), peaks) == pytest.approx(50.0)
    assert bench_ops._percent((5.0, 80.0), peaks) == pytest.approx(80.0)
    del peaks["f16_tflops"]  # as in a build without cuBLAS
    assert bench_ops._percent((5.0, 80.0), peaks) == pytest.approx(0.5)


def test_the_command_prints_a_table_or_json() -> None:
    model = TINY / "llama-tiny.gguf"
    base = [sys.executable, "-m", "dyno", "bench", "-m", str(model), "--device", "cpu", "-r", "1", "-t", "1"]
    text = subprocess.run(
        [*base, "-p", "16", "-n", "2", "--per-op"], capture_output=True, text=True, check=True
    )
    assert "us a prompt" in text.stdout
    assert "tg2: ops one by one" in text.stdout
    done = subprocess.run(
        [*base, "-p", "0", "-n", "2", "--per-op", "-o", "json"], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["tests"][0]["test"] == "tg2"
    wrong = subprocess.run([*base, "-pg", "16,2", "--per-op"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2


def test_ops_of_the_cpu_are_compared_with_a_copy() -> None:
    peaks = bench_ops.peaks_of("cpu", threads=1)
    assert set(peaks) == {"memory_gbps"}
    assert peaks["memory_gbps"] > 0
    tiny = TINY / "qwen3moe-tiny.gguf"
    with dyno.Engine(tiny, "cpu", profile=None, ctx=64, threads=1) as engine:
        found = bench_ops.measure(engine, bench.BenchCase(0, 2, 8), {"memory_gbps": 4.0}, repetitions=1)
    for op in found.ops:
        assert op.percent_of_peak == (pytest.approx(100 * op.gbps / 4.0) if op.bytes else None)
    assert "memory 4 GB/s (a copy, read and written)" in bench_ops.table(found)


def test_each_number_of_threads_is_compared_with_a_copy_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_ops, "peaks_of", lambda device, threads=0: {"memory_gbps": float(threads)})
    settings = [(("threads", n), ("threads_batch", batch)) for n, batch in ((1, 2), (2, 1))]
    grid = [bench.BenchCase(*n, settings=each) for each in settings for n in ((8, 0), (0, 2))]
    _per_op(str(TINY / "qwen3moe-tiny.gguf"), grid, 1, 0, "json", {"device": "cpu", "profile": None})
    found = json.loads(capsys.readouterr().out)["tests"]
    assert [test["peaks"]["memory_gbps"] for test in found] == [2, 1, 1, 2]
