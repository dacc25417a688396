"""The search of `benchmarks/vram_limits.py` for the smallest N of another engine that fits."""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

pytest.importorskip("pynvml")
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def limits() -> ModuleType:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        spec = importlib.util.spec_from_file_location("vram_limits", BENCHMARKS / "vram_limits.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["vram_limits"] = module  # its data classes look for it there
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(BENCHMARKS))
    return module


@pytest.fixture
def args() -> argparse.Namespace:
    return argparse.Namespace(
        model="m.gguf", gpu=0, threads=4, prompts="512,2048", repetitions=2, timeout=60.0, ends=math.inf
    )


class Engine:
    """Stands in for a process: its memory by N, and the commands it was started with."""

    def __init__(
        self, peak: Callable[[int, bool], float], most: float = math.inf, tokens_alone: bool = False
    ) -> None:
        self.peak, self.most, self.tokens_alone = peak, most, tokens_alone
        self.commands: list[list[str]] = []

    def __call__(self, _: argparse.Namespace, command: list[str]) -> dict[str, Any]:
        self.commands.append(command)
        count = int(command[command.index("--n-cpu-moe") + 1])
        peak = self.peak(count, "512,2048" in command)
        if self.tokens_alone and command[command.index("-p") + 1] != "0":
            return {"error": "no such kernel"}
        if peak > self.most:
            return {"error": "out of memory"}
        return {"peak_gib": peak, "cells": {}}

    def counts(self) -> list[int]:
        return [int(command[-1]) for command in self.commands]


def row(limits: ModuleType, args: argparse.Namespace, engine: Engine, limit: float, peer: Any) -> Any:
    limits.run = engine
    return limits.peer_row(args, limit, peer, limits.Experts(layers=24, gib=0.5, others_gib=1.5))


@pytest.mark.parametrize("base", [1.0, 3.49, 5.0])
def test_the_smallest_n_that_fits_is_found_in_two_runs(
    limits: ModuleType, args: argparse.Namespace, base: float
) -> None:
    engine = Engine(lambda count, _: base + 0.5 * (24 - count))
    peer = limits.Peer("bench", "2048")
    for limit in (6.0, 9.0):
        found = row(limits, args, engine, limit, peer)
        assert found["peak_gib"] <= limit
        assert base + 0.5 * (24 - found["n_cpu_moe"] + 1) > limit
    assert len(engine.commands) == 3  # one that tells the memory, and one for each limit


def test_the_run_that_measures_decides(limits: ModuleType, args: argparse.Namespace) -> None:
    """It takes more than the short one, or less."""
    for more in (0.6, -0.6):
        engine = Engine(lambda count, whole, more=more: 2.0 + 0.5 * (24 - count) + whole * more)
        found = row(limits, args, engine, 8.0, limits.Peer("bench", "2048"))
        assert found["n_cpu_moe"] == 24 - int((8.0 - 2.0 - more) / 0.5)
        assert len(engine.counts()) <= 4


def test_an_n_below_a_fit_is_tried_after_one_that_does_not_fit(
    limits: ModuleType, args: argparse.Namespace
) -> None:
    """Else an engine whose memory is not linear in N gets a slower row than it could have."""
    peaks = {13: 9.0, 14: 7.5, 15: 6.9}
    engine = Engine(lambda count, whole: peaks[count] if whole else 7.9)
    assert row(limits, args, engine, 8.0, limits.Peer("bench", "2048"))["n_cpu_moe"] == 14
    assert engine.counts() == [15, 15, 13, 14]


def test_layers_without_experts_move_nothing(limits: ModuleType, args: argparse.Namespace) -> None:
    engine = Engine(lambda count, _: 2.0 + 0.5 * (24 - max(count, 3)))
    assert row(limits, args, engine, 12.0, limits.Peer("bench", "2048"))["n_cpu_moe"] <= 4


def test_a_limit_below_the_least_says_so(limits: ModuleType, args: argparse.Namespace) -> None:
    engine = Engine(lambda count, _: 3.0 + 0.5 * (24 - count))
    found = row(limits, args, engine, 2.5, limits.Peer("bench", "2048"))
    assert (found["n_cpu_moe"], found["error"]) == (24, "does not fit into 2.5 GiB")


def test_an_engine_that_opens_nothing_is_not_searched(limits: ModuleType, args: argparse.Namespace) -> None:
    engine = Engine(lambda *_: 1.0, most=0.0)
    assert "out of memory" in row(limits, args, engine, 8.0, limits.Peer("bench", "2048"))["error"]
    assert len(set(engine.counts())) == 1


@pytest.mark.parametrize("limit", [0.0, 8.0])
def test_tokens_are_measured_where_prompts_fail(
    limits: ModuleType, args: argparse.Namespace, limit: float
) -> None:
    engine = Engine(lambda count, _: 2.0 + 0.5 * (24 - count), tokens_alone=True)
    found = row(limits, args, engine, limit, limits.Peer("bench", "2048"))
    assert found["n_cpu_moe"] == (12 if limit else 24)
    assert (found["prompts_error"], "error" in found) == ("no such kernel", False)
    assert engine.commands[-1][engine.commands[-1].index("-n") + 1] == "64"


def test_no_limit_leaves_all_experts_to_the_cpu(limits: ModuleType, args: argparse.Namespace) -> None:
    engine = Engine(lambda count, _: 3.0 + 0.5 * (24 - count))
    assert row(limits, args, engine, 0.0, limits.Peer("bench", "2048"))["n_cpu_moe"] == 24
    assert set(engine.counts()) == {24}


def test_no_process_starts_behind_the_end(limits: ModuleType, args: argparse.Namespace) -> None:
    engine = Engine(lambda count, _: 3.0 + 0.5 * (24 - count))
    args.ends = time.monotonic() - 1
    with pytest.raises(limits.OutOfTime):
        row(limits, args, engine, 8.0, limits.Peer("bench", "2048"))
    assert not engine.commands


def test_u_batches_are_rows(limits: ModuleType, args: argparse.Namespace) -> None:
    args.dyno, args.peer, args.ubatches = ["dyno -b 512=-b 512"], ["a=bench -fa 1"], "2048,512"
    args.peers_alone = False
    assert limits.rows_of(args) == {
        "dyno": ("", ""),
        "dyno -b 512": ("-b 512", ""),
        "a -ub 2048": ("bench -fa 1", "2048"),
        "a -ub 512": ("bench -fa 1", "512"),
    }
    args.ubatches = None
    assert list(limits.rows_of(args)) == ["dyno", "dyno -b 512", "a"]
    args.peers_alone = True
    assert list(limits.rows_of(args)) == ["dyno -b 512", "a"]


class File:
    """Stands in for a model file: one dense layer, and three with experts."""

    def __init__(self, _: str) -> None:
        pass

    def tensors(self) -> list[dict[str, Any]]:
        dense = [{"name": "blk.0.ffn_up.weight", "nbytes": 1 << 30}]
        experts = [
            {"name": f"blk.{layer}.ffn_{part}_exps.weight", "nbytes": 1 << 29}
            for layer in (1, 2, 3)
            for part in ("up", "down")
        ]
        return dense + experts


def test_layers_in_front_of_the_experts_count(limits: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--n-cpu-moe N` moves the experts of the first N layers, whether they have any or not."""
    monkeypatch.setattr(limits._core, "Gguf", File)
    assert limits.experts_of("m.gguf") == limits.Experts(layers=4, gib=1.0, others_gib=1.0)
