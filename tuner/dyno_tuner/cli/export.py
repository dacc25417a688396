"""`dyno profiles export`: the command line, environment or unit that runs a profile of another engine."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from dyno import profiles
from dyno._shell import escaped
from dyno.errors import ProfileError

from ..core.errors import TargetFailure, TuneError
from ..targets import declared
from ..targets.ggml import export as ggml_export
from . import own_export

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def export(
    file: Path, command: Sequence[str] | None, form: str | None, binaries: str | None, model: str | None
) -> str:
    """Export the profile as text in a form.

    Args:
        command: The user's own command line; None: the one that the tune started from.
        form: None: a command line.
        binaries: Folder with llama-server; None: the one that the profile names.
        model: GGUF file; None: the tuned one.

    Raises:
        ProfileError: The profile cannot be exported, or the binaries of the engine do not answer.
    """
    profile = profiles.load_profile(file)
    _, tuned, own = ggml_export.tuned_with(profile)
    tuned = model or tuned
    if not tuned:
        raise ProfileError(f"{file} does not name its model; give it with --model FILE")

    def tell(line: str) -> None:
        print(escaped(line), file=sys.stderr)

    try:
        if not declared(profile.match.engine.name).foreign:
            if binaries is not None:
                raise TuneError("--bin is for profiles of llama.cpp and ik_llama.cpp; this is one of dyno")
            if not os.path.isfile(tuned):
                place = os.path.abspath(tuned)
                tell(f"{place} does not exist here; give the model of the server with --model FILE")
            return own_export.export(
                profile, file, form or "dyno-serve", model=tuned, command=command or (), tell=tell
            )
        folder = ggml_export.binaries_folder(file, profile, binaries)
        return ggml_export.export(
            profile, form or "llama-server", binaries=folder, model=tuned,
            command=list(command) if command else own, tell=tell,
        )  # fmt: skip
    except (TuneError, TargetFailure) as error:
        raise ProfileError(str(error)) from error
