"""GGUF files for tests: valid ones are written by the `gguf` package, inconsistent ones by this module.

`tiny_gguf` writes files that all readers must accept. `build_gguf` and `hand_written_gguf` can also write
wrong counts, types, shapes, offsets and strings.

    >>> image = build_gguf({"general.architecture": "llama"}, [TensorSpec.zeros("w", (2, 32), "q8_0")])
    >>> image.data[:4]
    b'GGUF'
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

import numpy as np

from dyno.testing.blocks import BLOCK_GEOMETRY, TENSOR_TYPE_IDS, pack_tensor

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

_FORMATS: Final[dict[str, str]] = {
    "uint8": "B", "int8": "b", "uint16": "H", "int16": "h", "uint32": "I", "int32": "i", "float32": "f",
    "bool": "B", "uint64": "Q", "int64": "q", "float64": "d",
}  # fmt: skip
_VALUE_TYPE_IDS: Final[dict[str, int]] = {
    "uint8": 0, "int8": 1, "uint16": 2, "int16": 3, "uint32": 4, "int32": 5, "float32": 6, "bool": 7,
    "string": 8, "array": 9, "uint64": 10, "int64": 11, "float64": 12,
}  # fmt: skip


@dataclass(frozen=True)
class Typed:
    """A metadata scalar of a chosen type: `Typed("uint8", 3)`, `Typed("string", b"raw bytes")`."""

    type: str
    value: object


@dataclass(frozen=True)
class Array:
    """A metadata array of a chosen element type. A `count` may differ from the number of values."""

    element: str
    values: Sequence[object]
    count: int | None = None


@dataclass(frozen=True)
class TensorSpec:
    """A tensor: shape in NumPy order (contracted dimension last) and packed bytes."""

    name: str | bytes
    shape: tuple[int, ...]
    dtype: str | int
    """Type name, or a raw type id."""
    data: bytes
    offset: int | None = None
    """Offset in the tensor data that the header claims; None: the real one."""
    n_dims: int | None = None
    """Number of dimensions that the header claims; None: len(shape)."""

    @staticmethod
    def of(name: str, array: npt.NDArray[np.generic], dtype: str | None = None) -> TensorSpec:
        """A tensor with the values of `array`: as f32 or f16 by the dtype of the array, or packed as
        `dtype`."""
        kind = dtype or {"float32": "f32", "float16": "f16"}[array.dtype.name]
        return TensorSpec(name, tuple(array.shape), kind, pack_tensor(kind, array.astype(np.float32)))

    @property
    def type_id(self) -> int:
        return self.dtype if isinstance(self.dtype, int) else TENSOR_TYPE_IDS[self.dtype]

    @staticmethod
    def zeros(name: str, shape: tuple[int, ...], dtype: str) -> TensorSpec:
        """A tensor of zeros in any type of the format."""
        block, size = BLOCK_GEOMETRY[dtype]
        return TensorSpec(name, shape, dtype, bytes(int(np.prod(shape)) // block * size))


@dataclass
class GgufImage:
    """The bytes of a file, with the offsets of its parts."""

    data: bytes = b""
    marks: list[tuple[str, int]] = field(default_factory=list)
    """Name and byte offset of each field, in file order. The last one is ("end", len(data))."""

    def offset(self, mark: str) -> int:
        """Byte offset of the first mark with this name."""
        return dict(reversed(self.marks))[mark]

    def patched(self, mark: str, new: bytes) -> bytes:
        """A copy of the file in which `new` replaces the bytes at a mark."""
        at = self.offset(mark)
        return self.data[:at] + new + self.data[at + len(new) :]


class _Writer:
    def __init__(self) -> None:
        self.parts = bytearray()
        self.marks: list[tuple[str, int]] = []

    def mark(self, name: str) -> None:
        self.marks.append((name, len(self.parts)))

    def pack(self, code: str, value: object, mark: str | None = None) -> None:
        if mark:
            self.mark(mark)
        self.parts += struct.pack("<" + code, value)

    def string(self, text: str | bytes) -> None:
        raw = text.encode("utf-8") if isinstance(text, str) else text
        self.pack("Q", len(raw))
        self.parts += raw

    def pad(self, alignment: int) -> None:
        self.parts += bytes(-len(self.parts) % alignment)

    def scalar(self, kind: str, value: object) -> None:
        if kind == "string":
            if not isinstance(value, str | bytes):
                raise TypeError(f"a string value is needed, not {value!r}")
            self.string(value)
        else:
            self.pack(_FORMATS[kind], value)

    def array(self, array: Array) -> None:
        self.pack("I", _VALUE_TYPE_IDS[array.element])
        self.pack("Q", len(array.values) if array.count is None else array.count)
        for value in array.values:
            if array.element == "array":
                if not isinstance(value, Array):
                    raise TypeError(f"an inner Array is needed, not {value!r}")
                self.array(value)
            else:
                self.scalar(array.element, value)


def _typed(value: object) -> Typed | Array:
    """The metadata type of a plain Python or NumPy value."""
    match value:
        case Typed() | Array():
            return value
        case bool() | np.bool_():
            return Typed("bool", bool(value))
        case np.generic():
            return Typed(value.dtype.name, value.item())
        case np.ndarray():
            return Array(value.dtype.name, value.reshape(-1).tolist())
        case int():
            wide = not -(2**31) <= value < 2**32
            return Typed(("int" if value < 0 else "uint") + ("64" if wide else "32"), value)
        case float():
            return Typed("float32", value)
        case str() | bytes():
            return Typed("string", value)
        case list() | tuple():
            items = [_typed(item) for item in value]
            if not items:
                return Array("int32", [])
            if isinstance(items[0], Array):
                return Array("array", items)
            kinds = {item.type if isinstance(item, Typed) else "array" for item in items}
            if kinds == {"uint32", "int32"}:
                kinds = {"int32"}
            if len(kinds) != 1:
                raise TypeError(f"an array needs values of one type, not {sorted(kinds)}")
            return Array(kinds.pop(), list(value))
    raise TypeError(f"no metadata type for {value!r}")


def build_gguf(
    metadata: Mapping[str, object] | Iterable[tuple[str | bytes, object]] = (),
    tensors: Sequence[TensorSpec] = (),
    *,
    version: int = 3,
    alignment: int | None = None,
    magic: bytes = b"GGUF",
    tensor_count: int | None = None,
    metadata_count: int | None = None,
) -> GgufImage:
    """Write a GGUF file into memory, without a check of its consistency.

    Args:
        metadata: Keys and values. Pairs instead of a mapping allow duplicate keys. Plain values get the types
            bool, uint32 (or int32, uint64 and int64 if needed), float32, string, and arrays of these. NumPy
            values keep their types. `Typed` and `Array` choose a type.
        tensors: The tensors in file order, each aligned.
        version: Version number in the header.
        alignment: Alignment of tensor data; when given, it is also written as `general.alignment`.
        magic: First four bytes.
        tensor_count: Number of tensors that the header claims; None: the real one.
        metadata_count: Number of metadata keys that the header claims; None: the real one.

    Returns:
        The file, with the offset of each field.

    Raises:
        TypeError: A value that no metadata type fits.
    """
    pairs: list[tuple[str | bytes, object]] = []
    pairs.extend(metadata.items() if isinstance(metadata, Mapping) else metadata)
    if alignment is not None:
        pairs.append(("general.alignment", Typed("uint32", alignment)))
    align = alignment or 32
    out = _Writer()
    out.mark("magic")
    out.parts += magic
    out.pack("I", version, "version")
    out.pack("Q", len(tensors) if tensor_count is None else tensor_count, "tensor_count")
    out.pack("Q", len(pairs) if metadata_count is None else metadata_count, "metadata_count")
    for key, value in pairs:
        name = key if isinstance(key, str) else key.decode("utf-8", "replace")
        out.mark(f"key:{name}")
        out.string(key)
        typed = _typed(value)
        kind = "array" if isinstance(typed, Array) else typed.type
        out.pack("I", _VALUE_TYPE_IDS[kind], f"type:{name}")
        out.mark(f"value:{name}")
        if isinstance(typed, Array):
            out.array(typed)
        else:
            out.scalar(typed.type, typed.value)
    offset = 0
    for tensor in tensors:
        name = tensor.name if isinstance(tensor.name, str) else tensor.name.decode("utf-8", "replace")
        out.mark(f"tensor:{name}")
        out.string(tensor.name)
        out.pack("I", len(tensor.shape) if tensor.n_dims is None else tensor.n_dims, f"n_dims:{name}")
        out.mark(f"dims:{name}")
        for dim in reversed(tensor.shape):
            out.pack("Q", dim)
        out.pack("I", tensor.type_id, f"dtype:{name}")
        out.pack("Q", offset if tensor.offset is None else tensor.offset, f"offset:{name}")
        offset += len(tensor.data) + -len(tensor.data) % align
    out.mark("padding")
    out.pad(align)
    out.mark("data")
    for tensor in tensors:
        out.pad(align)
        out.mark("data:" + (tensor.name if isinstance(tensor.name, str) else "?"))
        out.parts += tensor.data
    out.mark("end")
    return GgufImage(bytes(out.parts), out.marks)


def hand_written_gguf(
    path: str | os.PathLike[str],
    metadata: Mapping[str, object] | Iterable[tuple[str | bytes, object]] = (),
    tensors: Sequence[TensorSpec] = (),
    *,
    version: int = 3,
    alignment: int | None = None,
) -> Path:
    """Write `build_gguf(metadata, tensors, …)` to `path`, and return the path."""
    target = Path(path)
    target.write_bytes(build_gguf(metadata, tensors, version=version, alignment=alignment).data)
    return target


def tiny_gguf(
    path: str | os.PathLike[str],
    metadata: Mapping[str, object] | None = None,
    tensors: Sequence[TensorSpec] = (),
    *,
    alignment: int | None = None,
) -> Path:
    """Write a valid file with the `gguf` package, which the extra `test` installs.

    Args:
        path: The file to write.
        metadata: Keys and values, with the types that `build_gguf` gives them.
        tensors: In file order.
        alignment: Alignment of tensor data in bytes; when given, it is also written as `general.alignment`.

    Returns:
        `path`.

    Raises:
        ValueError: The file would be inconsistent, or has an array that the package cannot write: an empty or
        nested one. Use `hand_written_gguf` for these.
        TypeError: A value that no metadata type fits.
    """
    import gguf

    writer = gguf.GGUFWriter(path, "")
    writer.kv_data[0].clear()  # the architecture, which it writes without being asked
    for key, value in (metadata or {}).items():
        typed = _typed(value)
        if isinstance(typed, Typed):
            writer.add_key_value(key, typed.value, gguf.GGUFValueType[typed.type.upper()])
            continue
        if typed.count is not None or not len(typed.values) or typed.element == "array":
            raise ValueError(f"{key}: the gguf package does not write this array; use hand_written_gguf")
        element = gguf.GGUFValueType[typed.element.upper()]
        writer.add_key_value(key, list(typed.values), gguf.GGUFValueType.ARRAY, sub_type=element)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    for tensor in tensors:
        kinds = [name for name, number in TENSOR_TYPE_IDS.items() if number == tensor.type_id]
        block, size = BLOCK_GEOMETRY[kinds[0]] if kinds else (1, 0)
        if (
            not isinstance(tensor.name, str)
            or tensor.offset is not None
            or tensor.n_dims is not None
            or not kinds
            or not tensor.shape
            or tensor.shape[-1] % block
            or math.prod(tensor.shape) // block * size != len(tensor.data)
        ):
            raise ValueError(f"tensor {tensor.name!r} lies; hand_written_gguf writes it")
        # The package gets the type as a number, because an older release may not know the newest types by
        # name. With an element type other than bytes, it keeps the shape.
        kind = cast("gguf.GGMLQuantizationType", tensor.type_id)
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), len(tensor.data), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:
        writer.write_tensor_data(np.frombuffer(tensor.data, np.uint8))
    writer.close()
    return Path(path)


def split_path(prefix: str | os.PathLike[str], number: int, count: int) -> Path:
    """The name of shard `number` (from 1) of `count`: PREFIX-00001-of-00003.gguf."""
    return Path(f"{Path(prefix)}-{number:05d}-of-{count:05d}.gguf")


def tiny_gguf_split(
    prefix: str | os.PathLike[str],
    metadata: Mapping[str, object],
    tensors: Sequence[TensorSpec],
    count: int,
    *,
    overrides: Mapping[int, Mapping[str, object]] | None = None,
) -> list[Path]:
    """Write a split file: consecutive runs of tensors in `count` shards, with the metadata of the model in
    the first one.

    Args:
        prefix: Path without the suffix that numbers the shards.
        metadata: Keys of the model.
        tensors: All tensors; shards get consecutive runs of nearly equal length.
        count: Number of shards.
        overrides: Per shard number (from 1), metadata keys to replace; a value of None leaves the key out.

    Returns:
        The paths, in order.
    """
    paths = []
    bounds = [len(tensors) * i // count for i in range(count + 1)]
    for number in range(1, count + 1):
        keys: dict[str, object] = dict(metadata) if number == 1 else {}
        keys["split.no"] = Typed("uint16", number - 1)
        keys["split.count"] = Typed("uint16", count)
        keys["split.tensors.count"] = Typed("int32", len(tensors))
        keys |= (overrides or {}).get(number, {})
        keys = {key: value for key, value in keys.items() if value is not None}
        part = tensors[bounds[number - 1] : bounds[number]]
        paths.append(tiny_gguf(split_path(prefix, number, count), keys, part))
    return paths
