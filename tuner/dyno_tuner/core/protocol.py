"""The protocol through which the tuner uses all engines, and the plain values that it exchanges.

A target lives in a worker process (or in this process, if it has no state). All exchanged values are plain
values with `to_dict` / `from_dict`, because they go through a pipe and into the journal.
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
    """A number with its noun, such as `3 measurements`. `nouns` is an irregular plural."""
    return f"{number:,} {noun if number == 1 else nouns or noun + 's'}"


def settings_text(settings: Mapping[str, Any], joint: str = " ") -> str:
    """Settings as text, such as `ubatch=512 threads=8`."""
    return joint.join(f"{name}={value}" for name, value in settings.items())


def changed_text(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    """The settings that differ from their defaults as text, or `default`."""
    changed = {
        name: value for name, value in settings.items() if name not in defaults or defaults[name] != value
    }
    return settings_text(changed) or "default"


class TrialStatus(enum.StrEnum):
    """The status of a trial. Only `ok` has a score. The others are failures, not slow trials."""

    OK = "ok"
    INVALID = "invalid"  # the engine refuses these settings
    CRASH = "crash"  # the worker died
    OOM = "oom"  # out of memory, by an exception or by the kernel
    TIMEOUT = "timeout"  # past the deadline; the worker was killed
    INCORRECT = "incorrect"  # the answers changed by more than is allowed
    IMPLAUSIBLE = "implausible"  # faster than an independent clock or the hardware allows

    @property
    def kills(self) -> bool:
        """Whether the worker died. The search never tries such a configuration again."""
        return self in (TrialStatus.CRASH, TrialStatus.OOM, TrialStatus.TIMEOUT)


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """A kernel choice: an op in a token bucket, with its Config."""

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
    """The configuration of a trial: a value for each knob, and kernel choices that differ from the
    engine's."""

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
        """The kernel choices as a hashable key."""
        return tuple((k.key, k.tokens, tuple(sorted(k.config.items()))) for k in self.kernels)


@dataclass(frozen=True, slots=True)
class OpContext:
    """The position of an operation in the run. With a real engine, only the size of the answer check depends
    on it. Simulations derive their noise from it."""

    key: str  # unique within the run
    process: int = 0  # number of the worker process
    now: float = 0.0  # seconds since the run began
    budget: float | None = None  # budget of the run in seconds at its start; None: no limit, or unknown

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
    """A sample: one timed run of one prompt."""

    metric: str  # "pp" or "tg"; in a mix, one of its parts, such as "tg128@d4096"
    prompt: int  # number of the fixed prompt; samples are paired by it
    tokens: int
    seconds: float
    clock_seconds: float  # the same time on an independent clock
    joules: float | None = None  # energy, if it was counted; including idle power

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
    """A measurement: the samples of a configuration after applying it and warming up."""

    status: TrialStatus
    samples: tuple[Sample, ...] = ()
    warmup: tuple[Sample, ...] = ()
    stable: bool = True  # False: not stable before the cap on samples
    message: str = ""
    seconds: float = 0.0  # total time, including loading
    by_energy: bool = False  # whether tokens per joule decide, instead of tokens per second

    def rates(self, metric: str) -> dict[int, float]:
        """The deciding values by prompt: tokens per second or tokens per joule. If a prompt was run several
        times, the median."""
        if not self.by_energy:
            return self.speeds(metric)
        return {p: 1 / joules for p, joules in self.joules(metric).items()}

    def speeds(self, metric: str) -> dict[int, float]:
        """Tokens per second by prompt."""
        return self._medians((s.prompt, s.rate) for s in self.samples if s.metric == metric)

    def joules(self, metric: str) -> dict[int, float]:
        """Joules per token by prompt; empty if energy was not counted."""
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
    """The comparison of answers in batches of one size."""

    name: str
    tokens: int
    mean_kld: float  # nats per token
    max_kld: float
    agree: int  # tokens with the same most likely next token
    blocks: tuple[float, ...]  # mean KLD of blocks of tokens, the same for all configurations

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
    """The distance of the answers of a configuration from the exact path, with the routing pinned to the
    exact path's."""

    status: TrialStatus
    mean_kld: float = 0.0  # nats per token
    max_kld: float = 0.0
    top1: float = 1.0  # share of tokens with the same most likely next token
    tokens: int = 0
    digest: str = ""  # digest of the bits of the logits; equal digests mean equal answers
    message: str = ""
    seconds: float = 0.0
    groups: tuple[GroupQuality, ...] = ()  # empty if the target does not report them

    @classmethod
    def of(cls, groups: Sequence[GroupQuality], digest: str, seconds: float) -> Quality:
        """The quality of answers that were scored in groups. All scored tokens have the same weight."""
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
        data = {k: v for k, v in data.items() if k != "cut"}  # a mark of the recorder
        return cls(**{**data, **numbers, "status": TrialStatus(data["status"]), "groups": groups})


@dataclass(frozen=True, slots=True)
class KernelOp:
    """An op of the model in a token bucket, with its possible Configs."""

    key: str
    tokens: str  # bucket
    m: int  # number of tokens for the timing
    count: int  # number of runs in one pass over the model
    default: Mapping[str, Value]
    candidates: tuple[Mapping[str, Value], ...]
    metric: str  # "pp" or "tg": the metric that it affects
    depth: int = 0  # positions in the cache before these tokens, for attention

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> KernelOp:
        return cls(**{**data, "candidates": tuple(data["candidates"])})


class Switch(enum.StrEnum):
    """The cost of switching to another configuration."""

    CALL = "call"  # settings change between two calls; only load settings cause a reload
    PROCESS = "process"  # each measurement is a process that loads the model


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The abilities of a target beyond measuring. They determine the stages of a run.

    Args:
        kernels: Whether its ops can be listed, timed and chosen individually.
        memory_plan: Whether it knows the memory of settings without loading them.
        routing: Whether it has experts, and reports their use.
        answers: Whether its answers can be compared with an exact path.
        rests: Whether it can let a GPU rest between two samples.
        switch: The cost of switching to another configuration.
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
    """The description of a target: facts about device, model and engine, without results."""

    target: str  # "dyno", "simulated", "replay", …
    label: str  # for people
    device: dict[str, Any]
    model: dict[str, Any]
    engine: dict[str, Any]
    bounds: dict[str, float] = field(
        default_factory=dict
    )  # upper bounds of tokens/s by metric, from the hardware
    virtual_time: bool = False  # whether seconds are simulated
    # Measured rates of the device, for the profile: memory_gbps, pcie_gbps, … They are not part of the
    # identity.
    rates: dict[str, float] = field(default_factory=dict)
    capabilities: Capabilities = Capabilities()  # not part of the identity
    # Limits in bytes of `device` and `host`, if weights are on both. They are not part of the identity.
    limits: dict[str, int] = field(default_factory=dict)

    def identity(self) -> dict[str, Any]:
        """The facts that a journal must share with this run, so that it can be continued."""
        return {"target": self.target, "device": self.device, "model": self.model, "engine": self.engine}

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Description:
        return cls(**{**data, "capabilities": Capabilities.from_dict(data.get("capabilities") or {})})


class Target(abc.ABC):
    """An engine to tune. Methods raise TargetFailure for settings that cannot be used, TargetLost if only a
    new process can continue, and TargetUnusable if the target does not work at all.

    A target without a capability keeps these default methods for it. The `Declaration` of the target makes
    the knobs of the search from `describe()`.
    """

    @abc.abstractmethod
    def describe(self) -> Description: ...

    def capabilities(self) -> Capabilities:
        return Capabilities()

    @abc.abstractmethod
    def apply(self, configuration: Configuration, context: OpContext) -> None:
        """Apply a configuration for the next measurements, with as little reloading as possible."""

    @abc.abstractmethod
    def measure(self, workload: Workload, metric: str, prompt: int) -> Sample:
        """Time one run of prompt number `prompt`."""

    def count_energy(self, wanted: str | None) -> str:
        """Set whether samples include joules: `options.BESIDE`, `options.DECIDES` or None.

        Returns:
            The reason why energy cannot be counted; "" if it can, or if it is not wanted.
        """
        return "this engine's energy is not counted" if wanted else ""

    @abc.abstractmethod
    def rest(self, seconds: float) -> None:
        """Compute nothing for this time."""

    @abc.abstractmethod
    def quality(self, configuration: Configuration, context: OpContext) -> Quality:
        """Compare the answers of a configuration with the exact path."""

    @abc.abstractmethod
    def clock(self) -> float:
        """Monotonic time in seconds; virtual time if the target simulates it."""

    @abc.abstractmethod
    def close(self) -> None: ...

    # ---- capabilities

    def routing(self, configuration: Configuration, workload: Workload) -> dict[str, Any]:
        """How the router spreads the workload's tokens over its experts; empty where there are none."""
        return {}

    def memory(self, settings: Settings, where: str = "device") -> int | None:
        """Bytes that the plan needs on the device, or with `host` on the CPU; None if the engine refuses the
        settings. If only the CPU computes, it is the device."""
        raise TargetUnusable("this target has no memory plan, so a limit cannot be kept")

    def expected(self, settings: Settings, workload: Workload) -> dict[str, float] | None:
        """Seconds by metric that the cost model of the plan expects; None without a cost model."""
        return None

    def kernel_ops(self, configuration: Configuration, workload: Workload) -> list[KernelOp]:
        return []

    def time_ops(
        self, key: str, m: int, configs: Sequence[Mapping[str, Value]], *, threads: int, seconds: float,
        depth: int = 0,
    ) -> list[list[float]]:  # fmt: skip
        """Seconds per launch of each config, with cold weights; None for a config that cannot be launched.
        Attention has `depth` positions in the cache before its tokens."""
        raise TargetUnusable("this target has no ops to time")
