"""The plain values of a diagnosis: the items of a command line, with the notes on each of them."""

from __future__ import annotations

import datetime
import difflib
import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

IK = "ik_llama.cpp"
MAIN = "llama.cpp"
ENGINES = (MAIN, IK)
BENCH, COMMON = "bench", "common"  # llama-bench; all tools with the common argument parser
BOTH_TOOLS = (BENCH, COMMON)
IK_SOURCE = "ik_llama.cpp 8337e4cd3 (2026-08-15)"
MAIN_SOURCE = "llama.cpp 0c1e57098"
SOURCES = {IK: IK_SOURCE, MAIN: MAIN_SOURCE}
OFF = frozenset({"0", "off", "false", "no", "n", "ignore", "notfound", ""})


def nearest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """The name most similar to another one; "" if none is similar."""
    return next(iter(difflib.get_close_matches(name, list(dict.fromkeys(names)), n=1, cutoff=cutoff)), "")


def nearest_hint(name: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """The end of a message about an unknown name."""
    near = nearest(name, names, cutoff)
    return f" (nearest: {near})" if near else ""


class Status(enum.StrEnum):
    """The verdict on a token, from good to bad."""

    DOES = "does"  # takes effect as described
    INERT = "inert"  # accepted, but changes nothing here
    NEEDS = "needs"  # depends on a build or a model that the line does not show
    UNKNOWN = "unknown"  # not in the tables
    RENUMBERED = "renumbered"  # an op id with another meaning in this version
    REMOVED = "removed"  # removed or renamed in this version
    MISSING = "missing"  # this engine or tool never had it
    WRONG_GPU = "wrong-gpu"
    INVALID = "invalid"  # a value or combination that cannot work, or does something else


WRONG = frozenset({Status.RENUMBERED, Status.REMOVED, Status.MISSING, Status.WRONG_GPU, Status.INVALID})


@dataclass(frozen=True)
class Note:
    """A statement about an item, with its source."""

    status: Status
    text: str
    source: str = ""

    @property
    def wrong(self) -> bool:
        return self.status in WRONG


@dataclass(frozen=True)
class Flag:
    """A row of the table of flags. `values`: the valid words; empty: any. `form`: `int` (with `values`: a
    number or one of the words), `percent` or empty."""

    names: tuple[str, ...]
    does: str
    engine: str
    tools: tuple[str, ...] = BOTH_TOOLS
    takes: bool = True
    values: tuple[str, ...] = ()
    form: str = ""
    optional: bool = False  # the value may be missing; a following 0 or 1 is the value
    where: str = ""  # file and line of the source
    also: tuple[str, ...] = ()  # further words with the same meaning as some of `values`

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def source(self) -> str:
        return ", ".join(filter(None, (SOURCES[self.engine], self.where)))


@dataclass
class Item:
    """A token with its value. `kind`: program, env, flag, cmake, cuda (a key of `-cuda`) or argument."""

    kind: str
    name: str  # canonical spelling if known, else as typed
    text: str  # as typed, with its value
    value: str | None = None
    flag: Flag | None = None
    notes: list[Note] = field(default_factory=list)
    nearest: str | None = None
    ops: list[dict[str, Any]] = field(default_factory=list)  # decoded `-op` pairs
    by_name: str | None = None  # the `-op` list by op names
    rewritten: str | None = None  # the same list in today's ids
    unlisted: bool = False  # a flag that is in no table of either engine
    replaced: bool = False  # a later token overrides this one

    @property
    def status(self) -> Status:
        order = list(Status)
        return max((n.status for n in self.notes), key=order.index, default=Status.UNKNOWN)

    @property
    def wrong(self) -> bool:
        return any(n.wrong for n in self.notes)

    def say(self, status: Status, text: str, source: str = "") -> None:
        self.notes.append(Note(status, text, source))


@dataclass(frozen=True)
class Version:
    """A point in the history of an engine. `date` is None for the commit that the tables describe, which is
    also the default."""

    text: str
    date: datetime.date | None
    later: bool = False  # later than the commit that the tables describe

    @property
    def has_undated(self) -> bool:
        """Whether all changes up to the commit of the tables are included, even those with an unknown
        date."""
        return self.is_reference or self.later

    @property
    def is_reference(self) -> bool:
        return self.date is None

    def since(self, iso: str) -> bool:
        """Whether this is on or after a date. The reference commit is after all dated changes."""
        return self.date is None or self.date >= datetime.date.fromisoformat(iso)


@dataclass(frozen=True)
class Facts:
    """Facts in addition to the line; None if unknown."""

    cc: float | None = None  # compute capability of the GPU, such as 7.5
    gpus: int | None = None
    moe: bool | None = None
    experts: int | None = None
    experts_used: int | None = None
    layers: int | None = None
    architecture: str | None = None
    tensors: tuple[tuple[str, int], ...] | None = None  # tensors of the model file: name and bytes
    vram_bytes: int | None = None  # memory of each GPU


@dataclass
class Line:
    """A whole command line, ready for the rules."""

    engine: str
    engine_reason: str
    version: Version
    facts: Facts
    items: list[Item]
    tool: str | None  # name of the program; None if the line has none

    @property
    def source(self) -> str:
        """The version of the engine that the tables describe."""
        return SOURCES[self.engine]

    @property
    def bench(self) -> bool:
        return self.tool == "llama-bench"

    def all(self, kind: str, name: str) -> list[Item]:
        """The tokens of this name that are in force, without overridden ones."""
        return [i for i in self.items if i.kind == kind and i.name == name and not i.replaced]

    def last(self, kind: str, name: str) -> Item | None:
        found = self.all(kind, name)
        return found[-1] if found else None

    def flags(self, *names: str) -> list[Item]:
        return [item for name in names for item in self.all("flag", name)]

    def flag(self, name: str) -> Item | None:
        return self.last("flag", name)

    def numbers(self, name: str, default: int | None = None) -> list[int]:
        """The values of a flag with whole numbers (several in llama-bench), or the default; empty if they
        cannot be read."""
        item = self.flag(name)
        if item is None:
            return [] if default is None else [default]
        parts = (item.value or "").split(",")
        return [int(p) for p in parts] if all(_is_int(p) for p in parts) else []

    def cuda(self, key: str) -> Item | None:
        return self.last("cuda", key)

    @property
    def wrong(self) -> bool:
        return any(i.wrong for i in self.items)

    @property
    def unlisted(self) -> list[Item]:
        """Flags that neither engine has by the tables, so that the program would stop."""
        return [i for i in self.items if i.unlisted]


def _is_int(text: str) -> bool:
    body = text[1:] if text[:1] in "+-" else text
    return body.isascii() and body.isdigit() and len(body) < 19


def is_on(value: str | None) -> bool:
    return (value or "").strip().lower() not in OFF


def inert(items: Iterable[Item], why: str, source: str = "") -> None:
    """Note that each of these has no effect, unless something else is wrong with it."""
    for item in items:
        if not item.wrong:
            item.say(Status.INERT, why, source)
