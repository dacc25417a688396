"""Request bodies with the fields of the public API and a few more. `Fields` checks all others."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictInt,
    WithJsonSchema,
    model_validator,
)

from dyno._generate import LONGEST_STOP, MOST_STOPS, StopFilter
from dyno._requests import Handling
from dyno._sampling import BOUNDS, DrawOptions, Sampling
from dyno.errors import PlanError

if TYPE_CHECKING:
    from pydantic import GetJsonSchemaHandler
    from pydantic.json_schema import JsonSchemaValue

__all__ = [
    "TEXT_PARTS",
    "ChatBody",
    "CompletionBody",
    "DetokenizeBody",
    "DrawBody",
    "EmbeddingBody",
    "Few",
    "Items",
    "Known",
    "RequestBody",
    "Stops",
    "TokenizeBody",
    "Whole",
    "draw_field",
]

_MAX_CHOICES = 16
_MAX_PROMPTS = 256
_MAX_INPUTS = 2048
_MAX_BIASES = 1024
_MAX_ENTRIES = 1 << 14
"""Most messages with their parts, or tools. No other client is served while pydantic creates an object for
each."""

_NULL = {"type": "null"}
_TEXT = {"type": "string"}
_NAME = {"type": "string", "minLength": 1}
T = TypeVar("T")
Items = Annotated[list[T], Field(fail_fast=True)]
"""A list that is only checked up to the first wrong item. Otherwise a body could cause millions of errors."""


def _few_entries(given: object) -> object:
    """Raises ValueError for a list with too many entries and parts, before each of them is checked."""
    count, left = 0, [given]
    while left:
        each = left.pop()
        if not isinstance(each, list):
            continue
        count += len(each)
        if count > _MAX_ENTRIES:
            raise ValueError(
                f"more than {_MAX_ENTRIES} entries, counted with their parts; join some of them, or leave "
                "some out"
            )
        left += [entry["content"] for entry in each if isinstance(entry, dict) and "content" in entry]
    return given


Few = BeforeValidator(_few_entries)
"""Marks a list of messages, parts of messages, or tools."""
_Token = Annotated[StrictInt, Field(json_schema_extra={"minimum": 0})]
_Texts = Annotated[
    # Strict, because an item "42" is a text and not a token.
    str | Items[_Token] | Items[str] | Items[Items[_Token]], Field(union_mode="left_to_right")
]
"""One text, the tokens of one text, or a list of either."""


class Known(BaseModel):
    """An object in a body, with its unknown fields in `model_extra`."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    harmless: ClassVar[frozenset[str]] = frozenset()
    """Further fields of the public APIs, which have no effect here."""


class Whole(Known):
    """An object whose known fields count as missing if they are null."""

    @model_validator(mode="before")
    @classmethod
    def _null_is_not_given(cls, given: Any) -> Any:
        """Remove known fields that are null, which means missing in the public APIs."""
        if not isinstance(given, dict):
            return given
        return {k: v for k, v in given.items() if v is not None or k not in cls.model_fields}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The described schema, in which each field that may be missing may also be null."""
        described = handler(core_schema)
        own = handler.resolve_ref_schema(described)
        for name, field in own.get("properties", {}).items():
            if name not in own.get("required", ()) and _NULL not in field.get("anyOf", ()):
                about = {key: field.pop(key) for key in ("default", "title") if key in field}
                own["properties"][name] = {"anyOf": [field, _NULL], **about}
        return described


def _can_stop(given: list[str]) -> list[str]:
    try:
        StopFilter(given)
    except PlanError as error:
        raise ValueError(str(error)) from error
    return given


def _as_list(given: object) -> object:
    if given is not None and not isinstance(given, (str, list)):
        raise ValueError("must be a string or a list of strings")
    return [given] if isinstance(given, str) else given


def _few(given: object) -> object:
    """Raises ValueError for too many biases, before each of them is checked."""
    if isinstance(given, dict) and len(given) > _MAX_BIASES:
        raise ValueError(f"{len(given)} tokens; expected at most {_MAX_BIASES}")
    return given


def draw_field(name: str, default: float | None = None) -> Any:
    """A sampling field, with the bounds of `Sampling` and, unless given, its default."""
    bound = BOUNDS[name]
    return Field(
        default=getattr(Sampling, name) if default is None else default,
        gt=bound.least if bound.above else None,
        ge=None if bound.above else bound.least,
        le=bound.most if math.isfinite(bound.most) else None,
    )


_STOP = {"type": "string", "minLength": 1, "maxLength": LONGEST_STOP}
_STOPS = {"type": "array", "items": _STOP, "maxItems": MOST_STOPS}
Stops = Annotated[Items[str], AfterValidator(_can_stop), WithJsonSchema(_STOPS)]
"""Stop strings in the form of `StopFilter`."""


class StreamOptions(Whole):
    """Further options of a stream."""

    harmless = frozenset({"include_obfuscation"})

    include_usage: bool = False


class RequestBody(Whole):
    """The common fields of all requests for the engine."""

    model: str | None = None
    timeout: float | None = Field(default=None, gt=0, le=86400)
    """Seconds after which the request ends, even if it is incomplete."""
    cache_prompt: bool = True
    ignore_eos: bool = False

    @property
    def handling(self) -> Handling:
        """Options of the generations other than sampling."""
        return Handling(reuse=self.cache_prompt, ignore_end=self.ignore_eos)


class DrawBody(RequestBody):
    """The common fields of completions and chat completions. The default temperature is the one of the public
    API."""

    temperature: float = draw_field("temperature", 1.0)
    top_k: int = draw_field("top_k")
    top_p: float = draw_field("top_p")
    min_p: float = draw_field("min_p")
    typical_p: float = draw_field("typical_p")
    xtc_probability: float = draw_field("xtc_probability")
    xtc_threshold: float = draw_field("xtc_threshold")
    repeat_penalty: float = draw_field("repeat_penalty")
    repeat_last_n: int = draw_field("repeat_last_n")
    presence_penalty: float = draw_field("presence_penalty")
    frequency_penalty: float = draw_field("frequency_penalty")
    dry_multiplier: float = draw_field("dry_multiplier")
    dry_base: float = draw_field("dry_base")
    dry_allowed_length: int = draw_field("dry_allowed_length")
    dry_sequence_breakers: Items[Annotated[str, Field(json_schema_extra={"minLength": 1})]] = Field(
        default_factory=lambda: list(Sampling.dry_sequence_breakers)
    )
    logit_bias: Annotated[dict[int, float], BeforeValidator(_few)] = Field(
        default_factory=dict, json_schema_extra={"propertyNames": {"pattern": "^[0-9]+$"}}
    )
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: Annotated[
        Stops | None, BeforeValidator(_as_list), WithJsonSchema({"anyOf": [_STOP, _STOPS, _NULL]})
    ] = None
    n: int = Field(default=1, ge=1, le=_MAX_CHOICES)
    stream: bool = False
    stream_options: StreamOptions | None = None
    grammar: str | None = None
    regex: str | None = None

    @property
    def stops(self) -> list[str]:
        """The stop strings as a list."""
        return self.stop or []

    @property
    def reports_usage(self) -> bool:
        """Whether a stream ends with its token usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def drawing(self) -> dict[str, Any]:
        """The sampling settings by their names in `dyno.Sampling`, without `seed` and `logprobs`."""
        names = ("temperature", "top_k", "top_p", "min_p", *DrawOptions.__annotations__)
        return {name: getattr(self, name) for name in names if name in type(self).model_fields}

    def seeds(self) -> list[int | None]:
        """The seeds of the choices, if the request has a seed other than -1.

        Sampling has no negative seeds, so other negative ones count from the upper end.
        """
        return [None if self.seed in (None, -1) else (self.seed + i) % 2**64 for i in range(self.n)]


class JsonSchema(Whole):
    """A named JSON schema."""

    harmless = frozenset({"description", "name", "strict"})

    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Whole):
    """The required format of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    """The schema of a `json_object`, as in llama-server."""

    @model_validator(mode="after")
    def _schema_is_there(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("type is json_schema; json_schema is missing")
        return self

    @property
    def schema_of_text(self) -> dict[str, Any] | None:
        """The schema that a text must follow; None: any text."""
        if self.type == "text":
            return None
        if self.json_schema is not None and self.type == "json_schema":
            return self.json_schema.schema_
        return self.schema_ or {"type": "object"}


class _Function(Known):
    name: str = Field(min_length=1)


class FunctionChoice(Known):
    """The choice of one tool."""

    type: Literal["function"]
    function: _Function


TEXT_PARTS = {"text": "text", "input_text": "text", "refusal": "refusal"}
"""The field with the text, by the type of a part of a chat message."""


def _fields(required: tuple[str, ...], **fields: Any) -> dict[str, Any]:
    """The schema of an object with some fields."""
    return {"type": "object", "properties": fields, "required": [*required]}


_PARTS = [_fields(("type", name), type={"const": kind}, **{name: _TEXT}) for kind, name in TEXT_PARTS.items()]
_CONTENTS = [_TEXT, {"type": "array", "items": {"anyOf": [_TEXT, *_PARTS]}}]
_Message = Annotated[
    dict[str, Any],
    Field(
        json_schema_extra={
            "anyOf": [
                _fields(("role", "content"), role=_NAME, content={"anyOf": _CONTENTS}),
                _fields(("role",), role={"const": "assistant"}, content={"anyOf": [*_CONTENTS, _NULL]}),
            ]
        }
    ),
]
"""A message, which `conversation` checks."""
_FUNCTION = _fields(("name",), name=_NAME, parameters={"type": ["object", "null"]})
_Tool = Annotated[
    dict[str, Any],
    Field(json_schema_extra=_fields(("function",), type={"const": "function"}, function=_FUNCTION)),
]
"""A tool, which `functions` checks."""
_CHOICES = ("auto", "none", "required")


class ChatBody(DrawBody):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[Items[_Message], Few] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=-1)
    max_completion_tokens: int | None = Field(default=None, ge=-1)
    tools: Annotated[Items[_Tool] | None, Few] = None
    tool_choice: Annotated[str, Field(json_schema_extra={"enum": [*_CHOICES]})] | FunctionChoice | None = None
    continue_final_message: bool = False
    """Continue the last message, which is the assistant's."""
    parallel_tool_calls: bool | None = None
    """If this is false, an answer only has its first tool call."""
    reasoning_effort: str | None = Field(default=None, max_length=32)
    """A variable of the template. `none` also turns reasoning off if the template supports that."""
    response_format: ResponseFormat | None = None
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=20)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _can_be_done(self) -> ChatBody:
        if isinstance(self.tool_choice, str) and self.tool_choice not in _CHOICES:
            raise ValueError(
                f"tool_choice is {self.tool_choice!r:.80}; supported: {', '.join(_CHOICES)}, "
                '{"type": "function", "function": {"name": ...}}'
            )
        return self

    @property
    def call(self) -> str | None:
        """The function that the answer must call; empty: any of the tools; None: calls are optional."""
        if isinstance(self.tool_choice, FunctionChoice):
            return self.tool_choice.function.name
        return "" if self.tool_choice == "required" else None

    def variables(self) -> dict[str, Any]:
        """Variables of the template."""
        effort = self.reasoning_effort
        given: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
        if effort == "none":
            given["enable_thinking"] = False
        return {**given, **self.chat_template_kwargs}

    @property
    def limit(self) -> int | None:
        """Maximum number of tokens; None: up to the end of the context."""
        given = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return None if given == -1 else given

    def sampling(self) -> dict[str, Any]:
        """The sampling arguments of `Engine.chat`."""
        more: dict[str, Any] = self.drawing()
        if self.response_format is not None:
            more["json_schema"] = self.response_format.schema_of_text
        return more | {"logprobs": self.top_logprobs if self.logprobs else None}


class CompletionBody(DrawBody):
    """The body of POST /v1/completions."""

    prompt: _Texts = Field(examples=["Hello"])
    max_tokens: int = Field(default=16, ge=-1)
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: bool = False

    @model_validator(mode="after")
    def _prompts_are_there(self) -> CompletionBody:
        if not self.prompt and not isinstance(self.prompt, str):
            raise ValueError("prompt is an empty list; expected a text, token ids, or a list of either")
        if len(self.prompts) > _MAX_PROMPTS:
            raise ValueError(f"prompt holds {len(self.prompts)} prompts; expected at most {_MAX_PROMPTS}")
        return self

    @property
    def limit(self) -> int | None:
        """Maximum number of tokens of a text; None: up to the end of the context."""
        return None if self.max_tokens == -1 else self.max_tokens

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each with `n` choices."""
        return _several(self.prompt)

    @property
    def handling(self) -> Handling:
        """Options of the generations other than sampling."""
        wanted = self.logprobs if self.echo else None
        return dataclasses.replace(super().handling, prompt_logprobs=wanted)

    def samplings(self) -> list[Sampling]:
        """The sampling settings of each choice."""
        return [Sampling(seed=seed, logprobs=self.logprobs, **self.drawing()) for seed in self.seeds()]


class EmbeddingBody(RequestBody):
    """The body of POST /v1/embeddings."""

    input: _Texts = Field(examples=["Hello"])
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(default=None, ge=1)
    pooling: Literal["mean", "last", "cls"] | None = None
    normalize: bool = True

    @model_validator(mode="after")
    def _inputs_are_there(self) -> EmbeddingBody:
        if not self.input:
            raise ValueError("input is empty; expected a text, token ids, or a list of either")
        if len(self.inputs) > _MAX_INPUTS:
            raise ValueError(f"input holds {len(self.inputs)} texts; expected at most {_MAX_INPUTS}")
        return self

    @property
    def inputs(self) -> list[str | list[int]]:
        """The texts, as strings or token ids."""
        return _several(self.input)


def _several(given: str | list[int] | list[str] | list[list[int]]) -> list[str | list[int]]:
    """Convert one text, the tokens of one text, or several of either, to a list with items of one kind."""
    if isinstance(given, str) or not given or isinstance(given[0], int):
        return [given]  # type: ignore[list-item]
    return [*given]


class TokenizeBody(Whole):
    """The body of POST /tokenize. The second names are those of vLLM."""

    content: str = Field(validation_alias=AliasChoices("content", "prompt"))
    add_special: bool = Field(False, validation_alias=AliasChoices("add_special", "add_special_tokens"))
    parse_special: bool = True
    with_pieces: bool = False
    """Give the text of each token too, or its bytes if they are only a part of a character."""


class DetokenizeBody(Whole):
    """The body of POST /detokenize."""

    tokens: Items[_Token]
    special: bool = False
