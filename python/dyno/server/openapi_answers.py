"""Models that describe the answers of a server in its OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field, RootModel

__all__ = [
    "ChatChunk",
    "ChatCompletion",
    "Completion",
    "CompletionChunk",
    "EmbeddingList",
    "Error",
    "Failed",
    "Health",
    "MessageAnswer",
    "MessageError",
    "MessageEvent",
    "ModelEntry",
    "ModelList",
    "Properties",
    "Ready",
    "TokenCount",
    "TokenText",
    "Tokens",
]


def _without_default(schema: dict[str, Any]) -> None:
    del schema["default"]


_MAY_BE_MISSING: Any = Field(default=None, json_schema_extra=_without_default)
"""A field that some answers lack. It is never null."""


class _CachedTokens(BaseModel):
    cached_tokens: int


class _Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: _CachedTokens


class _CalledFunction(BaseModel):
    name: str
    arguments: str = Field(description="The text of a JSON object.")


class _ToolCall(BaseModel):
    id: str
    type: Literal["function"]
    function: _CalledFunction


class _AnswerMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: str = _MAY_BE_MISSING
    tool_calls: list[_ToolCall] = _MAY_BE_MISSING


class _TokenLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class _DrawnLogprob(_TokenLogprob):
    top_logprobs: list[_TokenLogprob]


class _ChatLogprobs(BaseModel):
    content: list[_DrawnLogprob]


class _ChatChoice(BaseModel):
    index: int
    message: _AnswerMessage
    finish_reason: Literal["stop", "length", "tool_calls"]
    logprobs: _ChatLogprobs = _MAY_BE_MISSING


class _CallOfChunk(_ToolCall):
    index: int


class _Delta(BaseModel):
    role: Literal["assistant"] = _MAY_BE_MISSING
    content: str = _MAY_BE_MISSING
    reasoning_content: str = _MAY_BE_MISSING
    tool_calls: list[_CallOfChunk] = _MAY_BE_MISSING


class _ChoiceOfChunk(BaseModel):
    index: int
    delta: _Delta
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    logprobs: _ChatLogprobs = _MAY_BE_MISSING


class ChatChunk(BaseModel):
    """The next part of an answer to a conversation."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[_ChoiceOfChunk]
    usage: _Usage = _MAY_BE_MISSING


class ChatCompletion(BaseModel):
    """An answer to a conversation."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[_ChatChoice]
    usage: _Usage


class _TextLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class _TextChoice(BaseModel):
    index: int
    text: str
    logprobs: _TextLogprobs | None
    finish_reason: Literal["stop", "length"]


class Completion(BaseModel):
    """Texts that continue prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[_TextChoice]
    usage: _Usage


class _ChoiceOfTextChunk(BaseModel):
    index: int
    text: str
    logprobs: _TextLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class CompletionChunk(BaseModel):
    """The next part of texts that continue prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[_ChoiceOfTextChunk]
    usage: _Usage = _MAY_BE_MISSING


class _Embedding(BaseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str = Field(description="Numbers, or base64 of little-endian float32 bytes.")


class _EmbeddingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(BaseModel):
    """A vector for each text."""

    object: Literal["list"]
    data: list[_Embedding]
    model: str
    usage: _EmbeddingUsage


class _TextBlock(BaseModel):
    type: Literal["text"]
    text: str


class _ThinkingBlock(BaseModel):
    type: Literal["thinking"]
    thinking: str
    signature: str


class _ToolUseBlock(BaseModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class _MessageUsage(BaseModel):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


_Block = _TextBlock | _ThinkingBlock | _ToolUseBlock
_StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class _Message(BaseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[_Block]
    stop_sequence: str | None
    usage: _MessageUsage


class MessageAnswer(_Message):
    """An answer in the form of the messages API."""

    stop_reason: _StopReason


class _BegunMessage(_Message):
    stop_reason: None


class _MessageStart(BaseModel):
    type: Literal["message_start"]
    message: _BegunMessage


class _BlockStart(BaseModel):
    type: Literal["content_block_start"]
    index: int
    content_block: _Block


class _TextDelta(BaseModel):
    type: Literal["text_delta"]
    text: str


class _ThinkingDelta(BaseModel):
    type: Literal["thinking_delta"]
    thinking: str


class _InputDelta(BaseModel):
    type: Literal["input_json_delta"]
    partial_json: str


class _BlockDelta(BaseModel):
    type: Literal["content_block_delta"]
    index: int
    delta: _TextDelta | _ThinkingDelta | _InputDelta


class _BlockStop(BaseModel):
    type: Literal["content_block_stop"]
    index: int


class _EndOfMessage(BaseModel):
    stop_reason: _StopReason
    stop_sequence: str | None


class _MessageDelta(BaseModel):
    type: Literal["message_delta"]
    delta: _EndOfMessage
    usage: _MessageUsage


class _MessageStop(BaseModel):
    type: Literal["message_stop"]


class MessageEvent(
    RootModel[_MessageStart | _BlockStart | _BlockDelta | _BlockStop | _MessageDelta | _MessageStop]
):
    """The next part of an answer in the form of the messages API."""


class TokenCount(BaseModel):
    """The length of a conversation."""

    input_tokens: int


class ModelEntry(BaseModel):
    """The model of the server."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int = Field(description="The most tokens of a text with its prompt.")


class ModelList(BaseModel):
    """The models of the server."""

    object: Literal["list"]
    data: list[ModelEntry]


class _TokenPiece(BaseModel):
    id: int
    piece: str | list[int] = Field(description="The text, or the bytes of a part of a character.")


class Tokens(BaseModel):
    """The tokens of a text."""

    tokens: list[int] | list[_TokenPiece]


class TokenText(BaseModel):
    """The text of tokens."""

    content: str
    prompt: str = Field(description="The same text, under the name of vLLM.")


class TokenizerInfo(BaseModel):
    """The special tokens and the chat template of the model."""

    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    add_bos_token: bool = Field(description="Whether the first token precedes each prompt.")
    add_eos_token: bool
    chat_template: str | None
    model_max_length: int = Field(description="The most tokens of a text with its prompt.")


class _Load(BaseModel):
    running: int
    waiting: int
    sequences: int
    max_waiting: int
    held_tokens: int
    cache_bytes: int
    cache_bytes_most: int


class Ready(_Load):
    """The load of a server that takes requests."""

    status: Literal["ready"]


class Health(BaseModel):
    """The state of a process that lives."""

    status: Literal["ok"]


class Failed(BaseModel):
    """The reason why the server does not work at present."""

    status: Literal["failed"]
    reason: str


class Properties(_Load):
    """The server and its load."""

    version: str
    model: str
    architecture: str
    device: str
    profile: str | None
    settings: dict[str, Any]
    n_ctx_train: int
    n_vocab: int


class _ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None = Field(description="The wrong field of the request.")
    code: str | None


class Error(BaseModel):
    """A refusal in the form of the chat API."""

    error: _ErrorBody


class _MessageErrorBody(BaseModel):
    type: str
    message: str


class MessageError(BaseModel):
    """A refusal in the form of the messages API."""

    type: Literal["error"]
    error: _MessageErrorBody
