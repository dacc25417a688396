"""The body of POST /v1/messages, and the conversation that it becomes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from dyno.server.bodies import Few, Items, Known, RequestBody, Stops, Whole, draw_field

__all__ = ["CountBody", "MessagesBody"]


class _Part(Known):
    harmless = frozenset({"cache_control"})


class _Text(_Part):
    harmless = _Part.harmless | {"citations"}

    type: Literal["text"]
    text: str


class _Thinking(_Part):
    harmless = frozenset({"signature"})

    type: Literal["thinking"]
    thinking: str


class _RedactedThinking(_Part):
    harmless = frozenset({"data"})

    type: Literal["redacted_thinking"]


class _ToolUse(_Part):
    harmless = _Part.harmless | {"caller"}

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any] | None = None


class _ToolResult(_Part):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Items[_Text] | None = None
    is_error: bool | None = None


_Block = Annotated[
    _Text | _Thinking | _RedactedThinking | _ToolUse | _ToolResult, Field(discriminator="type")
]


class _Message(Known):
    role: Literal["user", "assistant"]
    content: str | Items[_Block]


class _Tool(Whole):
    harmless = frozenset(
        {
            *("allowed_callers", "cache_control", "defer_loading", "eager_input_streaming"),
            *("input_examples", "strict"),
        }
    )

    type: Literal["custom"] = "custom"
    name: str
    description: str | None = None
    input_schema: dict[str, Any]


class _ToolChoice(Whole):
    type: Literal["auto", "none", "any", "tool"]
    name: str | None = Field(default=None, min_length=1)
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _name_is_there(self) -> _ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError(f"type is {self.type}; a name belongs to the type tool, and to no other")
        return self


class _ThinkingChoice(Whole):
    harmless = frozenset({"budget_tokens", "display"})

    type: Literal["enabled", "disabled", "adaptive"]


class _Format(Whole):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class _OutputConfig(Whole):
    format: _Format | None = None
    effort: str | None = Field(default=None, max_length=32)
    """A variable of the template, like `reasoning_effort` of a chat completion."""


class CountBody(RequestBody):
    """The fields of POST /v1/messages/count_tokens, which a message also has."""

    messages: Annotated[Items[_Message], Few] = Field(min_length=1)
    system: Annotated[str | Items[_Text] | None, Few] = None
    tools: Annotated[Items[_Tool], Few] = Field(default_factory=list)
    tool_choice: _ToolChoice | None = None
    thinking: _ThinkingChoice | None = None
    output_config: _OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _blocks_are_in_place(self) -> CountBody:
        for index, message in enumerate(self.messages):
            allowed: tuple[type[_Part], ...] = (_Text, _ToolResult)
            if message.role == "assistant":
                allowed = (_Text, _Thinking, _RedactedThinking, _ToolUse)
            for block in message.content if isinstance(message.content, list) else ():
                if not isinstance(block, allowed):
                    raise ValueError(f"messages.{index}: {block.type} does not fit the role {message.role}")
        return self

    def conversation(self) -> list[dict[str, Any]]:
        """The messages in the form for a chat template."""
        found: list[dict[str, Any]] = []
        if self.system is not None:
            found.append({"role": "system", "content": _text(self.system)})
        for message in self.messages:
            if isinstance(message.content, str):
                found.append({"role": message.role, "content": message.content})
            elif message.role == "assistant":
                found.append(_assistant(message.content))
            else:
                found += _user(message.content)
        return found

    def functions(self) -> list[dict[str, Any]] | None:
        """The tools in the form for a chat template; None if there are none."""
        if not self.tools or (self.tool_choice is not None and self.tool_choice.type == "none"):
            return None
        return [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description or "",
                    "parameters": tool.input_schema,
                },
            }
            for tool in self.tools
        ]

    @property
    def call(self) -> str | None:
        """The function that the answer must call; empty: any of the tools; None: calls are optional."""
        if self.tool_choice is None or self.tool_choice.type in ("auto", "none"):
            return None
        return self.tool_choice.name or ""

    @property
    def continues(self) -> bool:
        """Whether the answer continues the last message, which is then a text of the assistant."""
        last = self.messages[-1]
        whole = isinstance(last.content, str) or all(isinstance(each, _Text) for each in last.content)
        return last.role == "assistant" and whole

    @property
    def one_call(self) -> bool:
        """Whether an answer only has its first tool call."""
        return self.tool_choice is not None and self.tool_choice.disable_parallel_tool_use

    def variables(self) -> dict[str, Any]:
        """Variables of the template."""
        found: dict[str, Any] = {}
        if self.thinking is not None:
            found["enable_thinking"] = self.thinking.type != "disabled"
        if self.output_config is not None and self.output_config.effort is not None:
            found["reasoning_effort"] = self.output_config.effort
        return {**found, **self.chat_template_kwargs}


class MessagesBody(CountBody):
    """The fields of POST /v1/messages, with the sampling settings of a chat completion."""

    max_tokens: int = Field(ge=1)
    stop_sequences: Stops = Field(default_factory=list)
    stream: bool = False
    temperature: float = draw_field("temperature", 1.0)
    top_k: int = draw_field("top_k")
    top_p: float = draw_field("top_p")
    min_p: float = draw_field("min_p")
    seed: int | None = Field(default=None, ge=-1, lt=2**63)

    def sampling(self) -> dict[str, Any]:
        """Arguments of `dyno.Sampling`."""
        wanted = None if self.output_config is None else self.output_config.format
        names = ("temperature", "top_k", "top_p", "min_p")
        return {
            **{name: getattr(self, name) for name in names},
            "seed": None if self.seed == -1 else self.seed,
            "json_schema": None if wanted is None else wanted.schema_,
        }


def _text(content: str | list[_Text] | None) -> str:
    if content is None:
        return ""
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _assistant(blocks: list[Any]) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": "".join(block.text for block in blocks if isinstance(block, _Text)),
    }
    if thoughts := [block.thinking for block in blocks if isinstance(block, _Thinking)]:
        message["reasoning_content"] = "".join(thoughts)
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {"name": block.name, "arguments": block.input or {}},
        }
        for block in blocks
        if isinstance(block, _ToolUse)
    ]
    if calls:
        message["tool_calls"] = calls
    return message


def _result(block: _ToolResult) -> str:
    """The text of the result of a tool. Templates have no field for a failure, so the text reports it."""
    return f"Error: {_text(block.content)}" if block.is_error else _text(block.content)


def _user(blocks: list[Any]) -> list[dict[str, Any]]:
    """The messages of user blocks. Results of tools become separate messages before the text."""
    found = [
        {"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block)}
        for block in blocks
        if isinstance(block, _ToolResult)
    ]
    if texts := [block for block in blocks if isinstance(block, _Text)]:
        found.append({"role": "user", "content": _text(texts)})
    return found
