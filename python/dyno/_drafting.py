"""The drafts of a scheduler's steps: who proposes them, whether they pay, and how many were right."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from dyno._draft_head import DraftHead
from dyno._draft_model import DraftModel
from dyno._drafts import DraftCounts, Drafter, Judge, Reads, Speculation
from dyno.errors import DynoError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dyno._requests import Request
    from dyno.engine import Engine

__all__ = ["Drafting", "speculation_of"]

_log = logging.getLogger("dyno.scheduler")


def speculation_of(settings: Mapping[str, Any], draft: Engine | None = None) -> Speculation | None:
    """The speculation that settings ask for; None for none.

    Args:
        settings: With `spec`, `spec_max` and `spec_min_p`, or without them.
        draft: The smaller model, if there is one.
    """
    kind = settings.get("spec", "off")
    if kind == "draft" and draft is None:
        _log.warning("the setting spec is draft, but no draft model was given, so nothing is drafted")
    if kind == "off" or (kind == "draft" and draft is None):
        return None
    most, min_p = int(settings["spec_max"]), float(settings["spec_min_p"])
    return Speculation(most, min_p, draft if kind == "draft" else None, head=kind == "mtp")


class Drafting:
    """The drafts of one scheduler.

    Args:
        engine: Of the scheduler.
        speculation: How tokens are drafted.

    Raises:
        PlanError: The draft model does not fit the model.
        UnsupportedError: The model has no head to draft with, or the model
            lies on a GPU and another device.
    """

    def __init__(self, engine: Engine, speculation: Speculation) -> None:
        self._speculation, self._ctx = speculation, int(engine.settings["ctx"])
        self._model: DraftModel | None = None
        if speculation.draft is not None:
            self._model = DraftModel(speculation.draft, engine, speculation.min_p)
        self._head = DraftHead(engine, speculation.min_p) if speculation.head else None
        self.judge = Judge()
        self.counts = DraftCounts()
        self._told_of: set[int] = set()
        self._has_failed = False
        self._reads = Reads(0, 0, {})
        """Of a draft model or the head, for the step that is made now."""
        self._begun = 0
        """Texts whose reading begins in it."""
        self._read: WeakSet[Request] = WeakSet()
        """Texts whose reading has begun."""

    @property
    def in_call(self) -> bool:
        """Whether this is a handler of a signal in the middle of a call of the draft model."""
        return self._model is not None and self._model.in_call

    def close(self) -> None:
        """Give back what was loaded for drafts."""
        if self._head is not None:
            self._head.close()

    def begin(self, request: Request) -> None:
        """Prepare for the text of a request, which has drawn nothing yet."""
        if self._model is None and self._head is None and request.pooler is None:
            request.drafter = Drafter(self._speculation)
            request.drafter.extend(request.prompt)

    def add(self, batch: Sequence[tuple[Request, list[int]]], room: int) -> None:
        """Add drafts to a step of running texts, behind the tokens to be fed.

        Args:
            batch: Each text, and what is to be fed: the token that it has drawn last, and the tokens before
                it that a rejected draft took back.
            room: Tokens of the step at most, and tokens of prompts that a draft model or a head reads in it.
        """
        to_come = {request.owner.slot: request.max_tokens - request.drawn for request, _ in batch}
        self._reads = Reads(room, self._speculation.most, to_come)
        if not self.judge.wants(len(batch)):
            return
        share = (room - sum(len(tokens) for _, tokens in batch)) // len(batch)
        # The last token of a text is drawn and never fed.
        rooms = [
            min(
                share,
                self._speculation.most,
                r.max_tokens - r.drawn - 1,
                self._ctx - len(r.held) - len(tokens),
            )
            for r, tokens in batch
        ]
        try:
            drafts = self._drafts(batch, rooms)
        except DynoError as error:  # texts go on without drafts
            self._failed(len(batch), error)
            return
        behind = {request for request, _ in batch if request.owner.slot in self._reads.behind}
        self._begun = len(behind - set(self._read))
        self._read |= behind
        for (_, tokens), draft in zip(batch, drafts, strict=True):
            tokens += draft

    def _drafts(self, batch: Sequence[tuple[Request, list[int]]], rooms: Sequence[int]) -> list[list[int]]:
        if self._head is not None:
            # It knows the rows of tokens in the cache alone: not of those that were taken back.
            next_tokens = [
                (request.owner.slot, tokens[-1], most if len(tokens) == 1 else 0)
                for (request, tokens), most in zip(batch, rooms, strict=True)
            ]
            return self._head.draft(next_tokens, self._reads)
        if self._model is not None:
            texts = [
                (request.owner.slot, [*request.held, *tokens], most)
                for (request, tokens), most in zip(batch, rooms, strict=True)
            ]
            return self._model.draft(texts, self._reads)
        return [
            request.drafter.draft(most) if request.drafter is not None and most > 0 else []
            for (request, _), most in zip(batch, rooms, strict=True)
        ]

    def _failed(self, texts: int, error: DynoError) -> None:
        self.judge.pause(texts)
        level = logging.INFO if self._has_failed else logging.WARNING
        self._has_failed = True
        _log.log(level, "a draft failed; pausing speculation for %d steps: %s", Judge.PAUSE, error)

    def stepped(self, texts: int, drafted: bool, tokens: int, seconds: float) -> None:
        """Learn from a step of texts alone, and say if drafts pause; arguments as of `Judge.stepped`.

        A step in which a model or a head was asked and had nothing to propose counts as one with drafts: it
        took their time. Each text has the steps in which they read its prompt once: these count in sum alone.
        """
        reads, self._reads = self._reads, Reads(0, 0, {})
        begun, self._begun = self._begun, 0
        drafted, behind = drafted or reads.any, bool(reads.behind)
        lost = self.judge.stepped(texts, drafted, tokens, seconds, behind=behind, begun=begun)
        if lost is None:
            return
        level = logging.INFO if texts in self._told_of else logging.WARNING  # once is enough
        self._told_of.add(texts)
        _log.log(
            level,
            "speculation slows decoding with %d text(s) at a time (%.0f tokens/s with drafts, %.0f without); "
            "it pauses for %d steps",
            texts,
            *lost,
            Judge.PAUSE,
        )
