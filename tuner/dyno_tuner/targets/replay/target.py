"""A recorded sweep as a target.

Each field that varies and is not a measurement is a knob. A measurement returns the samples of one recorded
process in order, the cold one first. A new process takes another record of the same code, if there is one, so
a search meets the recorded noise. Points without a record are illegal.
"""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.errors import TargetFailure, TuneError
from ...core.intervals import keyed_rng
from ...core.protocol import (
    Configuration,
    Description,
    OpContext,
    Quality,
    Sample,
    Settings,
    Target,
    TrialStatus,
    Value,
    Workload,
)
from ...space.knobs import Fidelity, Kind, Knob
from ...space.search_space import Space
from .code_paths import IN_TOKENS, INERT, PER_EXPERT, infer_factor, merges
from .recorded_sweep import Record, Sweep, experts_of, load_sweep

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

__all__ = ["ReplayTarget", "Sweep", "experts_of", "from_options", "load_sweep"]

# The defaults of ik_llama.cpp and llama.cpp, for fields that a record lacks.
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
    "mmq_max_tokens": 65536,
    "mmq_id_max_tokens": 65536,
}


def _name(metric: str, tokens: object, depth: int) -> str:
    return f"{metric}{tokens}" + (f"@d{depth}" if depth else "")


class ReplayTarget(Target):
    """A target that replays a recorded sweep.

    Args:
    metric, tokens, depth: which records are replayed; default: the prompts that most records have.
    seed: of the order in which records of the same code are met.
    """

    def __init__(
        self,
        sweep: Sweep,
        metric: str | None = None,
        tokens: int | None = None,
        seed: int = 0,
        depth: int | None = None,
    ) -> None:
        wanted = (metric, tokens, depth)
        matching = [
            w for w in sweep.workloads() if all(a in (None, b) for a, b in zip(wanted, w, strict=True))
        ]
        if not matching:
            have = ", ".join(_name(*w) for w in sweep.workloads())
            asked = _name(metric or "", tokens or "", depth or 0)
            raise TuneError(f"replay {sweep.path}: no records of {asked}; there are {have}")
        self.metric, self.tokens, self.depth = matching[0]
        self.sweep = sweep
        self.seed = seed
        self._records = [r for r in sweep.records if (r.metric, r.tokens, r.depth) == matching[0]]
        self._knobs = self._with_recorded_default(self._make_knobs())
        self.experts: dict[str, float | None] = {}  # factor of each bound
        self._knobs = tuple(self._with_rule(k) for k in self._knobs)
        self._recorded = {self._key(r.settings) for r in self._records}
        points = [tuple(k.values.index(v) for k, v in zip(self._knobs, key, strict=True)) for key in
                  dict.fromkeys(self._key(r.settings) for r in self._records)]  # fmt: skip
        self._space = Space(self._knobs, listed=points)
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
            ordinal = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
            ordered = sorted(values, key=lambda v: (float(v) if ordinal else 0.0, str(v)))
            if default not in values:
                near = float(default) if ordinal else 0.0
                default = min(ordered, key=lambda v: abs(float(v) - near)) if ordinal else common
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
        return tuple(k for k in knobs if not self._follows_ubatch(k.name))

    def _follows_ubatch(self, name: str) -> bool:
        """Whether a batch is determined by the u-batch in all records."""
        if name != "batch":
            return False
        pairs = {(r.settings.get("ubatch"), r.settings.get("batch")) for r in self._records}
        return len(pairs) == len({u for u, _ in pairs}) > 1

    def _with_rule(self, knob: Knob) -> Knob:
        """Add to a knob the rule by which it changes the code. A bound on the u-batch only selects a path. A
        u-batch has no effect beyond the prompt and the batch."""
        names = {k.name for k in self._knobs}
        if knob.name == "ubatch" and self.metric == "pp" and knob.ordinal:
            longest = self.tokens

            def effective(value: Value, settings: Settings) -> Hashable:
                return min(float(value), float(settings.get("batch", longest)), longest)

            rows = [(self._full(r.settings), statistics.median(r.warm)) for r in self._records if r.samples]
            return replace(knob, code=effective) if merges(rows, knob.name, effective) else knob
        if knob.name not in (*PER_EXPERT, *IN_TOKENS) or not knob.ordinal or "ubatch" not in names:
            return knob
        rows = [(self._full(r.settings), statistics.median(r.warm)) for r in self._records if r.samples]
        if knob.name in IN_TOKENS:
            factor: float | None = 1
        elif self.sweep.experts is not None:
            factor = self.sweep.experts
        else:
            factor = infer_factor(rows, knob.name, experts_of(self.sweep.model))
        self.experts[knob.name] = factor
        if factor is None:
            return knob
        scale = factor

        def path(value: Value, settings: Settings) -> Hashable:
            return scale == INERT or float(settings["ubatch"]) <= float(value) * scale

        return replace(knob, code=path, threshold_of="ubatch")

    def _full(self, settings: Mapping[str, Value]) -> dict[str, Value]:
        return {k.name: settings.get(k.name, k.default) for k in self._knobs}

    def _key(self, settings: Mapping[str, Value]) -> tuple[Value, ...]:
        return tuple(settings.get(k.name, k.default) for k in self._knobs)

    def _with_recorded_default(self, knobs: tuple[Knob, ...]) -> tuple[Knob, ...]:
        """If the engine's default was not recorded or failed, the nearest recorded point replaces it."""
        ran = {
            tuple(r.settings.get(k.name, k.default) for k in knobs): None for r in self._records if r.samples
        }
        if tuple(k.default for k in knobs) in ran:
            return knobs

        def far(key: Sequence[Value]) -> tuple[int, float]:
            differ = sum(v != k.default for v, k in zip(key, knobs, strict=True))
            return differ, sum(k.distance(v) for v, k in zip(key, knobs, strict=True))

        # A value that a record lacks is the engine's default, not that of the replacement.
        for record in self._records:
            for k in knobs:
                record.settings.setdefault(k.name, k.default)
        nearest = min(ran, key=far)
        return tuple(replace(k, default=v) for k, v in zip(knobs, nearest, strict=True))

    def knobs(self) -> tuple[Knob, ...]:
        return self._knobs

    def space(self) -> Space:
        return self._space

    def rate(self, settings: Settings) -> float:
        """Median in tokens/s of the warm samples of all records that run the same code."""
        return self._class_rate(self._space.code_class(self._space.point(self._full(settings))))

    def _class_rate(self, kind: Hashable) -> float:
        """The rate of a code path in tokens/s; 0 if all its records failed."""
        warm = [s for r in self._by_class.get(kind, []) for s in r.warm]
        return statistics.median(warm) if warm else 0.0

    def best(self) -> tuple[dict[str, Value], float]:
        """The settings and rate (tokens/s) of the record with the highest median of warm samples."""
        record = max((r for r in self._records if r.samples), key=lambda r: statistics.median(r.warm))
        return self._full(record.settings), statistics.median(record.warm)

    def best_code(self) -> float:
        """The highest rate of any code path, in tokens/s. Records of the same code differ by up to 2 %, so
        the best single record owes part of its rate to luck."""
        return max(self._class_rate(kind) for kind in self._by_class)

    def process_rates(self, settings: Settings | None = None) -> list[float]:
        """Median in tokens/s of the warm samples of each record that runs the same code, fastest first.

        Args:
            settings: None means the code of `best_code`.
        """
        if settings is None:
            kind = max(self._by_class, key=self._class_rate)
        else:
            kind = self._space.code_class(self._space.point(self._full(settings)))
        rates = [statistics.median(r.warm) for r in self._by_class.get(kind, []) if r.samples]
        return sorted(rates, reverse=True)

    def row(self, settings: Settings) -> dict[str, Any]:
        """The recorded fields of the best record of this configuration, without its samples."""
        key = self._key(self._full(settings))
        records = [r for r in self._records if self._key(r.settings) == key and r.samples]
        if not records:
            return {}
        return dict(max(records, key=lambda r: statistics.median(r.warm)).row)

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
            engine={"workload": self.name, "records": len(self._records)},
            virtual_time=True,
        )

    @property
    def name(self) -> str:
        return _name(self.metric, self.tokens, self.depth)

    def workload(self) -> Workload:
        counts = (self.tokens, 0) if self.metric == "pp" else (0, self.tokens)
        return Workload(pp=counts[0], tg=counts[1], depth=self.depth)

    def apply(self, configuration: Configuration, context: OpContext) -> None:
        settings = self._full(configuration.settings)
        if self._key(settings) not in self._recorded:
            raise TargetFailure(TrialStatus.INVALID, f"{settings} was not recorded")
        kind = self._space.code_class(self._space.point(settings))
        self.visited[kind] = None
        records = [r for r in self._by_class[kind] if r.samples]
        if not records:
            failure = self._by_class[kind][0].failure
            status = TrialStatus.OOM if "memory" in failure.lower() else TrialStatus.CRASH
            raise TargetFailure(status, failure)
        order = keyed_rng("record", self.seed, str(kind)).permutation(len(records))
        record = records[int(order[context.process % len(records)])]
        rng = keyed_rng("samples", self.seed, context.key)
        warm = [record.warm[int(i)] for i in rng.permutation(len(record.warm))]
        # The first use of a process keeps the recorded order; later uses shuffle its warm samples.
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

    def rest(self, seconds: float) -> None:
        """Do nothing: records do not change with a rest."""

    def quality(self, configuration: Configuration, context: OpContext) -> Quality:
        return Quality(TrialStatus.OK, message="a recorded sweep holds no answers")

    def clock(self) -> float:
        return self._now

    def close(self) -> None:
        self._current = []


def from_options(options: Mapping[str, Any]) -> ReplayTarget:
    """Build a target from plain values, in a worker process."""
    sweep = load_sweep(options["path"], options.get("experts"), options.get("model"))
    return ReplayTarget(sweep, options.get("metric"), options.get("tokens"), int(options.get("seed", 0)))
