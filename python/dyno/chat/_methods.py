"""The methods of `Engine` for conversations and for whole texts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack, cast

from dyno._sampling import DrawOptions, Sampling
from dyno._unknown_arguments import check_known

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from dyno._completion import Completion
    from dyno.chat.reply import Reply
    from dyno.chat.template import ChatTemplate
    from dyno.engine import Engine

__all__ = ["ChatMethods"]


class ChatMethods:
    """The methods of `Engine` for messages and whole texts."""

    def complete(
        self,
        prompt: str | Sequence[int],
        max_tokens: int | None = None,
        *,
        n: int = 1,
        temperature: float = 0.0,
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.05,
        seed: int | None = None,
        stop: Sequence[str] | str | None = (),
        logprobs: int | None = None,
        parse_special: bool = True,
        slot: int | None = None,
        **more: Unpack[DrawOptions],
    ) -> list[Completion]:
        """Generate whole texts that continue `prompt`, with their tokens.

        Args:
            prompt: As in `generate`, like all arguments without a description here.
            max_tokens: As in `generate`.
            n: Number of texts. Each reads the prompt. Their seeds are `seed`, `seed + 1`, ….
            temperature: As in `generate`.
            top_k: As in `generate`.
            top_p: As in `generate`.
            min_p: As in `generate`.
            seed: As in `generate`.
            stop: As in `generate`.
            logprobs: Report log-probabilities, and this many of the most probable tokens with each.
            parse_special: As in `generate`.
            slot: As in `generate`.
            **more: As in `generate`.

        Raises:
            PlanError, ModelError: As in `generate`.
        """
        from dyno._completion import completed
        from dyno._generate import StopFilter, count_of
        from dyno._writing import most_tokens, prompt_tokens

        engine = cast("Engine", self)
        engine._open()
        check_known(self.complete, more)
        if slot is not None:
            engine._slots.check_exists(slot, int(engine.settings["sequences"]))
        seeds = [None if seed is None else seed + i for i in range(count_of("n", n))]
        drawing = [
            Sampling(temperature, top_k, top_p, min_p, each, logprobs=logprobs, **more) for each in seeds
        ]
        tokens = prompt_tokens(engine, prompt, parse_special)
        limit = most_tokens(engine, tokens, max_tokens)
        return [completed(engine, tokens, each, StopFilter(stop), limit, slot) for each in drawing]

    def chat_template(
        self, wanted: str | os.PathLike[str] | None = None, *, tools: bool = False
    ) -> ChatTemplate:
        """The model's chat template, or another one; see `dyno.chat.find_template`.

        Raises:
            ChatError: There is no such template, or the file has none.
            PlanError: The engine is closed.
        """
        from dyno.chat.template import find_template

        engine = cast("Engine", self)
        engine._open()
        file = engine._file
        assert file is not None  # an open engine has a file
        return find_template(file, engine.tokenizer.vocabulary, wanted, tools=tools)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        call: str | None = None,
        continues: bool = False,
        template: ChatTemplate | str | os.PathLike[str] | None = None,
        variables: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
        temperature: float = 0.0,
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.05,
        seed: int | None = None,
        stop: Sequence[str] | str | None = (),
        logprobs: int | None = None,
        slot: int | None = None,
        **more: Unpack[DrawOptions],
    ) -> Reply:
        """Generate the model's answer to a conversation, part by part.

        Args:
            messages: Dicts with `role` and `content`, the last one usually from the user.
            tools: Functions that the model may call, as in the public chat API.
            call: The function that the model must call; empty: any of the tools. None: calls are optional.
            continues: Whether the last message is the beginning of the answer, which the model completes. The
                answer then has no reasoning before it, and cannot be combined with `call` or `json_schema`.
            template: A chat template, its file or its name; None takes the model's own.
            variables: For the template, such as `{"enable_thinking": False}`.
            max_tokens: Maximum number of tokens. None: up to the end of the context.
            temperature: As in `generate`, and so are top_k, top_p, min_p, seed and slot.
            top_k: As in `generate`.
            top_p: As in `generate`.
            min_p: As in `generate`.
            seed: As in `generate`.
            stop: Strings that end the answer; they are not part of it.
            logprobs: Report log-probabilities, and this many of the most probable tokens with each.
            slot: As in `generate`.
            **more: Further settings of the draws, as in `dyno.Sampling`.

        Returns:
            An iterator over the parts of the answer. `message()` reads to the end and returns the whole
            message.

        Raises:
            ChatError: There is no template, or it refuses the messages.
            PlanError: As in `generate`.

        Example:
            >>> reply = engine.chat([{"role": "user", "content": "Hello"}])  # doctest: +SKIP
            >>> reply.message()["content"]  # doctest: +SKIP
            'Hello! How can I help you?'
        """
        from dyno.chat._forms import check_messages
        from dyno.chat.reply import Reply
        from dyno.chat.template import ChatTemplate

        engine = cast("Engine", self)
        check_known(self.chat, more)
        check_messages(messages)
        sampling = Sampling(temperature, top_k, top_p, min_p, seed, logprobs=logprobs, **more)
        if not isinstance(template, ChatTemplate):
            template = self.chat_template(template, tools=bool(tools))
        return Reply(
            engine,
            messages,
            template,
            tools,
            variables or {},
            sampling,
            max_tokens,
            stop,
            slot,
            call=call,
            continues=continues,
        )

    def chat_choices(
        self, messages: Sequence[Mapping[str, Any]], n: int, *, seed: int | None = None, **options: Any
    ) -> list[Reply]:
        """`n` answers to one conversation. Each reads the prompt when its first part is requested.

        Args:
            messages: As in `chat`.
            n: Number of answers.
            seed: Seed of the first answer. The next answers add 1, 2, ….
            **options: As in `chat`.

        Raises:
            PlanError, ChatError: As in `chat`, or `n` is not a whole number of at least 0.
        """
        from dyno._generate import count_of

        seeds = [None if seed is None else seed + i for i in range(count_of("n", n))]
        return [self.chat(messages, seed=each, **options) for each in seeds]
