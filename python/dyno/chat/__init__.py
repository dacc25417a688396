"""Conversations: chat templates, prompts made of messages, and messages read from answers.

Importing this package loads nothing heavy; every name below is fetched on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dyno.chat.answer import Answer, Part
    from dyno.chat.calls import ToolCall
    from dyno.chat.reply import Reply
    from dyno.chat.template import ChatTemplate, Rendered, find_template, template_names

__all__ = [
    "Answer",
    "ChatTemplate",
    "Part",
    "Rendered",
    "Reply",
    "ToolCall",
    "find_template",
    "template_names",
]

_HOME = {
    "Answer": "dyno.chat.answer",
    "Part": "dyno.chat.answer",
    "Reply": "dyno.chat.reply",
    "ToolCall": "dyno.chat.calls",
    "ChatTemplate": "dyno.chat.template",
    "Rendered": "dyno.chat.template",
    "find_template": "dyno.chat.template",
    "template_names": "dyno.chat.template",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value
