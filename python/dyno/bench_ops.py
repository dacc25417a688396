"""The time of a prompt or token, op by op.

A GPU generates by replaying a captured graph, in which launches overlap. There, the time of an op is the time
that it adds to a replay, so the sum is the time of a token. Otherwise each launch is timed alone (on a GPU
between two events), and the sum exceeds the time of the test. Bytes and operations are the minimum that an op
needs.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dyno.bench import _feed, _once

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dyno.bench import BenchCase
    from dyno.engine import Engine

__all__ = ["OpTime", "PerOp", "measure", "peaks_of", "table"]


@dataclass(frozen=True)
class OpTime:
    """All launches of one distinct op in a test."""

    family: str
    key: str
    launches: float
    """Number of launches in the whole test."""
    seconds: float
    share: float
    """Share of the time of all ops."""
    bytes: float
    flops: float
    gbps: float
    """Achieved rate in 1e9 bytes per second."""
    tflops: float
    """Achieved rate in 1e12 operations per second."""
    percent_of_peak: float | None
    """Percentage of the measured peak rate of memory or of products, whichever is larger; None if unknown."""


@dataclass(frozen=True)
class PerOp:
    """The ops of one test, the most expensive first."""

    test: str
    tokens: int
    ops: list[OpTime]
    op_seconds: float
    """Sum over the ops."""
    in_graph: bool
    """Whether ops were timed in a replayed graph, where they overlap. Otherwise each was timed alone."""
    test_seconds: float
    """Median duration of the test itself, without timing of ops."""
    peaks: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def peaks_of(device: str, threads: int = 0) -> dict[str, float]:
    """Measured peak rates: for a GPU those that `dyno._core.measure_rates` gives, for the CPU the rate of a
    copy.

    A copy reads and writes. An op that only reads can be somewhat faster.

    Args:
        device: As `Engine.device` names it.
        threads: Number of CPU threads; 0: all cores that this process may use.

    Raises:
        DeviceError: No such device.
    """
    from dyno import _core, _rates

    if device.startswith("cuda"):
        return dict(_core.measure_rates(device))
    return {"memory_gbps": _rates.cpu_memory(threads)}


def measure(
    engine: Engine,
    case: BenchCase,
    peaks: Mapping[str, float],
    *,
    repetitions: int = 5,
    seed: int = 0,
    notify: Callable[[str], None] | None = None,
) -> PerOp:
    """Time every op of a test.

    Args:
        engine: Opened with a context that holds the case.
        case: A prompt or generated tokens (not both), possibly at a depth.
        peaks: As `peaks_of` gives them.
        repetitions: Number of runs, of which the median counts. In a graph, ops are timed once, in the middle
            of the generated tokens, because each time there is the median of several replays.
        seed: Seed of the random tokens.
        notify: Called with a note before each run.

    Raises:
        PlanError: The case does not fit into the context.
    """
    tell = notify or (lambda note: None)
    vocabulary = int(engine.model["n_vocab"])
    tokens = np.random.default_rng(seed).integers(0, vocabulary, case.positions, dtype=np.int32)
    engine.reset()
    for _ in range(2):
        _once(engine, case, tokens)  # warm
    tell(f"{case.test} untouched")
    untouched = statistics.median(_once(engine, case, tokens) for _ in range(repetitions)) / 1e9

    # If one GPU computes all ops of a token, a graph holds them.
    on_one_gpu = engine.device.startswith("cuda") and len(engine.plan["devices"]) == 1
    in_graph = not case.n_prompt and on_one_gpu and bool(engine.settings["cuda_graphs"])
    if case.n_prompt:
        begin, times = case.depth, 1
        pieces = [tokens[begin:]]
    elif in_graph:
        begin, times = case.depth + case.n_gen // 2, case.n_gen
        pieces = [tokens[begin : begin + 1]]
    else:
        begin, times = case.depth, 1
        pieces = [tokens[i : i + 1] for i in range(begin, case.positions)]
    families: dict[str, str] = {}
    runs: list[dict[str, float]] = []
    for number in range(1 if in_graph else repetitions):
        tell(f"{case.test} op by op {number + 1}/{1 if in_graph else repetitions}")
        engine.reset()
        _feed(engine, tokens[:begin], case.batch, last_row=False)
        seconds: dict[str, float] = {}
        for piece in pieces:
            for row in engine.diagnostics.time_ops(piece, in_graph=in_graph):
                families[row["key"]] = str(row["family"])
                seconds[row["key"]] = seconds.get(row["key"], 0.0) + times * float(row["seconds"])
        runs.append(seconds)
    medians = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    total = sum(medians.values())
    work = _work(engine, case)
    ops = []
    for key, seconds_of in medians.items():
        if seconds_of <= 0:
            continue
        # An op that runs but is not listed for these batch sizes still counts with its time.
        family, launches, moved, flops = work.get(key, (families[key], 0.0, 0.0, 0.0))
        rates = (moved / seconds_of / 1e9, flops / seconds_of / 1e12)
        ops.append(
            OpTime(
                family,
                key,
                launches,
                seconds_of,
                seconds_of / total,
                moved,
                flops,
                *rates,
                _percent(rates, peaks) if moved else None,
            )
        )
    ops.sort(key=lambda op: -op.seconds)
    return PerOp(case.test, case.tokens, ops, total, in_graph, untouched, dict(peaks))


def _percent(rates: Sequence[float], peaks: Mapping[str, float]) -> float | None:
    if not peaks:
        return None
    shares = [rates[0] / peaks["memory_gbps"]]
    if "f16_tflops" in peaks:  # a build without cuBLAS does not measure it
        shares.append(rates[1] / peaks["f16_tflops"])
    return 100 * max(shares)


def _work(engine: Engine, case: BenchCase) -> dict[str, tuple[str, float, float, float]]:
    """Family, launches, bytes and operations by op key, summed over all u-batches of a case."""
    ubatch = int(engine.settings["ubatch"])
    vocabulary = int(engine.model["n_vocab"])
    windows = [int(layer["attention"]["window"]) for layer in engine.model["layers"]]
    found: dict[str, tuple[str, float, float, float]] = {}
    end = case.positions
    start = case.depth
    while start < end:
        count = min(ubatch, end - start) if case.n_prompt else 1
        last = start + count >= end or not case.n_prompt
        for op in engine.describe_ops(count):
            key, family = str(op["key"]), str(op["family"])
            launches, moved, flops = float(op["count"]), float(op["bytes"]), float(op["flops"])
            desc = _desc(key)
            if family == "matmul" and desc.get("n") == vocabulary:
                if not last:
                    continue  # only the last row needs logits
                moved, flops = _cost(key, 1)
            elif family in ("attention", "rope_attention"):
                moved, flops = _attention(key, desc, windows, start, count)
            before = found.get(key, (family, 0.0, 0.0, 0.0))
            found[key] = (
                family,
                before[1] + launches,
                before[2] + launches * moved,
                before[3] + launches * flops,
            )
        start += count
    return found


def _desc(key: str) -> dict[str, Any]:
    from dyno import _core

    return dict(_core.ops.parse_key(key)[1])


def _cost(key: str, tokens: int) -> tuple[float, float]:
    from dyno import _core

    family, desc = _core.ops.parse_key(key, tokens)
    moved, flops = _core.ops.cost(family, desc)
    return float(moved), float(flops)


def _attention(
    key: str, desc: Mapping[str, Any], windows: Sequence[int], start: int, count: int
) -> tuple[float, float]:
    """Bytes and operations of one attention launch, including the positions in the cache.

    Both are averages over the layers of this op, with and without a window. The cost function of the op
    ignores the history: for one token it counts q, the output, one key and one value. For a fused op, it also
    counts the stored values, which do not grow with the depth.
    """
    one_moved, one_flops = _cost(key, 1)
    position_moved, position_flops = _of_position(desc)
    positions = np.arange(start, start + count)
    of_layers = [window for window in windows if (window > 0) == bool(desc["windowed"])]
    moved = flops = 0.0
    for window in of_layers:
        first = max(0, start - window + 1) if window else 0
        seen = np.minimum(positions + 1, window) if window else positions + 1
        moved += count * (one_moved - position_moved) + (start + count - first) * position_moved
        flops += count * (one_flops - position_flops) + float(seen.sum()) * position_flops
    return moved / len(of_layers), flops / len(of_layers)


def _of_position(desc: Mapping[str, Any]) -> tuple[float, float]:
    """Bytes of one position in the cache, and operations of one query with it."""
    from dyno import _core

    alone = {name: desc[name] for name in ("heads", "kv_heads", "dk", "dv", "k_type", "v_type")}
    values_in_keys = desc["latent"] if "latent" in desc else desc["v_in_k"]
    moved, flops = _core.ops.cost("attention", {**alone, "m": 1, "v_in_k": values_in_keys})
    return float(moved) - 4.0 * desc["heads"] * (desc["dk"] + desc["dv"]), float(flops)


def table(result: PerOp, limit: int = 30) -> str:
    """The table as text: the most expensive ops, and the sum of all ops compared with the test itself."""
    per = "token" if not result.test.startswith("pp") else "prompt"
    scale = 1 / result.tokens if per == "token" else 1.0
    header = ("op", "launches", f"us a {per}", "share", "GB/s", "TFLOP/s", "% of peak")
    rows = [
        (
            op.key,
            f"{op.launches * scale:g}",
            f"{op.seconds * scale * 1e6:.1f}",
            f"{100 * op.share:.1f} %",
            f"{op.gbps:.0f}",
            f"{op.tflops:.1f}",
            "" if op.percent_of_peak is None else f"{op.percent_of_peak:.1f}",
        )
        for op in result.ops[:limit]
    ]
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in (header, *rows)
    ]
    ops, test = result.op_seconds * scale * 1e6, result.test_seconds * scale * 1e6
    how = "in the graph" if result.in_graph else "one by one"
    lines.append(f"{result.test}: ops {how} {ops:.1f} us a {per}, the test itself {test:.1f} us a {per}")
    if result.peaks:
        peaks = f"measured peaks: memory {result.peaks['memory_gbps']:.0f} GB/s (a copy, read and written)"
        if "f16_tflops" in result.peaks:
            peaks += f", f16 products {result.peaks['f16_tflops']:.0f} TFLOP/s"
        lines.append(peaks)
    return "\n".join(lines)
