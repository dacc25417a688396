"""Parsing of amounts of memory, such as 16GiB."""

from __future__ import annotations

import re

__all__ = ["check_unit", "parse_bytes", "parse_limit"]

_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}

LEAST_LIMIT = 64 << 20
"""Bytes. A smaller limit is too small for any model, and usually a number without a unit: `5` is 5 bytes."""
LEAST_NUMBER = 64 << 10
"""Bytes. A smaller plain number was surely meant in GiB or MiB."""
_MOST_GIB = 2048
"""A larger number was surely not meant in GiB."""


def parse_bytes(text: str) -> int:
    """Bytes of `16GiB`, `16G` (the same), `16GB` (powers of 1000) or `800MiB`.

    Raises:
        ValueError: `text` is not an amount of memory, or is 0.
    """
    found = re.fullmatch(r"\s*([0-9]{1,9}(?:\.[0-9]{1,6})?)\s*([kmgt]?)(i?)(b?)\s*", text.lower())
    if not found or (found[3] and not found[2]):
        raise ValueError(f"{text!r} is not an amount of memory; write 16GiB or 800MiB")
    base = 1000 if found[2] and found[4] and not found[3] else 1024
    size = int(float(found[1]) * base ** _UNITS[found[2]])
    if size <= 0:
        raise ValueError(f"{text!r} is too little memory to run in; write 16GiB or 800MiB")
    return size


def parse_limit(text: str) -> int:
    """A memory limit in bytes, parsed as in `parse_bytes`.

    Raises:
        ValueError: `text` is not an amount of memory, or is less than any model needs.
    """
    size = parse_bytes(text)
    if size < LEAST_LIMIT:
        raise ValueError(
            f"{text!r} is {size:,} bytes; the least limit is {LEAST_LIMIT >> 20} MiB; write {_meant(text)}"
        )
    return size


def check_unit(value: int | str, size: int) -> None:
    """Refuse a plain number of bytes that was surely meant in another unit, such as 24 for 24 GiB.

    Args:
        value: The amount as the user wrote it.
        size: The same amount in bytes.

    Raises:
        ValueError: It is such a number. The message suggests a unit.
    """
    least = LEAST_LIMIT if isinstance(value, str) else LEAST_NUMBER
    if _is_plain(str(value)) and size < least:
        raise ValueError(f"{value!r} is {size:,} bytes; write {_meant(str(value))}")


def _is_plain(text: str) -> bool:
    return re.fullmatch(r"\s*[0-9.]+\s*", text) is not None


def _meant(text: str) -> str:
    """The text with the probable unit: GiB for a small number, else examples."""
    return f"{text.strip()}GiB" if _is_plain(text) and float(text) <= _MOST_GIB else "16GiB or 800MiB"
