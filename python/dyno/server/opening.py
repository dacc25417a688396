"""Opening what a server serves: the model, a smaller one that drafts, and the application over them."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dyno._drafting import speculation_of
from dyno._vocabulary import has_vocabulary
from dyno.engine import Engine
from dyno.errors import ModelError
from dyno.server.app import create_app

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from starlette.applications import Starlette

    from dyno.server.options import Options

__all__ = ["Recipe", "give_default_sequences", "opened"]

_SWITCH_S = 0.001
"""How long the event loop may keep the scheduler from its next step: 5 ms by default, longer than a step."""


@dataclass(frozen=True)
class Recipe:
    """The parts of a server, as plain values that another process can take."""

    model: str
    """Path of the file."""
    options: Options
    device: str = "auto"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Of `Engine`."""
    draft: str | None = None
    """Path of the file of a smaller model that drafts."""
    chat_template: str | None = None
    """A file or the name of a template; None takes the model's."""


@contextlib.contextmanager
def opened(recipe: Recipe) -> Iterator[tuple[Engine, Starlette]]:
    """The engine of a recipe and the application over it, whose scheduler runs meanwhile.

    Raises:
        ModelError: The model has no vocabulary.
        DynoError: As `Engine`, or a draft model that does not fit.
    """
    _check_vocabulary(recipe.model)
    with contextlib.ExitStack() as stack:
        stack.callback(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(_SWITCH_S)
        engine = stack.enter_context(Engine(recipe.model, recipe.device, **recipe.arguments))
        give_default_sequences(engine)
        draft = None
        if recipe.draft is not None and engine.settings["spec"] == "draft":
            draft = stack.enter_context(_open_draft(recipe.draft, engine))
        options = dataclasses.replace(recipe.options, speculation=speculation_of(engine.settings, draft))
        if recipe.chat_template is not None:
            template = engine.chat_template(recipe.chat_template)
            # Errors that clients get name the template: its folder is not for them.
            template = dataclasses.replace(template, name=Path(template.name).name)
            options = dataclasses.replace(options, template=template)
        app = create_app(engine, options)
        stack.enter_context(app.state.scheduler)
        yield engine, app


def _check_vocabulary(path: str) -> None:
    """Raises ModelError for a file that cannot be served, before its weights are read."""
    from dyno import _core

    if not has_vocabulary(_core.Gguf(path)):
        raise ModelError(
            f"[server] {Path(path).name} has no vocabulary (tokenizer.ggml.model), so the server cannot "
            "return text; serve a file with a vocabulary, or generate token ids in Python with dyno.Scheduler"
        )


def _open_draft(path: str, engine: Engine) -> Engine:
    """The smaller model that drafts for an engine, on its device, with as many sequences."""
    from dyno import _core

    shorter = int(_core.describe_model(path)["n_ctx_train"])
    threads = {name: engine.settings[name] for name in ("threads", "threads_batch")}
    return Engine(
        path,
        engine.device,
        sequences=engine.settings["sequences"],
        ctx=min(int(engine.settings["ctx"]), shorter),
        **threads,
    )


def give_default_sequences(engine: Engine) -> None:
    """More than the one sequence of an engine, unless the command line or the profile says how many."""
    from dyno.scheduler import DEFAULT_SEQUENCES

    if engine.settings.origins["sequences"] == "default":
        engine.set_context(sequences=DEFAULT_SEQUENCES)
