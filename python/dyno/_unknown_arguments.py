"""Arguments by names that a method does not have, such as the names of other libraries."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from dyno._sampling import DrawOptions
from dyno._setting import suggestion
from dyno.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["check_known"]

_OTHER_NAMES = {
    **dict.fromkeys(
        ("n_predict", "num_predict", "max_new_tokens", "max_completion_tokens", "max_length", "n_tokens"),
        "max_tokens",
    ),
    "temp": "temperature",
    **dict.fromkeys(("repetition_penalty", "penalty_repeat"), "repeat_penalty"),
    **dict.fromkeys(("stop_sequences", "stop_strings", "stop_words"), "stop"),
    **dict.fromkeys(("random_seed", "random_state"), "seed"),
    **dict.fromkeys(("response_format", "schema"), "json_schema"),
    "chat_template": "template",
    "chat_template_kwargs": "variables",
    "functions": "tools",
    "num_return_sequences": "n",
}
"""Names of other libraries, with the names here."""
_METHODS = {
    "n": "complete() and chat_choices() have it",
    "logprobs": "complete() and chat() have it",
    "stream": "generate() and chat() always give the answer in pieces, and complete() gives whole texts",
}
"""Names that only other methods have, with these methods."""


def check_known(method: Callable[..., object], names: Iterable[str]) -> None:
    """Raises PlanError if one of `names`, which the method got as `**more`, is no option of a draw."""
    unknown = next((name for name in names if name not in DrawOptions.__annotations__), None)
    if unknown is None:
        return
    own = [name for name in inspect.signature(method).parameters if name not in ("self", "more")]
    known = [*own, *DrawOptions.__annotations__]
    name = _OTHER_NAMES.get(unknown, unknown)
    near = f"did you mean {name!r}?" if name in known else _METHODS.get(name)
    hint = near or suggestion(unknown, known)
    called = method.__name__
    raise PlanError(f"[{called}] {called}() has no argument {unknown!r}; {hint}")
