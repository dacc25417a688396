"""The model file that a command names."""

from __future__ import annotations

import os

from .errors import TuneError


def check_model(model: str) -> None:
    """Raises TuneError if `model` is not a readable file. The message says what to give instead."""
    if os.path.isdir(model):
        try:
            inside = sorted(n for n in os.listdir(model) if n.endswith(".gguf"))
        except OSError as error:
            raise TuneError(f"model {model}: a folder that cannot be read: {error.strerror}") from error
        named = f"; give a file in it: {', '.join(inside[:3])}" if inside else " without a GGUF file"
        raise TuneError(f"model {model}: a folder{named}{', …' if len(inside) > 3 else ''}")
    if not os.path.isfile(model):
        remote = "; give a local file, because tune does not download models" if "://" in model else ""
        raise TuneError(f"model {model}: the file does not exist{remote}")
    if not os.access(model, os.R_OK):
        raise TuneError(f"model {model}: you have no permission to read it")
