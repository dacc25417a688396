"""Files of models whose weights are a hole: for plans, which read none of them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from dyno.testing import BLOCK_GEOMETRY, TensorSpec, build_gguf

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def write_hole(
    path: Path, metadata: Mapping[str, object], shapes: Mapping[str, tuple[str, tuple[int, ...]]]
) -> None:
    """A file with these keys and tensors, of which only the header takes room on the disk.

    Args:
        path: Of the file.
        metadata: Keys.
        shapes: By name without `.weight`: type and shape (NumPy order).
    """
    tensors, offset = [], 0
    for name, (dtype, shape) in shapes.items():
        tensors.append(TensorSpec(f"{name}.weight", shape, dtype, b"", offset=offset))
        block, size = BLOCK_GEOMETRY[dtype]
        offset += math.prod(shape) // block * size
        offset += -offset % 32
    header = build_gguf(metadata, tensors).data
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + offset)
