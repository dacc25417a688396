"""The files of `--pareto`: profiles of less memory, and a plot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dyno import profiles
from dyno.errors import ProfileError
from dyno.profiles.io import write_atomically

from ..core.errors import TuneError
from ..decide.pareto import FILES, Variant, plot, variant_outcome
from ..output.emit import Made, comments_of, profile_of
from ..output.pareto_page import pareto_page
from ..output.verdict import over_defaults
from ..space.memory_limits import gib

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ..core.protocol import Description
    from ..output.progress import Progress
    from .tune import Tune


def write_front(
    tune: Tune, variants: list[Variant], description: Description, made: Made, rates: dict[str, float],
    out: Path, written: Path, progress: Progress,
) -> Path | None:  # fmt: skip
    """Write a profile for each variant, and the plot, into a separate folder, because the runtime must not
    choose between them. Files of an earlier tune are moved aside, even if this tune has nothing to write.
    Returns the folder if this tune wrote something."""
    folder = out.with_name(out.stem + ".pareto")
    files: dict[str, bytes] = {}
    for v in variants:
        profile = profile_of(variant_outcome(tune, v), description, made, rates)
        faster = f"{v.overall.ratio:.2f} × {over_defaults(tune.options.objective)}."
        comments = comments_of(profile, f"{faster} The plan needs {gib(v.size)}.", searched=False)
        files[f"{v.name}.yaml"] = profiles.dumps_profile(profile, comments).encode()
    if variants:
        files["pareto.svg"] = plot(variants, description.label).encode()
        files["pareto.html"] = pareto_page(variants, description.label, made.workload).encode()
    try:
        _move_aside(folder, files, progress)
        for name, data in files.items():
            write_atomically(folder / name, data)
    except (OSError, ProfileError) as error:
        raise TuneError(f"{folder} cannot be written: {error}; the profile itself is in {written}") from error
    return folder if variants else None


def _move_aside(folder: Path, files: Mapping[str, bytes], progress: Progress) -> None:
    """Move aside all files of an earlier tune in `folder`. Only names that a tune writes are affected, and
    the content of these files is kept. Raises OSError."""
    earlier = [folder / name for name in FILES if (folder / name).is_file()]
    if all(files.get(p.name) == p.read_bytes() for p in earlier):
        return
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    aside.mkdir()
    for path in earlier:
        path.rename(aside / path.name)
    if not any(folder.iterdir()):
        folder.rmdir()
    progress.say(f"the --pareto profiles of an earlier run are kept in {aside}")
