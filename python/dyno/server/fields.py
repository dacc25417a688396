"""Fields of requests beside those of the bodies: harmless ones, refused ones, and ones that nobody knows."""

from __future__ import annotations

import difflib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dyno.server.bodies import Known
from dyno.server.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["IGNORED_FIELDS", "Fields"]

IGNORED_FIELDS = "dyno-ignored-fields"
"""Header of a response: the fields of its request that nobody knows."""

_log = logging.getLogger("dyno.server")
_LONGEST_NAME = 64
_MOST_TOLD = 100
"""Names that the log tells, so that a client cannot fill it."""
_MOST_IN_HEADER = 8
_MOST_UNKNOWN = 100
"""Unknown fields of one request. A field's name costs a search, and a body has room for a million of them."""

_HARMLESS = frozenset(
    {
        # The public chat API: about accounts, caches and delivery, or faster answers.
        *("metadata", "prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        *("safety_identifier", "service_tier", "store", "user"),
        # The public messages API.
        *("cache_control", "diagnostics", "inference_geo"),
        # vLLM and llama-server: order and place of the work.
        *("cache_salt", "id_slot", "priority", "request_id"),
    }
)


@dataclass(frozen=True)
class _Refused:
    """A field of other servers without which an answer would be another one."""

    neutral: Callable[[Any, Any], bool]
    """Whether a value, in a body, asks for nothing."""
    instead: str = ""
    """The way to have it here."""


def _only(*values: Any, instead: str = "") -> _Refused:
    return _Refused(lambda value, _: value in values, instead)


def _given(body: Any, name: str, default: Any = None) -> Any:
    """The value of a field that bodies of this kind have, and not of an unknown one with its name."""
    return getattr(body, name) if name in type(body).model_fields else default


_RULES = "use response_format, grammar or regex"
_REFUSED: dict[str, _Refused] = {
    # The public APIs.
    "audio": _only(),
    "best_of": _Refused(lambda value, body: value in (1, _given(body, "n", 1))),
    "container": _only(),
    "function_call": _only("none", "auto", instead="use tool_choice"),
    "functions": _only([], instead="use tools"),
    "mcp_servers": _only([]),
    "modalities": _only(["text"]),
    "output_format": _only(instead="use output_config.format"),
    "suffix": _only(""),
    "verbosity": _only("medium"),
    "web_search_options": _only(),
    # vLLM.
    "add_generation_prompt": _only(True),
    "allowed_token_ids": _only([]),
    "bad_words": _only([]),
    "chat_template": _only(instead="start the server with --chat-template"),
    "continue_final_message": _only(False),
    "echo": _only(False),
    "guided_choice": _only(instead=_RULES),
    "guided_grammar": _only(instead="use grammar"),
    "guided_json": _only(instead="use response_format"),
    "guided_regex": _only(instead="use regex"),
    "include_stop_str_in_output": _only(False),
    "min_tokens": _only(0),
    "repetition_penalty": _only(1, instead="use repeat_penalty"),
    "stop_token_ids": _only([]),
    "structured_outputs": _only(instead=_RULES),
    "truncate_prompt_tokens": _only(),
    "use_beam_search": _only(False),
    # llama-server.
    "dynatemp_range": _only(0),
    "json_schema": _only(instead="use response_format"),
    "mirostat": _only(0),
    "n_predict": _Refused(
        lambda value, body: (
            value == -1
            or any(_given(body, name) is not None for name in ("max_tokens", "max_completion_tokens"))
        ),
        "use max_tokens",
    ),
    "top_n_sigma": _Refused(lambda value, _: isinstance(value, (int, float)) and value <= 0),
    "with_pieces": _only(False),
}


class Fields:
    """Judges the fields of requests that their bodies do not have.

    Args:
        strict: Refuse fields that nobody knows.
    """

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._told: set[tuple[str, str]] = set()

    def ignored(self, path: str, body: Known) -> list[str]:
        """The names of fields that nobody knows; the log tells each one once.

        Args:
            path: Of the request.
            body: With fields beside its own, whose value null counts as absent. So may objects in it be.

        Raises:
            ApiError: The answer would be another one without a field, or more than a hundred fields are
            unknown, or one is and the server is strict.
        """
        given = {name: value for name, value in (body.model_extra or {}).items() if value is not None}
        for name in given.keys() & _REFUSED.keys():
            rule = _REFUSED[name]
            if not rule.neutral(given[name], body):
                instead = f"; {rule.instead}" if rule.instead else ""
                raise ApiError(
                    400,
                    f"{name} is not supported here, and the answer would be another one without it{instead}",
                    param=name,
                    code="unsupported_parameter",
                )
        unknown = {
            name: (name, type(body)) for name in given if name not in _HARMLESS and name not in _REFUSED
        }
        for place, name, kind in _within(body):
            if len(unknown) > _MOST_UNKNOWN:
                break
            unknown[f"{place}{name}"] = name, kind
        if len(unknown) > _MOST_UNKNOWN:
            raise ApiError(
                400,
                f"{path} does not know {len(unknown)} fields of the body or more; "
                f"it ignores {_MOST_UNKNOWN} at most",
                code="unknown_parameter",
            )
        for name, (own, kind) in unknown.items():
            key = (path, name[:_LONGEST_NAME])
            tells = len(self._told) < _MOST_TOLD and key not in self._told
            if not (tells or self._strict):
                continue
            known = [field.alias or each for each, field in kind.model_fields.items()]
            near = difflib.get_close_matches(own[:_LONGEST_NAME], known, 1, 0.75)
            advice = f"; did you mean {name.removesuffix(own)}{near[0]}?" if near else ""
            text = f"{_shown(name)} is not a field of {path}{advice}"
            if self._strict:
                raise ApiError(400, text, param=_shown(name), code="unknown_parameter")
            self._told.add(key)
            _log.warning("a request has an unknown field, which is ignored: %s", text)
        shown = [_shown(name) for name in unknown]
        return [*shown[:_MOST_IN_HEADER], *(["..."] if len(shown) > _MOST_IN_HEADER else [])]


def _within(body: Known) -> Iterator[tuple[str, str, type[Known]]]:
    """The unknown fields of objects in a body: place, with a dot behind it, name, and type of the object.

    Entries of a list have no numbers, so that a long conversation has few places.
    """
    left: list[tuple[str, Known]] = [("", body)]
    while left:
        place, outer = left.pop()
        for own, value in vars(outer).items():
            if isinstance(value, (str, int, float, dict)) or not value:
                continue
            objects = value if isinstance(value, list) else (value,)
            if not isinstance(objects[0], Known):
                continue  # a list's entries are of one kind, and it may hold a million numbers
            inside = f"{place}{type(outer).model_fields[own].alias or own}."
            for each in objects:
                left.append((inside, each))
                for name, given in (each.model_extra or {}).items():
                    if given is not None and name not in each.harmless:
                        yield inside, name, type(each)


def _shown(name: str) -> str:
    """A name for a log and a header: printable ASCII, and not long."""
    return ascii(name)[1:-1].replace(",", r"\x2c")[:_LONGEST_NAME]
