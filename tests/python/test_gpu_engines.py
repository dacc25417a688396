"""Arithmetic of `benchmarks/gpu_engines.py`: rounds that join, and the table of another engine's steps."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from types import ModuleType

pytest.importorskip("pynvml")
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def engines() -> ModuleType:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        spec = importlib.util.spec_from_file_location("gpu_engines", BENCHMARKS / "gpu_engines.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(BENCHMARKS))
    return module


def test_rounds_join_to_one_median(engines: ModuleType) -> None:
    rounds = [
        {"command": "one", "cells": {"tg": {"samples": [1.0, 9.0], "median": 5.0}}},
        {"command": "two", "cells": {"tg": {"samples": [2.0], "median": 2.0}}},
    ]
    assert engines.joined(rounds) == {
        "command": "two",
        "cells": {"tg": {"samples": [1.0, 9.0, 2.0], "median": 2.0}},
    }


def test_a_cell_that_one_round_lacks_does_not_count(engines: ModuleType) -> None:
    whole = {"cells": {"tg": {"samples": [1.0], "median": 1.0}}}
    assert engines.joined([whole, {"error": "longer than 1 s"}]) == {"error": "longer than 1 s"}


def test_steps_are_read_from_the_table(engines: ModuleType, tmp_path: Path) -> None:
    peer = tmp_path / "bench.py"
    head = (
        "|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |"
    )
    row = (
        "|   128 |     32 |    8 |   1280 |    0.100 | 10240.00 |    0.200 |  1280.00 |    0.300 |  4266.67 |"
    )
    peer.write_text(f"print({head!r})\nprint({row!r})\n")
    args = argparse.Namespace(sequences="8", depth=128, tokens=32, threads=1, timeout=60)
    steps = engines.peer_steps(args, "model.gguf", f"{sys.executable} -P {peer}")
    assert steps["cells"] == {"steps of 8": {"samples": [1280.0], "median": 1280.0}}
    assert "-c 1280 " in steps["command"]


def test_a_program_that_fails_leaves_its_words(engines: ModuleType) -> None:
    args = argparse.Namespace(sequences="1", depth=1, tokens=1, threads=1, timeout=60)
    words = f"{sys.executable} -P -c 'raise SystemExit(\"no such type\")'"
    row = engines.peer_steps(args, "model.gguf", words)
    assert "no such type" in row["error"]
    assert "cells" not in row
