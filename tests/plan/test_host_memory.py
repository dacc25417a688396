"""Sizes past 64 bits, and plans that the machine's memory does not hold."""

from __future__ import annotations

import struct
from pathlib import Path

import dyno
import numpy as np
import pytest
from dyno import _core
from dyno.errors import OutOfMemoryError, PlanError
from hole_model import write_hole

TINY = Path(__file__).resolve().parent.parent / "data" / "tiny" / "llama-tiny.gguf"
QUANTISED = TINY.parents[3] / "models" / "pycode-moe-20m-Q4_K_M.gguf"
CPU = {"cuda_graphs": False}


def wide_model(path: Path) -> Path:
    """Two gigapositions of 2^21 keys each, in a file whose weights are a hole."""
    heads, dim = 1 << 15, 64
    shapes = {
        "token_embd": (32, 32),
        "blk.0.attn_q": (heads * dim, 32),
        "blk.0.attn_k": (heads * dim, 32),
        "blk.0.attn_v": (heads * dim, 32),
        "blk.0.attn_output": (32, heads * dim),
        "blk.0.ffn_gate": (32, 32),
        "blk.0.ffn_up": (32, 32),
        "blk.0.ffn_down": (32, 32),
        "output_norm": (32,),
        "blk.0.attn_norm": (32,),
        "blk.0.ffn_norm": (32,),
    }
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.embedding_length": 32,
        "llama.context_length": 1 << 31,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.attention.head_count": heads,
        "llama.attention.key_length": dim,
        "llama.attention.value_length": dim,
        "llama.feed_forward_length": 32,
    }
    write_hole(path, metadata, {name: ("f32", shape) for name, shape in shapes.items()})
    return path


def long_model(path: Path, positions: int) -> Path:
    """The tiny model with another context_length."""
    data = TINY.read_bytes()
    key = b"llama.context_length" + struct.pack("<I", 4)
    at = data.index(key) + len(key)
    path.write_bytes(data[:at] + struct.pack("<I", positions) + data[at + 4 :])
    return path


def test_a_cache_past_64_bits_is_an_error_and_not_a_cache_of_no_bytes(tmp_path: Path) -> None:
    context = {"ctx": 1 << 31, "sequences": 1024, "kv_type_k": "f32", "kv_type_v": "f32"}
    with pytest.raises(
        PlanError, match=r"KV cache .*8388608 x 2199023255552, does not fit 64 bits; use a smaller ctx"
    ):
        _core.Session(wide_model(tmp_path / "wide.gguf"), context=context, session=CPU, plan_only=True)


def test_a_cache_that_the_machine_does_not_hold_is_refused_before_it_is_allocated(tmp_path: Path) -> None:
    path = long_model(tmp_path / "long.gguf", 1 << 24)
    with pytest.raises(OutOfMemoryError, match=r"this machine is .* short: .* free.*Use ctx=") as caught:
        _core.Session(path, context={"ctx": 1 << 24, "sequences": 1024}, session=CPU)
    assert "ctx=16777216 x 1024 sequences, " in str(caught.value)
    with pytest.raises(OutOfMemoryError, match=r"for ctx=16777216 x 1 sequence, "):
        dyno.Engine(path, device="cpu", profile=None, ctx=1 << 24, ram="1MiB")


def test_a_refused_context_leaves_the_session_as_it_was(tmp_path: Path) -> None:
    session = _core.Session(long_model(tmp_path / "long.gguf", 1 << 24), context={"ctx": 64}, session=CPU)
    tokens = np.arange(5, dtype=np.int32)
    before = session.decode([(0, tokens)])[0]
    with pytest.raises(OutOfMemoryError, match="this machine is"):
        session.set_context({"ctx": 1 << 24, "sequences": 1024})
    session.reset()
    np.testing.assert_array_equal(session.decode([(0, tokens)])[0], before)


def test_weights_that_are_read_in_place_need_no_memory() -> None:
    def planned(repack: bool) -> _core.Session:
        return _core.Session(
            QUANTISED, load={"cpu_repack": repack}, context={"ctx": 64}, session=CPU, plan_only=True
        )

    def copied(session: _core.Session) -> int:
        return sum(weight["bytes"] for weight in session.plan["tensors"] if not weight["mapped"])

    in_place, repacked = planned(False), planned(True)
    rest = in_place.plan["total_bytes"] - in_place.plan["weights_bytes"]
    assert rest == repacked.plan["total_bytes"] - repacked.plan["weights_bytes"]
    needed = copied(in_place)
    assert needed < copied(repacked)
    in_place.check_memory(rest + needed)
    with pytest.raises(OutOfMemoryError, match=r"copied weights .*cpu_repack=false"):
        repacked.check_memory(rest + needed)


def tree(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return str(root)


MEMINFO = {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:    8000 kB\n"}
V2 = {
    "proc/self/cgroup": "0::/a/b\n",
    "sys/fs/cgroup/a/b/memory.max": "max\n",
    "sys/fs/cgroup/a/b/memory.current": "5\n",
    "sys/fs/cgroup/a/memory.max": "1000000\n",
    "sys/fs/cgroup/a/memory.current": "600000\n",
    "sys/fs/cgroup/a/memory.stat": "anon 300000\ninactive_file 200000\nactive_file 100000\n",
}
V1 = {
    "proc/self/cgroup": "5:cpu:/x\n4:memory:/c\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "700000\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": "500000\n",
    "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 10000\ntotal_active_file 0\n",
}
SPENT = {**V1, "sys/fs/cgroup/memory/memory.limit_in_bytes": "400000\n"}


@pytest.mark.parametrize(
    ("files", "free"),
    [
        (MEMINFO, 8000 << 10),
        (MEMINFO | V2, 700_000),
        (MEMINFO | V1, 210_000),
        (MEMINFO | SPENT, 0),
        ({}, None),
    ],
)
def test_the_least_of_system_and_groups_is_free(
    tmp_path: Path, files: dict[str, str], free: int | None
) -> None:
    assert _core.available_host_bytes(tree(tmp_path, files)) == free


def test_this_machine_tells() -> None:
    assert _core.available_host_bytes() > 1 << 20
