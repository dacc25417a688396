"""The forms in which a template expects the content of messages and the arguments of tool calls.

Clients of the public API send content as text or as a list of text parts, and arguments as JSON text. Most
templates expect text and objects, some expect parts, and a few expect arguments as text. A template does not
declare this, but rendering a short conversation shows it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dyno.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Forms", "are_texts", "check_messages"]

_NAME, _VALUE, _SECOND = "probe_name", "probe_value", "probe_second"
_OBJECT = {_NAME: _VALUE}
_ROLES = ("assistant", "developer", "system", "tool", "user")
_USER = {"role": "user", "content": "a"}
_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "a",
        "parameters": {"type": "object", "properties": {_NAME: {"type": "string"}}},
    },
}


def check_messages(messages: object) -> None:
    """Raises PlanError for anything but a list of mappings with a role."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        text = messages if isinstance(messages, str) else "Hello"
        raise PlanError(
            f"[chat] messages is {messages!r:.60}; expected a list of messages, such as "
            f'[{{"role": "user", "content": {text!r:.60}}}]'
        )
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            wrong = f"{message!r:.60}"
        elif not isinstance(message.get("role"), str):
            wrong = f"{dict(message)!r:.60}"
        else:
            continue
        raise PlanError(
            f"[chat] messages[{number}] is {wrong}; expected a mapping with a role and content, such as "
            '{"role": "user", "content": "Hello"}'
        )


class Forms:
    """The forms that one template expects.

    Args:
        render: Renders messages and tools to a prompt. It raises whatever the template raises.
    """

    def __init__(self, render: Callable[[Sequence[Any], Sequence[Any] | None], str]) -> None:
        self._render = render
        self._parts: dict[str, bool] = {}
        self._objects: bool | None = None

    def fitted(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message in the form that the template expects."""
        changed = dict(message)
        content, calls = changed.get("content"), changed.get("tool_calls")
        takes = bool(content) and isinstance(content, list) and self._takes_parts(changed.get("role"))
        if isinstance(content, list) and not takes and are_texts(content):
            changed["content"] = "\n".join(part["text"] for part in content)
        if isinstance(calls, list):
            changed["tool_calls"] = [self._call(call) for call in calls]
        return changed

    def _call(self, call: Any) -> Any:
        if not isinstance(call, dict):
            return call
        if isinstance(call.get("function"), dict):
            return {**call, "function": self._call(call["function"])}
        if "arguments" not in call:
            return call
        given = call["arguments"]
        arguments = _as_object(given)
        if isinstance(arguments, dict) and not self._takes_objects():
            arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        return {**call, "arguments": arguments}

    def _takes_objects(self) -> bool:
        """Whether to pass arguments as objects. No if objects fail or come out as Python code, and text
        works."""
        if self._objects is None:
            found = self._shown(_called(_OBJECT))
            works = bool(found) and str(_OBJECT) not in found
            self._objects = works or not self._shown(_called(json.dumps(_OBJECT)))
        return self._objects

    def _takes_parts(self, given: Any) -> bool:
        """Whether the content of a role may be a list of parts. Yes if the prompt has all their texts and
        nothing else of them."""
        role = given if given in _ROLES else "user"
        if role not in self._parts:
            parts = [{"type": "text", "text": text} for text in (_VALUE, _SECOND)]
            found = self._shown(self._around(role, {"role": role, "content": parts}))
            self._parts[role] = _SECOND in found and "'type'" not in found and '"type"' not in found
        return self._parts[role]

    def _around(self, role: str, message: dict[str, Any]) -> list[Any]:
        """A valid conversation around a message of this role."""
        if role == "user":
            return [message]
        if role == "assistant":
            return [_USER, message, _USER]
        if role == "tool":
            *before, result = _called({} if self._takes_objects() else "{}")
            return [*before, {**result, **message}]
        return [message, _USER]

    def _shown(self, messages: Sequence[Any]) -> str:
        """The prompt if it contains the probe; empty if the template fails or leaves the probe out."""
        for tools in (None, [_TOOL]):
            try:
                found = self._render(messages, tools)
            # A template can raise anything. Rendering the real messages will report the error.
            except Exception:
                continue
            if _VALUE in found:
                return found
        return ""


def _called(arguments: object) -> list[dict[str, Any]]:
    """A conversation with a tool call and its result."""
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "probe", "arguments": arguments}}
    return [
        _USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "name": "probe", "content": "a"},
    ]


def are_texts(content: Sequence[Any]) -> bool:
    """Whether content is a list of text parts only."""
    return all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in content
    )


def _as_object(arguments: Any) -> Any:
    """Arguments as an object, if their text is one. An empty text is a call without arguments."""
    if not isinstance(arguments, str):
        return arguments
    try:
        found = json.loads(arguments) if arguments.strip() else {}
        if "\\u" in arguments:
            json.dumps(found, ensure_ascii=False).encode()  # raises for a lone surrogate, which is not text
    except (ValueError, RecursionError):
        return arguments  # the model wrote an invalid call, and sees it unchanged
    return found if isinstance(found, dict) else arguments
