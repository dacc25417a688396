"""The command `tune ab`."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from dyno import _core

from ..ab.answers import compare_answers
from ..ab.compare import SLOWER, Compared, Options, TooEarly, compare
from ..ab.dyno_side import gpu_bus
from ..ab.render import markdown, to_dict
from ..ab.run import watched
from ..ab.sides import DYNO, FOREIGN, Given, Kind, kind_of, make_side
from ..core.errors import DisturbedError, TuneError
from ..core.model_file import check_model
from ..core.protocol import Workload
from ..decide.answer_check import rounding_limit
from ..measure.machine_monitor import PATIENCE, Careful, Machine
from . import options as o  # noqa: TC001  (typer reads annotations when the command runs)
from .arguments import (
    check_writable,
    command_line,
    device_names,
    gpu_number,
    held_settings,
    parse_duration,
    teller,
    usage,
    workload_of,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from ..ab.run import Side

SLOWER_CODE, CHANGED_CODE = 3, 4


def ab(
    a: o.SideA,
    b: o.SideB,
    flags: o.Flags = None,
    model: Annotated[str, typer.Option("--model", "-m", help="GGUF file.")] = ...,  # type: ignore[assignment]
    device: o.Device = "auto",
    gpu: o.OneGpu = None,
    workload: o.MeasuredWorkload = None,
    rounds: o.Rounds = 6,
    budget: o.RoundsBudget = None,
    least: o.Least = 0.01,
    flags_a: o.FlagsA = "",
    flags_b: o.FlagsB = "",
    profile_a: o.ProfileA = None,
    profile_b: o.ProfileB = None,
    force: o.ForceBeside = False,
    force_profile: o.ForceProfile = False,
    hold: o.HeldInAll = None,
    binaries: o.Binaries = None,
    repository: o.Repository = None,
    defines: o.Defines = None,
    text: o.AnswersText = None,
    check: o.Check = True,
    allow: o.Allow = 0.0,
    deadline: o.Deadline = 600.0,
    log: o.Log = None,
    seed: Annotated[int, typer.Option(help="Random seed of the confidence intervals.", min=0)] = 0,
    out: o.TableOut = None,
    as_json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Compare two profiles, builds, commits or engines, by speed and by answers.

    Each round runs A, B, B, A, each in a new process. Exit codes: 0 B is not slower in any metric, and its
    answers are as good as those that A gives; 1 an error; 2 wrong usage; 3 B is slower; 4 the answers of B
    are worse, at any speed; 130 interrupted."""

    say = teller(quiet=quiet)
    seconds, held = parse_duration(budget) if budget else None, held_settings(hold or [], "dyno")
    if workload is not None:
        usage(Workload.parse, workload)
    device_names(device, None if gpu is None else str(gpu))
    kinds = [kind_of(a), kind_of(b)]
    words = f"-- FLAGS ({' '.join(flags or [])})"  # a misplaced word counts as a flag
    for option, value, takers, over in (
        (words, flags, FOREIGN, kinds), ("--text", text, FOREIGN, kinds), ("--log", log, FOREIGN, kinds),
        ("--bin", binaries, {Kind.FOREIGN_PROFILE}, kinds), ("--set", hold, DYNO, kinds),
        ("--force-profile", force_profile, DYNO, kinds),
        ("--define", defines, {Kind.COMMIT}, kinds), ("--repo", repository, {Kind.COMMIT}, kinds),
        ("--flags-a", flags_a, FOREIGN, kinds[:1]), ("--flags-b", flags_b, FOREIGN, kinds[1:]),
        ("--profile-a", profile_a, {Kind.BUILD, Kind.COMMIT}, kinds[:1]),
        ("--profile-b", profile_b, {Kind.BUILD, Kind.COMMIT}, kinds[1:]),
    ):  # fmt: skip
        if value:
            _check_taken(option, takers, over)
    check_model(model)
    if out is not None:
        check_writable("--out", out)
    number = gpu_number(device, gpu, foreign=FOREIGN.issuperset(kinds))
    parsed = workload_of(workload, "cpu" if number is None else f"cuda:{number}")
    options = Options(parsed, rounds, seconds, least, seed)
    with contextlib.ExitStack() as stack:
        said = log or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dyno-ab-"))) / "stderr.log"
        given = Given(
            os.path.abspath(model), number, str(text.absolute()) if text else None, deadline,
            str(said.absolute()), binaries, repository or Path.cwd(), defines or (), flags or (),
            held, force_profile,
        )  # fmt: skip
        sides: dict[str, Side] = {}
        for name, word, own, profile in (("A", a, flags_a, profile_a), ("B", b, flags_b, profile_b)):
            sides[name] = make_side(name, word, given, own, say, profile)
            stack.callback(sides[name].close)
        answers, changed = (
            compare_answers(sides, lambda kld: max(rounding_limit(kld), allow), say) if check else (None, "")
        )
        # A side may keep weights in host memory on purpose: by its flags, its profile or the engine's
        # defaults.
        watch = stack.enter_context(Machine(gpu_bus(number), host_weights=True))
        careful = Careful(
            watch, lambda kind, **data: say(str(data["message"])), lambda seen: None, time.sleep,
            None if force else PATIENCE,
        )  # fmt: skip
        try:
            result = compare(lambda name: watched("ab", sides[name], parsed, careful), options, say)
        except DisturbedError as error:
            raise TuneError(
                f"{error}. Stop these programs and compare again, or compare beside them with --force"
            ) from error
        except TooEarly as error:
            print(f"tune: {error}", file=sys.stderr)
            raise typer.Exit(130) from error
    facts: dict[str, Any] = {
        "a": sides["A"].facts, "b": sides["B"].facts, "model": os.path.basename(model),
        "device": str(_core.cpu_info()["name"]) if number is None else f"GPU {number}",
        "workload": str(parsed), "command": command_line(),
        "machine": careful.conditions.to_dict(),
    }  # fmt: skip
    table = markdown(result, answers, facts, changed)
    print(json.dumps(to_dict(result, answers, facts)) if as_json else table, flush=True)
    if out is not None:
        out.write_text(table + "\n", encoding="utf-8")
    if code := exit_code(result, changed):
        raise typer.Exit(code)


def _check_taken(option: str, takers: Collection[Kind], sides: Sequence[Kind]) -> None:
    """Raises typer.BadParameter if no side uses an option, which would then be ignored."""
    if not any(side in takers for side in sides):
        goes = " or ".join(sorted(kind.value for kind in takers))
        found = " and ".join(dict.fromkeys(side.value for side in sides))
        raise typer.BadParameter(f"{option} works only with {goes}, but the sides are {found}")


def exit_code(result: Compared, changed: str) -> int:
    """The exit code of a comparison.

    Args: `changed`: the reason why B's answers are less close than A's; "" if they are not."""
    if result.interrupted:
        return 130
    if changed:
        return CHANGED_CODE
    return SLOWER_CODE if any(m.verdict == SLOWER for m in result.metrics.values()) else 0
