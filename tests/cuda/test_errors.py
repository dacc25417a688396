"""Which exception an error code of CUDA becomes, by the program check_errors; needs a toolkit and no GPU."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

# After these the runtime's documentation has the process relaunched, or the hardware has failed.
LOST = {
    "cudaErrorECCUncorrectable",
    "cudaErrorNvlinkUncorrectable",
    "cudaErrorContained",
    "cudaErrorIllegalAddress",
    "cudaErrorLaunchTimeout",
    "cudaErrorAssert",
    "cudaErrorHardwareStackError",
    "cudaErrorIllegalInstruction",
    "cudaErrorMisalignedAddress",
    "cudaErrorInvalidAddressSpace",
    "cudaErrorInvalidPc",
    "cudaErrorLaunchFailure",
    "cudaErrorTensorMemoryLeak",
    "cudaErrorMpsClientTerminated",
    "cudaErrorExternalDevice",
}
OLDER_TOOLKITS_LACK = {"cudaErrorContained", "cudaErrorTensorMemoryLeak"}


def test_what_each_code_becomes() -> None:
    folder = os.environ.get("DYNO_CUDA_CHECKS")
    if folder is None:
        pytest.skip("needs DYNO_CUDA_CHECKS=BUILD/tests/cuda of a CUDA build; `make cuda-check` sets it")
    done = subprocess.run([Path(folder) / "check_errors"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    codes: dict[str, tuple[str, ...]] = {}
    said: dict[str, str] = {}
    for line in done.stdout.splitlines():
        first, rest = line.split(" ", 1)
        if first.startswith("cuda"):
            codes[first] = tuple(rest.split())
        else:
            said[first] = rest
    assert len(codes) > 80
    assert codes.pop("cudaSuccess") == ("nothing", "kept")
    assert codes.pop("cudaErrorMemoryAllocation") == ("OutOfMemoryError", "kept")
    assert set(codes) | OLDER_TOOLKITS_LACK >= LOST
    for name, became in codes.items():
        # The error of a device that never worked here (cudaErrorNoDevice, …) is no loss either.
        wanted = ("DeviceLostError", "lost") if name in LOST else ("DeviceError", "kept")
        assert became == wanted, name
    assert "cudaErrorIllegalAddress" in said["message"]  # the first, not what followed from it
    assert said["message"].endswith("while decoding 3 tokens")
    assert "restart" in said["message"]
    assert said["again"] == said["message"]
    # Of destructors only the error that the loss does not explain is told.
    assert done.stderr.count("\n") == 1
    assert "cudaFree(wrong): cudaErrorInvalidValue" in done.stderr
