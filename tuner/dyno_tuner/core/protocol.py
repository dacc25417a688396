"""The one small protocol through which the tuner sees every engine, and the plain values that cross it.

A target lives in a worker process (or, where it has no state, in this one). Everything that crosses is a
plain value with `to_dict` / `from_dict`, because it goes over a pipe and into the journal.
"""

from __future__ import annotations

import abc
import dataclasses
import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .errors import TargetUnusable
from .workload import METRICS as METRICS
from .workload import Workload as Workload  # noqa: TC001 - others import it from here
from .workload import kind_of as kind_of

Value = bool | int | float | str
Settings = Mapping[str, Value]


def counted(number: int, noun: str, nouns: str = "") -> str:
    """`1 measurement`, `3 measurements`; `nouns` where an s does not make the plural."""
    return f"{number:,} {noun if number == 1 else nouns or noun + 's'}"


def settings_text(settings: Mapping[str, Any], joint: str = " ") -> str:
    """Settings for people: `ubatch=512 threads=8`."""
    return joint.join(f"{name}={value}" for name, value in settings.items())


class TrialStatus(enum.StrEnum):
    """The end of a trial. Only `ok` has a score; none of the others is a slow trial."""

    OK = "ok"
    INVALID = "invalid"  # the engine refuses these settings
    CRASH = "crash"  # the worker died
    OOM = "oom"  # out of memory, by exception or by the kernel's hand
    TIMEOUT = "timeout"  # past its deadline; the worker was killed
    INCORRECT = "incorrect"  # the answers changed by more than is allowed
    IMPLAUSIBLE = "implausible"  # faster than an independent clock or the hardware allows

    @property
    def kills(self) -> bool:
        """Whether the worker did not survive it. The search never tries such a configuration again."""
        return self in (TrialStatus.CRASH, TrialStatus.OOM, TrialStatus.TIMEOUT)


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """One op of one token bucket with the Config to run it with."""

    key: str  # op_key, e.g. "matmul q4_0 n=512 k=512"
    tokens: str  # bucket, e.g. "m1" or "m257-512"
    config: Mapping[str, Value]  # {"variant": …, params…}

    def to_dict(self) -> dict[str, Any]:
        return {"key": self.key, "tokens": self.tokens, "config": dict(self.config)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> KernelChoice:
        return cls(str(data["key"]), str(data["tokens"]), dict(data["config"]))


@dataclass(frozen=True, slots=True)
class Configuration:
    """Everything a trial turns: a value for every knob, and kernel choices beside the engine's own."""

    settings: Mapping[str, Value]
    kernels: tuple[KernelChoice, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {"settings": dict(self.settings), "kernels": [k.to_dict() for k in self.kernels]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Configuration:
        return cls(dict(data["settings"]), tuple(KernelChoice.from_dict(k) for k in data["kernels"]))

    def replace(self, **values: Value) -> Configuration:
        return Configuration({**self.settings, **values}, self.kernels)

    def kernels_key(self) -> tuple[object, ...]:
        """The kernel choices as something to look up by."""
        return tuple((k.key, k.tokens, tuple(sorted(k.config.items()))) for k in self.kernels)


@dataclass(frozen=True, slots=True)
class OpContext:
    """The place of an operation in the run. Of a real engine only the size of the check of answers depends on
    it; simulations draw their noise from it."""

    key: str  # unique in the run
    process: int = 0  # number of the worker process, counted by the tuner
    now: float = 0.0  # seconds since the run began
    budget: float | None = None  # seconds of the run as it was begun; None: no limit, or not known

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> OpContext:
        budget = data.get("budget")
        return cls(
            str(data["key"]), int(data["process"]), float(data["now"]),
            None if budget is None else float(budget),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sample:
    """One timed run of one prompt."""

    metric: str  # "pp" or "tg"; in a mix one of its parts, "tg128@d4096"
    prompt: int  # which of the fixed prompts; samples are paired by it
    tokens: int
    seconds: float
    clock_seconds: float  # the same span on an independent clock
    joules: float | None = None  # energy of the span, where it was counted; idle power is part of it

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    def to_list(self) -> list[Any]:
        told = [self.metric, self.prompt, self.tokens, self.seconds, self.clock_seconds]
        return told if self.joules is None else [*told, self.joules]

    @classmethod
    def from_list(cls, data: list[Any]) -> Sample:
        joules = float(data[5]) if len(data) > 5 else None
        return cls(str(data[0]), int(data[1]), int(data[2]), float(data[3]), float(data[4]), joules)


@dataclass(frozen=True, slots=True)
class Measurement:
    """One stay at one configuration: apply it, warm up, take samples."""

    status: TrialStatus
    samples: tuple[Sample, ...] = ()
    warmup: tuple[Sample, ...] = ()
    stable: bool = True  # False: the cap on warm-up samples was reached first
    message: str = ""
    seconds: float = 0.0  # everything, with loading
    by_energy: bool = False  # tokens per joule decide, not tokens per second

    def rates(self, metric: str) -> dict[int, float]:
        """The values that decide, by prompt: tokens per second, or tokens per joule; where a prompt was run
        several times, the median."""
        if not self.by_energy:
            return self.speeds(metric)
        return {p: 1 / joules for p, joules in self.joules(metric).items()}

    def speeds(self, metric: str) -> dict[int, float]:
        """Tokens per second by prompt."""
        return self._medians((s.prompt, s.rate) for s in self.samples if s.metric == metric)

    def joules(self, metric: str) -> dict[int, float]:
        """Joules per token by prompt; empty where energy was not counted."""
        return self._medians(
            (s.prompt, s.joules / s.tokens) for s in self.samples
            if s.metric == metric and s.joules is not None
        )  # fmt: skip

    @staticmethod
    def _medians(found: Iterable[tuple[int, float]]) -> dict[int, float]:
        by_prompt: dict[int, list[float]] = {}
        for prompt, value in found:
            by_prompt.setdefault(prompt, []).append(value)
        return {p: sorted(r)[len(r) // 2] for p, r in sorted(by_prompt.items())}

    def to_dict(self) -> dict[str, Any]:
        return {
            "status": str(self.status),
            "samples": [s.to_list() for s in self.samples],
            "warmup": [s.to_list() for s in self.warmup],
            "stable": self.stable,
            "message": self.message,
            "seconds": self.seconds,
            **({"by_energy": True} if self.by_energy else {}),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Measurement:
        return cls(
            TrialStatus(data["status"]),
            tuple(Sample.from_list(s) for s in data["samples"]),
            tuple(Sample.from_list(s) for s in data["warmup"]),
            bool(data["stable"]),
            str(data["message"]),
            float(data["seconds"]),
            bool(data.get("by_energy")),
        )


@dataclass(frozen=True, slots=True)
class GroupQuality:
    """The answers in batches of one size."""

    name: str
    tokens: int
    mean_kld: float  # nats per token
    max_kld: float
    agree: int  # tokens with the same most likely next token
    blocks: tuple[float, ...]  # mean KLD of neighbouring tokens, the same ones for every configuration

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> GroupQuality:
        return cls(
            str(data["name"]), int(data["tokens"]), float(data["mean_kld"]), float(data["max_kld"]),
            int(data["agree"]), tuple(float(b) for b in data["blocks"]),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Quality:
    """The distance of a configuration's answers from the exact path's, with the routing pinned to that
    path's."""

    status: TrialStatus
    mean_kld: float = 0.0  # nats per token
    max_kld: float = 0.0
    top1: float = 1.0  # share of tokens with the same most likely next token
    tokens: int = 0
    digest: str = ""  # of the logits' bits: equal digests, equal answers
    message: str = ""
    seconds: float = 0.0
    groups: tuple[GroupQuality, ...] = ()  # empty where a target cannot tell

    @classmethod
    def of(cls, groups: Sequence[GroupQuality], digest: str, seconds: float) -> Quality:
        """Of answers that were scored in groups: every scored token counts the same."""
        tokens = sum(g.tokens for g in groups)
        return cls(
            TrialStatus.OK,
            mean_kld=sum(g.mean_kld * g.tokens for g in groups) / tokens,
            max_kld=max(g.max_kld for g in groups),
            top1=sum(g.agree for g in groups) / tokens,
            tokens=tokens,
            digest=digest,
            seconds=seconds,
            groups=tuple(groups),
        )

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Quality:
        numbers = {n: float(data[n]) for n in ("mean_kld", "max_kld", "top1", "seconds")}
        groups = tuple(GroupQuality.from_dict(g) for g in data.get("groups", ()))
        data = {k: v for k, v in data.items() if k != "cut"}  # a recorder's mark
        return cls(**{**data, **numbers, "status": TrialStatus(data["status"]), "groups": groups})


@dataclass(frozen=True, slots=True)
class KernelOp:
    """An op of the model at one token bucket, with the Configs it could run with."""

    key: str
    tokens: str  # bucket
    m: int  # tokens it is timed with
    count: int  # times it runs in one pass over the model
    default: Mapping[str, Value]
    candidates: tuple[Mapping[str, Value], ...]
    metric: str  # "pp" or "tg": what it moves

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> KernelOp:
        return cls(**{**data, "candidates": tuple(data["candidates"])})


class Switch(enum.StrEnum):
    """The cost of another configuration."""

    CALL = "call"  # settings change between two calls; only what is loaded is loaded again
    PROCESS = "process"  # each measurement is a process that loads the model


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The abilities of a target beside measuring. The stages of a run follow from it.

    Args:
        kernels: its ops can be listed, timed and chosen one by one.
        memory_plan: it knows the bytes of any settings without loading them.
        routing: it has experts, and tells how the router spreads tokens over them.
        answers: its answers can be compared with an exact path's.
        rests: it can rest a GPU between two samples.
        switch: the cost of another configuration.
    """

    kernels: bool = False
    memory_plan: bool = False
    routing: bool = False
    answers: bool = True
    rests: bool = True
    switch: Switch = Switch.CALL

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Capabilities:
        return cls(**{**data, "switch": Switch(data.get("switch", Switch.CALL))})


@dataclass(frozen=True, slots=True)
class Description:
    """The device, model and engine of a target: facts, no results."""

    target: str  # "dyno", "simulated", "replay", …
    label: str  # for people
    device: dict[str, Any]
    model: dict[str, Any]
    engine: dict[str, Any]
    bounds: dict[str, float] = field(
        default_factory=dict
    )  # tokens/s by metric that the hardware cannot exceed
    virtual_time: bool = False  # seconds are computed, not waited for
    # Measured ones of the device, for the profile: memory_gbps, pcie_gbps, … No part of the identity.
    rates: dict[str, float] = field(default_factory=dict)
    capabilities: Capabilities = Capabilities()  # no part of the identity
    # Bytes that `device` and `host` may hold, where weights lie on both. No part of the identity.
    limits: dict[str, int] = field(default_factory=dict)

    def identity(self) -> dict[str, Any]:
        """The facts that a journal must share with this run to be continued."""
        return {"target": self.target, "device": self.device, "model": self.model, "engine": self.engine}

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Description:
        return cls(**{**data, "capabilities": Capabilities.from_dict(data.get("capabilities") or {})})


class Target(abc.ABC):
    """An engine to be tuned. Methods raise TargetFailure for settings that cannot be used, TargetLost where
    only a new process can go on, and TargetUnusable where nothing can be done.

    A target without a capability keeps the methods of that capability as they stand here. The knobs of its
    search are made beside it, from `describe()`, by its `Declaration`.
    """

    @abc.abstractmethod
    def describe(self) -> Description: ...

    def capabilities(self) -> Capabilities:
        return Capabilities()

    @abc.abstractmethod
    def apply(self, configuration: Configuration, context: OpContext) -> None:
        """Makes `configuration` the one that is measured next, with as little reloading as it needs."""

    @abc.abstractmethod
    def measure(self, workload: Workload, metric: str, prompt: int) -> Sample:
        """Times one run of prompt number `prompt`."""

    def count_energy(self, wanted: str | None) -> str:
        """Sets whether samples hold joules: `options.BESIDE`, `options.DECIDES` or None.

        Returns:
            Why energy cannot be counted; "" if it can, or if nobody wants it.
        """
        return "this engine's energy is not counted" if wanted else ""

    @abc.abstractmethod
    def rest(self, seconds: float) -> None:
        """Computes nothing for so long."""

    @abc.abstractmethod
    def quality(self, configuration: Configuration, context: OpContext) -> Quality:
        """Compares the answers of `configuration` with the exact path's."""

    @abc.abstractmethod
    def clock(self) -> float:
        """Seconds, monotonic; of virtual time where there is no other."""

    @abc.abstractmethod
    def close(self) -> None: ...

    # ---- capabilities

    def routing(self, configuration: Configuration, workload: Workload) -> dict[str, Any]:
        """How the router spreads the workload's tokens over its experts; empty where there are none."""
        return {}

    def memory(self, settings: Settings, where: str = "device") -> int | None:
        """Bytes that the plan puts on the device, or with `host` on the CPU beside it; None where the engine
        refuses the settings. Of the CPU alone, all bytes are the device's."""
        raise TargetUnusable("this target has no memory plan, so a limit cannot be kept")

    def expected(self, settings: Settings, workload: Workload) -> dict[str, float] | None:
        """Seconds by metric that the plan's cost model expects; None if there is no model of it."""
        return None

    def kernel_ops(self, configuration: Configuration, workload: Workload) -> list[KernelOp]:
        return []

    def time_ops(
        self, key: str, m: int, configs: Sequence[Mapping[str, Value]], *, threads: int, seconds: float
    ) -> list[list[float]]:
        """Seconds per launch of each config, with cold weights; none where one cannot be launched."""
        raise TargetUnusable("this target has no ops to time")
