"""The op ids of ik_llama.cpp's `-op`, and their meanings over time.

The ids are positions in the op enum of ggml.h, so each inserted op renumbers the following ones.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .line import Item, Status

if TYPE_CHECKING:
    from .line import Version


@dataclass(frozen=True)
class Era:
    """The op ids from one commit until the next one. Only matrix products and their neighbours are listed."""

    since: str
    commit: str
    ids: dict[str, int]

    def name(self, number: int) -> str | None:
        return next((n for n, i in self.ids.items() if i == number), None)


# Source: the enum ggml_op of ggml.h in ik_llama.cpp, commit by commit.
ERAS = (
    Era("2024-07-27", "", {"MUL_MAT": 23, "MUL_MAT_ID": 24}),
    Era("2024-09-08", "", {"MUL_MAT": 24, "MUL_MAT_ID": 25}),
    Era("2024-10-02", "", {"MUL_MAT": 25, "MUL_MAT_ID": 26}),
    Era("2024-10-31", "7e5af2073", {"MULTI_ADD": 25, "MUL_MAT": 26, "MUL_MAT_ID": 27, "OUT_PROD": 28}),
    Era("2025-02-23", "b50efcc9d",
        {"MULTI_ADD": 25, "MUL_MAT": 26, "MUL_MAT_ID": 27, "OUT_PROD": 28, "MOE_FUSED_UP_GATE": 29}),
    Era("2025-08-15", "633e0617b",
        {"MULTI_ADD": 26, "MUL_MAT": 27, "MUL_MAT_ID": 28, "OUT_PROD": 29, "MOE_FUSED_UP_GATE": 30}),
    Era("2025-08-31", "8de297b79",
        {"MULTI_ADD": 26, "MUL_MAT": 27, "MUL_MAT_ID": 28, "OUT_PROD": 29, "FUSED_UP_GATE": 30,
         "MOE_FUSED_UP_GATE": 31}),
)  # fmt: skip
# Ids that are known only for 8337e4cd3 (2026-08-15).
REFERENCE_IDS = {
    "NONE": 0, "ADD_ID": 3, "FUSED_MUL_UNARY": 25, "MUL_MULTI_ADD": 32, "GET_ROWS": 42,
    "FLASH_ATTN_EXT": 72, "GLU": 97,
}  # fmt: skip
REFERENCE_COUNT = 111
MATMULS = frozenset({"MUL_MAT", "MUL_MAT_ID", "FUSED_UP_GATE", "MOE_FUSED_UP_GATE"})
EXPERT_MATMULS = frozenset({"MUL_MAT_ID", "MOE_FUSED_UP_GATE"})
SOURCE = "ik_llama.cpp ggml.h op enum, 2024-07-27 to 8337e4cd3; parser in common.cpp at 8337e4cd3"


def era_of(version: Version) -> Era | None:
    """The ids of a version; None before the first known one."""
    return next((e for e in reversed(ERAS) if version.since(e.since)), None)


def op_name(number: int, version: Version) -> str | None:
    """The op of an id; `all ops` if it is outside of the enum; None if the tables do not list it."""
    if number < 0 or (version.is_reference and number >= REFERENCE_COUNT):
        return "all ops"
    if number == 0:
        return "NONE"
    era = era_of(version)
    name = era.name(number) if era else None
    if name is None and version.is_reference:
        name = next((n for n, i in REFERENCE_IDS.items() if i == number), None)
    return name


def decode(item: Item, version: Version) -> None:
    """Decode the pairs of an `-op id,0|1,…`, and note their meanings in this version and today."""
    tokens = (item.value or "").split(",")
    if len(tokens) % 2:
        item.say(
            Status.INVALID,
            f"the last token {tokens[-1]!r} has no 0 or 1 after it, so the program drops it silently",
            SOURCE,
        )
    pairs: list[tuple[int, int]] = []
    for word, switch in zip(tokens[::2], tokens[1::2], strict=False):
        if not re.fullmatch(r"-?[0-9]{1,9}", word):
            item.say(
                Status.INVALID,
                f"{word!r} is not a number, so the program silently reads it as id 0 (NONE); "
                "give ids, because names are not accepted",
                SOURCE,
            )
        elif switch not in ("0", "1"):
            item.say(Status.INVALID, f"{switch!r} after id {word} is neither 0 (off) nor 1 (on)", SOURCE)
        else:
            pairs.append((int(word), int(switch)))
    today = ERAS[-1]
    here = [op_name(n, version) for n, _ in pairs]
    for (number, on), name in zip(pairs, here, strict=True):
        item.ops.append({"id": number, "offload": bool(on), "op": name, "meanings": _meanings(number)})
        if name is None:
            item.say(Status.UNKNOWN, f"id {number} is not in dyno's tables for {version.text}", SOURCE)
    meant = _intended(pairs, here, version)
    shown = meant.ids if meant else None
    names = [(meant.name(n) if meant else None) or here[i] for i, (n, _) in enumerate(pairs)]
    if pairs and all(names):
        item.by_name = ",".join(f"{name},{pair[1]}" for name, pair in zip(names, pairs, strict=True))
        now = [_today(name or "", today) for name in names]
        if None not in now:
            item.rewritten = ",".join(f"{n},{pair[1]}" for n, pair in zip(now, pairs, strict=True))
    _explain(item, pairs, here, names if shown else None, meant, version)


def _today(name: str, today: Era) -> int | None:
    if name == "all ops":
        return -1
    return today.ids.get(name, REFERENCE_IDS.get(name))


def _meanings(number: int) -> list[dict[str, str]]:
    return [{"since": e.since, "op": name} for e in ERAS if (name := e.name(number)) is not None]


def _intended(pairs: list[tuple[int, int]], here: list[str | None], version: Version) -> Era | None:
    """The numbering that the list was probably written for, if it differs from this version's: all ids are
    matrix products there, but not here. None if the list makes sense in this version."""
    if not pairs or all(n in MATMULS or n == "all ops" for n in here):
        return None
    own = era_of(version)
    if own is None:
        return None
    for era in reversed(ERAS):
        if era is not own and all(era.name(n) in MATMULS or n < 0 for n, _ in pairs):
            return era
    return None


def _explain(item: Item, pairs: list[tuple[int, int]], here: list[str | None], names: list[str | None] | None,
             meant: Era | None, version: Version) -> None:  # fmt: skip
    if not pairs:
        return
    reading = ", ".join(
        f"{n} {name or 'unknown'} {'on' if s else 'off'}" for (n, s), name in zip(pairs, here, strict=True)
    )
    item.say(
        Status.DOES,
        f"offload policy for ops whose weights are in host memory, at {version.text}: {reading}",
        SOURCE,
    )
    if meant is not None and names is not None:
        item.say(
            Status.RENUMBERED,
            f"all ids are matrix products only in the numbering from {meant.since} ({_until(meant)}): "
            f"{', '.join(n or '' for n in names)}; at {version.text} they are "
            f"{', '.join(n or 'unknown' for n in here)}. "
            + (f"By name: {item.by_name}; in today's ids: -op {item.rewritten}" if item.rewritten else ""),
            SOURCE,
        )
        return
    now = [ERAS[-1].name(n) or next((k for k, i in REFERENCE_IDS.items() if i == n), None) for n, _ in pairs]
    elsewhere = [
        f"from {e.since}: {', '.join(e.name(n) or '?' for n, _ in pairs)}"
        for e in ERAS
        if e is not era_of(version) and all(e.name(n) in MATMULS for n, _ in pairs)
    ]
    if not version.since(ERAS[-1].since) and now != here and item.rewritten:
        item.say(
            Status.DOES,
            f"the ids were renumbered later: today they mean {', '.join(n or 'unknown' for n in now)}; by "
            f"name: {item.by_name}; in today's ids: -op {item.rewritten}",
            SOURCE,
        )
    elif elsewhere:
        item.say(Status.DOES, f"in other versions these ids mean other ops: {'; '.join(elsewhere)}", SOURCE)


def _until(era: Era) -> str:
    at = ERAS.index(era)
    return f"until {ERAS[at + 1].since}" if at + 1 < len(ERAS) else "to this day"
