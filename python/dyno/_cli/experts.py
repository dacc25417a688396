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
        typer.Option("--text", help="UTF-8 text to run. Without it, the recorded counts are printed."),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help=f"Maximum number of tokens to run. Default: {_TOKENS}.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the counts to this file, for Engine(expert_use=FILE)."),
    ] = None,
    json_: options.Json = False,
    *,
    session: groups.SessionOptions,
    opening: groups.EngineOptions,
    verbose: state.Verbose = 0,
) -> None:
    """Count how often the router chooses each expert while a text runs.

    The counts are saved for the setting expert_cache_mib, or written to the file of --output."""
    state.verbosity(verbose)
    path = options.model_argument(model_file, model)
    arguments = opening.arguments(**session.given())
    if text is None and (
        tokens is not None or session != groups.SessionOptions() or opening != groups.EngineOptions()
    ):
        raise typer.BadParameter(
            "is missing; the other options apply only if a text runs", param_hint="--text"
        )
    if arguments.get("layers"):
        raise typer.BadParameter(
            "layers shortens the model, but the counts cover all its layers; omit it", param_hint="--set"
        )
    from dyno import _core, _expert_use
    from dyno.errors import PlanError

    file = _core.Gguf(str(path))
    if not _core.describe_model(file)["experts"]:
        raise PlanError(f"[experts] {path} is not a mixture of experts, so there is nothing to count")
    if text is None:
        use = _expert_use.remembered(file)
        if use is None:
            raise PlanError(
                f"[experts] there are no recorded counts for {path}; "
                f"to record them, run `dyno experts {path} --text FILE`"
            )
        if output is not None:
            use.write(output)
    else:
        # Check the file first, before a long run.
        where = output or _expert_use.kept(_expert_use.fingerprint(file))
        if where is None:
            raise PlanError(
                "[experts] there is no home folder to save the counts in; give a file with --output"
            )
        use = _counted(path, file, text, tokens or _TOKENS, opening.device_name, arguments)
        use.write(where)
        print(f"counts saved in {where}", file=sys.stderr)
    if json_:
        print(json.dumps({"model": use.model, "tokens": use.tokens, "counts": use.counts.tolist()}))
        return
    layers, count = use.counts.shape
    print(f"{use.tokens} tokens, {layers} layers with {count} experts each")
    for part in _PARTS:
        share = 100 * use.share_of(part)
        print(f"the most used {100 * part:.0f} % of the experts account for {share:.1f} % of the choices")


def _counted(
    path: Path, file: _core.Gguf, text: Path, most: int, device: str, arguments: dict[str, Any]
) -> ExpertUse:
    from dyno import _expert_use
    from dyno._progress import progress
    from dyno.engine import Engine

    # Before a large model loads, so that a missing file is an error at once; only once, as it may be a pipe.
    with text.open(encoding="utf-8") as stream, Engine(path, device, **{"ctx": 512, **arguments}) as engine:
        state.print_choices(engine)
        tokens = _expert_use.first_tokens(engine.tokenizer, stream, most)
        with progress("experts", len(tokens)) as advance:
            counts = _expert_use.count(
                engine, tokens, int(engine.settings["ctx"]), lambda done: advance(done, "")
            )
    return _expert_use.ExpertUse(_expert_use.fingerprint(file), len(tokens), counts)
