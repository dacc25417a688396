"""`dyno run`: text that continues a prompt."""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path  # noqa: TC003 - typer reads annotations at run time
from typing import TYPE_CHECKING, Annotated

import typer

from dyno._cli import drawing, groups, options, state

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dyno.chat import Reply
    from dyno.engine import Engine


@groups.grouped
def run(
    model_file: options.ModelFile = None,
    model: options.Model = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="Text to continue. -: read it from standard input.")
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read the prompt from a file.")] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            "--n-predict",
            "-n",
            help="Maximum number of tokens to generate. -1: up to the end of the context.",
        ),
    ] = 128,
    temperature: Annotated[
        float,
        typer.Option(
            "--temperature", "--temp", help="Sampling temperature. 0: always take the most probable token."
        ),
    ] = 0.0,
    *,
    draws: drawing.DrawingOptions,
    json_schema: drawing.JsonSchema = None,
    json_schema_file: drawing.JsonSchemaFile = None,
    grammar: drawing.GrammarText = None,
    grammar_file: drawing.GrammarFile = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            rich_help_panel=drawing.CHAT,
            help="Send the prompt as a chat message and print the answer.",
        ),
    ] = False,
    system: drawing.System = None,
    chat_template: drawing.ChatTemplateName = None,
    chat_template_kwargs: drawing.TemplateVariables = None,
    tools: drawing.Tools = None,
    special: Annotated[
        bool,
        typer.Option(
            "--special/--no-special",
            help="Parse the names of control tokens in the prompt as control tokens, or as plain text.",
        ),
    ] = True,
    echo: Annotated[bool, typer.Option(help="Print the prompt before its continuation.")] = True,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos", help="Continue after the end-of-text token, up to --max-tokens. Not with --chat."
        ),
    ] = False,
    ctx: options.Ctx = None,
    session: groups.SessionOptions,
    opening: groups.EngineOptions,
    verbose: state.Verbose = 0,
) -> None:
    """Continue a prompt, or answer it with --chat. The generated text goes to standard output, and everything
    else to standard error."""
    state.verbosity(verbose)
    model = options.model_argument(model_file, model)
    if max_tokens is not None and max_tokens < -1:
        raise typer.BadParameter(
            f"{max_tokens} is not a valid number of tokens; give 1 or more, or -1 for the whole context",
            param_hint="-n",
        )
    if (prompt is None) == (file is None):
        twice = "--prompt and --file both give a prompt; give one of them"
        raise typer.BadParameter(
            twice
            if prompt is not None
            else "no prompt was given; give -p TEXT, -f FILE, or -p - for standard input; "
            "`dyno chat` is for conversations",
            param_hint="--prompt",
        )
    arguments = opening.arguments(ctx=options.ctx_argument(ctx, model), **session.given())
    of_chat = {
        "-sys/--system": system,
        "--chat-template": chat_template,
        "--chat-template-kwargs": chat_template_kwargs,
        "--tools": tools,
    }
    if not chat and (given := [name for name, value in of_chat.items() if value is not None]):
        raise typer.BadParameter("works only with --chat", param_hint=", ".join(given))
    if chat and ignore_eos:
        raise typer.BadParameter("an answer ends at this token; leave out --chat", param_hint="--ignore-eos")
    sampling = draws.settings(temperature) | drawing.rules(
        json_schema, json_schema_file, grammar, grammar_file
    )
    variables = drawing.template_variables(chat_template_kwargs)
    offered = drawing.tool_definitions(tools)
    text = _prompt(prompt, file)
    if sys.stdout is None:
        raise OSError("standard output is closed, so the text cannot be printed; use > FILE")
    if not text and not chat:
        _check_empty(model, "--prompt" if file is None else "--file")

    from dyno.engine import Engine

    with Engine(model, opening.device_name, **arguments) as engine:
        state.print_choices(engine)
        _warn_of_threads(engine)
        limit = None if max_tokens is None or max_tokens < 0 else max_tokens
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="replace")  # a terminal shows `?` for characters that it lacks
        if chat:
            reply = engine.chat(
                messages(system, text),
                tools=offered,
                template=chat_template,
                variables=variables,
                max_tokens=limit,
                stop=draws.stop or (),
                slot=0,
                **sampling,
            )
            tokens, pieces = reply.prompt, shown(reply)
        else:
            if has_chat_template(model):
                print(
                    "chat template: not applied; the prompt is continued as raw text (use --chat to "
                    "apply it)",
                    file=sys.stderr,
                )
            tokens = engine.tokenizer.encode(text, parse_special=special)
            # Use slot 0, because its position is read below.
            pieces = engine.generate(
                tokens, limit, stop=draws.stop or (), slot=0, ignore_end=ignore_eos, **sampling
            )
            if echo:
                sys.stdout.write(text)
                sys.stdout.flush()
        start = first = time.perf_counter()
        try:
            for number, piece in enumerate(pieces):
                if number == 0:
                    first = time.perf_counter()
                sys.stdout.write(piece)
                sys.stdout.flush()
        finally:  # so that an error message begins a new line
            sys.stdout.write("\n")
            sys.stdout.flush()
        if verbose or sys.stderr.isatty():
            _print_timing(engine, len(tokens), first - start, time.perf_counter() - first)


def messages(system: str | None, text: str) -> list[dict[str, str]]:
    """A list of the system message, if there is one, and one user message."""
    before = [] if system is None else [{"role": "system", "content": system}]
    return [*before, {"role": "user", "content": text}]


def shown(reply: Reply) -> Iterator[str]:
    """The content of a reply, then each tool call as a line of JSON. Its reasoning is printed to stderr."""
    for part in reply:
        if part.reasoning:
            sys.stderr.write(part.reasoning)
            sys.stderr.flush()
        if part.tool_call is not None:
            begin = "\n" if reply.answer.content or len(reply.answer.tool_calls) > 1 else ""
            yield begin + json.dumps(part.tool_call.to_dict(), ensure_ascii=False)
        else:
            yield part.content
    if reply.answer.reasoning:
        sys.stderr.write("\n")


def has_chat_template(model: Path) -> bool:
    """Whether the file holds a chat template. `dyno run` applies it with --chat only."""
    from dyno import _core

    return bool(_core.Gguf(str(model)).get("tokenizer.chat_template"))


def _warn_of_threads(engine: Engine) -> None:
    """Warn about more threads than cores, because threads wait for each other at each step."""
    from dyno._effective import usable_cores

    cores = usable_cores()
    for name in ("threads", "threads_batch"):
        if engine.device == "cpu" and (wanted := int(engine.settings[name])) > cores:
            logging.getLogger("dyno.cli").warning(
                "%s=%d is more than the %d cores that this process may use, which makes it slower",
                name,
                wanted,
                cores,
            )


def _prompt(prompt: str | None, file: Path | None) -> str:
    if file is not None:
        return options.text_of(file)
    assert prompt is not None  # checked by the caller
    if prompt == "-":
        return options.text_of_stdin()
    if "\\n" in prompt and "\n" not in prompt:  # llama.cpp replaces it by default
        logging.getLogger("dyno.cli").warning(
            "the prompt has a backslash and an n, and no line break; if you mean a line break, let the shell "
            "write it: -p $'a\\nb'"
        )
    return prompt


def _check_empty(model: Path, option: str) -> None:
    """Refuse an empty prompt, unless the tokenizer adds a BOS token. This reads no weights.

    Raises:
        typer.BadParameter: The prompt has no tokens.
    """
    from dyno.tokenizer import Tokenizer

    if not Tokenizer.from_gguf(model).encode(""):
        raise typer.BadParameter("the prompt is empty; give a text to continue", param_hint=option)


def _print_timing(engine: Engine, n_prompt: int, prompt_s: float, rest_s: float) -> None:
    drawn = engine.position() - n_prompt  # tokens after the first one
    parts = [f"prompt {n_prompt} tokens"]
    if prompt_s > 0:
        parts.append(f"first text after {prompt_s:.2f} s")
    if drawn > 0 and rest_s > 0:
        parts.append(f"then {drawn} tokens in {rest_s:.2f} s ({drawn / rest_s:.1f} t/s)")
    print(" · ".join(parts), file=sys.stderr)
    state.print_expert_choices(engine.expert_choices)
