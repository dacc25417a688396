"""`dyno experts`: which experts of a model a text uses most."""

from __future__ import annotations

import json
import sys
from pathlib import Path  # noqa: TC003 - typer reads annotations at run time
from typing import TYPE_CHECKING, Annotated

import typer

from dyno._cli import options, state

if TYPE_CHECKING:
    from dyno._expert_use import ExpertUse

_PARTS = (0.05, 0.1, 0.25, 0.5)


def experts(
    model_file: options.ModelFile = None,
    model: options.Model = None,
    text: Annotated[
        Path | None,
        typer.Option("--text", help="UTF-8 text to run; without it, the use on record is printed."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the text at most.")] = 16384,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the counts there, for Engine(expert_use=FILE)."),
    ] = None,
    json_: options.Json = False,
    device: options.Device = "auto",
    gpu: options.Gpu = None,
    set_: options.Set = None,
    verbose: state.Verbose = 0,
) -> None:
    """Count how often a text chooses each expert, and keep that for the setting expert_cache_mib."""
    state.verbosity(verbose)
    path = options.model_argument(model_file, model)
    from dyno import _core, _expert_use
    from dyno.errors import PlanError

    if text is None:
        use = _expert_use.remembered(_core.Gguf(str(path)))
        if use is None:
            raise PlanError(
                f"[experts] no use of the experts of {path} is on record; "
                f"`dyno experts {path} --text FILE` records it"
            )
        if output is not None:
            use.write(output)
    else:
        use = _recorded(path, text, tokens, options.device_argument(device, gpu), options.settings(set_))
        where = output or _expert_use.kept(use.model)
        if where is None:
            raise PlanError(
                "[experts] no home folder is known to keep the counts in; name a file by --output"
            )
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


def _recorded(path: Path, text: Path, most: int, device: str, settings: dict[str, object]) -> ExpertUse:
    from dyno import _core, _expert_use
    from dyno._progress import progress
    from dyno.engine import Engine

    with Engine(path, device, **{"ctx": 512, **settings}) as engine, progress("experts", 1) as advance:  # type: ignore[arg-type]
        state.print_choices(engine)
        tokens = engine.tokenizer.encode(text.read_text(encoding="utf-8"))[:most]
        counts = _expert_use.count(engine, tokens, int(engine.settings["ctx"]))
        advance(1, "")
    return _expert_use.ExpertUse(_expert_use.fingerprint(_core.Gguf(str(path))), len(tokens), counts)
