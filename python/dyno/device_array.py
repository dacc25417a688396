"""Arrays in the memory of the device that computed them, for any library that supports DLPack."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import CapsuleType

__all__ = ["DeviceArray", "namespace_of", "to_host", "view"]

_CPU, _CUDA = 1, 2  # device types of DLPack


class DeviceArray(Protocol):
    """An array of float32 rows in the memory of a device. `numpy.from_dlpack`, `cupy.from_dlpack` and
    `torch.from_dlpack` give a view without a copy.

    The memory lives as long as the array or a view of it, even if the engine is closed.
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
        """A DLPack capsule of the array."""

    def __dlpack_device__(self) -> tuple[int, int]:
        """Type and number of the device: (1, 0) is the CPU, (2, n) is cuda:n."""


def view(array: DeviceArray) -> Any:
    """A view without a copy: a NumPy array for CPU memory, a CuPy array for GPU memory.

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
    """A NumPy array with the values of a NumPy array, a CuPy array, or anything with `__dlpack__`.

    CPU memory is not copied.

    Raises:
        ImportError: The array is on a GPU and CuPy is not installed.
    """
    if isinstance(array, np.ndarray):
        return array
    found = view(array)
    host: NDArray[Any] = found if isinstance(found, np.ndarray) else found.get()
    return host


def namespace_of(*arrays: Any) -> Any:
    """The module whose functions compute with all of `arrays`: NumPy, or the array API namespace of their
    library.

    Raises:
        TypeError: The arrays come from different libraries.
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
    # CuPy arrays lack that method, but the module itself has the functions of the standard.
    root = type(array).__module__.partition(".")[0]
    return sys.modules["cupy"] if root == "cupy" else np
