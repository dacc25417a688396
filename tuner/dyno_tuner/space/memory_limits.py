"""Memory as a hard limit, checked with the plan of the engine before anything runs; with the near misses,
values that just do not fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dyno import _memory_size

from ..core.errors import TuneError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ..core.protocol import Settings, Value
    from .knobs import Knob

# Remedies if a value does not fit, in words. In addition, `ctx` is halved.
_CURES: tuple[tuple[str, dict[str, Value]], ...] = (
    ("a q8_0 KV cache", {"kv_type_k": "q8_0", "kv_type_v": "q8_0"}),
    ("weights that are not repacked", {"cpu_repack": False}),
)
_NAMES = {"ubatch": "u-batch", "ctx": "a context of"}


def parse_bytes(text: str) -> int:
    """Parse `16GiB`, `16G` (the same), `16GB` (powers of 1000) or `800MiB`. Raises TuneError."""
    try:
        return _memory_size.parse_bytes(text)
    except ValueError as error:
        raise TuneError(str(error)) from error


def gib(size: float) -> str:
    """A size in words, such as `0.7 GiB` or `12 MiB`, never zero."""
    if size >= 0.05 * 2**30:
        return f"{size / 2**30:.1f} GiB"
    return f"{max(0.1, size / 2**20):.1f} MiB" if size < 10 * 2**20 else f"{size / 2**20:.0f} MiB"


def told_apart(size: int, other: int) -> tuple[str, str]:
    """Two sizes in words, in a unit in which they differ."""
    for show in (gib, lambda n: f"{n / 2**20:,.0f} MiB"):
        if show(size) != show(other):
            return show(size), show(other)
    return f"{size:,} bytes", f"{other:,} bytes"


@dataclass(frozen=True)
class NearMiss:
    """A value that the limit excludes, with the other settings at their defaults."""

    name: str
    value: Value
    short: int  # bytes
    cures: tuple[str, ...]

    def __str__(self) -> str:
        cures = f"{' or '.join(self.cures) or 'no searched setting'} makes it fit"
        if (self.name, self.value) == ("n_gpu_layers", -1):
            more = f"{gib(self.short)} more on the device"
            return f"the whole model needs {more}, so a part stays on the CPU; {cures}"
        return f"{_NAMES.get(self.name, self.name)} {self.value} needs {gib(self.short)} more; {cures}"


class MemoryLimit:
    """A limit on the planned memory in bytes.

    Args:
    limit: Bytes.
    plan: Gives the planned bytes of settings; None if the engine refuses them.
    names: Names of the settings that memory depends on. Others are ignored.
    widest: Values of some settings that never need less than others. A configuration that fits with them
        fits.
    """

    def __init__(
        self,
        limit: int,
        plan: Callable[[Settings], int | None],
        names: Sequence[str],
        widest: Mapping[str, Value] | None = None,
    ) -> None:
        self.limit = limit
        self._plan = plan
        self._names = tuple(dict.fromkeys(names))
        self._widest = dict(widest or {})
        self._known: dict[tuple[Value | None, ...], int | None] = {}

    def needs(self, settings: Mapping[str, Value]) -> int | None:
        key = tuple(settings.get(name) for name in self._names)
        if key not in self._known:
            self._known[key] = self._plan({n: settings[n] for n in self._names if n in settings})
        return self._known[key]

    def allows(self, settings: Mapping[str, Value]) -> bool:
        """Whether settings fit. Settings that the engine refuses are allowed here, because the engine gives
        the reason."""
        if self._widest and self._fits({**settings, **self._widest}):
            return True
        needed = self.needs(settings)
        return needed is None or needed <= self.limit

    def check_default(self, defaults: Mapping[str, Value], longest: int) -> None:
        """Raises TuneError if the default itself does not fit, because everything is compared with it."""
        needed = self.needs(defaults)
        if needed is None or needed <= self.limit:
            return
        helps = self._cures(defaults, longest)
        for ubatch in (256, 128, 64, 32):
            smaller = {**defaults, "ubatch": ubatch}
            if "ubatch" in defaults and ubatch < int(defaults["ubatch"]) and self._fits(smaller):
                helps = (*helps, f"--set ubatch={ubatch}")
                break
        whole, limit = told_apart(needed, self.limit)
        raise TuneError(
            f"the default settings need {whole}, {gib(needed - self.limit)} more than the limit of "
            f"{limit}; " + f"{' or '.join(helps) or 'no setting here'} makes it fit"
        )

    def near_misses(
        self, knobs: Sequence[Knob], defaults: Mapping[str, Value], longest: int
    ) -> list[NearMiss]:
        """For each knob, the first value beyond the limit.

        Args:
            longest: Context length that the workload needs. Suggested contexts are not shorter.
        """
        found: list[NearMiss] = []
        for knob in (k for k in knobs if k.name in self._names):
            for value in knob.values:
                settings = {**defaults, knob.name: value}
                needed = self.needs(settings)
                if needed is not None and needed > self.limit:
                    cures = self._cures(settings, longest, without=knob.name)
                    found.append(NearMiss(knob.name, value, needed - self.limit, cures))
                    break
        return found

    def _fits(self, settings: Mapping[str, Value]) -> bool:
        needed = self.needs(settings)
        return needed is not None and needed <= self.limit

    def _cures(self, settings: Mapping[str, Value], longest: int, without: str = "") -> tuple[str, ...]:
        found: list[str] = []
        for words, values in _CURES:
            changed = {n: v for n, v in values.items() if settings.get(n) != v}
            if without in values or not changed or not set(values) <= set(settings):
                continue
            if self._fits({**settings, **values}):
                found.append(words)
        ctx: Any = settings.get("ctx", 0)
        while without != "ctx" and (ctx := int(ctx) // 2) >= longest:
            if self._fits({**settings, "ctx": ctx}):
                found.append(f"a context of {ctx}")
                break
        return tuple(found)
