"""The messages and tools of a chat completion, checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dyno.server.bodies import TEXT_PARTS
from dyno.server.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["conversation", "functions"]


def conversation(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with a role, whose content is text or a list of parts of the type `text`.

    Raises:
        ApiError: A message has no role, or no content although the assistant did not write it, or its
            content is something else, such as an image.
    """
    for index, message in enumerate(messages):
        place, role = f"messages.{index}", message.get("role")
        if role is None:
            raise _wrong(f"{place}.role", "is required, such as user", joint=" ")
        if not isinstance(role, str) or not role:
            raise _wrong(f"{place}.role", f"must be the name of a role, not {role!r:.80}", joint=" ")
        if message.get("content") is None and role != "assistant":
            raise _wrong(f"{place}.content", f"is required in a message of the role {role!r:.80}", joint=" ")
    return [
        {**message, "content": _parts(f"messages.{index}.content", content)}
        if (content := message.get("content")) is not None and not isinstance(content, str)
        else message
        for index, message in enumerate(messages)
    ]


def _parts(place: str, content: object) -> list[dict[str, str]]:
    if not isinstance(content, list):
        raise _wrong(place, "expected a text or a list of parts")
    return [{"type": "text", "text": _text(f"{place}.{index}", part)} for index, part in enumerate(content)]


def _text(place: str, part: object) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise _wrong(place, "expected an object with a type and a text")
    kind = part.get("type")
    name = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if name is None:
        raise _wrong(f"{place}.type", f"{kind!r:.80} is not supported; expected text")
    text = part.get(name)
    if not isinstance(text, str):
        raise _wrong(f"{place}.{name}", "expected a text")
    return text


def functions(tools: Sequence[dict[str, Any]] | None) -> Sequence[dict[str, Any]] | None:
    """Tools, each of which is a function with a name. A template writes others as if they were no tools.

    Raises:
        ApiError: A tool is something else.
    """
    for index, tool in enumerate(tools or ()):
        place, kind = f"tools.{index}", tool.get("type", "function")
        if kind != "function":
            raise _wrong(f"{place}.type", f"{kind!r:.80} is not supported; expected function")
        place, function = f"{place}.function", tool.get("function")
        if function is None:
            raise _wrong(place, "is required: an object with the name of the function", joint=" ")
        if not isinstance(function, dict):
            raise _wrong(place, f"must be an object, not {_kind(function)}", joint=" ")
        name = function.get("name")
        if name is None:
            raise _wrong(f"{place}.name", "is required", joint=" ")
        if not isinstance(name, str) or not name:
            raise _wrong(f"{place}.name", f"must be the name of the function, not {name!r:.80}", joint=" ")
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, dict):
            words = f"must be a JSON schema, which is an object, not {_kind(parameters)}"
            raise _wrong(f"{place}.parameters", words, joint=" ")
    return tools


def _kind(value: object) -> str:
    """A value that may be large, or its kind."""
    return "a list" if isinstance(value, list) else f"{value!r:.80}"


def _wrong(place: str, words: str, joint: str = ": ") -> ApiError:
    return ApiError(400, f"{place}{joint}{words}", param=place, code="invalid_value")
