"""The peak use of GPU memory while something runs, as reported by NVML."""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING

from ..core.errors import TuneError

if TYPE_CHECKING:
    from types import TracebackType

_STEP = 0.05  # seconds between two readings


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class GpuMemory:
    """A monitor of GPU memory. After `with GpuMemory(0) as memory: …`, `memory.mib` is the peak above the use
    at the start.

    Raises TuneError if the library or the GPU is missing. A peak shorter than 50 ms can be missed. Other
    processes on the same GPU are included.

    Args:
        gpu: Number of the GPU, counted as in nvidia-smi.
        bus: PCI bus id of the GPU, if the number is CUDA's. CUDA does not count GPUs that
            CUDA_VISIBLE_DEVICES hides.
    """

    def __init__(self, gpu: int, bus: str | None = None, library: str = "libnvidia-ml.so.1") -> None:
        try:
            self._nvml = ctypes.CDLL(library)
        except OSError as error:
            raise TuneError(f"--gpu {gpu}: {library} cannot be loaded: {error}") from error
        self._handle = ctypes.c_void_p()
        self._call("nvmlInit_v2")
        if bus is None:
            self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(gpu), ctypes.byref(self._handle))
        else:
            name = ctypes.c_char_p(bus.encode())
            self._call("nvmlDeviceGetHandleByPciBusId_v2", name, ctypes.byref(self._handle))
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._before = self._peak = self._used()

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._nvml, name)(*arguments)
        if status != 0:
            raise TuneError(f"{name} failed with error {status}; check that nvidia-smi lists this GPU")

    def _used(self) -> int:
        found = _Memory()
        self._call("nvmlDeviceGetMemoryInfo", self._handle, ctypes.byref(found))
        return int(found.used)

    def _watch(self) -> None:
        while not self._end.wait(_STEP):
            self._peak = max(self._peak, self._used())

    @property
    def mib(self) -> float:
        return (self._peak - self._before) / 2**20

    def __enter__(self) -> GpuMemory:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()
