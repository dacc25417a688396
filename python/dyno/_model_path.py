"""The path of a model file, as a caller of the Python API gives it."""

from __future__ import annotations

import os

from dyno.errors import PlanError

__all__ = ["model_path"]


def model_path(path: object) -> str:
    """The path of a GGUF file as text, with `~` replaced by the home folder.

    Raises:
        PlanError: It is no path, it is empty, or it contains a NUL character.
    """
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise PlanError(f"[gguf] path is {path!r:.60}; expected the path of a GGUF file")
    text = os.fsdecode(path)
    if not text or "\0" in text:
        raise PlanError(f"[gguf] path is {text!r:.60}; expected the path of a GGUF file")
    return os.path.expanduser(text)
