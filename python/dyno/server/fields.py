"""Request fields that the bodies do not have: harmless, refused and unknown ones."""

from __future__ import annotations

import difflib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dyno.server.bodies import ChatBody, CompletionBody, EmbeddingBody, Known
from dyno.server.errors import ApiError
from dyno.server.messages_body import MessagesBody

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["IGNORED_FIELDS", "Fields"]

IGNORED_FIELDS = "dyno-ignored-fields"
"""Response header with the unknown fields of the request."""

_log = logging.getLogger("dyno.server")
_LONGEST_NAME = 64
_MOST_TOLD = 100
"""Most names that are logged, so that a client cannot fill the log."""
_MOST_IN_HEADER = 8
_MOST_UNKNOWN = 100
"""Most unknown fields of one request. Each name costs a search, and a body may contain a million of them."""

_HARMLESS = frozenset(
    {
        # The public chat API: accounts, caches, delivery, or faster answers.
        *("metadata", "prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        *("safety_identifier", "service_tier", "store", "user"),
        # The public messages API.
        *("cache_control", "diagnostics", "inference_geo"),
        # vLLM and llama-server: order and place of the work.
        *("cache_salt", "id_slot", "priority", "request_id"),
        # llama-server: without effect unless another field switches them on, which is refused.
        *("dynatemp_exponent", "mirostat_eta", "mirostat_tau"),
    }
)


@dataclass(frozen=True)
class _Refused:
    """A field of other servers that would change the answer."""

    neutral: Callable[[Any, Any], bool]
    """Whether a value in a body has no effect."""
    instead: str = ""
    """Advice on the equivalent in this server."""


def _only(*values: Any, instead: str = "") -> _Refused:
    return _Refused(lambda value, _: value in values, instead)


def _given(body: Any, name: str, default: Any = None) -> Any:
    """The value of a field that this kind of body has, ignoring an unknown field of this name."""
    return getattr(body, name) if name in type(body).model_fields else default


def _adds_special(body: Any) -> bool:
    """Whether BOS and EOS are added to the text of a body. A chat template writes them itself."""
    return bool(_given(body, "add_special", isinstance(body, (CompletionBody, EmbeddingBody))))


def _is_unlimited(value: Any, _: Any) -> bool:
    return isinstance(value, (int, float)) and value <= 0


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
    "add_generation_prompt": _Refused(
        # vLLM expects both fields, although one implies the other.
        lambda value, body: value is not _given(body, "continue_final_message", default=False),
        "use continue_final_message",
    ),
    "add_special_tokens": _Refused(lambda value, body: value is _adds_special(body)),
    "allowed_token_ids": _only([]),
    "bad_words": _only([]),
    "chat_template": _only(instead="start the server with --chat-template"),
    "documents": _only([], instead="use chat_template_kwargs.documents"),
    "echo": _only(False),
    "guided_choice": _only(instead=_RULES),
    "guided_grammar": _only(instead="use grammar"),
    "guided_json": _only(instead="use response_format"),
    "guided_regex": _only(instead="use regex"),
    "include_reasoning": _only(True),
    "include_stop_str_in_output": _only(False),
    "length_penalty": _only(1),
    "logits_processors": _only([]),
    "min_tokens": _only(0),
    "prompt_logprobs": _only(),
    "repetition_penalty": _only(1, instead="use repeat_penalty"),
    "skip_special_tokens": _only(True),
    "stop_token_ids": _only([]),
    "structured_outputs": _only(instead=_RULES),
    "truncate_prompt_tokens": _only(),
    "use_beam_search": _only(False),
    # llama-server.
    "dynatemp_range": _only(0),
    "json_schema": _only(instead="use response_format"),
    "lora": _only([]),
    "mirostat": _only(0),
    "n_predict": _Refused(
        lambda value, body: (
            value == -1
            or any(
                name in body.model_fields_set and _given(body, name) is not None
                for name in ("max_tokens", "max_completion_tokens")
            )
        ),
        "use max_tokens",
    ),
    "n_probs": _only(0, instead="use logprobs"),
    "reasoning_budget": _only(-1),
    "reasoning_format": _only("auto", "deepseek"),
    "samplers": _only([]),
    "t_max_predict_ms": _Refused(_is_unlimited, "use timeout"),
    "thinking_budget_tokens": _only(-1),
    "top_n_sigma": _Refused(_is_unlimited),
}


_TEXTS: tuple[type[Known], ...] = (ChatBody, CompletionBody, MessagesBody)
"""Bodies whose answers are texts. A field of one kind would also change the answer to another kind."""
_OF_TEXTS = frozenset(name for kind in _TEXTS for name in kind.model_fields) - {"messages", "prompt"}
"""Without the two fields of which the path decides which one applies."""
_ASKS_FOR_NOTHING: dict[str, tuple[Any, ...]] = {
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
}
"""Further values of such fields without effect."""
_SAME = {
    "max_completion_tokens": ("max_tokens",),
    "output_config": ("response_format",),
    "reasoning_effort": ("output_config.effort",),
    "response_format": ("output_config.format",),
    "stop": ("stop_sequences",),
    "stop_sequences": ("stop",),
    "system": ("messages",),
    "thinking": ("chat_template_kwargs",),
}
"""The equivalent fields of other kinds of texts."""


def _of_other_text(body: Known, name: str, value: Any) -> bool:
    """Whether an unknown field belongs to another kind of text, and its value would have an effect."""
    if type(body) not in _TEXTS or name == "stream_options":  # all streams of messages report their usage
        return False
    if name == "thinking" and isinstance(value, dict) and value.get("type") in ("enabled", "adaptive"):
        return False  # templates enable reasoning by default if they can
    found = [kind.model_fields[name] for kind in _TEXTS if name in kind.model_fields]
    neutral = [
        *_ASKS_FOR_NOTHING.get(name, ()),
        *([], {}, ""),
        *(field.get_default(call_default_factory=True) for field in found),
    ]
    return bool(found) and value is not False and value not in neutral


def _instead(body: Known, name: str) -> str:
    """The advice for a field of another kind of text."""
    has = [other for other in _SAME.get(name, ()) if other.partition(".")[0] in type(body).model_fields]
    return f"use {has[0]}" if has else ""


class Fields:
    """The check of request fields that the bodies do not have.

    Args:
        strict: Whether to refuse unknown fields.
    """

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._told: set[tuple[str, str]] = set()

    def ignored(self, path: str, body: Known) -> list[str]:
        """The names of unknown fields. Each one is logged once.

        Args:
            path: Path of the request.
            body: The body, which may have further fields, also in its objects. The value null counts as
                missing.

        Raises:
            ApiError: Ignoring a field would change the answer, more than a hundred fields are unknown, or one
            is unknown and the server is strict.
        """
        given = {name: value for name, value in (body.model_extra or {}).items() if value is not None}
        for name in given.keys() & _REFUSED.keys():
            rule = _REFUSED[name]
            if not rule.neutral(given[name], body):
                raise _refusal(name, rule.instead)
        for name in given.keys() & _OF_TEXTS - _REFUSED.keys():
            if _of_other_text(body, name, given[name]):
                raise _refusal(name, _instead(body, name))
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
            _log.warning("ignoring an unknown field of a request: %s", text)
        shown = [_shown(name) for name in unknown]
        return [*shown[:_MOST_IN_HEADER], *(["..."] if len(shown) > _MOST_IN_HEADER else [])]


def _refusal(name: str, instead: str) -> ApiError:
    advice = f"; {instead}" if instead else ""
    return ApiError(
        400,
        f"{name} is not supported, and ignoring it would change the answer{advice}",
        param=name,
        code="unsupported_parameter",
    )


def _within(body: Known) -> Iterator[tuple[str, str, type[Known]]]:
    """The unknown fields of objects in a body: path with a final dot, name, and type of the object.

    Entries of a list have no numbers, so that a long conversation has few paths.
    """
    left: list[tuple[str, Known]] = [("", body)]
    while left:
        place, outer = left.pop()
        for own, value in vars(outer).items():
            if isinstance(value, (str, int, float, dict)) or not value:
                continue
            objects = value if isinstance(value, list) else (value,)
            if not isinstance(objects[0], Known):
                continue  # entries of a list have one kind, and it may contain a million numbers
            inside = f"{place}{type(outer).model_fields[own].alias or own}."
            for each in objects:
                left.append((inside, each))
                for name, given in (each.model_extra or {}).items():
                    if given is not None and name not in each.harmless:
                        yield inside, name, type(each)


def _shown(name: str) -> str:
    """A name for logs and headers: printable ASCII of limited length."""
    return ascii(name)[1:-1].replace(",", r"\x2c")[:_LONGEST_NAME]
