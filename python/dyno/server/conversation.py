"""The messages of a chat completion, checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dyno.server.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["conversation"]

_TEXTS = {"text": "text", "input_text": "text", "refusal": "refusal"}
"""The field with the text, by the type of a part."""


def conversation(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages whose content is text, absent, or a list of parts of the type `text`.

    Raises:
        ApiError: A content is something else, such as an image.
    """
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
    name = _TEXTS.get(kind) if isinstance(kind, str) else None
    if name is None:
        raise _wrong(f"{place}.type", f"{kind!r:.80} is not supported; expected text")
    text = part.get(name)
    if not isinstance(text, str):
        raise _wrong(f"{place}.{name}", "expected a text")
    return text


def _wrong(place: str, words: str) -> ApiError:
    return ApiError(400, f"{place}: {words}", param=place, code="invalid_value")
