"""Opening the parts of a server: the model, a draft model, and the application."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dyno._drafting import speculation_of
from dyno._vocabulary import has_vocabulary
from dyno.chat import template_names
from dyno.engine import Engine
from dyno.errors import ModelError
from dyno.scheduler import DEFAULT_SEQUENCES
from dyno.server.app import create_app

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from starlette.applications import Starlette

    from dyno.server.options import Options

__all__ = ["Recipe", "ServedEngine", "opened"]

_SWITCH_S = 0.001
"""Switch interval of Python threads in seconds, for which the event loop may delay the next step of the
scheduler. The default of 5 ms is longer than a step."""


class ServedEngine(Engine):
    """An engine of a server, with several sequences unless the command line or the profile sets their number.

    Its placement and its profile are chosen for them from the start.
    """

    _usual_sequences = DEFAULT_SEQUENCES


@dataclass(frozen=True)
class Recipe:
    """The recipe of a server: its parts as plain values, which can go to another process."""

    model: str
    """Path of the model file."""
    options: Options
    device: str = "auto"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `Engine`."""
    draft: str | None = None
    """Path of the file of a draft model."""
    chat_template: str | None = None
    """A template file or the name of a template; None: the one of the model."""


@contextlib.contextmanager
def opened(recipe: Recipe) -> Iterator[tuple[Engine, Starlette]]:
    """Open the engine of a recipe, and its application, whose scheduler runs within the context.

    Raises:
        ModelError: The model has no vocabulary.
        DynoError: As in `Engine`, or the draft model does not fit.
    """
    from dyno import _core

    _check_vocabulary(recipe.model)
    with contextlib.ExitStack() as stack:
        stack.callback(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(_SWITCH_S)
        engine = stack.enter_context(ServedEngine(recipe.model, recipe.device, **recipe.arguments))
        draft = None
        if recipe.draft is not None and engine.settings["spec"] == "draft":
            draft = stack.enter_context(_open_draft(recipe.draft, engine, recipe.arguments))
        options = dataclasses.replace(recipe.options, speculation=speculation_of(engine.settings, draft))
        if recipe.chat_template is not None:
            template = engine.chat_template(recipe.chat_template)
            # Error messages for clients contain the name of the template, but must not show its folder.
            template = dataclasses.replace(template, name=Path(template.name).name)
            options = dataclasses.replace(options, template=template)
        elif not template_names(_core.Gguf(recipe.model)):
            logging.getLogger("dyno.server").warning(
                "the model file has no chat template, so chat requests are refused; give --chat-template "
                "FILE, or a built-in one such as --chat-template chatml"
            )
        app = create_app(engine, options)
        stack.enter_context(app.state.scheduler)
        yield engine, app


def _check_vocabulary(path: str) -> None:
    """Raises ModelError if a file cannot be served, before its weights are read."""
    from dyno import _core

    if not has_vocabulary(_core.Gguf(path)):
        raise ModelError(
            f"[server] {Path(path).name} has no vocabulary (tokenizer.ggml.model), so the server cannot "
            "return text; serve a file with a vocabulary, or generate token ids in Python with dyno.Scheduler"
        )


def _open_draft(path: str, engine: Engine, arguments: Mapping[str, Any]) -> Engine:
    """Open the draft model of an engine, on the same device and with as many sequences. Instead of a virtual
    device, it is on the CPU.

    Args:
        path: File of the draft model.
        engine: The engine.
        arguments: Its arguments. If they switch profiles off, the draft model gets none either.
    """
    from dyno import _core

    shorter = int(_core.describe_model(path)["n_ctx_train"])
    threads = {name: engine.settings[name] for name in ("threads", "threads_batch")}
    return Engine(
        path,
        "cpu" if engine.device.startswith("cpu:") else engine.device,
        "auto" if arguments.get("profile", "auto") is not None else None,
        sequences=engine.settings["sequences"],
        ctx=min(int(engine.settings["ctx"]), shorter),
        **threads,
    )
