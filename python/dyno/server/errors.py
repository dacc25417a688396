"""Errors in the form of the public API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

from dyno.errors import (
    ChatError,
    ClosedError,
    ContextLengthError,
    NotInstalledError,
    PlanError,
    QueueFullError,
    UnsupportedError,
)
from dyno.server.bodies import Known

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

__all__ = ["ApiError", "api_error", "from_validation"]


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.headers, self.message = status, headers or {}, message
        self.body: dict[str, Any] = {
            "error": {"message": message, "type": kind, "param": param, "code": code}
        }


def from_validation(error: ValidationError) -> ApiError:
    """The field of a body that is wrong.

    A value of several types has errors of each. The type that accepts the most of it counts.
    """
    found = error.errors(include_url=False)
    classes = {each.__name__: each for each in _kinds(Known)}
    tags = frozenset(tag for each in classes.values() for tag in _tags(each))
    paths = [_path(each["loc"], classes.keys(), tags) for each in found]
    path = max(paths, key=lambda path: (len(path), [step for step in path if isinstance(step, int)]))
    chosen = [each for each, its in zip(found, paths, strict=True) if its == path]
    first = chosen[0]
    param = ".".join(map(str, path)) or None
    given = _not(first["input"], str(first["type"])) if param else ""
    begin, *others = dict.fromkeys(_words(each) for each in chosen)
    text = " or ".join([begin, *(each.removeprefix("must be ") for each in others)])
    if param:
        joint = " " if begin.startswith(("must ", "is ")) else ": "
        text = f"{param}{joint}{text}{given}"
    elif begin.startswith("must "):
        text = f"the body {text}"
    return ApiError(400, text, param=param, code="invalid_value")


_WORDS = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "must be a whole number"),
    "int_parsing_size": "must be a smaller whole number",
    **dict.fromkeys(("float_type", "float_parsing"), "must be a number"),
    "finite_number": "must be a finite number",
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
    "string_type": "must be a string",
    "list_type": "must be a list",
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "must be an object"),
    "literal_error": "must be {expected}",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "too_short": "must have at least {min_length} item{s}",
    "too_long": "must have at most {max_length} item{s}",
    "string_too_short": "must have at least {min_length} character{s}",
    "string_too_long": "must have at most {max_length} character{s}",
    "missing": "is required",
}
"""By the kind of a validation error: the words behind the name of the field."""


def _words(error: ErrorDetails) -> str:
    """Plain words for one error; words of our own have a beginning that pydantic puts before them."""
    if (words := _WORDS.get(error["type"])) is not None:
        limits = error.get("ctx", {}).items()
        context = {name: f"{value:g}" if isinstance(value, float) else value for name, value in limits}
        one = 1 in (context.get("min_length"), context.get("max_length"))
        return words.format(**context, s="" if one else "s")
    return error["msg"].removeprefix("Value error, ")


def _path(
    place: tuple[int | str, ...], classes: Collection[str], tags: Collection[str]
) -> tuple[int | str, ...]:
    """The place of an error without the types of values among which pydantic chose.

    Args:
        place: With names of types, of `classes`, and `tags` of the entries of lists.
    """
    path: list[int | str] = []
    for index, step in enumerate(place):
        if isinstance(step, str):
            of_entry = index > 0 and isinstance(place[index - 1], int) and index + 1 < len(place)
            if step == "str" or "[" in step or step in classes or (of_entry and step in tags):
                continue
        path.append(step)
    return tuple(path)


def _kinds(kind: type[Known]) -> Iterator[type[Known]]:
    for each in kind.__subclasses__():
        yield each
        yield from _kinds(each)


def _tags(kind: type[Known]) -> tuple[str, ...]:
    """The values of the field `type` by which pydantic knows an object of this kind among others."""
    return get_args(kind.model_fields["type"].annotation) if "type" in kind.model_fields else ()


def _not(given: object, kind: str) -> str:
    """The end of a message, which shows the wrong value, and the kind of one that may be large."""
    if kind == "missing":
        return ""
    if isinstance(given, (dict, list)):
        name = "an object" if isinstance(given, dict) else "a list"
        return f", not {name}" if kind.endswith("_type") else ""
    return f", not {given[:80] if isinstance(given, str) else given!r:.80}"


def api_error(error: BaseException, prompt: str | None = None) -> ApiError:
    """The error that a client gets for an exception.

    Args:
        error: The exception.
        prompt: The field of the request that becomes the prompt.
    """
    if isinstance(error, ApiError):
        return error
    text = " ".join(str(error).split())
    if isinstance(error, QueueFullError):
        wait = {"Retry-After": str(error.retry_after_s)}
        return ApiError(429, text, kind="rate_limit_error", code="queue_full", headers=wait)
    if isinstance(error, ContextLengthError):
        return ApiError(400, text, code="context_length_exceeded", param=prompt)
    if isinstance(error, ClosedError):
        return ApiError(503, "the server shuts down", kind="server_error", code="shutting_down")
    if isinstance(error, NotInstalledError):
        return ApiError(501, text, kind="server_error", code="not_installed")
    if isinstance(error, (PlanError, ChatError, UnsupportedError)):
        return ApiError(400, text, code="invalid_value")
    # Without the error's own text, which may hold a path.
    return ApiError(500, f"{type(error).__name__}; the server's log has more", kind="server_error")
