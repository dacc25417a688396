"""The workload of a tune: a prompt and generated tokens at a depth, or a mix of such parts with weights."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .errors import TuneError
from .serve_load import ServedLoad

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

METRICS = ("pp", "tg")
MAX_TOKENS = 1 << 24
MAX_PARTS = 64
# The weights are shares of the waiting time in such a use.
MIXES = {
    # Short questions in a growing conversation, and long answers: most of the waiting is generation.
    "chat": "pp=512,depth=0,4096,weight=1; tg=128,depth=512,4096,weight=3",
    # Pages of retrieved text, and a short answer: most of the waiting is prompt processing.
    "rag": "pp=4096,depth=0,weight=2; pp=2048,depth=4096,weight=1; tg=128,depth=4096,8192,weight=1",
}


def kind_of(metric: str) -> str:
    """The kind (`pp` or `tg`) of a metric such as `pp` or, in a mix, `pp4096@d8192`."""
    return metric[:2]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a mix, with its weight."""

    kind: str  # "pp" or "tg"
    tokens: int
    depth: int
    weight: float = 1.0
    served: ServedLoad | None = None  # the load of a server, if this is its metric

    @property
    def name(self) -> str:
        if self.served is not None:
            return self.served.metric
        return f"{self.kind}{self.tokens}" + (f"@d{self.depth}" if self.depth else "")

    @classmethod
    def parse(cls, name: str, weight: float = 1.0) -> Part:
        """Parse a part such as `tg128@d4096`. Raises TuneError."""
        found = re.fullmatch(r"(pp|tg)([0-9]{1,9})(?:@d([0-9]{1,9}))?", name)
        if not found or int(found[2]) == 0:
            raise TuneError(f"workload: {name!r} is not a metric; write pp4096 or tg128@d4096")
        return cls(found[1], int(found[2]), int(found[3] or 0), weight)


@dataclass(frozen=True, slots=True)
class Workload:
    """A workload: a prompt of `pp` tokens and `tg` generated tokens, after `depth` tokens of context.

    With `parts` it is a mix. Its metrics are the names of the parts, each with a weight, and `pp`, `tg` and
    `depth` are the largest of all parts. With `served` it is the load of a server, whose only metric counts
    output tokens.
    """

    pp: int = 512
    tg: int = 64
    depth: int = 0
    parts: tuple[Part, ...] = ()
    name: str = ""  # name of the mix, if it has one
    served: ServedLoad | None = None

    def __post_init__(self) -> None:
        for name in ("pp", "tg", "depth"):
            value = getattr(self, name)
            if value < 0 or value > MAX_TOKENS:
                raise TuneError(f"workload: {name}={value} is out of range; give 0 to {MAX_TOKENS} tokens")
        if self.pp == 0 and self.tg == 0:
            raise TuneError(
                "workload: pp and tg are both 0, so there is nothing to measure; give at least one"
            )
        for part in self.parts:
            if not (math.isfinite(part.weight) and 0 < part.weight <= 1e6):
                raise TuneError(f"workload: {part.name} has the weight {part.weight}; give 0 to 1e6")
        if len(self.parts) > MAX_PARTS:
            raise TuneError(f"workload: {len(self.parts)} parts are too many; give at most {MAX_PARTS}")

    @classmethod
    def of_served(cls, load: ServedLoad) -> Workload:
        """The workload of a server load. A sample consists of all its requests."""
        part = Part("tg", load.requests * load.tg, 0, 1.0, load)
        return cls(load.pp, load.tg, 0, (part,), str(load), load)

    @classmethod
    def mix(cls, parts: Sequence[Part], name: str = "") -> Workload:
        """A mix of parts. Parts with the same name are merged, and their weights are added. They are sorted
        by depth, so that each context is a prefix of the next one."""
        merged: dict[str, Part] = {}
        for p in parts:
            weight = p.weight + (merged[p.name].weight if p.name in merged else 0.0)
            merged[p.name] = Part(p.kind, p.tokens, p.depth, weight)
        ordered = sorted(merged.values(), key=lambda p: (p.depth, p.kind, p.tokens))
        largest = {k: max((p.tokens for p in ordered if p.kind == k), default=0) for k in METRICS}
        depth = max((p.depth for p in ordered), default=0)
        return cls(largest["pp"], largest["tg"], depth, tuple(ordered), name)

    @classmethod
    def parse(cls, text: str, base: Workload | None = None) -> Workload:
        """Parse one of:

        - ``pp=512,tg=64,depth=0``: what is left out keeps `base`'s value;
        - lists, every length at every depth, weights behind a colon: ``pp=512,4096:2,tg=128,depth=0,8192``;
        - several of these, separated by semicolons: ``pp=4096,weight=2; tg=128,depth=4096,32768``;
        - the name of a mix: ``chat`` or ``rag``;
        - the load of a server: ``serve``, or ``serve:concurrency=8,pp=1024,tg=256,shared=0.5,ttft=2``.

        Raises:
            TuneError: The text has another form. The message names the fault.
        """
        if text.strip() == "serve" or text.strip().startswith("serve:"):
            return cls.of_served(ServedLoad.parse(text.strip()))
        if text.strip() in MIXES:
            return cls.mix(_items(MIXES[text.strip()], None), text.strip())
        if "=" not in text:
            raise TuneError(
                f"workload: cannot read {text.strip()!r}: there is no mix of this name; choose from "
                f"{', '.join(MIXES)} and serve, or write for example pp=512,tg=64,depth=0"
            )
        items = [piece for piece in text.split(";") if piece.strip()]
        if len(items) == 1:
            single = base or cls()
            values = _item(items[0])
            if set(values) == {"weight"}:
                raise TuneError(f"workload: {text.strip()!r} weighs nothing; give pp, tg or depth with it")
            plain = {n: values.get(n, [(getattr(single, n), 1.0)]) for n in ("pp", "tg", "depth")}
            if all(len(v) == 1 and v[0][1] == 1.0 for v in plain.values()):
                return cls(**{n: v[0][0] for n, v in plain.items()})
            return cls.mix(_items(items[0], single))
        return cls.mix(_items(text, None))

    @property
    def metrics(self) -> tuple[str, ...]:
        if self.parts:
            return tuple(p.name for p in self.parts)
        return tuple(m for m in METRICS if getattr(self, m) > 0)

    @property
    def weights(self) -> dict[str, float]:
        """The weights of the metrics in the objective, which is the weighted geometric mean of their ratios
        to the default."""
        return {p.name: p.weight for p in self.parts} or dict.fromkeys(self.metrics, 1.0)

    def part(self, metric: str) -> Part:
        """The part of a metric. Raises KeyError if this workload has no such metric."""
        for part in self.parts:
            if part.name == metric:
                return part
        if self.parts or metric not in METRICS:
            raise KeyError(metric)
        return Part(metric, int(getattr(self, metric)), self.depth)

    def tokens(self, metric: str) -> int:
        """Number of tokens of a metric; for a kind (`pp`, `tg`), the largest one."""
        return int(getattr(self, metric)) if metric in METRICS else self.part(metric).tokens

    def label(self, metric: str) -> str:
        """The metric with its numbers, such as `pp512` or `tg64@d4096`."""
        return self.part(metric).name

    @property
    def longest(self) -> int:
        """Context length in tokens that the workload needs; for a server, per sequence."""
        if self.served is not None:
            return self.served.pp + self.served.tg
        every = self.parts or tuple(self.part(m) for m in self.metrics)
        return max(p.depth + p.tokens for p in every)

    @property
    def prompts(self) -> tuple[int, ...]:
        """All numbers of tokens that are processed at once: prompts and the context before them. A server
        processes the prompts of several clients in one step."""
        if self.served is not None:
            return (min(self.served.pp * self.served.concurrency, MAX_TOKENS),)
        every = self.parts or tuple(self.part(m) for m in self.metrics)
        found = {p.tokens for p in every if p.kind == "pp"} | {p.depth for p in every if p.depth}
        return tuple(sorted(found))

    def bounds(self, single: Mapping[str, float]) -> dict[str, float]:
        """Upper bounds of tokens per second by kind, from the bounds for a single sequence. A step of several
        sequences reads each weight only once.
        """
        if self.served is None:
            return dict(single)
        return {kind: bound * self.served.concurrency for kind, bound in single.items()}

    def __str__(self) -> str:
        """As `parse` reads it."""
        if self.name:
            return self.name
        if not self.parts:
            return f"pp={self.pp},tg={self.tg},depth={self.depth}"
        return "; ".join(f"{p.kind}={p.tokens},depth={p.depth},weight={p.weight:g}" for p in self.parts)

    def to_dict(self) -> dict[str, Any]:
        if self.served is not None:
            return {"served": self.served.to_dict()}
        data: dict[str, Any] = {"pp": self.pp, "tg": self.tg, "depth": self.depth}
        if self.parts:
            data["parts"] = [[p.kind, p.tokens, p.depth, p.weight] for p in self.parts]
            data["name"] = self.name
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Workload:
        if "served" in data:
            return cls.of_served(ServedLoad.from_dict(data["served"]))
        parts = [Part(str(k), int(t), int(d), float(w)) for k, t, d, w in data.get("parts", ())]
        if parts:
            return cls.mix(parts, str(data.get("name", "")))
        return cls(pp=int(data["pp"]), tg=int(data["tg"]), depth=int(data["depth"]))


def _items(text: str, base: Workload | None) -> list[Part]:
    """The parts of a text. With `base` (only for a single item), missing values come from it."""
    parts: list[Part] = []
    for item in (piece for piece in text.split(";") if piece.strip()):
        values = _item(item)
        scale = values["weight"][0][1] if "weight" in values else 1.0
        depths = values.get("depth", [(base.depth if base else 0, 1.0)])
        found = [
            Part(kind, tokens, depth, scale * weight * share)
            for kind in METRICS
            for tokens, weight in values.get(kind, [(getattr(base, kind), 1.0)] if base else [])
            for depth, share in depths
            if tokens
        ]
        if not found:
            raise TuneError(f"workload: {item.strip()!r} measures nothing; give pp or tg")
        parts += found
    return parts


def _item(text: str) -> dict[str, list[tuple[int, float]]]:
    """The lists of one item, as pairs (tokens, weight). The entry `weight` has the weight of the whole
    item."""
    values: dict[str, list[tuple[int, float]]] = {}
    name = ""
    for piece in text.split(","):
        head, equals, rest = (p.strip() for p in piece.partition("="))
        if equals:
            if head not in (*METRICS, "depth", "weight"):
                raise TuneError(
                    f"workload: cannot read {piece.strip()!r}; write for example pp=512,tg=64,depth=0"
                )
            if head in values:
                raise TuneError(f"workload: {head} is given twice in {text.strip()!r}")
            name = head
        elif not name or name == "weight":
            raise TuneError(
                f"workload: cannot read {piece.strip()!r}; write for example pp=512,tg=64,depth=0"
            )
        number, colon, weight = (rest if equals else head).partition(":")
        if name == "weight":
            values[name] = [(0, _weight(number))]
            continue
        try:
            tokens = int(number)
        except ValueError:
            raise TuneError(f"workload: {name}={number!r} is not a whole number of tokens") from None
        if not 0 <= tokens <= MAX_TOKENS:
            raise TuneError(f"workload: {name}={tokens} is out of range; give 0 to {MAX_TOKENS} tokens")
        values.setdefault(name, []).append((tokens, _weight(weight) if colon else 1.0))
    return values


def _weight(text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not (math.isfinite(weight) and 0 < weight <= 1e6):
        raise TuneError(f"workload: {text!r} is not a weight; give a number above 0")
    return weight
