"""A file with interleaved rows gives the logits of its plain twin, bit for bit."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import dyno
import numpy as np
import pytest
from dyno import _core
from dyno.testing import tiny_model

if TYPE_CHECKING:
    from pathlib import Path

Q4_0_R8 = 202


def interleave_q4_0(raw: np.ndarray, rows: int, blocks: int) -> np.ndarray:
    """Rows of q4_0 as q4_0_r8: of each block the eight scales, then four bytes of each row in turn."""
    plain = raw.reshape(rows // 8, 8, blocks, 18)
    scales = plain[..., :2].transpose(0, 2, 1, 3).reshape(rows // 8, blocks, 16)
    codes = plain[..., 2:].reshape(rows // 8, 8, blocks, 4, 4).transpose(0, 2, 3, 1, 4)
    return np.concatenate([scales, codes.reshape(rows // 8, blocks, 128)], axis=-1).reshape(-1)


def interleaved_twin(path: Path, twin: Path) -> int:
    """Writes the file with each q4_0 matrix interleaved; how many there are."""
    data = bytearray(path.read_bytes())
    count = 0
    for tensor in _core.Gguf(path).tensors():
        rows = tensor["shape"][-2] if len(tensor["shape"]) > 1 else 0
        if tensor["dtype"] != "q4_0" or rows % 8:
            continue
        name = tensor["name"].encode()
        entry = data.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)
        (n_dims,) = struct.unpack_from("<I", data, entry)
        struct.pack_into("<I", data, entry + 4 + 8 * n_dims, Q4_0_R8)
        at, size = tensor["offset"], tensor["nbytes"]
        raw = np.frombuffer(bytes(data[at : at + size]), np.uint8)
        all_rows = int(np.prod(tensor["shape"][:-1]))
        data[at : at + size] = interleave_q4_0(raw, all_rows, tensor["shape"][-1] // 32).tobytes()
        count += 1
    twin.write_bytes(data)
    return count


@pytest.mark.parametrize("repack", [True, False])
@pytest.mark.parametrize("numerics", ["default", "exact"])
def test_logits_are_those_of_the_plain_file(tmp_path: Path, numerics: str, repack: bool) -> None:
    plain = tiny_model(tmp_path / "plain.gguf", "qwen3moe", dtype="q4_0", n_ff_expert=32)
    assert interleaved_twin(plain, tmp_path / "r8.gguf") > 8
    tokens = [1, 5, 9, 200, 17, 3]
    found = []
    for path in (plain, tmp_path / "r8.gguf"):
        with dyno.Engine(
            path, device="cpu", profile=None, ctx=64, numerics=numerics, cpu_repack=repack
        ) as engine:
            found.append(engine.logits(tokens))
    np.testing.assert_array_equal(found[0], found[1])
