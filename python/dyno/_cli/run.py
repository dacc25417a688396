"""`dyno run`: text that continues a prompt."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path  # noqa: TC003 - typer reads annotations at run time
from typing import TYPE_CHECKING, Annotated

import typer

from dyno._cli import options, state

if TYPE_CHECKING:
    from dyno.engine import Engine


def run(
    model_file: options.ModelFile = None,
    model: options.Model = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="Text to continue; - reads stdin.")
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read the prompt from a file.")] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens", "--n-predict", "-n", help="Tokens at most; -1: to the end of the context."
        ),
    ] = 128,
    temperature: Annotated[
        float, typer.Option("--temperature", "--temp", help="0: the most probable token every time.")
    ] = 0.0,
    top_k: Annotated[int, typer.Option(help="Among the k most probable tokens; 0: all.")] = 40,
    top_p: Annotated[
        float, typer.Option(help="Among the tokens that together reach this probability.")
    ] = 0.95,
    min_p: Annotated[float, typer.Option(help="Among tokens this probable relative to the best.")] = 0.05,
    seed: Annotated[
        int | None, typer.Option("--seed", "-s", help="The same seed draws the same text.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End at this text; may be given several times.")
    ] = None,
    special: Annotated[
        bool,
        typer.Option(
            "--special/--no-special",
            help="Read names of control tokens in the prompt as these tokens; --no-special: as text.",
        ),
    ] = True,
    echo: Annotated[bool, typer.Option(help="Print the prompt before its continuation.")] = True,
    device: options.Device = "auto",
    gpu: options.Gpu = None,
    profile: options.ProfileFile = None,
    no_profile: options.NoProfile = False,
    require_profile: options.RequireProfile = False,
    force_profile: options.ForceProfile = False,
    ctx: options.Ctx = None,
    ubatch: options.Ubatch = None,
    threads: options.Threads = None,
    threads_batch: options.ThreadsBatch = None,
    kv_type_k: options.KvTypeK = None,
    kv_type_v: options.KvTypeV = None,
    set_: options.Set = None,
    verbose: state.Verbose = 0,
) -> None:
    """Continue a prompt. Text goes to stdout, everything else to stderr."""
    state.verbosity(verbose)
    model = options.model_argument(model_file, model)
    if max_tokens is not None and max_tokens < -1:
        raise typer.BadParameter(
            f"{max_tokens} is no number of tokens; -1 goes on to the end of the context", param_hint="-n"
        )
    if (prompt is None) == (file is None):
        raise typer.BadParameter("give either --prompt or --file", param_hint="--prompt")
    arguments = options.settings(
        set_,
        ctx=ctx,
        ubatch=ubatch,
        threads=threads,
        threads_batch=threads_batch,
        kv_type_k=kv_type_k,
        kv_type_v=kv_type_v,
    )
    chosen = options.profile_argument(profile, no_profile, require_profile, force_profile)
    text = _prompt(prompt, file)

    from dyno.engine import Engine

    with Engine(model, options.device_argument(device, gpu), **chosen, **arguments) as engine:
        state.print_choices(engine)
        _warn_of_threads(engine)
        if has_chat_template(model):
            print("chat template: not applied, the prompt is completed as raw text", file=sys.stderr)
        tokens = engine.tokenizer.encode(text, parse_special=special)
        limit = None if max_tokens is None or max_tokens < 0 else max_tokens
        sampling = (temperature, top_k, top_p, min_p, seed)
        pieces = engine.generate(tokens, limit, *sampling, stop or (), slot=0)  # whose position is read below
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="replace")  # a terminal that can't show a character shows a mark
        if echo:
            sys.stdout.write(text)
            sys.stdout.flush()
        start = first = time.perf_counter()
        for number, piece in enumerate(pieces):
            if number == 0:
                first = time.perf_counter()
            sys.stdout.write(piece)
            sys.stdout.flush()
        sys.stdout.write("\n")
        sys.stdout.flush()
        if verbose or sys.stderr.isatty():
            _print_timing(engine, len(tokens), first - start, time.perf_counter() - first)


def has_chat_template(model: Path) -> bool:
    """Whether the file holds a chat template, which `dyno run` does not apply."""
    from dyno import _core

    return bool(_core.Gguf(str(model)).get("tokenizer.chat_template"))


def _warn_of_threads(engine: Engine) -> None:
    """One line for more threads than cores; they wait for each other at every step."""
    from dyno._effective import usable_cores

    cores = usable_cores()
    for name in ("threads", "threads_batch"):
        if engine.device == "cpu" and (wanted := int(engine.settings[name])) > cores:
            logging.getLogger("dyno.cli").warning(
                "%s=%d is more than the %d cores that this process may use, which is slower",
                name,
                wanted,
                cores,
            )


def _prompt(prompt: str | None, file: Path | None) -> str:
    if file is not None:
        return file.read_text(encoding="utf-8")
    assert prompt is not None  # checked by the caller
    return sys.stdin.read() if prompt == "-" else prompt


def _print_timing(engine: Engine, n_prompt: int, prompt_s: float, rest_s: float) -> None:
    drawn = engine.position() - n_prompt  # tokens that followed the first one
    parts = [f"prompt {n_prompt} tokens"]
    if prompt_s > 0:
        parts.append(f"first text after {prompt_s:.2f} s")
    if drawn > 0 and rest_s > 0:
        parts.append(f"then {drawn} tokens in {rest_s:.2f} s ({drawn / rest_s:.1f} t/s)")
    print(" · ".join(parts), file=sys.stderr)
