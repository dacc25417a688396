"""A recorded sweep as a target: JSON Lines with one record per configuration, as llama-bench writes them.

Every field that varies and is no measurement is a knob; `cuda_params` is taken apart into its keys. A visit
takes the samples of one recorded process in their order, the cold one first; a new process takes another
record of the same code where there is one, so that a search meets the noise that was really there. Points
that were not recorded are not legal.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import TargetFailure, TuneError
from ..knobs import Fidelity, Kind, Knob
from ..space import Space
from ..stats import keyed_rng
from ..target import (
    Configuration,
    Description,
    OpContext,
    Quality,
    Sample,
    Settings,
    TrialStatus,
    Value,
    Workload,
)

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

# What ik_llama.cpp and llama.cpp run where a record does not say.
_DEFAULTS: dict[str, Value] = {
    "ubatch": 512,
    "batch": 2048,
    "fused_moe": True,
    "mmq_id_size": 32,
    "fusion": 1,
    "graphs": 1,
    "flash_attn": True,
    "type_k": "f16",
    "type_v": "f16",
    "no_op_offload": 0,
    "offload_batch_size": 32,
    "mla_attn": 3,
    "attn_max_batch": 0,
}
_NAMES = {"n_ubatch": "ubatch", "n_batch": "batch", "n_threads": "threads"}
_NO_KNOBS = frozenset(
    [
        "avg_ts",
        "stddev_ts",
        "samples_ts",
        "avg_ns",
        "stddev_ns",
        "samples_ns",
        "test_time",
        "order",
        "model",
        "n_prompt",
        "n_gen",
        "n_depth",
        "build_commit",
        "build_number",
        "cpu_info",
        "gpu_info",
        "backends",
        "model_filename",
        "model_type",
        "model_size",
        "model_n_params",
        "n_experts",
        "n_expert",
        "cuda_params",
    ]
)
# Experts by the beginning of a model's name, for files whose records do not have `n_experts`.
_EXPERTS = {
    "qwen3moe-30b-a3b": 128,
    "qwen3-30b-a3b": 128,
    "qwen3moe-235b": 128,
    "deepseek2-lite": 64,
    "deepseek-v2-lite": 64,
    "deepseek-v3": 256,
    "deepseek-r1": 256,
    "kimi-k2": 384,
    "gpt-oss-20b": 32,
    "gpt-oss-120b": 128,
    "glm4moe": 128,
    "glm-4.5-air": 128,
    "granitemoe": 32,
    "bailingmoe2": 256,
    "mixtral-8x7b": 8,
}
_MAX_RECORDS = 100_000


def experts_of(model: str) -> int | None:
    """Number of experts of a model by its name; None where the name says nothing."""
    name = model.lower()
    found = [(len(prefix), count) for prefix, count in _EXPERTS.items() if name.startswith(prefix)]
    return max(found)[1] if found else None


@dataclass(frozen=True)
class Record:
    """One process of the sweep."""

    settings: dict[str, Value]
    metric: str
    tokens: int
    samples: tuple[float, ...]  # tokens/s, in order, the first one cold

    @property
    def warm(self) -> tuple[float, ...]:
        return self.samples[1:] if len(self.samples) > 1 else self.samples


@dataclass
class Sweep:
    """A file of records."""

    path: str
    model: str
    experts: int | None
    records: list[Record] = field(default_factory=list)

    def workloads(self) -> list[tuple[str, int]]:
        """(metric, tokens), the one with most records first."""
        counts = Counter((r.metric, r.tokens) for r in self.records)
        return [w for w, _ in counts.most_common()]


def load_sweep(path: str | Path, experts: int | None = None) -> Sweep:
    """Reads a sweep. Raises TuneError that names the line and what is wrong with it."""
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TuneError(f"replay {path}: cannot be read: {error}") from error
    sweep = Sweep(str(path), "", experts)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if number > _MAX_RECORDS:
            raise TuneError(f"replay {path}: more than {_MAX_RECORDS} lines")
        try:
            data = json.loads(line)
            if not isinstance(data, dict):
                raise ValueError("not a JSON object")
            sweep.records.append(_record(data))
        except (ValueError, KeyError, TypeError) as error:
            what = f"no field {error}" if isinstance(error, KeyError) else str(error)
            raise TuneError(f"replay {path}, line {number}: {what}") from error
        sweep.model = sweep.model or str(data.get("model", data.get("model_type", "")))
        if sweep.experts is None and (given := data.get("n_experts", data.get("n_expert"))) is not None:
            sweep.experts = int(given)
    if not sweep.records:
        raise TuneError(f"replay {path}: holds no records")
    if sweep.experts is None:
        sweep.experts = experts_of(sweep.model)
    return sweep


def _record(data: Mapping[str, Any]) -> Record:
    settings: dict[str, Value] = {}
    for name, value in data.items():
        if name not in _NO_KNOBS and isinstance(value, bool | int | float | str):
            settings[_NAMES.get(name, name)] = value
    for part in str(data.get("cuda_params") or "").split(","):
        if part:
            name, equals, value = part.partition("=")
            if not equals:
                raise ValueError(f"cuda_params: {part!r} is no key=value")
            settings[name.replace("-", "_")] = _number(value)
    prompt, generated = int(data["n_prompt"]), int(data["n_gen"])
    if (prompt > 0) == (generated > 0):
        raise ValueError(f"n_prompt={prompt} and n_gen={generated}: exactly one has to be positive")
    samples = tuple(float(s) for s in data["samples_ts"])
    if not samples or not all(0 < s < 1e9 for s in samples):
        raise ValueError(f"samples_ts={list(samples)!r} are no rates in tokens/s")
    return Record(settings, "pp" if prompt else "tg", prompt or generated, samples)


def _number(text: str) -> Value:
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text


class ReplayTarget:
    """Args:
    metric, tokens: which records are replayed; default: the workload that most records have.
    seed: of the order in which records of the same code are met.
    """

    def __init__(
        self, sweep: Sweep, metric: str | None = None, tokens: int | None = None, seed: int = 0
    ) -> None:
        matching = [w for w in sweep.workloads() if metric in (None, w[0]) and tokens in (None, w[1])]
        if not matching:
            have = ", ".join(f"{m}{t}" for m, t in sweep.workloads())
            raise TuneError(
                f"replay {sweep.path}: no records of {metric or ''}{tokens or ''}; there are {have}"
            )
        self.metric, self.tokens = matching[0]
        self.sweep = sweep
        self.seed = seed
        self._records = [r for r in sweep.records if (r.metric, r.tokens) == matching[0]]
        self._knobs = self._make_knobs()
        by_settings: dict[tuple[Value, ...], list[Record]] = {}
        for record in self._records:
            by_settings.setdefault(self._key(record.settings), []).append(record)
        self._by_settings = by_settings
        self._knobs = self._with_recorded_default()
        self._space = Space(self._knobs, lambda s: self._key(s) in self._by_settings)
        self._by_class: dict[Hashable, list[Record]] = {}
        for record in self._records:
            kind = self._space.code_class(self._space.point(self._full(record.settings)))
            self._by_class.setdefault(kind, []).append(record)
        self._now = 0.0
        self._current: list[float] = []
        self._taken = 0
        self.visited: dict[Hashable, None] = {}

    # ---- the space

    def _make_knobs(self) -> tuple[Knob, ...]:
        names = sorted({n for r in self._records for n in r.settings})
        knobs: list[Knob] = []
        for name in names:
            given = [r.settings[name] for r in self._records if name in r.settings]
            common = Counter(given).most_common(1)[0][0]
            default = _DEFAULTS.get(name, common)
            if type(default) is not type(common):
                default = common
            values = set(given) | ({default} if len(given) < len(self._records) else set())
            if len(values) < 2:
                continue
            if default not in values:
                default = common
            ordinal = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
            ordered = sorted(values, key=lambda v: (float(v) if ordinal else 0.0, str(v)))
            knobs.append(
                Knob(
                    name,
                    tuple(ordered),
                    default,
                    Kind.LOAD,
                    frozenset({self.metric}),
                    Fidelity.ROUNDING,
                    ordinal,
                )
            )
        order = {"ubatch": 0, "mmq_id_size": 1}
        knobs.sort(key=lambda k: (order.get(k.name, 2), k.name))
        return tuple(self._with_rule(k, {k.name for k in knobs}) for k in knobs)

    def _with_rule(self, knob: Knob, names: set[str]) -> Knob:
        """mmq-id-size switches paths at ubatch = value × experts; nothing else of it reaches the code."""
        experts = self.sweep.experts
        if knob.name != "mmq_id_size" or "ubatch" not in names or not experts:
            return knob

        def path(value: Value, settings: Settings) -> Hashable:
            return int(settings["ubatch"]) <= int(value) * experts

        return Knob(
            knob.name, knob.values, knob.default, knob.kind, knob.moves, knob.fidelity, knob.ordinal, path
        )

    def _full(self, settings: Mapping[str, Value]) -> dict[str, Value]:
        return {k.name: settings.get(k.name, k.default) for k in self._knobs}

    def _key(self, settings: Mapping[str, Value]) -> tuple[Value, ...]:
        return tuple(settings.get(k.name, k.default) for k in self._knobs)

    def _with_recorded_default(self) -> tuple[Knob, ...]:
        """Where the engine's default was not recorded, the recorded point nearest to it stands in for it."""
        default = tuple(k.default for k in self._knobs)
        if default in self._by_settings:
            return self._knobs

        def far(key: Sequence[Value]) -> tuple[int, float]:
            differ = sum(v != k.default for v, k in zip(key, self._knobs, strict=True))
            return differ, sum(k.distance(v) for v, k in zip(key, self._knobs, strict=True))

        nearest = min(self._by_settings, key=far)
        return tuple(
            Knob(k.name, k.values, v, k.kind, k.moves, k.fidelity, k.ordinal, k.code)
            for k, v in zip(self._knobs, nearest, strict=True)
        )

    def knobs(self) -> tuple[Knob, ...]:
        return self._knobs

    def space(self) -> Space:
        return self._space

    def rate(self, settings: Settings) -> float:
        """Median of the warm samples of all records that run the same code, tokens/s."""
        return self._class_rate(self._space.code_class(self._space.point(self._full(settings))))

    def _class_rate(self, kind: Hashable) -> float:
        return statistics.median(s for r in self._by_class[kind] for s in r.warm)

    def best(self) -> tuple[dict[str, Value], float]:
        """The record with the highest median of warm samples: its settings and that rate."""
        record = max(self._records, key=lambda r: statistics.median(r.warm))
        return self._full(record.settings), statistics.median(record.warm)

    @property
    def classes(self) -> int:
        return len(self._by_class)

    # ---- the target

    def describe(self) -> Description:
        return Description(
            target="replay",
            label=f"replay of {Path(self.sweep.path).name}",
            device={"kind": "recorded"},
            model={"architecture": self.sweep.model, "experts": self.sweep.experts},
            engine={"workload": f"{self.metric}{self.tokens}", "records": len(self._records)},
            virtual_time=True,
        )

    def workload(self) -> Workload:
        return Workload(pp=self.tokens, tg=0) if self.metric == "pp" else Workload(pp=0, tg=self.tokens)

    def apply(self, configuration: Configuration, context: OpContext) -> None:
        settings = self._full(configuration.settings)
        if self._key(settings) not in self._by_settings:
            raise TargetFailure(str(TrialStatus.INVALID), f"{settings} was not recorded")
        kind = self._space.code_class(self._space.point(settings))
        self.visited[kind] = None
        records = self._by_class[kind]
        order = keyed_rng("record", self.seed, str(kind)).permutation(len(records))
        record = records[int(order[context.process % len(records)])]
        rng = keyed_rng("samples", self.seed, context.key)
        warm = [record.warm[int(i)] for i in rng.permutation(len(record.warm))]
        # The recorded order the first time a process is met, any order of its warm samples after that.
        self._current = [record.samples[0], *warm]
        self._taken = 0

    def measure(self, workload: Workload, metric: str, prompt: int) -> Sample:
        if not self._current or metric != self.metric:
            raise TuneError(f"replay: {metric} cannot be measured here, only {self.metric}{self.tokens}")
        count = len(self._current)
        index = self._taken if self._taken < count else 1 % count + (self._taken - 1) % max(1, count - 1)
        self._taken += 1
        seconds = self.tokens / self._current[index]
        self._now += seconds
        return Sample(metric, prompt, self.tokens, seconds, seconds)

    def quality(self, configuration: Configuration, context: OpContext) -> Quality:
        return Quality(TrialStatus.OK, message="a recorded sweep holds no answers")

    def clock(self) -> float:
        return self._now

    def close(self) -> None:
        self._current = []


def from_options(options: Mapping[str, Any]) -> ReplayTarget:
    """Builds a target in a worker from plain values."""
    sweep = load_sweep(options["path"], options.get("experts"))
    return ReplayTarget(sweep, options.get("metric"), options.get("tokens"), int(options.get("seed", 0)))
