"""`dyno chat`: a conversation with a model at the terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dyno._cli import drawing, groups, options, state
from dyno._home import own_folder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@groups.grouped
def chat(
    model_file: options.ModelFile = None,
    model: options.Model = None,
    system: drawing.System = None,
    chat_template: drawing.ChatTemplateName = None,
    chat_template_kwargs: drawing.TemplateVariables = None,
    max_tokens: Annotated[
        int,
        typer.Option(
            "--max-tokens", "--n-predict", "-n", help="Maximum number of tokens in an answer. -1: no limit."
        ),
    ] = -1,
    temperature: Annotated[
        float,
        typer.Option(
            "--temperature", "--temp", help="Sampling temperature. 0: always take the most probable token."
        ),
    ] = 0.8,
    *,
    draws: drawing.DrawingOptions,
    history: Annotated[
        bool, typer.Option(help="Save the messages you type, so that arrow keys recall them next time.")
    ] = True,
    ctx: options.Ctx = None,
    session: groups.SessionOptions,
    opening: groups.EngineOptions,
    verbose: state.Verbose = 0,
) -> None:
    """Chat with a model in the terminal.

    /help lists the commands. Ctrl-C stops an answer, and Ctrl-D ends the conversation. If standard input is
    not a terminal, each line of it is sent as a message.
    """
    state.verbosity(verbose)
    path = options.model_argument(model_file, model)
    if max_tokens < -1 or max_tokens == 0:
        raise typer.BadParameter(
            f"{max_tokens} is not a valid length; give 1 or more tokens, or -1 for no limit", param_hint="-n"
        )
    arguments = opening.arguments(ctx=options.ctx_argument(ctx, path), **session.given())
    sampling = draws.settings(temperature)
    variables = drawing.template_variables(chat_template_kwargs)
    if sys.stdin is None:
        raise OSError("standard input is closed; start dyno chat in a terminal, or pipe messages into it")
    if hasattr(sys.stdin, "reconfigure"):  # one wrong byte ends no conversation
        sys.stdin.reconfigure(errors="surrogateescape")
    lines = _typed(history) if sys.stdin.isatty() else iter(sys.stdin)

    from dyno._cli.conversation import Conversation
    from dyno.engine import Engine

    with Engine(path, opening.device_name, **arguments) as engine:
        state.print_choices(engine)
        conversation = Conversation(
            engine,
            engine.chat_template(chat_template),
            system=system,
            variables=variables,
            max_tokens=None if max_tokens < 0 else max_tokens,
            stop=draws.stop,
            options=sampling,
        )
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="replace")
        for line in lines:
            if not conversation.say(line.rstrip("\n")):
                break


def history_file() -> Path:
    """The path of the file with typed messages, for the next conversation."""
    return own_folder("STATE") / "chat_history"


def _typed(keep: bool) -> Iterator[str]:
    """Messages that the user types, until Ctrl-D.

    Raises:
        ImportError: prompt-toolkit is not installed.
    """
    try:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.history import FileHistory, InMemoryHistory
    except ImportError as error:
        raise ImportError(
            "dyno chat needs prompt-toolkit, which is missing: pip install 'gguf-dyno[chat]'"
        ) from error
    if keep:
        file = history_file()
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file.touch(mode=0o600)
    session: PromptSession[str] = PromptSession(
        history=FileHistory(str(file)) if keep else InMemoryHistory(), key_bindings=_bindings()
    )
    return _lines(session)


def _lines(session: Any) -> Iterator[str]:
    while True:
        try:
            yield session.prompt("> ", prompt_continuation="  ", multiline=True)
        except KeyboardInterrupt:  # an empty line replaces the typed one
            continue
        except EOFError:
            return


def _bindings() -> Any:
    """Key bindings: Enter sends, Alt-Enter begins a new line."""
    from prompt_toolkit.key_binding import KeyBindings

    bindings = KeyBindings()

    @bindings.add("enter")
    def _send(event: Any) -> None:
        event.current_buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def _new_line(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    return bindings
