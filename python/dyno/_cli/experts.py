"""`dyno experts`: which experts of a model a text uses most."""

from __future__ import annotations

import json
import sys
from pathlib import Path  # noqa: TC003 - typer reads annotations at run time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dyno._cli import groups, options, state

if TYPE_CHECKING:
    from dyno import _core
    from dyno._expert_use import ExpertUse

_PARTS = (0.05, 0.1, 0.25, 0.5)
_TOKENS = 16384


@groups.grouped
def experts(
    model_file: options.ModelFile = None,
    model: options.Model = None,
    text: Annotated[
        Path | None,
        typer.Option("--text", help="UTF-8 text to run; without it, the use on record is printed."),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help=f"Tokens of the text at most. Default: {_TOKENS}.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the counts there, for Engine(expert_use=FILE)."),
    ] = None,
    json_: options.Json = False,
    *,
    session: groups.SessionOptions,
    opening: groups.EngineOptions,
    verbose: state.Verbose = 0,
) -> None:
    """Count how often a text chooses each expert. The counts are kept for the setting expert_cache_mib, or
    written to --output."""
    state.verbosity(verbose)
    path = options.model_argument(model_file, model)
    arguments = opening.arguments(**session.given())
    if text is None and (
        tokens is not None or session != groups.SessionOptions() or opening != groups.EngineOptions()
    ):
        raise typer.BadParameter("the other options are for a text that runs; give one", param_hint="--text")
    if arguments.get("layers"):
        raise typer.BadParameter(
            "layers cuts the model, and the counts are of all its layers", param_hint="--set"
        )
    from dyno import _core, _expert_use
    from dyno.errors import PlanError

    file = _core.Gguf(str(path))
    if not _core.describe_model(file)["experts"]:
        raise PlanError(f"[experts] {path} has no experts")
    if text is None:
        use = _expert_use.remembered(file)
        if use is None:
            raise PlanError(
                f"[experts] no use of the experts of {path} is on record; "
                f"`dyno experts {path} --text FILE` records it"
            )
        if output is not None:
            use.write(output)
    else:
        # First, so that no text runs in vain.
        where = output or _expert_use.kept(_expert_use.fingerprint(file))
        if where is None:
            raise PlanError(
                "[experts] no home folder is known to keep the counts in; name a file by --output"
            )
        use = _counted(path, file, text, tokens or _TOKENS, opening.device_name, arguments)
        use.write(where)
        print(f"kept in {where}", file=sys.stderr)
    if json_:
        print(json.dumps({"model": use.model, "tokens": use.tokens, "counts": use.counts.tolist()}))
        return
    layers, count = use.counts.shape
    print(f"{use.tokens} tokens, {layers} layers with {count} experts each")
    for part in _PARTS:
        share = 100 * use.share_of(part)
        print(f"the most used {100 * part:.0f} % of the experts are {share:.1f} % of the choices")


def _counted(
    path: Path, file: _core.Gguf, text: Path, most: int, device: str, arguments: dict[str, Any]
) -> ExpertUse:
    from dyno import _expert_use
    from dyno._progress import progress
    from dyno.engine import Engine

    with Engine(path, device, **{"ctx": 512, **arguments}) as engine:
        state.print_choices(engine)
        tokens = _expert_use.first_tokens(engine.tokenizer, text, most)
        with progress("experts", len(tokens)) as advance:
            counts = _expert_use.count(
                engine, tokens, int(engine.settings["ctx"]), lambda done: advance(done, "")
            )
    return _expert_use.ExpertUse(_expert_use.fingerprint(file), len(tokens), counts)
