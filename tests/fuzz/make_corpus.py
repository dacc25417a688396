"""Writes the seeds of the fuzz target: well-formed files of every kind and each hostile case once.

Usage: make_corpus.py FOLDER
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import numpy as np
from dyno.testing import BLOCK_GEOMETRY, TENSOR_TYPE_IDS, Array, TensorSpec, Typed, build_gguf

HUGE = (2**32, 2**61, 2**63 - 1, 2**63, 2**64 - 33, 2**64 - 1)
SCALARS = {
    "uint8": 1, "int8": -1, "uint16": 2, "int16": -2, "uint32": 3, "int32": -3, "float32": 0.5, "bool": True,
    "uint64": 4, "int64": -4, "float64": 0.25, "string": "text",
}  # fmt: skip


def well_formed() -> dict[str, bytes]:
    """Every value type, tensor type, version and alignment."""
    rng = np.random.default_rng(0)
    values: dict[str, object] = {f"scalar.{kind}": Typed(kind, value) for kind, value in SCALARS.items()}
    values |= {f"array.{kind}": Array(kind, [value] * 3) for kind, value in SCALARS.items()}
    nested = Array("array", [Array("array", [Array("string", ["a", ""])]), Array("bool", [])])
    files = {
        "empty": build_gguf().data,
        "values": build_gguf(values).data,
        "values-v2": build_gguf(values, version=2).data,
        "nested": build_gguf({"k": nested, "after": 1}).data,
        "split": build_gguf({"split.no": Typed("uint16", 0), "split.count": Typed("uint16", 1)}).data,
    }
    for dtype, (block, size) in BLOCK_GEOMETRY.items():
        data = rng.integers(0, 256, 4 * size, dtype=np.uint8).tobytes()
        files[f"tensor-{dtype}"] = build_gguf({"n": 1}, [TensorSpec("w", (2, 2 * block), dtype, data)]).data
    pair = [TensorSpec.of(name, np.ones((2, 2, 2, 8), np.float32)) for name in ("a.weight", "b.weight")]
    for alignment in (8, 64):
        files[f"alignment-{alignment}"] = build_gguf({"n": 1}, pair, alignment=alignment).data
    return files


def hostile() -> dict[str, bytes]:
    """Counts, lengths, shapes, types and offsets that no file should have."""
    tensor = TensorSpec.of("w", np.zeros((2, 32), np.float32))
    image = build_gguf({"u": 7, "s": "text", "a": ["x", "y"]}, [tensor])
    files = {"big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0)}
    for number in HUGE:
        raw = struct.pack("<Q", number)
        for mark in ("tensor_count", "metadata_count", "key:u", "value:s", "tensor:w", "dims:w", "offset:w"):
            files[f"{mark.replace(':', '-')}-{number}"] = image.patched(mark, raw)
        for element in ("uint8", "bool", "string", "array"):
            lie = build_gguf({"k": Array(element, [], count=number)})
            files[f"array-{element}-{number}"] = lie.data
    for kind in (13, 9999):
        files[f"value-type-{kind}"] = image.patched("type:u", struct.pack("<I", kind))
        files[f"tensor-type-{kind}"] = image.patched("dtype:w", struct.pack("<I", kind))
    for n_dims in (0, 5):
        files[f"dims-{n_dims}"] = image.patched("n_dims:w", struct.pack("<I", n_dims))
    for alignment in (0, 3, 2**31):
        files[f"alignment-{alignment}"] = build_gguf({"general.alignment": alignment}, [tensor]).data
    files["duplicate-keys"] = build_gguf([("k", 1), ("k", 2)]).data
    files["duplicate-tensors"] = build_gguf({}, [tensor, tensor]).data
    files["overlap"] = build_gguf({}, [tensor, TensorSpec("v", (64,), "f32", bytes(256), offset=128)]).data
    files["not-utf8"] = build_gguf([(b"\xff\xc3", Typed("string", b"\xff"))]).data
    inner = struct.pack("<IQ", 9, 1) * 64 + struct.pack("<IQ", 0, 0)
    files["deep"] = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 9) + inner
    for name, at in image.marks[:-1]:
        files[f"truncated-{name.replace(':', '-')}"] = image.data[:at]
    return files


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    files = {**well_formed(), **{f"hostile-{name}": data for name, data in hostile().items()}}
    for name, data in files.items():
        (folder / name).write_bytes(data)
    print(f"{len(files)} seeds in {folder}, {len(TENSOR_TYPE_IDS)} tensor types")


if __name__ == "__main__":
    main()
