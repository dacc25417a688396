"""Arrays in the memory of the device that computed them, for every library that takes DLPack."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import CapsuleType

__all__ = ["DeviceArray", "namespace_of", "to_host", "view"]

_CPU, _CUDA = 1, 2  # DLPack's numbers of devices


class DeviceArray(Protocol):
    """Rows of float32 in the memory of a device; `numpy.from_dlpack`, `cupy.from_dlpack` or
    `torch.from_dlpack` gives a view without a copy.

    The memory lives as long as the array or a view of it, also if the engine is closed.
    """

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""

    def __dlpack__(
        self,
        *,
        stream: object = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> CapsuleType:
        """A capsule that DLPack describes."""

    def __dlpack_device__(self) -> tuple[int, int]:
        """Type and number of the device: (1, 0) is the CPU, (2, n) is cuda:n."""


def view(array: DeviceArray) -> Any:
    """A view without a copy: of NumPy for memory of the CPU, of CuPy for memory of a GPU.

    Raises:
        ImportError: The array is on a GPU and CuPy is not installed.
        ValueError: The array is on another kind of device.
    """
    kind, _ = array.__dlpack_device__()
    if kind == _CPU:
        return np.from_dlpack(array)
    if kind != _CUDA:
        raise ValueError(f"an array on a device of DLPack type {kind} is neither on a CPU nor on a GPU")
    try:
        import cupy
    except ImportError as error:
        raise ImportError("arrays on a GPU need CuPy: pip install 'gguf-dyno[gpu]'") from error
    return cupy.from_dlpack(array)


def to_host(array: Any) -> NDArray[Any]:
    """A NumPy array with the values of an array of NumPy, of CuPy, or of anything that has `__dlpack__`.

    Memory of the CPU is not copied.

    Raises:
        ImportError: The array is on a GPU and CuPy is not installed.
    """
    if isinstance(array, np.ndarray):
        return array
    found = view(array)
    host: NDArray[Any] = found if isinstance(found, np.ndarray) else found.get()
    return host


def namespace_of(*arrays: Any) -> Any:
    """The module whose functions compute with all of `arrays`: NumPy, or that of the array API standard.

    Raises:
        TypeError: They are of different libraries.
    """
    found = {id(space): space for space in map(_namespace, arrays)}
    if len(found) != 1:
        names = sorted(str(getattr(space, "__name__", space)) for space in found.values())
        raise TypeError(f"the arrays must come from one library, not from {', '.join(names) or 'none'}")
    return next(iter(found.values()))


def _namespace(array: Any) -> Any:
    if isinstance(array, np.ndarray):
        return np
    if hasattr(array, "__array_namespace__"):
        return array.__array_namespace__()
    # CuPy's arrays lack that method; the module itself has the functions of the standard.
    root = type(array).__module__.partition(".")[0]
    return sys.modules["cupy"] if root == "cupy" else np
