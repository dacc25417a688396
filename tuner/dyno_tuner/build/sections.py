"""The code of object files, section by section, to recognise two builds with the same code.

Only loaded or linked sections count: code, data, relocations and symbols. Compiler banners, debug sections
and notes do not. In an object with device code, names of host stubs contain a process number. So there only
the code, the data and the device code count, but not the symbols.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..core.errors import TuneError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

DEVICE = (".nv_fatbin", "__nv_relfatbin", ".nvFatBinSegment", "__nv_fatbin")
_NOBITS, _NULL = 8, 0
_IGNORED = (".comment", ".note", ".debug", ".gnu.debuglink", ".gnu_debug", ".llvm_addrsig", ".shstrtab")
_SYMBOLS = (".symtab", ".strtab", ".rela", ".rel", ".group", ".symtab_shndx")
MOST_BYTES = 4 << 30


@dataclass(frozen=True)
class Code:
    """The digests of the code in an object file."""

    host: str
    device: str = ""
    """Digest of the device code; empty if there is none."""
    device_bytes: int = 0

    def to_list(self) -> list[str | int]:
        return [self.host, self.device, self.device_bytes]


def sections(path: Path) -> list[tuple[str, bytes]]:
    """Names and contents of the sections of a 64-bit little-endian ELF file, in their order.

    Raises:
        TuneError: It is not such a file, or its tables point outside of it.
    """
    if path.stat().st_size > MOST_BYTES:
        raise TuneError(f"{path}: {path.stat().st_size} bytes are more than an object file has")
    data = path.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01" or len(data) < 64:
        raise TuneError(f"{path}: not a 64-bit little-endian ELF file")
    try:
        (table,) = struct.unpack_from("<Q", data, 40)
        entry, count, names_at = struct.unpack_from("<HHH", data, 58)
        if entry < 64 or not 0 < table < len(data):
            raise TuneError(f"{path}: its table of sections has entries of {entry} bytes at {table}")
        first = struct.unpack_from("<IIQQQQIIQQ", data, table)
        # With 65,280 sections or more, the first entry has the real numbers.
        count = count or first[5]
        names_at = first[6] if names_at == 0xFFFF else names_at
        if count > len(data) // 64 or names_at >= count:
            raise TuneError(f"{path}: {count} sections, names in section {names_at}")
        headers = [struct.unpack_from("<IIQQQQ", data, table + i * entry) for i in range(count)]
    except struct.error as error:
        raise TuneError(f"{path}: its table of sections ends outside of the file") from error
    names = headers[names_at][4]
    found = []
    for name, kind, _, _, offset, size in headers:
        if kind in (_NULL, _NOBITS):
            continue
        end = data.find(b"\0", names + name)
        if offset + size > len(data) or end < 0:
            raise TuneError(f"{path}: a section of {size} bytes at {offset} ends outside of the file")
        found.append((data[names + name : end].decode(errors="replace"), data[offset : offset + size]))
    return found


def code_of(path: Path) -> Code:
    """The digests of an object file.

    Raises:
        TuneError: It is not a 64-bit little-endian ELF file.
    """
    parts = sections(path)
    on_device = [(n, c) for n, c in parts if n in DEVICE]
    host, device = hashlib.sha256(), hashlib.sha256()
    for name, content in parts:
        if name in DEVICE or name.startswith(_IGNORED):
            continue
        if on_device and name.startswith((*_SYMBOLS, "__nv_module_id")):
            continue
        host.update(name.encode() + b"\0" + len(content).to_bytes(8, "little") + content)
    for name, content in on_device:
        device.update(name.encode() + b"\0" + content)
    size = sum(len(c) for _, c in on_device)
    return Code(host.hexdigest(), device.hexdigest() if on_device else "", size)


def differing(first: Mapping[str, Code], other: Mapping[str, Code]) -> list[str]:
    """Names of the objects that only one of two builds has, or whose code differs."""
    names = sorted(first.keys() | other.keys())
    return [name for name in names if first.get(name) != other.get(name)]
