"""`dyno profiles export` for a profile of dyno itself: the text that starts `dyno serve` with it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from typing import TYPE_CHECKING

from ..core.errors import TuneError
from ..core.recorded_command import held_pairs, recorded, values_of
from ..core.redaction import HIDDEN, redact_words
from ..targets.ggml import deployment
from ..targets.ggml.export import unit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from dyno import profiles

__all__ = ["FORMS", "export"]

FORMS = ("dyno-serve", "systemd", "compose", "helm-values")
_FOREIGN = {
    "llama-server": "llama-server does not read it",
    "models.ini": "llama-server does not read it",
    "env": "dyno serve reads no settings from the environment",
}
_PLACED = ("--model", "-m", "--profile", "--no-profile")


def export(
    profile: profiles.Profile, file: Path, form: str, *, model: str, command: Sequence[str] = (),
    tell: Callable[[str], None] = lambda _: None,
) -> str:  # fmt: skip
    """The text that starts `dyno serve` with a profile.

    Args:
        profile: The profile.
        file: Its file, which the server reads.
        form: One of `FORMS`.
        model: Path of the model.
        command: Further words for `dyno serve`, such as its port.
        tell: Called with a line about each thing that the text cannot hold.

    Raises:
        TuneError: The form or a word does not fit a profile of dyno.
    """
    if form not in FORMS:
        why = f", and {_FOREIGN[form]}" if form in _FOREIGN else ""
        raise TuneError(f"--as {form!r}: this is a profile of dyno itself{why}; give {', '.join(FORMS)}")
    own = list(command)
    for word in ("dyno", "serve"):
        if own[:1] == [word]:
            own = own[1:]
    if own and not own[0].startswith("-"):
        raise TuneError(f"{own[0]!r} after -- would be a second model; give the model with --model before --")
    if placed := next((word for word in own if word.partition("=")[0] in _PLACED), None):
        raise TuneError(f"{placed} after -- contradicts the profile; give the model with --model before --")
    hidden = redact_words(own)
    if hidden != own:
        tell(f"secrets of the command line are written as {HIDDEN}; insert them where the server runs")
    place, source = os.path.abspath(model), os.path.abspath(file)
    gpu = _gpu(profile)
    inside = form in ("compose", "helm-values")
    words = [*_program(), "serve", place, "--profile", source, *_same(profile)]
    chosen = any(word.partition("=")[0] in ("--device", "--gpu") for word in own)
    if gpu is not None and not inside and not chosen:  # a container shows only its GPU, as number 0
        words += ["--device", f"cuda:{gpu}"]
    words += hidden
    if inside and not any(word.partition("=")[0] == "--host" for word in own):
        tell("without --host, the server listens inside its container only; give -- --host 0.0.0.0")
    env = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
    if form == "compose":
        image = "${DYNO_IMAGE:?name an image whose entry point is dyno, such as of deploy/Dockerfile}"
        words = ["dyno", *words[len(_program()) :]]
        return deployment.compose(words, env, profile, (place, source), tell, name="dyno", image=image)
    if form == "helm-values":
        words = ["dyno", *words[len(_program()) :]]
        return deployment.helm_values(words, env, profile, {"model": place, "profile": source}, tell)
    return unit(words, {}, profile) if form == "systemd" else shlex.join(words) + "\n"


def _program() -> list[str]:
    """The words that start dyno on this machine. systemd needs an absolute path."""
    beside = os.path.join(os.path.dirname(sys.executable), "dyno")
    found = beside if os.access(beside, os.X_OK) else shutil.which("dyno")
    return [os.path.abspath(found)] if found else [sys.executable, "-P", "-m", "dyno"]


def _gpu(profile: profiles.Profile) -> str | None:
    """Number of the tuned GPU; None for a CPU, or if the command that made the profile names none."""
    words, _ = recorded(profile)
    named = [*values_of(words, "--gpu"), *values_of(words, "--device")]
    number = re.fullmatch(r"(?:cuda:)?([0-9]{1,4})", named[0]) if named else None
    return number[1] if number and profile.match.device.kind == "cuda" else None


def _same(profile: profiles.Profile) -> list[str]:
    """The memory limits, the virtual devices and the fixed settings of the tune."""
    words, _ = recorded(profile)
    found: list[str] = []
    for name, others in (
        ("--virtual-device", ("--virtual-devices",)), ("--vram", ()), ("--ram", ()),
    ):  # fmt: skip
        found += [word for value in values_of(words, name, *others) for word in (name, value)]
    device = next(iter(values_of(words, "--device")), "")
    if device.startswith("cpu"):
        found = ["--device", device, *found]
    return [*found, *(word for pair in held_pairs(profile) for word in ("--set", pair))]
