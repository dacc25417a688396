"""Continuous batching: the generations of many callers in one engine, with one decode a step."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from dyno._generate import finite
from dyno._sampling import HostSampler
from dyno._slots import Owner
from dyno._writing import Drawn
from dyno.errors import DynoError, PlanError, QueueFullError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from types import TracebackType

    from numpy.typing import NDArray

    from dyno._sampling import Sampling
    from dyno.engine import Engine

__all__ = ["Scheduler"]

_SECONDS_WITHOUT_SLOT = 0.005
"""How long a step waits if generations outside of the scheduler own all slots."""


@dataclass(eq=False)
class _Request:
    """One generation."""

    prompt: list[int]
    max_tokens: int
    draw: Callable[[NDArray[np.float32]], int]
    sampler: HostSampler | None
    cancelled: threading.Event
    out: queue.SimpleQueue[Drawn | BaseException | None] = field(default_factory=queue.SimpleQueue)
    owner: Owner = field(default_factory=Owner)
    held: list[int] = field(default_factory=list)
    """Tokens that the slot holds."""
    pending: list[int] = field(default_factory=list)
    """Tokens to be fed next: the rest of the prompt, or the token that was drawn last."""
    drawn: int = 0


class Scheduler:
    """The generations of many callers in one engine.

    While a scheduler is open, `generate`, `chat` and `complete` of its engine go through it, from any number
    of threads. Each step feeds the last token of every running generation and as much of the waiting prompts
    as the step has room for, in one decode. As many generations run as the engine has `sequences`; others
    wait, first come, first served. A prompt that begins like what a free slot holds is computed from the
    first difference on.

    Args:
        engine: Open. No other scheduler may be open on it.
        max_waiting: Generations that may wait.
        step_tokens: Tokens of a step at most, of prompts and generations together; at least `sequences`.
            None: the engine's `ubatch`.

    Raises:
        PlanError: The engine has a scheduler, or an argument is impossible.

    Example:
        >>> with Engine("model.gguf", sequences=8) as engine, Scheduler(engine):  # doctest: +SKIP
        ...     with ThreadPoolExecutor() as pool:
        ...         texts = list(pool.map(lambda p: "".join(engine.generate(p)), prompts))
    """

    def __init__(self, engine: Engine, *, max_waiting: int = 64, step_tokens: int | None = None) -> None:
        self._engine = engine
        self._sequences = int(engine.settings["sequences"])
        self._ctx = int(engine.settings["ctx"])
        if max_waiting < 0:
            raise PlanError(f"[scheduler] max_waiting is {max_waiting}; expected at least 0")
        room = int(engine.settings["ubatch"]) if step_tokens is None else step_tokens
        if step_tokens is not None and step_tokens < self._sequences:
            raise PlanError(
                f"[scheduler] step_tokens is {step_tokens}; expected at least one for each of the "
                f"{self._sequences} sequences"
            )
        self._room = max(room, self._sequences)
        self._max_waiting = max_waiting
        self._ends = engine.tokenizer.end_of_generation
        self._n_vocab = int(engine.model["n_vocab"])
        self._waiting: deque[_Request] = deque()
        self._running: list[_Request] = []
        self._kept: dict[int, list[int]] = {}
        """Tokens that free slots hold."""
        self._changed = threading.Condition()
        self._closing = False
        self._totals = {"steps": 0, "prompt_tokens": 0, "reused_tokens": 0, "generated_tokens": 0}
        self.failure: BaseException | None = None
        """The error that ended the last failed step; None if the last step worked."""
        if engine._scheduler is not None:
            raise PlanError("[scheduler] this engine has a scheduler already; close it first")
        engine._scheduler = self
        self._thread = threading.Thread(target=self._run, name="dyno-scheduler", daemon=True)
        self._thread.start()

    # ---- for callers, in any thread ----

    def drawn(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        max_tokens: int,
        cancelled: threading.Event | None = None,
    ) -> Generator[Drawn, None, None]:
        """The tokens after a prompt; the last one may be the model's end of generation.

        Args:
            prompt: Token ids, at least one and no more than the context holds.
            sampling: How tokens are drawn.
            max_tokens: Tokens drawn at most.
            cancelled: Ends the generation when it is set, from any thread.

        Raises:
            QueueFullError: As many generations wait as may.
            PlanError: The scheduler is closed, or the prompt is impossible.
        """
        if max_tokens == 0:
            return
        request = self._submit(prompt, sampling, max_tokens, cancelled or threading.Event())
        try:
            while (each := request.out.get()) is not None:
                if isinstance(each, BaseException):
                    raise each
                yield each
        finally:
            request.cancelled.set()

    def load(self) -> dict[str, int]:
        """How many generations run and wait now, and how many may."""
        with self._changed:
            return {
                "running": len(self._running),
                "waiting": len(self._waiting),
                "sequences": self._sequences,
                "max_waiting": self._max_waiting,
            }

    def totals(self) -> dict[str, int]:
        """Since the scheduler was opened: `steps`, and tokens of prompts that were computed
        (`prompt_tokens`), that a slot held from before (`reused_tokens`) and that were drawn
        (`generated_tokens`).
        """
        return dict(self._totals)

    def close(self) -> None:
        """End all generations with a PlanError. Closing twice does nothing."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        if self._engine._scheduler is self:
            self._engine._scheduler = None

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _submit(
        self, prompt: Sequence[int], sampling: Sampling, max_tokens: int, cancelled: threading.Event
    ) -> _Request:
        tokens = [int(token) for token in prompt]
        if not 0 < len(tokens) <= self._ctx:
            raise PlanError(f"[scheduler] the prompt has {len(tokens)} tokens; expected 1 to {self._ctx}")
        outside = next((token for token in tokens if not 0 <= token < self._n_vocab), None)
        if outside is not None:
            raise PlanError(f"[scheduler] token {outside} is not one of 0 to {self._n_vocab - 1}")
        self._check_open_to_more()
        # A grammar may take long to compile: it does so in the caller's thread.
        sampler = None
        if sampling.needs_logits:
            sampler = HostSampler(sampling, self._engine.tokenizer, self._n_vocab, tokens)
        draw = sampling.sampler() if sampler is None else sampler.draw
        request = _Request(tokens, max_tokens, draw, sampler, cancelled)
        with self._changed:
            self._check_open_to_more()
            self._waiting.append(request)
            self._changed.notify_all()
        return request

    def _check_open_to_more(self) -> None:
        with self._changed:
            if self._closing:
                raise PlanError("[scheduler] the scheduler is closed")
            # A free sequence takes a request in the next step, whatever the queue may hold.
            free = max(self._sequences - len(self._running), 0)
            if len(self._waiting) >= self._max_waiting + free:
                raise QueueFullError(
                    f"[scheduler] {len(self._waiting)} generations wait and {len(self._running)} run; "
                    f"no more than {self._max_waiting} may wait: try again later"
                )

    # ---- in the scheduler's thread ----

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._closing or self._waiting or self._running):
                    self._changed.wait()
                if self._closing:
                    break
            try:
                self._step()
                self.failure = None
            except Exception as error:
                self.failure = error
                self._fail_all(error)
        self._fail_all(PlanError("[scheduler] the scheduler is closed"))

    def _step(self) -> None:
        self._drop_cancelled()
        self._admit()
        batch = self._batch()
        if not batch:
            with self._changed:
                if self._waiting and not self._closing:
                    self._changed.wait(_SECONDS_WITHOUT_SLOT)
            return
        inputs = [(request.owner.slot, np.array(tokens, np.int32)) for request, tokens in batch]
        with self._engine._lock:
            session = self._engine._open()
            logits = session.decode(inputs, rows="last")[0]
            self._engine._tell_failed_captures(session)
        assert logits is not None  # the last rows were asked for
        self._totals["steps"] += 1
        for (request, tokens), row in zip(batch, logits, strict=True):
            self._totals["prompt_tokens"] += 0 if request.drawn else len(tokens)
            request.held += tokens
            del request.pending[: len(tokens)]
            if not request.pending:
                self._take(request, row)

    def _drop_cancelled(self) -> None:
        for request in [r for r in self._running if r.cancelled.is_set()]:
            self._end(request)
        with self._changed:
            gone = [r for r in self._waiting if r.cancelled.is_set()]
            for request in gone:
                self._waiting.remove(request)
        for request in gone:
            request.out.put(None)

    def _admit(self) -> None:
        while len(self._running) < self._sequences:
            with self._changed:
                if not self._waiting:
                    return
                request = self._waiting[0]
            with self._engine._lock:
                session = self._engine._open()
                if not self._take_slot(request, session):
                    return
            with self._changed:
                self._waiting.popleft()
                self._running.append(request)

    def _take_slot(self, request: _Request, session: Any) -> bool:
        """Give a request the free slot that holds most of its prompt; under the engine's lock."""
        slots = self._engine._slots
        for slot in slots.foreign:
            self._kept.pop(slot, None)
        slots.foreign.clear()
        best, common = None, 0
        for slot, held in self._kept.items():
            same = _common(held, request.prompt)
            if same > common and slots.is_free(slot):
                best, common = slot, same
        if best is None:  # rather one that holds nothing than one that another prompt may begin like
            free = [slot for slot in range(self._sequences) if slots.is_free(slot)]
            if not free:
                return False
            best = min(free, key=lambda slot: len(self._kept.get(slot, ())))
        slots.take(request.owner, best, self._sequences)
        slots.foreign.discard(best)
        self._kept.pop(best, None)
        if common:
            session.rewind(common, best)
        else:
            session.reset(best)
        self._totals["reused_tokens"] += common
        request.held = request.prompt[:common]
        request.pending = request.prompt[common:]
        return True

    def _batch(self) -> list[tuple[_Request, list[int]]]:
        """The tokens of a step: of each running text, then of prompts in the order in which they came."""
        batch = [(r, list(r.pending)) for r in self._running if r.drawn]
        room = self._room - len(batch)
        for request in self._running:
            if room <= 0:
                break
            if not request.drawn:
                chunk = request.pending[:room]
                batch.append((request, chunk))
                room -= len(chunk)
        return batch

    def _take(self, request: _Request, row: NDArray[np.float32]) -> None:
        """Draw the next token of a request from its logits."""
        try:
            token = request.draw(finite(row, len(request.held) - 1))
        except DynoError as error:
            self._end(request, error)
            return
        request.drawn += 1
        self._totals["generated_tokens"] += 1
        request.out.put(Drawn(token, request.sampler.logprobs if request.sampler else None))
        if token in self._ends or request.drawn >= request.max_tokens or len(request.held) >= self._ctx:
            self._end(request)
        else:
            request.pending = [token]

    def _end(self, request: _Request, error: BaseException | None = None) -> None:
        """Free the slot of a running request, whose tokens stay there for the next prompt."""
        with self._changed:
            self._running.remove(request)
        self._kept[request.owner.slot] = request.held
        self._engine._slots.give_back(request.owner)
        request.out.put(error)

    def _fail_all(self, error: BaseException) -> None:
        """End every request with an error. The contents of the slots are unknown after it."""
        with self._changed:
            ended = [*self._running, *self._waiting]
            self._running.clear()
            self._waiting.clear()
        self._kept.clear()
        for request in ended:
            self._engine._slots.give_back(request.owner)
            # Callers raise it in threads of their own: each gets an instance.
            copy: BaseException = error
            with contextlib.suppress(Exception):
                copy = type(error)(*error.args)
            request.out.put(copy)


def _common(held: Sequence[int], prompt: Sequence[int]) -> int:
    """Tokens at the beginning that agree; never the prompt's last one, whose logits are needed."""
    most = min(len(held), len(prompt) - 1)
    return next((i for i in range(most) if held[i] != prompt[i]), most)
