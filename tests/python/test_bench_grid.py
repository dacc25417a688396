"""The grid of a bench and its output formats; no clock is read."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import pytest
from dyno import _bench_formats as formats
from dyno.bench import BenchCase, BenchResult, cases
from dyno.errors import PlanError

SETTINGS = {"ubatch": 512, "threads": 2, "threads_batch": 2, "kv_type_k": "f16", "kv_type_v": "f16"}
MACHINE = {
    "build_version": "1",
    "build_info": {"compiler": "x"},
    "cpu_info": "chip",
    "gpu_info": "",
    "backends": "CPU",
}
MODEL = {
    "model_filename": "m.gguf",
    "model_type": "llama 1.00B Q4_0",
    "model_size": 3 << 30,
    "model_n_params": 10**9,
}


def result(case: BenchCase, **settings: Any) -> BenchResult:
    return BenchResult(case, [10**9, 2 * 10**9], SETTINGS | settings, 2, "2026-01-01T00:00:00Z")


def records(*results: BenchResult) -> list[dict[str, Any]]:
    return [formats.record(r, MACHINE, MODEL) for r in results]


def test_grid() -> None:
    grid = cases([512, 0], [0, 64], [(128, 16)], [0, 1024], [2048], {"threads": [1, 2]})
    assert [(c.settings, c.test) for c in grid] == [
        ((("threads", t),), name + depth)
        for t in (1, 2)
        for depth in ("", " @ d1024")
        for name in ("pp512", "tg64", "pp128+tg16")
    ]
    assert max(c.positions for c in grid) == 1024 + 512


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0], [0], [], [0], [2048], {}), "nothing to measure"),
        (([-1], [0], [], [0], [2048], {}), "-p"),
        (([1], [0], [], [-5], [2048], {}), "-5"),
        (([1], [0], [], [0], [0], {}), "-b"),
    ],
)
def test_impossible_grids(arguments: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        cases(*arguments)


def test_rates() -> None:
    r = result(BenchCase(100, 0))
    assert r.samples_ts == [100.0, 50.0]
    assert r.avg_ts == 75.0
    assert r.stddev_ts == pytest.approx(35.355, abs=1e-3)


def test_json_has_every_sample_and_the_names_that_parsers_know() -> None:
    row = json.loads(formats.as_json(records(result(BenchCase(512, 0, depth=7)))))[0]
    names = (
        "model_filename model_type model_size model_n_params n_batch n_ubatch n_threads type_k type_v "
        "n_prompt n_gen n_depth avg_ns stddev_ns avg_ts stddev_ts samples_ns samples_ts"
    )
    assert set(names.split()) <= row.keys()
    assert row["samples_ns"] == [10**9, 2 * 10**9]
    assert (row["n_prompt"], row["n_gen"], row["n_depth"]) == (512, 0, 7)


def test_jsonl_and_csv_say_the_same_as_json() -> None:
    rows = records(result(BenchCase(512, 0)), result(BenchCase(0, 64)))
    whole = json.loads(formats.as_json(rows))
    assert [json.loads(line) for line in formats.as_jsonl(rows).splitlines()] == whole
    table = list(csv.DictReader(io.StringIO(formats.as_csv(rows))))
    assert [json.loads(r["samples_ts"]) for r in table] == [r["samples_ts"] for r in whole]
    assert [int(r["n_gen"]) for r in table] == [0, 64]


def test_markdown() -> None:
    lines = formats.as_markdown(records(result(BenchCase(512, 0)), result(BenchCase(0, 64)))).splitlines()
    header = [c.strip() for c in lines[0].strip("|").split("|")]
    assert header == ["model", "size", "params", "backend", "threads", "test", "t/s"]
    cells = [c.strip() for c in lines[2].strip("|").split("|")]
    assert cells == ["llama 1.00B Q4_0", "3.00 GiB", "1.00 B", "CPU", "2", "pp512", "384.00 ± 181.02"]
    assert len({len(line) for line in lines}) == 1


def test_markdown_shows_what_varies() -> None:
    rows = records(result(BenchCase(512, 0), ubatch=128), result(BenchCase(512, 0), ubatch=256))
    header = formats.as_markdown(rows).splitlines()[0]
    assert "n_ubatch" in header
    assert "n_batch" not in header
