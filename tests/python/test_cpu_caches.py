"""The cache sizes of the CPU, from the kernel's description of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from dyno import _core

KIB = 1 << 10
CACHES = [
    ("1", "Data", "48K"),
    ("1", "Instruction", "64K"),
    ("2", "Unified", "2048K"),
    ("3", "Unified", "32768K"),
]


def machine(root: Path, caches: list[tuple[str, str, str]]) -> str:
    """A machine's sys with these caches: level, type and size of each."""
    for i, (level, kind, size) in enumerate(caches):
        folder = root / f"sys/devices/system/cpu/cpu0/cache/index{i}"
        folder.mkdir(parents=True)
        for name, text in (("level", level), ("type", kind), ("size", size)):
            (folder / name).write_text(text + "\n")
    return str(root)


@pytest.mark.parametrize("order", [slice(None), slice(None, None, -1)])
def test_data_caches_of_each_level(tmp_path: Path, order: slice) -> None:
    assert _core.cpu_caches(machine(tmp_path, CACHES[order])) == (48 * KIB, 2048 * KIB, 32768 * KIB)


def test_units(tmp_path: Path) -> None:
    caches = [("1", "Data", "32768"), ("2", "Unified", "1M"), ("3", "Unified", "1G")]
    assert _core.cpu_caches(machine(tmp_path, caches)) == (32 * KIB, KIB * KIB, KIB * KIB * KIB)


@pytest.mark.parametrize("size", ["", "K", "-4K", "12monkeys", "99999999999999999999K", "9999999999G"])
def test_an_odd_size_is_none(tmp_path: Path, size: str) -> None:
    unknown = _core.cpu_caches(str(tmp_path / "nowhere"))  # as the C library says
    odd = [("1", "Data", size), ("2", "Unified", size), ("3", "Unified", size)]
    assert _core.cpu_caches(machine(tmp_path, odd)) == unknown


def test_this_machine() -> None:
    cache = Path("/sys/devices/system/cpu/cpu0/cache")
    levels = {
        (i / "level").read_text().strip(): (i / "size").read_text().strip() for i in cache.glob("index*")
    }
    if not levels.get("3", "").endswith("K"):
        pytest.skip("the kernel does not describe a level 3 cache here")
    assert _core.cpu_info()["l3_bytes"] == int(levels["3"][:-1]) * KIB
