"""The process that renders chat templates. Each line on stdin is a request, and each line on stdout an
answer.

A template comes with a model file and may be hostile. Here it has limited memory and time, and cannot reach
secrets of the caller. `dyno.chat._rendering` starts and stops the process.
"""

from __future__ import annotations

import datetime
import functools
import json
import resource
import signal
import sys
from typing import TYPE_CHECKING, Any

from jinja2.exceptions import TemplateError, TemplateSyntaxError

from dyno.chat._forms import Forms
from dyno.chat._jinja import ChatEnvironment, Refused, render
from dyno.chat._origin import Text, own, spans_of

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["answer", "main"]

# These roles of the API count as text of the template. Any other role is foreign text.
_ROLES = frozenset(("assistant", "developer", "function", "ipython", "model", "system", "tool", "user"))


@functools.lru_cache(maxsize=8)
def _compiled(text: str) -> Any:
    return ChatEnvironment().from_string(text)


@functools.lru_cache(maxsize=8)
def _forms(text: str, tokens: tuple[tuple[str, str], ...]) -> Forms:
    template = _compiled(text)

    def rendered(messages: Sequence[Any], tools: Sequence[Any] | None) -> str:
        variables = {"tools": tools, "documents": None, "add_generation_prompt": False, **dict(tokens)}
        return render(template, {**variables, "messages": messages}, None)

    return Forms(rendered)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The rendered `text` with `own`, the spans that the template wrote; or `error` with its `kind`.

    Args:
        request: `template`, `messages`, `variables`, `tokens` (names of special tokens by variable), `now`
        (ISO 8601 or None), `fits` (whether messages may change their form to one that the template takes)
        and `max_chars`.
    """
    now, messages = request["now"], request["messages"]
    try:
        template = _compiled(request["template"])
        if request["fits"]:
            forms = _forms(request["template"], tuple(request["tokens"].items()))
            messages = [forms.fitted(message) for message in messages]
        variables = {
            **request["variables"],
            **{name: own(token) for name, token in request["tokens"].items()},
            "messages": [_message(message) for message in messages],
        }
        text = render(template, variables, datetime.datetime.fromisoformat(now) if now else None)
    except TemplateSyntaxError as error:
        return {"kind": "syntax", "error": f"line {error.lineno}: {error.message}"}
    except Refused as error:
        return {"kind": "refused", "error": str(error)}
    except TemplateError as error:
        return {"kind": "failed", "error": f"{type(error).__name__}: {error}"}
    except MemoryError:
        return {"kind": "memory", "error": "it needs more memory than it may have"}
    # A template can compute anything from its arguments, so any exception here is an error of the template.
    except Exception as error:
        return {"kind": "failed", "error": f"{type(error).__name__}: {str(error)[:500]}"}
    if len(text) > request["max_chars"]:
        return {
            "kind": "output",
            "error": f"it wrote {len(text)} characters of at most {request['max_chars']}",
        }
    return {"text": text, "own": spans_of(text)}


def _message(message: dict[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    known = isinstance(role, str) and not isinstance(role, Text) and role in _ROLES
    return {**message, "role": own(role)} if known and role is not None else message


def main(memory_bytes: int, seconds: float) -> None:
    """Answer requests until stdin ends.

    Args:
        memory_bytes: Maximum address space of this process.
        seconds: Maximum time of a request. Afterwards the kernel ends the process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the caller handles Ctrl-C
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    out = sys.stdout
    out.write("ready\n")
    out.flush()
    for line in sys.stdin:
        # The caller normally ends a late process. This limit applies if the caller has gone.
        signal.setitimer(signal.ITIMER_REAL, 2 * seconds + 1)
        try:
            reply = json.dumps(answer(json.loads(line)))
        except MemoryError:
            reply = json.dumps({"kind": "memory", "error": "it needs more memory than it may have"})
        except RecursionError:
            reply = json.dumps({"kind": "failed", "error": "messages or tools are nested too deeply"})
        signal.setitimer(signal.ITIMER_REAL, 0)
        out.write(reply + "\n")
        out.flush()
