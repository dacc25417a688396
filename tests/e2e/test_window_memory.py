"""Memory of windowed layers on a GPU: free when a text is forgotten, and counted when settings change."""

from __future__ import annotations

import ctypes
import signal
import time
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from dyno import _core
from dyno.errors import OutOfMemoryError
from random_models import random_model
from window_shapes import WIDE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

SHAPE = replace(WIDE, n_layers=4, metadata={**WIDE.metadata, "context_length": 16384})
"""Layers 0 and 2 have windows."""
PIECE = 2 << 20
"""Bytes that the cache takes at a time."""
PIECE_ROWS = PIECE // (SHAPE.kv_heads * SHAPE.head_dim * 4)
BEHIND = 256
"""Rows behind a sequence's end that have memory too."""
STRIDE = 8 * PIECE_ROWS
"""Between places where windows stay."""
LENGTH = 12000
TEXT = np.random.default_rng(21).integers(0, SHAPE.n_vocab, LENGTH).astype(np.int32)


class BrokenOff(Exception):
    """Of a signal that comes between two u-batches."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    if not any(d["kind"] == "cuda" and not _core.device_problem(d) for d in _core.devices()):
        pytest.skip(f"no GPU: {_core.no_cuda_reason()}")
    return random_model(tmp_path / "m.gguf", SHAPE)


def opened(path: Path, **context: Any) -> _core.Session:
    return _core.Session(
        path,
        load={"device": "cuda:0", "numerics": "exact"},
        context={
            "ctx": 16384,
            "kv_type_k": "f32",
            "kv_type_v": "f32",
            "window_cache": "window",
            **context,
        },
        session={"threads": 2, "ubatch": 64},
    )


def memory(held: int, windows: int) -> int:
    """Bytes of `held` positions in the layers without windows, and `windows` pieces in each of the others."""
    pieces = -(-(held + BEHIND) // PIECE_ROWS)
    return 2 * 2 * (pieces + windows) * PIECE


@pytest.mark.parametrize("everywhere", [False, True])
def test_a_reset_frees_windows_at_once(path: Path, everywhere: bool) -> None:
    freed = []
    for _ in range(8):  # other processes may take memory of the GPU in the meantime
        s = opened(path, sequences=2)
        s.decode([(0, TEXT)], "none")
        before, free = s.gpu_cache_bytes, _core.gpu_free_bytes(0)
        assert before > memory(LENGTH, 1)
        if everywhere:
            s.reset()
        else:
            s.reset(0)
        freed.append(_core.gpu_free_bytes(0) - free)
        assert s.gpu_cache_bytes == memory(LENGTH, 1)  # each layer's first rows may be read
        if freed[-1] > (before - s.gpu_cache_bytes) / 2:
            return
        s.close()
    pytest.fail(f"the GPU's free memory changed by {freed} bytes")


def test_a_rewind_frees_windows_at_once(path: Path) -> None:
    s = opened(path)
    want = None
    for part in np.split(TEXT, [STRIDE, STRIDE + 40, LENGTH - 1]):
        logits = s.decode([(0, part)], "last")[0]
        want = logits if want is None and len(part) == 40 else want
    assert want is not None
    before = s.gpu_cache_bytes
    s.rewind(STRIDE)
    # The first rows, the window before the stop, and the rows behind it.
    assert s.gpu_cache_bytes == memory(LENGTH, 3) < before
    got = s.decode([(0, TEXT[STRIDE : STRIDE + 40])], "last")[0]
    assert got is not None
    assert np.abs(got - want).max() < 1e-4 * np.abs(want).max()


def test_a_short_text_leaves_no_piece_behind_it(path: Path) -> None:
    """Its last piece lies wholly behind the first rows."""
    s = opened(path)
    s.decode([(0, TEXT[: PIECE_ROWS + 300])], "none")
    s.reset(0)
    assert s.gpu_cache_bytes == memory(PIECE_ROWS + 300, 1)


@contextmanager
def broken_off_after(seconds: float) -> Iterator[None]:
    def handler(*_: object) -> None:
        raise BrokenOff

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_decode_that_is_broken_off_frees_windows_at_once(path: Path) -> None:
    s = opened(path)
    took = 0.0
    for _ in range(2):  # the second time is that of a device that is awake
        began = time.perf_counter()
        s.decode([(0, TEXT)], "last")
        took = time.perf_counter() - began
        s.reset(0)
    with pytest.raises(BrokenOff), broken_off_after(0.5 * took):  # noqa: PT012 - the second call only waits
        s.decode([(0, TEXT)], "last")
        time.sleep(60)  # for a signal that came too late
    assert s.position(0) == 0
    assert s.gpu_cache_bytes == memory(LENGTH, 1)
    assert s.decode([(0, TEXT[:100])], "last")[0] is not None


@contextmanager
def taken_from_gpu(most_free: int) -> Iterator[None]:
    """Somebody else takes memory of the first GPU, so that no more than `most_free` bytes are free."""
    driver = ctypes.CDLL("libcuda.so.1")
    context, device, address = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_uint64()
    assert driver.cuDeviceGet(ctypes.byref(device), 0) == 0
    assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
    assert driver.cuCtxPushCurrent_v2(context) == 0
    try:
        size = ctypes.c_size_t(_core.gpu_free_bytes(0) - most_free)
        assert driver.cuMemAlloc_v2(ctypes.byref(address), size) == 0
        try:
            yield
        finally:
            assert driver.cuMemFree_v2(address) == 0
    finally:
        driver.cuCtxPopCurrent_v2(ctypes.byref(context))
        driver.cuDevicePrimaryCtxRelease_v2(device)


def test_settings_change_while_long_texts_hold_a_tight_cache(path: Path) -> None:
    """The memory that texts hold already is a part of what the plan needs."""
    s = opened(path, sequences=4)
    s.decode([(0, TEXT)], "none")
    for slot in (1, 2, 3):
        s.copy_prefix(0, slot, LENGTH)
    want = s.decode([(2, TEXT[:1])], "last")[0]
    assert want is not None
    s.rewind(LENGTH, 2)
    planned, spare = s.plan["kv_bytes"], 96 << 20
    most_free = planned - s.gpu_cache_bytes + spare
    assert most_free < planned
    with taken_from_gpu(most_free):
        s.set({"threads": 2, "ubatch": 128})
        assert s.plan["settings"]["ubatch"] == 128
        got = s.decode([(2, TEXT[:1])], "last")[0]
        assert got is not None
        assert np.abs(got - want).max() < 1e-4 * np.abs(want).max()
        s.set_context({"ctx": 8192, "sequences": 4, "kv_type_k": "f32", "kv_type_v": "f32"})
        s.decode([(3, TEXT[:5000])], "none")
        with pytest.raises(OutOfMemoryError, match="short"):  # texts hold no more than the plan counted
            s.set_context({"ctx": 16384, "sequences": 16, "kv_type_k": "f32", "kv_type_v": "f32"})
    assert s.position(3) == 5000
