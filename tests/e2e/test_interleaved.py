"""A file with interleaved rows gives the logits of its plain twin, bit for bit."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

import dyno
import numpy as np
import pytest
from dyno import _core
from dyno.testing import tiny_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def interleave_q4_0(raw: np.ndarray, rows: int, blocks: int) -> np.ndarray:
    """Rows of q4_0 as q4_0_r8: of each block the eight scales, then four bytes of each row in turn."""
    plain = raw.reshape(rows // 8, 8, blocks, 18)
    scales = plain[..., :2].transpose(0, 2, 1, 3).reshape(rows // 8, blocks, 16)
    codes = plain[..., 2:].reshape(rows // 8, 8, blocks, 4, 4).transpose(0, 2, 3, 1, 4)
    return np.concatenate([scales, codes.reshape(rows // 8, blocks, 128)], axis=-1).reshape(-1)


def interleave_bf16(raw: np.ndarray, rows: int, pairs: int) -> np.ndarray:
    """Rows of bf16 as bf16_r16: of each two columns the values of 16 rows in turn."""
    return raw.reshape(rows // 16, 16, pairs, 4).transpose(0, 2, 1, 3).reshape(-1)


class Form(NamedTuple):
    """An interleaved type: its id, rows of a unit, values of a block, and how plain rows become units."""

    id: int
    rows: int
    block: int
    interleave: Callable[[np.ndarray, int, int], np.ndarray]


FORMS = {"q4_0": Form(202, 8, 32, interleave_q4_0), "bf16": Form(230, 16, 2, interleave_bf16)}


def interleaved_twin(path: Path, twin: Path, dtype: str) -> int:
    """Writes the file with each matrix of the type interleaved; how many there are."""
    form = FORMS[dtype]
    data = bytearray(path.read_bytes())
    count = 0
    for tensor in _core.Gguf(path).tensors():
        rows = tensor["shape"][-2] if len(tensor["shape"]) > 1 else 0
        if tensor["dtype"] != dtype or rows == 0 or rows % form.rows:
            continue
        name = tensor["name"].encode()
        entry = data.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)
        (n_dims,) = struct.unpack_from("<I", data, entry)
        struct.pack_into("<I", data, entry + 4 + 8 * n_dims, form.id)
        at, size = tensor["offset"], tensor["nbytes"]
        raw = np.frombuffer(bytes(data[at : at + size]), np.uint8)
        all_rows = int(np.prod(tensor["shape"][:-1]))
        data[at : at + size] = form.interleave(raw, all_rows, tensor["shape"][-1] // form.block).tobytes()
        count += 1
    twin.write_bytes(data)
    return count


@pytest.mark.parametrize("repack", [True, False])
@pytest.mark.parametrize("numerics", ["default", "exact"])
@pytest.mark.parametrize("dtype", FORMS)
def test_logits_are_those_of_the_plain_file(tmp_path: Path, dtype: str, numerics: str, repack: bool) -> None:
    plain = tiny_model(tmp_path / "plain.gguf", "qwen3moe", dtype=dtype, n_ff_expert=32)
    assert interleaved_twin(plain, tmp_path / "units.gguf", dtype) > 8
    tokens = [1, 5, 9, 200, 17, 3]
    found = []
    for path in (plain, tmp_path / "units.gguf"):
        with dyno.Engine(
            path, device="cpu", profile=None, ctx=64, numerics=numerics, cpu_repack=repack
        ) as engine:
            found.append(engine.logits(tokens))
    np.testing.assert_array_equal(found[0], found[1])
