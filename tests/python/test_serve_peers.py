"""benchmarks/serve_peers.py: servers of several engines on lanes of cores, and what is kept of their runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from chat_model import chat_model

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / "serve_peers.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)


def test_runs_of_all_lanes_make_a_cell(tmp_path: Path) -> None:
    def written(name: str, level: int, rates: dict[str, float]) -> None:
        rows: list[dict[str, Any]] = []
        for server, rate in rates.items():
            times = {"ttft_p50": 1 / rate, "ttft_p95": 2 / rate, "itl_p50": 0.01}
            rows.append({
                "server": server, "concurrency": level,
                "runs": [{"output_tokens": 100, "seconds": 100 / rate, **times}],
            })  # fmt: skip
        (tmp_path / name).write_text(json.dumps({"results": rows}))

    for lane, rate in enumerate((10.0, 30.0, 20.0)):
        written(f"{lane}_0_4.json", 4, {"a": rate, "b": 2 * rate})
    written("0_0_1.json", 1, {"a": 5.0})
    out = tmp_path / "out.txt"
    done = run("m.gguf", "--merge", str(tmp_path), "--json", str(out))
    assert done.returncode == 0, done.stderr
    cells = json.loads(out.read_text())["clients"]
    assert list(cells) == ["1", "4"]
    assert list(cells["4"]) == ["a", "b"]
    assert cells["4"]["a"]["output_rate"] == 20.0
    assert cells["4"]["b"]["ttft_p50"] == 0.025
    assert [each["output_rate"] for each in cells["4"]["b"]["runs"]] == [20.0, 60.0, 40.0]
    assert "  4 clients  b " in done.stdout


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a lane takes two cores")
def test_two_servers_on_a_lane(tmp_path: Path) -> None:
    model, out = chat_model(tmp_path / "m.gguf"), tmp_path / "o.json"
    words = (
        f"{sys.executable} -m dyno serve {{model}} --device cpu --no-profile --ctx 64 -t 1 --port {{port}}"
    )
    servers = ["--server", f"a={words} --sequences 2", "--server", f"b={words}"]
    given = [str(model), "--threads", "1", "--lanes", "1", "--seconds", "3", "--pp", "8", "--tg", "3"]
    done = run(*given, *servers, "--json", str(out))
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert set(found["clients"]) <= {"1", "4", "16"}
    assert found["lanes"] == 1
    for cell in found["clients"].values():
        assert set(cell) == {"a", "b"}
        assert all(run["output_rate"] > 0 for each in cell.values() for run in each["runs"])
    broken = run(*given, "--server", f"c={sys.executable} -c exit(3)", "--json", str(out))
    assert broken.returncode != 0
    assert "c is not ready" in broken.stderr


def test_clients_may_share_the_cores_of_the_servers(tmp_path: Path) -> None:
    model, out = chat_model(tmp_path / "m.gguf"), tmp_path / "o.json"
    words = (
        f"{sys.executable} -m dyno serve {{model}} --device cpu --no-profile --ctx 64 -t 1 --port {{port}}"
    )
    cores = len(os.sched_getaffinity(0))
    given = [str(model), "--lanes", "1", "--seconds", "1", "--pp", "8", "--tg", "3", "--clients-share"]
    given += ["--server", f"a={words}", "--json", str(out)]
    done = run(*given, "--threads", "1")
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["clients_share"] is True
    assert found["lanes"] == 1
    done = run(*given, "--threads", str(cores + 1))
    assert done.returncode == 1
    assert f"a lane takes {cores + 1} cores" in done.stderr
