"""Logits that stay on the device: views without a copy, and memory that lives as long as they do."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import dyno
import numpy as np
import pytest
from dyno import _core
from dyno.device_array import to_host, view
from dyno.errors import PlanError
from dyno.testing import tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GPUS = [d for d in _core.devices() if d["kind"] == "cuda" and not _core.device_problem(d)]
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[dyno.Engine]:
    path = tiny_model(tmp_path / "m.gguf", "qwen3moe", n_layers=1)
    with dyno.Engine(path, "cpu", None, threads=1) as opened:
        yield opened


@pytest.mark.parametrize("rows", ["all", "last", "none"])
def test_values_and_shape_are_those_of_the_array(engine: dyno.Engine, rows: str) -> None:
    wanted = engine.logits(TOKENS, rows=rows)
    found = engine.logits(TOKENS, rows=rows, device_array=True)
    assert found.shape == wanted.shape
    assert found.__dlpack_device__() == (1, 0)
    np.testing.assert_array_equal(np.from_dlpack(found), wanted)
    assert engine.position() == len(TOKENS)


def test_it_appends_as_the_array_does(engine: dyno.Engine) -> None:
    whole = engine.logits(TOKENS)
    engine.logits(TOKENS[:5])
    rest = engine.logits(TOKENS[5:], reset=False, device_array=True)
    np.testing.assert_allclose(np.from_dlpack(rest), whole[5:], rtol=1e-4, atol=1e-5)
    with pytest.raises(PlanError, match="ctx"):
        engine.logits([1] * 1000, device_array=True)
    with pytest.raises(PlanError, match="rows must be"):
        engine.logits([1], rows="some", device_array=True)


def test_views_share_the_memory_and_outlive_everything(engine: dyno.Engine) -> None:
    wanted = engine.logits(TOKENS).copy()
    array = engine.logits(TOKENS, device_array=True)
    first, second = np.from_dlpack(array), view(array)
    assert first.ctypes.data == second.ctypes.data == to_host(array).ctypes.data
    engine.logits(TOKENS[::-1])  # does not write into it
    engine.close()
    del array, second
    gc.collect()
    others = [np.full(wanted.shape, 7, np.float32) for _ in range(20)]  # would take memory that was freed
    np.testing.assert_array_equal(first, wanted)
    assert len(others) == 20


def test_other_devices_and_copies_are_refused(engine: dyno.Engine) -> None:
    array = engine.logits([1], device_array=True)
    array.__dlpack__(stream=None, max_version=(1, 0), dl_device=(1, 0), copy=False)
    with pytest.raises(BufferError, match=r"own device \(1, 0\)"):
        array.__dlpack__(dl_device=(2, 0))
    with pytest.raises(BufferError, match="copy it"):
        array.__dlpack__(copy=True)


def test_a_gpu_array_without_cupy_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGpu:
        shape = (1, 1)

        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 0

    monkeypatch.setitem(__import__("sys").modules, "cupy", None)
    with pytest.raises(ImportError, match=r"gguf-dyno\[gpu\]"):
        to_host(OnGpu())


@pytest.mark.gpu
@pytest.mark.skipif(not GPUS, reason=f"no GPU: {_core.no_cuda_reason()}")
def test_logits_stay_on_the_gpu(tmp_path: Path) -> None:
    cupy = pytest.importorskip("cupy")
    path = tiny_model(tmp_path / "m.gguf", "qwen3moe")
    with dyno.Engine(path, "cuda:0", None) as engine:
        for rows in ("all", "last", "all"):  # the last one without the capture of a graph
            wanted = engine.logits(TOKENS, rows=rows)
            array = engine.logits(TOKENS, rows=rows, device_array=True)
            assert array.__dlpack_device__() == (2, 0)
            found = cupy.from_dlpack(array)
            assert found.data.ptr == cupy.from_dlpack(array).data.ptr
            np.testing.assert_array_equal(found.get(), wanted)
    del array
    np.testing.assert_array_equal(found.get(), wanted)  # after the engine and the array have gone
