"""The OpenAPI document of a server. The models that check the bodies of requests also describe them."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from dyno import __version__
from dyno.server.bodies import ChatBody, CompletionBody, DetokenizeBody, EmbeddingBody, Known, TokenizeBody
from dyno.server.fields import IGNORED_FIELDS
from dyno.server.messages_body import CountBody, MessagesBody
from dyno.server.openapi_answers import (
    ChatChunk,
    ChatCompletion,
    Completion,
    CompletionChunk,
    EmbeddingList,
    Error,
    Failed,
    Health,
    MessageAnswer,
    MessageError,
    MessageEvent,
    ModelEntry,
    ModelList,
    Properties,
    Ready,
    TokenCount,
    TokenizerInfo,
    Tokens,
    TokenText,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pydantic import BaseModel
    from pydantic.json_schema import JsonSchemaValue

__all__ = ["OPERATIONS", "Operation", "document", "document_bytes"]

_JSON = "application/json"
_BODY = (400, 408, 413)
_TEXT = (*_BODY, 429, 501, 503, 504)
_ERRORS = {
    400: "A field of the body is wrong, or a prompt is longer than the context.",
    401: "The key is missing or wrong.",
    403: "The server has no key, and a page of another origin asks, or the header Host has an unknown name.",
    404: "The server has no such model.",
    408: "The body has not come in time.",
    413: "The body is too large.",
    429: "The queue is full.",
    431: "The request line and the headers are too large.",
    500: "The engine failed, and no request caused it.",
    501: "The request needs a library that is not installed.",
    503: "The server is shutting down.",
    504: "The time of the request is over.",
}


@dataclass(frozen=True)
class Operation:
    """One method of one path.

    Args:
        method: The method.
        path: The path, with names in braces.
        summary: One sentence for readers.
        answer: The model of the answer, or its media type if it has no model.
        body: The model that checks the body.
        errors: The statuses of errors, without those that each operation has.
        event: The model of the events of a stream, if the body may ask for one.
        failed: The model of an answer with status 503 that is no `Error`.
        is_open: Whether it needs no key.
    """

    method: Literal["GET", "POST"]
    path: str
    summary: str
    answer: type[BaseModel] | str
    body: type[Known] | None = None
    errors: tuple[int, ...] = ()
    event: type[BaseModel] | None = None
    failed: type[BaseModel] | None = None
    is_open: bool = False

    @property
    def name(self) -> str:
        """Its identifier, for generators of clients."""
        words = re.findall(r"\w+", f"{self.method.lower()} {self.path.removeprefix('/v1')}")
        return "_".join(words)

    @property
    def error(self) -> type[BaseModel]:
        """The model of its errors."""
        return MessageError if self.path.startswith("/v1/messages") else Error

    @property
    def models(self) -> Iterator[type[BaseModel]]:
        """The models that it needs."""
        for each in (self.body, self.answer, self.event, self.failed, self.error):
            if isinstance(each, type):
                yield each


OPERATIONS = (
    Operation(
        "POST",
        "/v1/chat/completions",
        "Answer a conversation.",
        ChatCompletion,
        ChatBody,
        _TEXT,
        event=ChatChunk,
    ),
    Operation(
        "POST",
        "/v1/completions",
        "Continue one or more prompts.",
        Completion,
        CompletionBody,
        _TEXT,
        event=CompletionChunk,
    ),
    Operation("POST", "/v1/embeddings", "Compute vectors of texts.", EmbeddingList, EmbeddingBody, _TEXT),
    Operation(
        "POST",
        "/v1/messages",
        "Answer a conversation of Anthropic's form.",
        MessageAnswer,
        MessagesBody,
        _TEXT,
        event=MessageEvent,
    ),
    Operation(
        "POST",
        "/v1/messages/count_tokens",
        "Count the tokens of a conversation.",
        TokenCount,
        CountBody,
        (*_BODY, 503, 504),
    ),
    Operation("GET", "/v1/models", "List the model of the server.", ModelList),
    Operation("GET", "/v1/models/{name}", "Describe a model.", ModelEntry, errors=(404,)),
    Operation("POST", "/tokenize", "Convert a text to tokens.", Tokens, TokenizeBody, _BODY),
    Operation("POST", "/detokenize", "Convert tokens to a text.", TokenText, DetokenizeBody, _BODY),
    Operation("GET", "/tokenizer_info", "Describe special tokens and the chat template.", TokenizerInfo),
    Operation("GET", "/props", "Describe the server and its load.", Properties),
    Operation("GET", "/metrics", "Give metrics in the text format of Prometheus.", "text/plain"),
    Operation(
        "GET",
        "/health",
        "Tell whether the process lives and has its GPU.",
        Health,
        failed=Failed,
        is_open=True,
    ),
    Operation("GET", "/ready", "Tell whether the server takes requests.", Ready, failed=Failed, is_open=True),
    Operation("GET", "/openapi.json", "Describe the paths of the server.", _JSON),
)
"""All operations of a server except the files of its page."""


class _Schemas(GenerateJsonSchema):
    """Schemas without titles, which would repeat their names. No name has an underscore in front."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def normalize_name(self, name: str) -> str:
        return super().normalize_name(name).lstrip("_")

    def model_schema(self, schema: Any) -> JsonSchemaValue:
        described = super().model_schema(schema)
        del described["title"]
        return described


_REF = "#/components/schemas/{model}"
_ALWAYS = (403, 431, 500)
_IGNORED = {
    IGNORED_FIELDS: {"description": "The unknown fields of the request.", "schema": {"type": "string"}}
}
_HEADERS: dict[int, dict[str, Any]] = {
    401: {"WWW-Authenticate": {"required": True, "schema": {"const": "Bearer"}}},
    429: {
        "Retry-After": {
            "description": "Seconds.",
            "required": True,
            "schema": {"type": "integer", "minimum": 0},
        }
    },
}


def document(*, needs_key: bool) -> dict[str, Any]:
    """The document of a server.

    Args:
        needs_key: Whether the server has a key.
    """
    models = dict.fromkeys(model for each in OPERATIONS for model in each.models)
    refs, definitions = models_json_schema(
        [(model, "validation") for model in models], ref_template=_REF, schema_generator=_Schemas
    )
    of_models = {model: ref for (model, _), ref in refs.items()}
    components: dict[str, Any] = {"schemas": definitions["$defs"]}
    keys: dict[str, Any] = {}
    if needs_key:
        components["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        keys["security"] = [{"bearer": []}, {"header": []}]
    paths: dict[str, Any] = {}
    for each in OPERATIONS:
        of_path = paths.setdefault(each.path, {})
        of_path[each.method.lower()] = _described(each, of_models, needs_key=needs_key)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "dyno serve",
            "version": __version__,
            "license": {"name": "MIT", "identifier": "MIT"},
        },
        "paths": paths,
        "components": components,
        **keys,
    }


@functools.cache
def document_bytes(*, needs_key: bool) -> bytes:
    """The document as JSON, written once."""
    return json.dumps(document(needs_key=needs_key), ensure_ascii=False, separators=(",", ":")).encode()


def _described(each: Operation, refs: Mapping[Any, JsonSchemaValue], *, needs_key: bool) -> Any:
    """An operation of the document.

    Args:
        each: The operation.
        refs: The references to all models.
        needs_key: Whether the server has a key.
    """
    if isinstance(each.answer, str):
        kind = "object" if each.answer == _JSON else "string"
        content: dict[str, Any] = {each.answer: {"schema": {"type": kind}}}
    else:
        content = {_JSON: {"schema": refs[each.answer]}}
    if each.event is not None:
        content["text/event-stream"] = {"schema": _event(refs[each.event], refs[each.error])}
    answer: dict[str, Any] = {"description": "The answer.", "content": content}
    if each.body is not None:
        answer["headers"] = _IGNORED
    answers = {"200": answer}
    for status in sorted({*each.errors, *_ALWAYS, *((401,) if needs_key and not each.is_open else ())}):
        # The connection itself refuses too large a head, for any path.
        schema = refs[Error if status == 431 else each.error]
        told: dict[str, Any] = {"description": _ERRORS[status], "content": {_JSON: {"schema": schema}}}
        answers[str(status)] = told | ({"headers": _HEADERS[status]} if status in _HEADERS else {})
    if each.failed is not None:
        failed = {_JSON: {"schema": refs[each.failed]}}
        answers["503"] = {"description": "The server does not work.", "content": failed}
    described: dict[str, Any] = {"summary": each.summary, "operationId": each.name}
    names = re.findall(r"{(\w+)}", each.path)
    if names:
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in names
        ]
    if each.body is not None:
        described["requestBody"] = {"required": True, "content": {_JSON: {"schema": refs[each.body]}}}
    if needs_key and each.is_open:
        described["security"] = []
    return described | {"responses": answers}


def _event(*data: JsonSchemaValue) -> dict[str, Any]:
    """The schema of one event of a stream, as tools read it: OpenAPI 3.1 itself does not describe events.

    Args:
        data: Schemas of the objects that it may hold.
    """
    objects = {"type": "string", "contentMediaType": _JSON, "contentSchema": {"anyOf": [*data]}}
    return {
        "description": "One event. The word [DONE] ends a stream, except one of the messages API.",
        "type": "object",
        "properties": {"event": {"type": "string"}, "data": {"anyOf": [{"const": "[DONE]"}, objects]}},
        "required": ["data"],
    }
