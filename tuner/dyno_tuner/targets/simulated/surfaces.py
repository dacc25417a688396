"""Response surfaces with known true rates, for tests of the method.

A surface has knobs and a function from settings to true rates. They have the shapes of real engines:
saturation, a crossover of two paths, a memory cliff, ruggedness, and gains that need two settings together.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...core.intervals import keyed_rng
from ...core.protocol import METRICS, Configuration, Settings, TrialStatus, Value
from ...space.knobs import Fidelity, Kind, Knob
from ...space.search_space import Space

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_PP = frozenset({"pp"})
_TG = frozenset({"tg"})


def _no_fault(settings: Settings) -> TrialStatus | None:
    return None


def _no_kld(settings: Settings) -> float:
    return 0.0


@dataclass(frozen=True)
class SimulatedOp:
    """An alternative kernel of an op, whose default is `{"variant": "plain"}`. Kernels with the same key are
    candidates for one op.

    Args:
    alone: time of the default / time of this kernel, for a single launch.
    serving: by metric, tokens/s with this kernel / tokens/s with the default; may depend on the settings.
    fault: fault of the worker with this kernel, if any; a single launch can still be timed.
    share: share of the time of a pass that its launches take.
    """

    key: str
    metric: str
    alone: float
    serving: Callable[[Settings], Mapping[str, float]]
    variant: str = "other"
    fault: TrialStatus | None = None
    share: float = 0.5


@dataclass(frozen=True)
class Surface:
    """A simulated engine's knobs and true rates, answers and faults.

    Args:
    rates: true tokens/s of each metric with the default kernels.
    ops: alternative kernels.
    fault: fault of the worker with these settings, if any.
    kld: mean KL divergence from the exact path, in nats.
    watts: true power, in watts.
    """

    name: str
    knobs: tuple[Knob, ...]
    rates: Callable[[Settings], dict[str, float]]
    fault: Callable[[Settings], TrialStatus | None] = _no_fault
    kld: Callable[[Settings], float] = _no_kld
    weights: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(METRICS, 1.0))
    ops: tuple[SimulatedOp, ...] = ()
    watts: Callable[[Settings], float] | None = None
    """True power during work; None: no energy counter."""

    def with_kernels(self, configuration: Configuration) -> dict[str, float]:
        """True tokens/s of a configuration with its kernels."""
        rates = dict(self.rates(configuration.settings))
        others = {(k.key, k.config["variant"]) for k in configuration.kernels}
        for op in self.ops:
            if (op.key, op.variant) in others:
                for metric, gain in op.serving(configuration.settings).items():
                    rates[metric] *= gain
        return rates

    def fault_of(self, configuration: Configuration) -> TrialStatus | None:
        """The fault of the settings or of a kernel, if any."""
        others = {(k.key, k.config["variant"]) for k in configuration.kernels}
        faults = (op.fault for op in self.ops if (op.key, op.variant) in others)
        return self.fault(configuration.settings) or next((f for f in faults if f is not None), None)

    def space(self) -> Space:
        return Space(self.knobs)

    def truth(self, settings: Settings) -> float:
        """Log of the weighted geometric mean of the true rates; -inf if it does not run or is wrong."""
        if self.fault(settings) is not None or self.kld(settings) > 1e-3:
            return -math.inf
        rates = self.rates(settings)
        return sum(w * math.log(rates[m]) for m, w in self.weights.items()) / sum(self.weights.values())


def _int(settings: Settings, name: str) -> int:
    return int(settings[name])


def _powers(low: int, high: int) -> tuple[Value, ...]:
    return tuple(1 << p for p in range(low, high + 1))


def _thread_curve(threads: int, cores: int, serial: float, bandwidth: int) -> float:
    """Speed by number of threads: Amdahl's law until memory is saturated, then a slow loss, and a drop beyond
    the number of cores."""
    useful = min(threads, bandwidth)
    gain = 1 / (serial + (1 - serial) / useful)
    gain *= 0.985 ** max(0, threads - bandwidth)
    return gain * (0.8 if threads > cores else 1.0)


def saturating() -> Surface:
    """288 points: the gain of the u-batch saturates, then falls; token generation needs fewer threads than
    prefill."""
    threads: tuple[Value, ...] = (1, 2, 4, 6, 8, 12)
    knobs = (
        Knob("ubatch", _powers(5, 12), 512, moves=_PP, fidelity=Fidelity.ROUNDING),
        Knob("threads", threads, 8, moves=_TG),
        Knob("threads_batch", threads, 8, moves=_PP),
    )

    def rates(s: Settings) -> dict[str, float]:
        ubatch = _int(s, "ubatch")
        batch = ubatch / (ubatch + 180.0) * (1 - 0.06 * max(0.0, math.log2(ubatch / 1024)))
        return {
            "pp": 90 * batch * _thread_curve(_int(s, "threads_batch"), 8, 0.02, 12),
            "tg": 9 * _thread_curve(_int(s, "threads"), 8, 0.05, 4),
        }

    return Surface("saturating", knobs, rates)


def offload(link_gbps: float = 12.0) -> Surface:
    """A mixture of experts with experts in host memory: the CPU computes them, or they are copied over a
    link.

    All 16 experts of 48 layers are 15 GB, and a token uses 2. Streaming takes the time of the link for each
    u-batch, and hides behind the GPU only if the u-batch is large. On the CPU each token costs the same.
    """
    ratio = 8  # experts / used
    sizes = _powers(5, 13)

    def streamed(value: Value, s: Settings) -> bool:
        return _int(s, "ubatch") >= int(value) * ratio

    def switched(value: Value, s: Settings) -> object:
        return bool(value) if streamed(s["offload_min_tokens"], s) else "unused"

    knobs = (
        Knob("ubatch", sizes, 512, moves=_PP, fidelity=Fidelity.ROUNDING),
        Knob("offload_min_tokens", (0, *(int(u) // ratio for u in sizes), 1 << 20), 32, moves=_PP,
             fidelity=Fidelity.ROUNDING, code=streamed, threshold_of="ubatch",
             value_at=lambda tokens: max(1, math.ceil(tokens / ratio))),
        Knob("op_offload.matmul_id", (False, True), True, moves=_PP, ordinal=False,
             fidelity=Fidelity.ROUNDING, code=switched),
    )  # fmt: skip

    def rates(s: Settings) -> dict[str, float]:
        ubatch = _int(s, "ubatch")
        dense = 0.002 + ubatch * 6e-5  # seconds of attention and the rest on the GPU, for each pass
        cpu = 0.02 + ubatch * 1.6e-3
        crossing = 15.0 / link_gbps
        gpu = max(crossing, ubatch * 4e-5)
        if not streamed(s["offload_min_tokens"], s):
            experts = cpu
        elif s["op_offload.matmul_id"]:
            experts = gpu
        else:  # two of three matrices cross
            experts = max(crossing * 2 / 3, ubatch * 4e-5) + cpu / 3
        return {"pp": ubatch / (dense + experts), "tg": 20.0}

    return Surface(f"offload-{link_gbps:g}", knobs, rates)


def crossover() -> Surface:
    """280 points: a quantised path up to a threshold, a dequantised one above it. Which is faster depends on
    the u-batch. The best point changes both u-batch and threshold from the default."""

    def path(value: Value, s: Settings) -> bool:
        return _int(s, "ubatch") <= int(value)

    knobs = (
        Knob("ubatch", _powers(6, 12), 512, moves=_PP, fidelity=Fidelity.ROUNDING),
        Knob("mmq_id_max_tokens", (0, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384), 8192, moves=_PP,
             fidelity=Fidelity.ROUNDING, code=path, threshold_of="ubatch"),
        Knob("fusion", (False, True), True, ordinal=False, fidelity=Fidelity.ROUNDING),
        Knob("cuda_graphs", (False, True), True, moves=_TG, ordinal=False),
    )  # fmt: skip

    def rates(s: Settings) -> dict[str, float]:
        ubatch = _int(s, "ubatch")
        quantised = 900 * ubatch / (ubatch + 250.0) * (0.93 if ubatch >= 4096 else 1.0)
        dense = 1500 * ubatch / (ubatch + 1600.0)
        pp = quantised if ubatch <= _int(s, "mmq_id_max_tokens") else dense
        tg = 40.0 * (1.0 if s["cuda_graphs"] else 0.78) * (1.0 if s["fusion"] else 0.88)
        return {"pp": pp * (1.0 if s["fusion"] else 0.985), "tg": tg}

    return Surface("crossover", knobs, rates)


def cliff() -> Surface:
    """400 points: larger values are faster until memory runs out; then the worker dies."""
    knobs = (
        Knob("ubatch", _powers(5, 12), 512, moves=_PP, fidelity=Fidelity.ROUNDING),
        Knob("layers_on_gpu", (0, 8, 16, 24, 32, 40, 44, 46, 47, 48), 24, Kind.LOAD),
        Knob("copies", (1, 2, 3, 4, 6), 1),
    )

    def memory(s: Settings) -> float:
        return _int(s, "layers_on_gpu") * 0.3 + _int(s, "ubatch") * 0.0012 + _int(s, "copies") * 0.25

    def fault(s: Settings) -> TrialStatus | None:
        return TrialStatus.OOM if memory(s) > 16.0 else None

    def rates(s: Settings) -> dict[str, float]:
        share = _int(s, "layers_on_gpu") / 48
        ubatch = _int(s, "ubatch")
        copies = 1 + 0.05 * math.log2(_int(s, "copies")) - 0.012 * _int(s, "copies")
        tg = 1 / ((1 - share) / 8 + share / 60)
        pp = 1 / ((1 - share) / (70 * ubatch / (ubatch + 900)) + share / (1400 * ubatch / (ubatch + 300)))
        return {"pp": pp * copies, "tg": tg}

    return Surface("cliff", knobs, rates, fault)


def rugged() -> Surface:
    """500 points of a kernel's tile sizes: smooth trends with fixed deviations of ±3 %, and an unordered
    choice."""
    knobs = (
        Knob("rows", (1, 2, 4, 8, 16), 4, moves=_PP, fidelity=Fidelity.ROUNDING),
        Knob("columns", (1, 2, 4, 8, 16), 4, moves=_PP, fidelity=Fidelity.ROUNDING),
        Knob("stages", (1, 2, 3, 4), 2, moves=_PP, fidelity=Fidelity.ROUNDING),
        Knob("order", ("row", "column", "zigzag", "hilbert", "split"), "row", moves=_PP, ordinal=False),
    )

    def rates(s: Settings) -> dict[str, float]:
        rows, columns, stages = (math.log2(_int(s, n)) for n in ("rows", "columns", "stages"))
        order = {"row": 0.0, "column": -0.06, "zigzag": 0.03, "hilbert": 0.05, "split": -0.02}[
            str(s["order"])
        ]
        smooth = -0.03 * (rows - 3) ** 2 - 0.02 * (columns - 3) ** 2 - 0.03 * (rows + columns - 5.5) ** 2
        smooth += 0.05 * math.sqrt(stages + 0.1) - (0.08 if stages > 1 and rows + columns > 6 else 0.0)
        bump = 0.03 * float(keyed_rng("rugged", rows, columns, stages, s["order"]).uniform(-1, 1))
        return {"pp": 700 * math.exp(smooth + order + bump), "tg": 30.0}

    return Surface("rugged", knobs, rates, weights={"pp": 1.0})


def interaction() -> Surface:
    """500 points: a larger u-batch alone is slower, its threshold alone has no effect, both together gain a
    third."""
    knobs = (
        Knob("ubatch", _powers(7, 11), 512, moves=_PP, fidelity=Fidelity.ROUNDING),
        Knob("threshold", (256, 512, 1024, 2048, 4096), 512, moves=_PP, fidelity=Fidelity.ROUNDING),
        Knob("threads_batch", (2, 4, 6, 8), 8, moves=_PP),
        Knob("threads", (1, 2, 4, 6, 8), 8, moves=_TG),
    )

    def rates(s: Settings) -> dict[str, float]:
        ubatch = _int(s, "ubatch")
        fits = ubatch <= _int(s, "threshold")
        pp = 500 * (ubatch / 512) ** (0.2 if ubatch > 512 else 0.35)
        return {
            "pp": pp * (1.0 if fits else 0.6) * _thread_curve(_int(s, "threads_batch"), 8, 0.05, 8) / 6,
            "tg": 10 * _thread_curve(_int(s, "threads"), 8, 0.1, 6),
        }

    return Surface("interaction", knobs, rates)


def wide() -> Surface:
    """4,000 points over six knobs, with pairs that interact."""
    knobs = (
        Knob("ubatch", _powers(4, 13), 512, moves=_PP, fidelity=Fidelity.ROUNDING),
        Knob("threads_batch", (2, 4, 6, 8, 12), 8, moves=_PP),
        Knob("threads", (1, 2, 4, 6, 8), 8, moves=_TG),
        Knob("block", (8, 16, 32, 64), 16),
        Knob("order", ("row", "column"), "row", ordinal=False),
        Knob("fusion", (False, True), True, ordinal=False, fidelity=Fidelity.ROUNDING),
    )

    def rates(s: Settings) -> dict[str, float]:
        ubatch = _int(s, "ubatch")
        block = math.log2(_int(s, "block"))
        batch = ubatch / (ubatch + 400.0) * (1 - 0.05 * max(0.0, math.log2(ubatch / 2048)) ** 2)
        tile = math.exp(-0.02 * (block - (5.5 if s["order"] == "column" else 4.0)) ** 2)
        order = 1.04 if s["order"] == "column" else 1.0
        fused = 1.0 if not s["fusion"] else 1.03 if ubatch <= 2048 else 0.99
        return {
            "pp": 120 * batch * tile * order * fused * _thread_curve(_int(s, "threads_batch"), 12, 0.03, 10),
            "tg": 9 * tile * _thread_curve(_int(s, "threads"), 8, 0.05, 5) * (1.05 if s["fusion"] else 1.0),
        }

    return Surface("wide", knobs, rates)


def null() -> Surface:
    """96 equal points: any winner is due to noise."""
    knobs = (
        Knob("ubatch", _powers(6, 11), 512, moves=_PP, fidelity=Fidelity.ROUNDING),
        Knob("threads", (1, 2, 4, 8), 8, moves=_TG),
        Knob("threads_batch", (1, 2, 4, 8), 8, moves=_PP),
    )
    return Surface("null", knobs, lambda s: {"pp": 400.0, "tg": 30.0})


def with_ops(surface: Surface, *ops: SimulatedOp) -> Surface:
    """`surface` with alternative kernels."""
    return dataclasses.replace(surface, ops=ops)


def overlap() -> Surface:
    """Kernels whose single launches mislead, as overlapping launches do. In each of two ops, one kernel is
    faster alone but costs generation 14 and 3 %; another is slower alone but gains 4 and 3 %."""
    kernels = {
        ("matmul a", "early"): (1.3, 0.86),
        ("matmul a", "late"): (0.95, 1.04),
        ("attention", "wide"): (1.1, 0.97),
        ("attention", "split"): (0.9, 1.03),
        ("norm", "rows"): (1.0, 1.0),
    }

    def serving(gain: float) -> Callable[[Settings], Mapping[str, float]]:
        return lambda settings: {"tg": gain}

    ops = [
        SimulatedOp(key, "tg", alone, serving(gain), variant)
        for (key, variant), (alone, gain) in kernels.items()
    ]
    return dataclasses.replace(with_ops(null(), *ops), name="overlap")


def faulty() -> Surface:
    """`saturating` with regions that crash, hang or run out of memory, and a fast variant with wrong
    answers."""
    base = saturating()
    knobs = (
        *base.knobs,
        Knob(
            "cpu_isa",  # auto runs, avx2 is fast and wrong, portable hangs
            ("auto", "avx2", "portable"),
            "auto",
            fidelity=Fidelity.ROUNDING,
            ordinal=False,
        ),
    )

    def fault(s: Settings) -> TrialStatus | None:
        if s["cpu_isa"] == "portable":
            return TrialStatus.TIMEOUT
        if _int(s, "ubatch") >= 4096:
            return TrialStatus.OOM
        if _int(s, "threads_batch") == 6 and _int(s, "ubatch") <= 64:
            return TrialStatus.CRASH
        return None

    def rates(s: Settings) -> dict[str, float]:
        gain = 1.5 if s["cpu_isa"] == "avx2" else 1.0
        return {metric: rate * gain for metric, rate in base.rates(s).items()}

    return Surface("faulty", knobs, rates, fault, lambda s: 0.02 if s["cpu_isa"] == "avx2" else 1e-6)


def hungry() -> Surface:
    """48 points where the fastest setting does not use the least energy.

    The last threads wait for memory: they add 4 % of speed and 30 % of power. The other layout adds 3 % of
    speed and 15 % of power. A larger u-batch is faster and uses less energy.
    """
    knobs = (
        Knob("ubatch", (128, 256, 512, 1024), 256, moves=_PP, fidelity=Fidelity.ROUNDING),
        Knob("threads", (2, 4, 8), 4),
        Knob("cpu_repack", (False, True), False, ordinal=False),
    )
    speed, power = {2: 0.6, 4: 1.0, 8: 1.04}, {2: 0.8, 4: 1.0, 8: 1.3}

    def rates(s: Settings) -> dict[str, float]:
        gain = speed[_int(s, "threads")] * (1.03 if s["cpu_repack"] else 1.0)
        ubatch = _int(s, "ubatch")
        return {"pp": 600 * gain * ubatch / (ubatch + 60), "tg": 30 * gain}

    def watts(s: Settings) -> float:
        return 80 * power[_int(s, "threads")] * (1.15 if s["cpu_repack"] else 1.0)

    return Surface("hungry", knobs, rates, watts=watts)


SURFACES: dict[str, Callable[[], Surface]] = {
    f.__name__: f
    for f in (saturating, crossover, cliff, rugged, interaction, wide, null, overlap, faulty, hungry)
}
REGRET_SURFACES = ("saturating", "crossover", "cliff", "rugged", "interaction")
