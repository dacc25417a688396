"""The table of knobs, and the class `Knob` that the search uses.

A row has the values of a setting that are worth trying on this device with this model, and the condition
under which it matters. `dyno.settings` has the facts of a setting (type, default, kind, affected metrics,
fidelity). `resolve()` turns the applicable rows into `Knob`s. A target may have knobs outside of the table (a
recorded sweep has its own). The search sees only `Knob`s.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dyno.settings import SETTINGS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence

    from ..core.protocol import Settings, Value, Workload


class Kind(enum.StrEnum):
    """The cost of changing a setting."""

    BUILD = "build"  # another build
    LOAD = "load"  # the weights are read again
    CONTEXT = "context"  # the KV cache is created again, but the weights stay
    SESSION = "session"  # free between two calls
    SCHEDULER = "scheduler"  # read when a load begins


class Fidelity(enum.StrEnum):
    """The effect that changing a setting may have on the answers."""

    EXACT = "exact"  # no bit changes
    ROUNDING = "rounding"  # like another order of additions
    APPROX = "approx"  # more; searched only if the user allows it


@dataclass(frozen=True)
class Knob:
    """A setting with the values to search, in their natural order. Apart from the two functions at the end,
    it is plain data."""

    name: str
    values: tuple[Value, ...]
    default: Value
    kind: Kind = Kind.SESSION
    moves: frozenset[str] = frozenset({"pp", "tg"})
    fidelity: Fidelity = Fidelity.EXACT
    ordinal: bool = True  # whether neighbouring values behave similarly
    # The part of the value on which the executed code depends, given the other settings; None: no effect. Two
    # configurations with the same parts for all knobs are measured as one.
    code: Callable[[Value, Settings], Hashable] | None = None
    threshold_of: str | None = None  # a bound in units of another knob, which switches between two paths
    # The value for a crossing at a number of units, if the threshold is computed from the curves of both
    # paths. None: it is bisected on the grid.
    value_at: Callable[[float], Value] | None = None

    def __post_init__(self) -> None:
        if self.default not in self.values:
            raise ValueError(f"knob {self.name}: default {self.default!r} is not one of {self.values!r}")
        if len(set(self.values)) != len(self.values):
            raise ValueError(f"knob {self.name}: a value is listed twice in {self.values!r}")

    def distance(self, value: Value) -> float:
        """The distance of `value` from the default in steps; 1 for any other value of an unordered knob."""
        if not self.ordinal:
            return float(value != self.default)
        return float(abs(self.values.index(value) - self.values.index(self.default)))


@dataclass(frozen=True)
class Facts:
    """The facts that the rows of the table use."""

    device: Mapping[str, Any]
    model: Mapping[str, Any]
    workload: Workload
    defaults: Mapping[str, Value]  # the settings of the engine without a profile
    ctx: int = 4096
    host_weights: bool = False  # whether weights are on the CPU in addition to the device
    streams: bool = False  # whether the device gets copies of them for prompts
    host_cores: int = 0  # number of cores, if weights are on the CPU
    host_nodes: int = 1  # number of NUMA nodes for the weights on the CPU


@dataclass(frozen=True)
class KnobSpec:
    """A row of the table."""

    name: str  # name of the setting in dyno.settings
    values: Callable[[Facts], Sequence[Value]]
    applies: Callable[[Facts], bool]
    ordinal: bool = True
    code: Callable[[Facts], Callable[[Value, Settings], Hashable]] | None = None
    threshold_of: str | None = None
    value_at: Callable[[Facts], Callable[[float], Value]] | None = None


def _is_cuda(f: Facts) -> bool:
    return f.device.get("kind") == "cuda"


def _is_cpu(f: Facts) -> bool:
    return f.device.get("kind") == "cpu"


def _is_moe(f: Facts) -> bool:
    return int(f.model.get("experts") or 0) > 0


def _cores(f: Facts) -> int:
    return max(1, int(f.device.get("cores") or f.host_cores or 1))


def _on_cpu(f: Facts) -> bool:
    """Whether the CPU computes anything."""
    return _is_cpu(f) or f.host_weights


def _nodes(f: Facts) -> int:
    """Number of NUMA nodes over which weights on the CPU can be placed."""
    return f.host_nodes if _on_cpu(f) else 1


def _layers(f: Facts) -> int:
    return int(f.model.get("layers") or 0)


def _of_rules(f: Facts) -> bool:
    """Whether placement rules of the user place the weights. Numbers of layers are then not searched."""
    return bool(f.defaults.get("placement")) or bool(f.defaults.get("cpu_moe"))


def _by_experts(f: Facts) -> bool:
    return f.host_weights and _is_moe(f) and not _of_rules(f)


def _caches_experts(f: Facts) -> bool:
    """Whether single experts on the CPU can be cached on the device, with a benefit."""
    return f.host_weights and _is_moe(f) and bool(f.model.get("expert_use")) and f.workload.tg > 0


def _cache_sizes(f: Facts) -> Sequence[Value]:
    """Sizes of the expert cache in MiB: 0, and parts of the model (which is mostly experts) up to half."""
    mib = int(f.model.get("file_bytes") or 0) / (1 << 20)
    return sorted({0} | {max(1, round(mib * part)) for part in (1 / 32, 1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2)})


def _cache_code(f: Facts) -> Callable[[Value, Settings], Hashable]:
    """No effect if nothing is cached."""
    usual = f.defaults.get("expert_cache_mib", 0)
    return lambda value, settings: str(value) if settings.get("expert_cache_mib", usual) else "unused"


def _by_layers(f: Facts) -> bool:
    """Whether whole layers can go to the CPU: for dense models, and for mixtures of experts whose other
    weights do not fit either."""
    whole = not _is_moe(f) or int(f.defaults.get("n_gpu_layers", -1)) >= 0
    return f.host_weights and whole and not _of_rules(f)


def _counts(default: int, most: int) -> list[int]:
    """About a dozen numbers of layers: eighths of all layers, and neighbours of the default, because the best
    number is close to the memory limit."""
    eighths = {most * eighth // 8 for eighth in range(9)}
    near = {default + step for step in (-4, -2, -1, 0, 1, 2, 4)}
    return sorted(n for n in eighths | near if 0 <= n <= most)


def _expert_layers(f: Facts) -> Sequence[Value]:
    return _counts(min(int(f.defaults["n_cpu_moe"]), _layers(f)), _layers(f))


def _gpu_layers(f: Facts) -> Sequence[Value]:
    """Numbers of layers on the GPU. The output counts as a layer; -1: all."""
    most, default = _layers(f) + 1, int(f.defaults["n_gpu_layers"])
    return [n for n in _counts(most if default < 0 else default, most) if n < most] + [-1]


def _layers_code(f: Facts) -> Callable[[Value, Settings], Hashable]:
    return lambda value, settings: min(int(value), _layers(f))


def _gpu_layers_code(f: Facts) -> Callable[[Value, Settings], Hashable]:
    most = _layers(f) + 1
    return lambda value, settings: most if int(value) < 0 else min(int(value), most)


def _expert_ratio(f: Facts) -> int:
    """Factor on `offload_min_tokens` from which the engine streams experts, because tokens share them."""
    experts, used = int(f.model.get("experts") or 0), int(f.model.get("experts_used") or 0)
    return -(-experts // used) if experts and used else 1


NEVER_OFFLOAD = 1 << 20
LEAST_OFFLOAD = 2
"""The smallest offload threshold of a search. With 0 or 1, single tokens would stream weights too, but only
prompts decide between thresholds."""


def _offload_thresholds(f: Facts) -> Sequence[Value]:
    """Offload thresholds: each number of tokens that a pass of a prompt can have, and never."""
    ratio = _expert_ratio(f)
    passes = {min(int(u), p) for u in _ubatches(f) for p in f.workload.prompts or (1,)}
    return sorted({NEVER_OFFLOAD} | {max(LEAST_OFFLOAD, tokens // ratio) for tokens in passes})


def _offload_path(f: Facts) -> Callable[[Value, Settings], Hashable]:
    """The part of the value that counts: which passes use copies of weights."""
    passes = f.workload.prompts or (1,)
    experts = [f"op_offload.{op}" for op in ("matmul_id", "moe_up_gate")]

    def path(value: Value, settings: Settings) -> Hashable:
        ubatch = int(settings.get("ubatch", passes[-1]))
        # Only experts scale the threshold, and only if their products may use copies.
        shared = any(settings.get(name, f.defaults.get(name, False)) for name in experts)
        ratio = _expert_ratio(f) if shared else 1
        taken = tuple(min(ubatch, p) >= int(value) * ratio for p in passes)
        return taken[0] if len(set(taken)) == 1 else taken

    return path


def _offload_at(f: Facts) -> Callable[[float], Value]:
    ratio = _expert_ratio(f)
    return lambda tokens: max(LEAST_OFFLOAD, math.ceil(tokens / ratio))


def _offload_switch(f: Facts) -> Callable[[Value, Settings], Hashable]:
    """No effect if no pass uses copies."""
    path = _offload_path(f)

    def switched(value: Value, settings: Settings) -> Hashable:
        least = settings.get("offload_min_tokens", f.defaults.get("offload_min_tokens", 0))
        return bool(value) if path(least, settings) else "unused"

    return switched


def _share_code(f: Facts) -> Callable[[Value, Settings], Hashable]:
    """No effect if no pass uses copies, or if there are no experts among them."""
    path = _offload_path(f)

    def shared(value: Value, settings: Settings) -> Hashable:
        least = settings.get("offload_min_tokens", f.defaults.get("offload_min_tokens", 0))
        # The products of gate and up belong to one of two ops, depending on their types.
        copies = settings.get("op_offload.matmul_id", f.defaults.get("op_offload.matmul_id", False))
        return int(value) if copies and path(least, settings) else "unused"

    return shared


def _thread_counts(f: Facts) -> Sequence[Value]:
    """Thread counts: powers of two and the values halfway between (1, 2, 3, 4, 6, 8, 12, …) up to the number
    of cores, and always that number itself."""
    cores = _cores(f)
    steps = {n for p in range(12) for n in (1 << p, 3 << p) if n <= cores}
    return sorted(steps | {cores})


def _ubatches(f: Facts) -> Sequence[Value]:
    """U-batches: powers of two from 32 to the longest prompt. Larger ones behave like the longest prompt."""
    top = min(8192, max(f.workload.pp, f.workload.depth, 64), f.ctx)
    return [1 << p for p in range(5, 14) if (1 << p) < 2 * top]


def _ubatch_code(f: Facts) -> Callable[[Value, Settings], Hashable]:
    longest = max(f.workload.prompts, default=1)
    return lambda value, settings: min(int(value), longest)


def _path_code(f: Facts) -> Callable[[Value, Settings], Hashable]:
    """The part of the value that counts: the path of a pass, by its number of tokens, which is limited by the
    prompt. Prompts of several lengths can take several paths."""
    passes = f.workload.prompts or (1,)

    def path(value: Value, settings: Settings) -> Hashable:
        ubatch = int(settings.get("ubatch", passes[-1]))
        taken = tuple(min(ubatch, p) <= int(value) for p in passes)
        return taken[0] if len(set(taken)) == 1 else taken

    return path


def _compute_code(f: Facts) -> Callable[[Value, Settings], Hashable]:
    """The type of products that dequantise first matters only if a pass takes that path."""
    passes = f.workload.prompts or (1,)
    bounds = ("mmq_max_tokens", "mmq_id_max_tokens") if _is_moe(f) else ("mmq_max_tokens",)

    def used(value: Value, settings: Settings) -> Hashable:
        ubatch = int(settings.get("ubatch", passes[-1]))
        least = min(int(settings.get(b, f.defaults.get(b, 0))) for b in bounds)
        return value if any(min(ubatch, p) > least for p in passes) else "unused"

    return used


def _concurrency_code(f: Facts) -> Callable[[Value, Settings], Hashable]:
    """No effect without graphs, and in dyno no effect if q, k and v are one fused launch."""
    dyno = _is_dyno(f)

    def concurrent(value: Value, settings: Settings) -> Hashable:
        fused = dyno and bool(settings.get("fusion", f.defaults.get("fusion", False)))
        return bool(value) and bool(settings.get("cuda_graphs", True)) and not fused

    return concurrent


def _few_tokens(f: Facts) -> Sequence[Value]:
    return [0, 1, 2, 4, 8, 16, 32, 64, 128]


def _short_prompts(f: Facts) -> bool:
    """Whether whole passes are so short that the matrix-vector path can be the best one."""
    return _is_cuda(f) and 1 < max(f.workload.pp, f.workload.depth) <= 128


def _cache_types(f: Facts) -> Sequence[Value]:
    return SETTINGS["kv_type_k"].choices


def _has_values(f: Facts) -> bool:
    """Whether values have a type of their own. In dyno, a latent row serves as key and value."""
    return not (_is_dyno(f) and f.model.get("latent_cache"))


def _is_dyno(f: Facts) -> bool:
    """Whether the engine is dyno, by settings that no other engine has."""
    return not {"matvec_max_tokens", "numerics"}.isdisjoint(f.defaults)


def _switch(f: Facts) -> Sequence[Value]:
    return [False, True]


def _thresholds(f: Facts) -> Sequence[Value]:
    return [0, *(1 << p for p in range(5, 14))]


def _step_code(f: Facts) -> Callable[[Value, Settings], Hashable]:
    """The part of the value that counts: the tokens of a step (0: the u-batch), which are at least one per
    sequence."""
    return lambda value, settings: max(
        int(value) or int(settings.get("ubatch", f.defaults.get("ubatch", 0))),
        int(settings.get("sequences", f.defaults.get("sequences", 1))),
    )


def _sequences(f: Facts) -> Sequence[Value]:
    """Numbers of sequences: powers of two up to the number of concurrent clients. More would be unused."""
    most = f.workload.served.concurrency if f.workload.served is not None else 1
    return sorted({1 << p for p in range(11) if 1 << p < most} | {most})


def _steps(f: Facts) -> Sequence[Value]:
    """Step sizes: 0 (the u-batch), and powers of two from the number of sequences up to twice the largest
    u-batch."""
    clients = f.workload.served.concurrency if f.workload.served is not None else 1
    return [0, *(1 << p for p in range(5, 15) if 1 << p >= clients)]


def _of_text(f: Facts) -> bool:
    """Whether clients send passages of a text, because continuations of random tokens say nothing about
    drafts."""
    return f.workload.served is not None and f.workload.served.text is not None


def _draft_code(f: Facts) -> Callable[[Value, Settings], Hashable]:
    """No effect if nothing is drafted."""
    usual = f.defaults.get("spec", "off")
    return lambda value, settings: int(value) if settings.get("spec", usual) != "off" else "unused"


KNOBS: tuple[KnobSpec, ...] = (
    KnobSpec("sequences", _sequences, lambda f: f.workload.served is not None,
             code=lambda f: lambda value, settings: min(int(value), max(int(v) for v in _sequences(f)))),
    KnobSpec("step_tokens", _steps, lambda f: f.workload.served is not None, code=_step_code),
    KnobSpec("spec", lambda f: ["off", "ngram"], _of_text, ordinal=False),
    KnobSpec("spec_max", lambda f: [2, 4, 8, 16, 32], _of_text, code=_draft_code),
    KnobSpec("ubatch", _ubatches, lambda f: f.workload.pp > 1, code=_ubatch_code),
    KnobSpec("n_cpu_moe", _expert_layers, _by_experts, code=_layers_code),
    KnobSpec("expert_cache_mib", _cache_sizes, _caches_experts),
    KnobSpec("expert_cache", lambda f: SETTINGS["expert_cache"].choices, _caches_experts, code=_cache_code,
             ordinal=False),
    KnobSpec("n_gpu_layers", _gpu_layers, _by_layers, code=_gpu_layers_code, ordinal=False),
    KnobSpec("threads", _thread_counts, lambda f: _on_cpu(f) and f.workload.tg > 0),
    KnobSpec("threads_batch", _thread_counts, lambda f: _on_cpu(f) and f.workload.pp > 1),
    KnobSpec("cpu_repack", _switch, _is_cpu, ordinal=False),
    KnobSpec("numa", lambda f: SETTINGS["numa"].choices, lambda f: _nodes(f) > 1, ordinal=False),
    KnobSpec("kv_type_k", _cache_types, lambda f: True, ordinal=False),
    KnobSpec("kv_type_v", _cache_types, _has_values, ordinal=False),
    KnobSpec("flash_attention", _switch, _is_cuda, ordinal=False),
    KnobSpec("cuda_graphs", _switch, lambda f: _is_cuda(f) and f.workload.tg > 0, ordinal=False),
    KnobSpec("graph_concurrency", _switch, lambda f: _is_cuda(f) and f.workload.tg > 0, ordinal=False,
             code=_concurrency_code),
    KnobSpec("fusion", _switch, _is_cuda, ordinal=False),
    KnobSpec("matvec_max_tokens", _few_tokens, _short_prompts, code=_path_code, threshold_of="ubatch"),
    KnobSpec("matvec_id_max_tokens", _few_tokens, lambda f: _short_prompts(f) and _is_moe(f), code=_path_code,
             threshold_of="ubatch"),
    KnobSpec("mmq_id_max_tokens", _thresholds, lambda f: _is_cuda(f) and _is_moe(f), code=_path_code,
             threshold_of="ubatch"),
    KnobSpec("mmq_max_tokens", _thresholds, _is_cuda, code=_path_code, threshold_of="ubatch"),
    KnobSpec("offload_min_tokens", _offload_thresholds, lambda f: f.streams and f.workload.pp > 1,
             code=_offload_path, threshold_of="ubatch", value_at=_offload_at),
    KnobSpec("cpu_share", lambda f: [-1, 0, 5, 10, 15, 20, 30, 40, 50],
             lambda f: f.streams and _is_moe(f) and f.workload.pp > 1, ordinal=False, code=_share_code),
    *(
        KnobSpec(f"op_offload.{op}", _switch, lambda f: f.streams and _is_moe(f) and f.workload.pp > 1,
                 ordinal=False, code=_offload_switch)
        for op in ("matmul_id", "moe_up_gate")
    ),
    *(
        KnobSpec(f"op_offload.{op}", _switch, lambda f: f.streams and _by_layers(f) and f.workload.pp > 1,
                 ordinal=False, code=_offload_switch)
        for op in ("matmul", "up_gate")
    ),
    KnobSpec("compute_type", lambda f: ["f16", "bf16", "f32"], _is_cuda, ordinal=False, code=_compute_code),
    KnobSpec("mla_mode", lambda f: ["auto", "expanded", "absorbed"],
             lambda f: _is_cuda(f) and bool(f.model.get("latent_cache")), ordinal=False),
)  # fmt: skip


def resolve(facts: Facts, *, approx: bool, held: Collection[str] = ()) -> tuple[Knob, ...]:
    """The applicable knobs of this engine with more than one value.

    Args:
        facts: Device, model, workload and the defaults of the engine. A setting without a default does not
            exist in this engine.
        approx: Whether to include knobs that change answers.
        held: Names that the user has fixed, which are not searched.
    """
    knobs: list[Knob] = []
    for row in KNOBS:
        if row.name not in facts.defaults or row.name in held or not row.applies(facts):
            continue
        setting = SETTINGS[row.name]
        if setting.fidelity == "approx" and not approx:
            continue
        default = facts.defaults[row.name]
        values = list(row.values(facts))
        if default not in values:
            values.append(default)
            if row.ordinal:
                values.sort(key=float)
        if len(values) < 2:
            continue
        knobs.append(
            Knob(
                row.name, tuple(values), default, Kind(setting.kind),
                frozenset(m for m in setting.moves if m != "memory") or frozenset({"pp", "tg"}),
                Fidelity(setting.fidelity), row.ordinal, row.code(facts) if row.code else None,
                row.threshold_of, row.value_at(facts) if row.value_at else None,
            )
        )  # fmt: skip
    return tuple(knobs)


def moved_by(knobs: Iterable[Knob], kind: str) -> tuple[Knob, ...]:
    """The same knobs, but all of them affect the measures of one kind."""
    return tuple(replace(knob, moves=frozenset({kind})) for knob in knobs)
