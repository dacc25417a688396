"""A GPU that the process loses: typed errors, and a process that is still good for everything else."""

from __future__ import annotations

from pathlib import Path

import pytest
from dyno import _core
from own_process import found_by

GPUS = [d for d in _core.devices() if d["kind"] == "cuda" and not _core.device_problem(d)]
HERE = Path(__file__).resolve().parent


@pytest.mark.gpu
@pytest.mark.skipif(not GPUS, reason=f"no GPU: {_core.no_cuda_reason()}")
@pytest.mark.parametrize(
    ("fault", "moment"),
    [
        ("trap", "decoding"),
        ("illegal address", "generating"),
        ("misaligned address", "another engine"),
        ("illegal address", "closing"),
    ],
)
def test_everything_on_it_raises_and_the_cpu_works_on(trained_model: Path, fault: str, moment: str) -> None:
    found, stderr = found_by(HERE / "lost_device.py", str(trained_model), fault, moment)
    print(f"{fault}, {moment}: {found['error']}: {found['after']['logits']}")
    assert found["error"].startswith("CUDA_ERROR_"), found
    raised = dict(found["after"])
    if "first" in found:
        raised["first"] = found["first"]
    others = {name: error for name, error in raised.items() if error[:1] != ["DeviceLostError"]}
    assert not others
    messages = {error[1] for error in raised.values()}
    assert len(messages) == 1, messages
    (message,) = messages
    for part in ("cuda:0 is lost", "restart", "device='cpu' still works", ": cudaError"):
        assert part in message
    whole = "decoding 4 tokens"
    doing = {"decoding": whole, "another engine": whole, "generating": "generating"}
    assert f"while {doing.get(moment, 'closing a session')}" in message
    assert found["problem"] == message
    assert found["auto"] != "cuda:0"
    assert found["kept"]
    assert found["cpu"]
    # Closing after the loss is silent; a destructor that is the first to meet it says so once.
    told = [line for line in stderr.splitlines() if line.startswith("[cuda]")]
    assert told == ([message] if moment == "closing" else []), stderr
    if moment == "closing":
        assert found["closed"][0] == "ClosedError"  # the engine is closed
