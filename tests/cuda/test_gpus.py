"""The description of a GPU that is here."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from dyno import _core
from dyno.devices import list_devices

GPUS = [device for device in _core.devices() if device["kind"] == "cuda"]

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPUS, reason=f"no GPU: {_core.no_cuda_reason()}")]


def test_each_gpu_maps_memory_by_need() -> None:
    """Without that, caches of windows are full ones by default, and take memory for all positions."""
    told = [device.info["maps_memory"] for device in list_devices() if device.kind == "cuda"]
    assert told == [True] * len(GPUS)
    assert all(device["maps_memory"] is True for device in GPUS)


def test_a_new_process_tells_it_in_its_first_answer() -> None:
    """The driver is asked, which the runtime has to load before."""
    code = "from dyno import _core; import json; print(json.dumps(_core.devices()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = [device for device in json.loads(done.stdout) if device["kind"] == "cuda"]
    assert [device["maps_memory"] for device in found] == [True] * len(GPUS)
