"""A temporary power limit of a GPU, which is restored in any case."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ..core.errors import TuneError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

_GUARD = Path(__file__).with_name("power_guard.py")
_MERCY = 15.0  # seconds for the guard to restore the limit
SETTLE = 2.0  # seconds after a change until the clocks follow


class PowerLimit:
    """The power limit of one GPU: `with PowerLimit(bus) as limit: limit.set(400)`.

    A guard process restores the original limit when the block ends, even if this process is killed. If the
    guard has died, this process restores it when the block ends.

    Args:
        pci_bus_id: of the GPU.
        sleep: waits for the clocks after a change.

    Raises:
        TuneError: NVML does not answer, or does not report the limits of this GPU.
    """

    def __init__(self, pci_bus_id: str, sleep: Callable[[float], None] = time.sleep) -> None:
        self._bus, self._sleep = pci_bus_id, sleep
        self._guard: subprocess.Popen[str] | None = None
        try:
            import pynvml
        except ImportError as error:
            raise TuneError("--power-limits needs NVML: the package nvidia-ml-py is not installed") from error
        self._nvml: Any = pynvml
        try:
            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByPciBusId(pci_bus_id)
            least, most = pynvml.nvmlDeviceGetPowerManagementLimitConstraints(self._handle)
            self._before = int(pynvml.nvmlDeviceGetPowerManagementLimit(self._handle))
        except pynvml.NVMLError as error:
            raise TuneError(
                f"--power-limits: NVML does not report the limits of {pci_bus_id}: {error}"
            ) from error
        self.range = (least / 1000, most / 1000)
        """Lowest and highest limit in watts."""

    @property
    def before(self) -> float:
        """The original limit in watts."""
        return self._before / 1000

    def check(self, watts: Sequence[float]) -> None:
        """Raises TuneError for limits that this GPU does not accept, or that this user may not set.

        The permission is checked by setting the current limit.
        """
        least, most = self.range
        for limit in watts:
            if not least <= limit <= most:
                raise TuneError(f"--power-limits {limit:g}: this GPU accepts {least:g} to {most:g} W")
        self._set(self._before)

    def __enter__(self) -> Self:
        guard = subprocess.Popen(
            [sys.executable, "-P", str(_GUARD), self._bus, str(self._before)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        assert guard.stdin is not None
        assert guard.stdout is not None
        if guard.stdout.readline().strip() != "ready":
            code = guard.wait()
            guard.stdin.close()
            guard.stdout.close()
            raise TuneError(f"--power-limits: the process that sets the limit back does not start ({code})")
        self._guard = guard
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore the original limit.

        Raises:
            TuneError: It could not be restored, and the block has ended without an error. After an error in
                the block, a line on stderr reports it, and the first error is raised.
        """
        guard, self._guard = self._guard, None
        assert guard is not None
        assert guard.stdin is not None
        assert guard.stdout is not None
        guard.stdin.close()
        try:
            code = guard.wait(_MERCY)
        except subprocess.TimeoutExpired:
            guard.kill()
            code = guard.wait()
        guard.stdout.close()
        why = self._set_back_here() if code != 0 else ""
        self._nvml.nvmlShutdown()
        if not why:
            return
        message = (
            f"the power limit of {self._bus} was not set back to {self.before:g} W ({why}); "
            f"set it with nvidia-smi -i {self._bus} -pl {self.before:g}"
        )
        if error is None:
            raise TuneError(message)
        print(f"tune: {message}", file=sys.stderr, flush=True)

    def _set_back_here(self) -> str:
        """Restore the original limit without the guard. Returns the reason if that fails."""
        try:
            self._nvml.nvmlDeviceSetPowerManagementLimit(self._handle, self._before)
        except self._nvml.NVMLError as error:
            return str(error)
        return ""

    def set(self, watts: float) -> None:
        """Set the limit, and wait for the clocks.

        Raises:
            TuneError: The driver refuses it, enforces another one, or does not report the enforced one.
        """
        assert self._guard is not None, "without its guard a limit would outlive the run"
        self._set(round(watts * 1000))
        self._sleep(SETTLE)
        try:
            enforced = self._nvml.nvmlDeviceGetEnforcedPowerLimit(self._handle) / 1000
        except self._nvml.NVMLError as error:
            raise TuneError(
                f"--power-limits {watts:g}: NVML does not report the enforced limit: {error}"
            ) from error
        if abs(enforced - watts) > 1:
            raise TuneError(f"--power-limits {watts:g}: the driver enforces {enforced:g} W")

    def _set(self, milliwatts: int) -> None:
        try:
            self._nvml.nvmlDeviceSetPowerManagementLimit(self._handle, milliwatts)
        except self._nvml.NVMLError as error:
            raise TuneError(
                f"--power-limits: the limit of {self._bus} cannot be set ({error}); this needs root, "
                "or a container with that privilege"
            ) from error
