"""A runtime for GGUF models with tuned, verified settings.

The import of this package is fast and uses no device. Each name below is loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dyno._sampling import Sampling
    from dyno.engine import Engine
    from dyno.errors import (
        ChatError,
        ClosedError,
        ContextLengthError,
        DeviceError,
        DeviceLostError,
        DynoError,
        GgufError,
        ModelError,
        NotInstalledError,
        OutOfMemoryError,
        PlanError,
        ProfileError,
        QueueFullError,
        StepError,
        UnsupportedError,
    )
    from dyno.profiles import Profile, find_profile, load_profile
    from dyno.scheduler import Scheduler
    from dyno.tokenizer import Tokenizer

    __version__: str

__all__ = [
    "ChatError",
    "ClosedError",
    "ContextLengthError",
    "DeviceError",
    "DeviceLostError",
    "DynoError",
    "Engine",
    "GgufError",
    "ModelError",
    "NotInstalledError",
    "OutOfMemoryError",
    "PlanError",
    "Profile",
    "ProfileError",
    "QueueFullError",
    "Sampling",
    "Scheduler",
    "StepError",
    "Tokenizer",
    "UnsupportedError",
    "__version__",
    "find_profile",
    "load_profile",
]

_HOME = {
    "__version__": "dyno._core",
    "Engine": "dyno.engine",
    "Profile": "dyno.profiles",
    "Sampling": "dyno._sampling",
    "Scheduler": "dyno.scheduler",
    "Tokenizer": "dyno.tokenizer",
    "find_profile": "dyno.profiles",
    "load_profile": "dyno.profiles",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME.get(name, "dyno.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
