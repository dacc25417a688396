"""The command `tune ab`."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from dyno import _core

from ..check import ROUNDING_FACTOR, ROUNDING_FLOOR
from ..errors import TuneError
from ..target import Workload
from .compare import SLOWER, Options, compare
from .render import markdown, to_dict
from .run import Answers, Run, Side  # noqa: TC001  (typer reads annotations when the command runs)
from .sides import Given, make_side

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

SLOWER_CODE, CHANGED_CODE = 3, 4


def ab(
    a: Annotated[
        str,
        typer.Argument(metavar="A", help="Profile, folder of llama-bench, build or commit, or `default`."),
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="The same; B is compared with A.")],
    flags: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- FLAGS]", help="Of llama-server, for the binaries of both sides."),
    ] = None,
    model: Annotated[str, typer.Option("--model", "-m", help="GGUF file.")] = ...,  # type: ignore[assignment]
    device: Annotated[str, typer.Option(help="cpu or cuda:N.")] = "cpu",
    gpu: Annotated[int | None, typer.Option(help="The same as --device cuda:N.", min=0, max=999)] = None,
    workload: Annotated[
        str | None,
        typer.Option(
            help="What is measured, as in tune: chat, rag or tokens; "
            "default pp=512,tg=64, on a GPU pp=4096,tg=128."
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(help="ABBA rounds of four processes each.", min=2, max=1000)] = 6,
    budget: Annotated[
        str | None, typer.Option(help="Begin no round that would end later: 90s, 3m, 1h.")
    ] = None,
    least: Annotated[
        float, typer.Option(help="A smaller difference is none, however sure.", min=0.0, max=1.0)
    ] = 0.01,
    flags_a: Annotated[str, typer.Option(help="Further flags of A's binaries, as one word.")] = "",
    flags_b: Annotated[str, typer.Option(help="Further flags of B's binaries, as one word.")] = "",
    profile_a: Annotated[Path | None, typer.Option(help="Profile for a build or commit A.")] = None,
    profile_b: Annotated[Path | None, typer.Option(help="Profile for a build or commit B.")] = None,
    hold: Annotated[
        list[str] | None, typer.Option("--set", help="Setting of dyno on both sides: NAME=VALUE.")
    ] = None,
    binaries: Annotated[
        Path | None, typer.Option("--bin", help="Folder of binaries, for profiles of other engines.")
    ] = None,
    repository: Annotated[
        Path | None, typer.Option("--repo", help="Where commits are looked up; default: the current folder.")
    ] = None,
    defines: Annotated[
        list[str] | None, typer.Option("--define", "-D", help="Of CMake, for commits: GGML_CUDA=ON.")
    ] = None,
    text: Annotated[Path | None, typer.Option(help="Text that llama-perplexity compares on.")] = None,
    check: Annotated[bool, typer.Option("--answers/--no-answers", help="Compare the answers too.")] = True,
    allow: Annotated[
        float, typer.Option("--allow-approx", help="Mean KLD (nats) that B's answers may have.", min=0.0)
    ] = 0.0,
    deadline: Annotated[float, typer.Option(help="Seconds that one process may take.", min=1.0)] = 600.0,
    log: Annotated[
        Path | None, typer.Option(help="Keep here what other engines' binaries say on standard error.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the interval.", min=0)] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the table here, too.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Compare two profiles, builds, commits or engines: A B B A, a fresh process each, answers too.

    Exit codes: 0 B is slower in nothing and answers as A does; 1 an error; 2 wrong usage; 3 B is slower;
    4 B's answers are not as near (whatever its speed); 130 interrupted."""
    from ..cli import _held, parse_duration

    def say(line: str) -> None:
        if not quiet:
            print(line, file=sys.stderr, flush=True)

    if not os.path.isfile(model):
        raise TuneError(f"model {model}: no such file")
    number = _gpu(device, gpu)
    usual = Workload(pp=512, tg=64) if number is None else Workload(pp=4096, tg=128)
    parsed = Workload.parse(workload, usual) if workload is not None else usual
    with contextlib.ExitStack() as stack:
        said = log or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dyno-ab-"))) / "stderr.log"
        given = Given(
            os.path.abspath(model), number, str(text.absolute()) if text else None, deadline,
            str(said.absolute()), binaries, repository or Path.cwd(), defines or (), flags or (),
            _held(hold or [], "dyno"),
        )  # fmt: skip
        sides: dict[str, Side] = {}
        for name, word, own, profile in (("A", a, flags_a, profile_a), ("B", b, flags_b, profile_b)):
            sides[name] = make_side(name, word, given, own, say, profile)
            stack.callback(sides[name].close)

        def measure(name: str) -> Run:
            return sides[name].run(parsed)

        options = Options(parsed, rounds, parse_duration(budget) if budget else None, least, seed)
        answers, changed = _answers(sides, allow, say) if check else (None, "")
        result = compare(measure, options, say)
    facts: dict[str, Any] = {
        "a": sides["A"].facts, "b": sides["B"].facts, "model": os.path.basename(model),
        "device": str(_core.cpu_info()["name"]) if given.gpu is None else f"GPU {given.gpu}",
        "workload": str(parsed), "command": shlex.join(["tune", *sys.argv[1:]]),
    }  # fmt: skip
    table = markdown(result, answers, facts, changed)
    if out is not None:
        out.write_text(table + "\n", encoding="utf-8")
    print(json.dumps(to_dict(result, answers, facts)) if as_json else table)
    if result.interrupted:
        raise typer.Exit(130)
    if changed:
        raise typer.Exit(CHANGED_CODE)
    if any(m.verdict == SLOWER for m in result.metrics.values()):
        raise typer.Exit(SLOWER_CODE)


def _gpu(device: str, gpu: int | None) -> int | None:
    if device.startswith("cuda:") and device[5:].isascii() and device[5:].isdigit():
        number = int(device[5:])
        if gpu is not None and gpu != number:
            raise typer.BadParameter(f"--gpu {gpu} and --device {device} contradict each other")
        return number
    if device != "cpu":
        raise typer.BadParameter(f"--device {device!r}: give cpu or cuda:N")
    return gpu


def _answers(
    sides: Mapping[str, Side], allow: float, say: Callable[[str], None]
) -> tuple[tuple[Answers, Answers] | None, str]:
    """Both sides against A's most exact path, and why B is not as near. Engines of two kinds are each held
    against their own: how far their most exact paths are apart is no matter of the settings compared."""
    alike = len({side.kind for side in sides.values()}) == 1
    with tempfile.TemporaryDirectory(prefix="dyno-ab-") as folder:
        say("comparing answers")
        found = []
        for name in "AB":
            place = Path(folder) if alike else Path(folder) / name
            place.mkdir(exist_ok=True)
            found.append(sides[name].answers(place, first=name == "A" or not alike))
    if found[0] is None or found[1] is None:
        lacking = "A" if found[0] is None else "B"
        say(f"answers are not compared: side {lacking} has no llama-perplexity, or the model no vocabulary")
        return None, ""
    limit = max(ROUNDING_FACTOR * found[0].mean_kld + ROUNDING_FLOOR, allow)
    # Written so that a KLD which is not a number fails.
    near = found[1].mean_kld <= limit
    return (found[0], found[1]), "" if near or not alike else f"answers changed: allowed is {limit:.3g}"
