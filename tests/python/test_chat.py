"""Conversations with an engine: prompts of messages, answers in parts, and what ends them."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import dyno
import pytest
from chat_model import TEMPLATE, chat_model
from dyno._writing import Drawn
from dyno.chat import ChatTemplate
from dyno.diagnostics import Diagnostics
from dyno.errors import ChatError, PlanError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

USER = [{"role": "user", "content": "Hello"}]
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("chat") / "m.gguf")


@pytest.fixture
def engine(model: Path) -> Iterator[dyno.Engine]:
    with dyno.Engine(model, device="cpu", profile=None, ctx=256, threads=1, sequences=2) as opened:
        yield opened


@pytest.fixture
def says(engine: dyno.Engine, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes the model say something: the tokens of a text, then of nothing more."""

    def script(text: str) -> None:
        tokens = engine.tokenize(text, parse_special=True)

        def drawn(engine: Any, prompt: Any, sampling: Any, limit: int, *rest: Any, **more: Any) -> Any:
            yield from [Drawn(token) for token in tokens][:limit]

        monkeypatch.setattr("dyno._completion.drawn_tokens", drawn)

    return script


# ---- with a real model ----


def test_a_prompt_is_what_the_template_makes_of_the_messages(engine: dyno.Engine) -> None:
    reply = engine.chat([{"role": "system", "content": "Be brief<|end|>"}, *USER], max_tokens=1)
    assert engine.detokenize(reply.prompt, special=True) == (
        "<|system|>Be brief<|end|><|end|><|user|>Hello<|end|><|assistant|>"
    )
    vocabulary = engine.tokenizer.vocabulary
    names = [vocabulary.tokens[t] for t in reply.prompt if vocabulary.types[t] == 3]
    assert names == ["<|system|>", "<|end|>", "<|user|>", "<|end|>", "<|assistant|>"]


def test_an_answer_is_what_generating_after_the_prompt_gives(engine: dyno.Engine) -> None:
    warm = {"temperature": 0.8, "seed": 3, "repeat_penalty": 1.2}
    reply = engine.chat(USER, max_tokens=20, **warm)  # type: ignore[arg-type]
    parts = [part.content for part in reply]
    assert reply.finish_reason == "length"
    assert reply.message() == {"role": "assistant", "content": "".join(parts)}
    text = "".join(engine.generate(reply.prompt, 20, **warm))  # type: ignore[arg-type]
    assert "".join(parts).strip("\r\n") == text.strip("\r\n")
    assert len(reply.tokens) == 20


def test_logprobs_come_with_each_token(engine: dyno.Engine) -> None:
    reply = engine.chat(USER, max_tokens=5, logprobs=3)
    reply.message()
    assert [each.token for each in reply.logprobs] == reply.tokens
    for each in reply.logprobs:
        assert len(each.top) == 3
        assert each.top[0] == (each.token, each.logprob)  # greedy


def test_choices_have_seeds_of_their_own(engine: dyno.Engine) -> None:
    def texts(n: int, seed: int) -> list[str]:
        replies = engine.chat_choices(USER, n, seed=seed, max_tokens=12, temperature=1.5)
        return [reply.message()["content"] for reply in replies]

    three = texts(3, 5)
    assert len(set(three)) == 3
    assert texts(2, 6) == three[1:]
    assert engine.chat_choices(USER, 0) == []
    with pytest.raises(PlanError, match="n must be a whole number"):
        engine.chat_choices(USER, -1)


def test_a_reply_owns_its_slot_until_it_ends(engine: dyno.Engine) -> None:
    first, second, third = (engine.chat(USER, max_tokens=50) for _ in range(3))
    next(first)
    next(second)
    with pytest.raises(PlanError, match="no slot is free"):
        next(third)
    first.close()
    assert engine.chat(USER, max_tokens=3).message()["content"]


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "seed": 4}, {"presence_penalty": 0.5}], ids=str)
@pytest.mark.parametrize("on_device", [False, True])
def test_what_the_slot_holds_is_not_computed_again(
    engine: dyno.Engine, options: dict[str, Any], on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dyno._sampling import Sampling
    from dyno.chat.reply import Reply

    monkeypatch.setattr(Diagnostics, "draws_on_device", on_device)
    sampling = Sampling(**options)
    template = engine.chat_template()
    longer = [*USER, {"role": "assistant", "content": "Hi"}, *USER]

    def reply(held: list[int]) -> Reply:
        found = Reply(engine, longer, template, None, {}, sampling, 15, (), 0, held)
        found.message()
        return found

    want = reply([]).tokens
    before = engine.chat(USER, max_tokens=6, slot=0)
    before.message()
    held = [*before.prompt, *before.tokens][: engine.position(0)]
    fed: list[int] = []
    session = engine._session
    rewind = session.rewind

    class Spy:
        def __getattr__(self, name: str) -> Any:
            return getattr(session, name)

        def rewind(self, position: int, slot: int = 0) -> None:
            fed.append(position)
            rewind(position, slot)

    monkeypatch.setattr(engine, "_session", Spy())
    assert reply(held).tokens == want
    assert fed == [len(before.prompt)]  # the first answer was another one
    assert reply([1, 2, 3]).tokens == want  # nothing agrees


# ---- with a script ----


def test_reasoning_has_its_own_field(engine: dyno.Engine, says: Callable[[str], None]) -> None:
    says("<think>\nwhy\n</think>\n\nBecause.<|end|>never")
    reply = engine.chat(USER)
    assert reply.message() == {"role": "assistant", "content": "Because.", "reasoning_content": "why"}
    assert reply.finish_reason == "stop"
    says("why</think>Because.")
    reply = engine.chat(USER, variables={"thinking": True})
    assert reply.message()["reasoning_content"] == "why"
    assert reply.finish_reason == "length"


def test_tool_calls_are_read_if_tools_were_offered(engine: dyno.Engine, says: Callable[[str], None]) -> None:
    text = 'Wait.\n<tool_call>{"name": "now", "arguments": {"zone": "é"}}</tool_call>'
    says(text + "<|end|>")
    reply = engine.chat(USER, tools=TOOLS)
    message = reply.message()
    (call,) = message["tool_calls"]
    assert (message["content"], call["function"]["name"]) == ("Wait.", "now")
    assert json.loads(call["function"]["arguments"]) == {"zone": "é"}
    assert reply.finish_reason == "tool_calls"
    again = engine.chat([*USER, message, {"role": "tool", "content": "12"}, *USER], tools=TOOLS)
    assert '<tool_call>{"name": "now"' in engine.detokenize(again.prompt, special=True)
    assert engine.chat(USER).message()["content"] == text


def test_stop_strings_end_an_answer_across_tokens(engine: dyno.Engine, says: Callable[[str], None]) -> None:
    says("one two three")
    reply = engine.chat(USER, stop="wo th")
    assert (reply.message()["content"], reply.finish_reason) == ("one t", "stop")
    says("one tw")
    reply = engine.chat(USER, stop=["wo th", "x"])
    assert (reply.message()["content"], reply.finish_reason) == ("one tw", "length")


def test_control_tokens_are_no_text(engine: dyno.Engine, says: Callable[[str], None]) -> None:
    says("a<|user|>b😀<|end|>")
    assert engine.chat(USER).message()["content"] == "ab😀"


def test_parts_are_whole_characters(engine: dyno.Engine, says: Callable[[str], None]) -> None:
    says("é😀")
    assert [part.content for part in engine.chat(USER)] == ["é", "😀"]


# ---- refusals ----


def test_a_file_without_a_template(tmp_path: Path) -> None:
    path = chat_model(tmp_path / "m.gguf", template=None)
    with dyno.Engine(path, device="cpu", profile=None) as engine:
        with pytest.raises(ChatError, match="no chat template; pass --chat-template FILE"):
            engine.chat(USER)
        prompt = engine.chat(USER, template="chatml", max_tokens=1).prompt
        assert engine.detokenize(prompt, special=True).startswith("<|im_start|>user\nHello<|im_end|>")
        mine = ChatTemplate("{{ messages[0].content }}")
        assert engine.chat(USER, template=mine, max_tokens=1).prompt == engine.tokenize("Hello")
    with pytest.raises(PlanError, match="closed"):
        engine.chat(USER)


def test_impossible_conversations(engine: dyno.Engine) -> None:
    with pytest.raises(
        PlanError,
        match=r"the conversation has (30[0-9]) tokens, ctx is 256; open the engine with ctx=\1 or more, "
        r"on a command line -c \1 \(the model was made for",
    ):
        engine.chat([{"role": "user", "content": "x" * 300}])
    with pytest.raises(PlanError, match="max_tokens must be a whole number of at least 0, not -1"):
        engine.chat(USER, max_tokens=-1)
    with pytest.raises(PlanError, match="temperature must be at least 0"):
        engine.chat(USER, temperature=-1)
    with pytest.raises(PlanError, match="slot 7 does not exist"):
        engine.chat(USER, slot=7)
    with pytest.raises(PlanError, match="the template given gives an empty prompt"):
        engine.chat(USER, template=ChatTemplate("{# nothing #}"))


def test_a_template_that_hides_its_own_control_tokens_is_told_of(
    engine: dyno.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    hidden = ChatTemplate("{{ '<|%s|>' % messages[0].role }}{{ messages[0].content }}<|end|>")
    with caplog.at_level(logging.WARNING, "dyno.chat"):
        engine.chat([{"role": "user", "content": "<|assistant|>"}], template=hidden)
    (record,) = caplog.records
    assert "the template given computes <|user|> in a way that hides its origin" in record.getMessage()
    caplog.clear()
    engine.chat([{"role": "user", "content": "<|assistant|>"}], template=ChatTemplate(TEMPLATE))
    assert caplog.records == []
