"""Errors in the form of the public API."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, get_args

from dyno._wrong_values import not_given, plain_words
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

__all__ = ["ApiError", "api_error", "from_validation", "without_part"]

_PART = re.compile(r"\[[a-z_]+\] ")
"""Names the part of dyno that refuses something, in front of a message."""
_FIELDS = {
    "conversation": ("messages",),
    "dry_sequence_breakers": ("dry_sequence_breakers",),
    "grammar": ("grammar", "tools"),
    "json_schema": ("response_format", "output_config"),
    "logit_bias": ("logit_bias",),
    "regex": ("regex",),
    "tool_choice": ("tool_choice",),
}
"""By the word with which a message begins: the fields of requests that it may be about."""


class ApiError(Exception):
    """An error that becomes the response to a request."""

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


def without_part(message: str) -> str:
    """A message without the part of dyno in front of it, which says nothing to a client."""
    return _PART.sub("", message, count=1) if _PART.match(message) else message


def from_validation(error: ValidationError) -> ApiError:
    """The error about the wrong field of a body.

    A value with several possible types has errors for each. The type that accepts the most of it counts.
    """
    found = error.errors(include_url=False)
    classes = {each.__name__: each for each in _kinds(Known)}
    tags = frozenset(tag for each in classes.values() for tag in _tags(each))
    paths = [_path(each["loc"], classes.keys(), tags) for each in found]
    path = max(paths, key=lambda path: (len(path), [step for step in path if isinstance(step, int)]))
    chosen = [each for each, its in zip(found, paths, strict=True) if its == path]
    if (tag := chosen[0])["type"] == "union_tag_invalid":
        place, told = ".".join(map(str, (*path, "type"))), tag["ctx"]
        known = told["expected_tags"].replace("'", "")
        text = f"{place}: {told['tag']!r:.80} is not supported; expected {known}"
        return ApiError(400, text, param=place, code="invalid_value")
    if keys := [each for each in chosen if each["loc"][-1:] == ("[key]",)]:
        key = keys[0]["input"]
        place = ".".join(map(str, path[:-1] if path[-1] == key else path))
        text = f"{place}: the key {key!r:.80} {plain_words(keys[0])}"
        return ApiError(400, text, param=place, code="invalid_value")
    param = ".".join(map(str, path)) or None
    given = not_given(chosen[0]) if param else ""
    begin, *others = dict.fromkeys(without_part(plain_words(each)) for each in chosen)
    text = " or ".join([begin, *(each.removeprefix("must be ") for each in others)])
    if param:
        joint = " " if begin.startswith(("must ", "is ")) else ": "
        text = f"{param}{joint}{text}{given}"
    elif begin.startswith("must "):
        text = f"the body {text}"
    else:  # of several fields together; the message begins with one of them
        subject = begin.partition(" ")[0].removesuffix(":")
        kind = classes.get(error.title, Known)
        param = subject if subject.partition(".")[0] in kind.model_fields else None
    return ApiError(400, text, param=param, code="invalid_value")


def _path(
    place: tuple[int | str, ...], classes: Collection[str], tags: Collection[str]
) -> tuple[int | str, ...]:
    """The path of an error, without the names of types that pydantic adds.

    Args:
        place: Path that includes names of types, names in `classes`, and `tags` of list entries.
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
    """The values of the field `type` by which pydantic recognises an object of this kind."""
    return get_args(kind.model_fields["type"].annotation) if "type" in kind.model_fields else ()


def _blamed(text: str, prompt: str | None, given: Collection[str]) -> tuple[str, str | None]:
    """A message of the engine with the name that its subject has in a request, and that field."""
    subject, _, rest = text.removeprefix("the ").partition(" ")
    if subject in ("prompt", "token"):
        return text, prompt
    known = _FIELDS.get(subject, (subject,))
    field = next((each for each in known if each in given), None)
    if field is None or field == subject or subject == "conversation":
        return text, field
    return f"{field} {rest}", field


def api_error(
    error: BaseException, prompt: str | None = None, given: Collection[str] = frozenset()
) -> ApiError:
    """The error for clients that stands for an exception.

    Args:
        error: The exception.
        prompt: The field of the request that becomes the prompt.
        given: The fields that the request has.
    """
    if isinstance(error, ApiError):
        return error
    text = without_part(" ".join(str(error).split()))
    if isinstance(error, QueueFullError):
        wait = {"Retry-After": str(error.retry_after_s)}
        return ApiError(429, text, kind="rate_limit_error", code="queue_full", headers=wait)
    if isinstance(error, ContextLengthError):
        return ApiError(400, text, code="context_length_exceeded", param=prompt)
    if isinstance(error, ClosedError):
        return ApiError(503, "the server is shutting down", kind="server_error", code="shutting_down")
    if isinstance(error, NotInstalledError):
        return ApiError(501, text, kind="server_error", code="not_installed")
    if isinstance(error, (PlanError, ChatError, UnsupportedError)):
        text, param = _blamed(text, prompt, given)
        return ApiError(400, text, param=param, code="invalid_value")
    # Without the text of the error, which may contain a path.
    return ApiError(500, f"{type(error).__name__}; the server's log has more", kind="server_error")
