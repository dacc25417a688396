"""The drafts in the steps of a scheduler: their source, whether they make it faster, and how many are
accepted."""

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
    """The speculation that the settings ask for; None for `off`.

    Args:
        settings: Settings by name; `spec`, `spec_max` and `spec_min_p` may be missing.
        draft: The engine of the draft model, if there is one.
    """
    kind = settings.get("spec", "off")
    if kind == "draft" and draft is None:
        _log.warning("the setting spec is draft, but no draft model was given, so nothing is drafted")
    if kind == "off" or (kind == "draft" and draft is None):
        return None
    most, min_p = int(settings["spec_max"]), float(settings["spec_min_p"])
    return Speculation(most, min_p, draft if kind == "draft" else None, head=kind == "mtp")


class Drafting:
    """The drafting part of one scheduler.

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
        """The tokens that a draft model or the head may read in the current step."""
        self._begun = 0
        """Number of texts that the drafter begins to read in this step."""
        self._read: WeakSet[Request] = WeakSet()
        """Requests whose texts the drafter has begun to read."""

    @property
    def in_call(self) -> bool:
        """Whether the caller is a signal handler that interrupted a call of the draft model."""
        return self._model is not None and self._model.in_call

    def close(self) -> None:
        """Unload what was loaded for drafts."""
        if self._head is not None:
            self._head.close()

    def begin(self, request: Request) -> None:
        """Prepare to draft for a request that has drawn no token yet."""
        if self._model is None and self._head is None and request.pooler is None:
            request.drafter = Drafter(self._speculation)
            request.drafter.extend(request.prompt)

    def add(self, batch: Sequence[tuple[Request, list[int]]], room: int) -> None:
        """Append drafts to the tokens that a step of running texts feeds.

        Args:
            batch: Each text with the tokens to feed: its last drawn token, and before that the tokens that a
                rejected draft took back.
            room: The most tokens of the step, and the most prompt tokens that a draft model or head reads in
                it.
        """
        to_come = {request.owner.slot: request.max_tokens - request.drawn for request, _ in batch}
        self._reads = Reads(room, self._speculation.most, to_come)
        if not self.judge.wants(len(batch)):
            return
        share = (room - sum(len(tokens) for _, tokens in batch)) // len(batch)
        # The last token of a text is drawn, but never fed.
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
        except DynoError as error:  # the texts continue without drafts
            self._failed(len(batch), error)
            return
        behind = {request for request, _ in batch if request.owner.slot in self._reads.behind}
        self._begun = len(behind - set(self._read))
        self._read |= behind
        for (_, tokens), draft in zip(batch, drafts, strict=True):
            tokens += draft

    def _drafts(self, batch: Sequence[tuple[Request, list[int]]], rooms: Sequence[int]) -> list[list[int]]:
        if self._head is not None:
            # The head knows only rows of tokens in the cache, and not of tokens that were taken back.
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
        """Record the speed of a step that fed no prompt, and log if drafts pause. Arguments as in
        `Judge.stepped`.

        If a draft model or head was asked but proposed nothing, the step counts as one with drafts, because
        it took time. Steps in which the drafter reads a prompt occur once for each text, so only their sum
        counts.
        """
        reads, self._reads = self._reads, Reads(0, 0, {})
        begun, self._begun = self._begun, 0
        drafted, behind = drafted or reads.any, bool(reads.behind)
        lost = self.judge.stepped(texts, drafted, tokens, seconds, behind=behind, begun=begun)
        if lost is None:
            return
        level = logging.INFO if texts in self._told_of else logging.WARNING  # warn only once
        self._told_of.add(texts)
        _log.log(
            level,
            "speculation slows decoding with %d text%s at a time (%.0f tokens/s with drafts, %.0f without); "
            "it pauses for %d steps",
            texts,
            "" if texts == 1 else "s",
            *lost,
            Judge.PAUSE,
        )
