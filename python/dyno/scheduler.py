"""Continuous batching: the generations of many callers in one engine, with one decode per step.

The methods of the class share the queue, the running texts and their lock. Parts that do not need this state
are separate modules: requests, prefixes, drafts, steps, and the teller.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from dyno._drafting import Drafting, speculation_of
from dyno._drafts import DraftCounts, Speculation
from dyno._generate import finite, not_finite
from dyno._locks import is_mine
from dyno._prefixes import Prefixes
from dyno._requests import Drawn, Handling, Request, SchedulerEvents
from dyno._sampling import HostSampler, Sampling
from dyno._steps import Answer, Checked, computed, described, is_drafted, room_of_step, told_of
from dyno._teller import Teller
from dyno._vocabulary import has_vocabulary
from dyno.errors import ClosedError, DeviceError, PlanError, QueueFullError

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence
    from types import TracebackType

    from dyno import _core
    from dyno._embedding import Pooler
    from dyno._sampling import TokenLogprobs
    from dyno.engine import Engine

__all__ = ["DEFAULT_SEQUENCES", "Scheduler", "SchedulerEvents", "Speculation"]

DEFAULT_SEQUENCES = 4
"""Number of sequences of a server, if neither its command line nor a profile sets it."""
_SECONDS_WITHOUT_SLOT = 0.005
"""Seconds that a step waits if generations outside of the scheduler own all slots."""
_ALL_ROWS_TOKENS = 64
"""Most prompt tokens in a step if the logits after each are needed, because one row covers the whole
vocabulary."""
_LONGEST_RETRY_S = 60
_FAILING_S, _LONGEST_FAILING_S = 10.0, 300.0
_TOTALS = (
    *("steps", "prompt_tokens", "reused_tokens", "copied_tokens", "recomputed_tokens"),
    *("generated_tokens", "stopped"),
)
_WEIGHT_OF_NEWEST = 0.2
"""Weight of the newest request in the running mean of durations."""


class Scheduler:
    """A scheduler that runs the generations of many callers in one engine.

    While a scheduler is open, `generate`, `chat` and `complete` of its engine use it, from any number of
    threads. Each step feeds, in one decode, the last token of each running generation and as much of the
    waiting prompts as fits. Up to `sequences` generations of the engine run at the same time. Others wait,
    first come, first served. If a prompt begins like a running or ended text, only the part after the first
    difference is computed.

    Args:
        engine: An open engine without another scheduler.
        max_waiting: Maximum number of waiting generations.
        step_tokens: Maximum number of tokens in one step, over all prompts and generations; at least
            `sequences`. None: the setting `step_tokens` of the engine, or `ubatch` if that is 0.
        speculation: Speculative decoding with n-grams of the text, a smaller model or the MTP head of the
            model. Several drafted tokens are verified in one decode. Texts stay the same, up to rounding.
            Drafting pauses automatically if it makes generation slower. None: as the settings `spec`,
            `spec_max` and `spec_min_p` of the engine say; the default is off.
        events: Receiver of events about tokens and requests, for metrics.

    Raises:
        PlanError: The engine already has a scheduler, or an argument is impossible.
        UnsupportedError: The MTP head should draft, but the file has none, or the model is on a GPU and
            another device.

    Example:
        >>> with Engine("model.gguf", sequences=8) as engine, Scheduler(engine):  # doctest: +SKIP
        ...     with ThreadPoolExecutor() as pool:
        ...         texts = list(pool.map(lambda p: "".join(engine.generate(p)), prompts))
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_waiting: int = 64,
        step_tokens: int | None = None,
        speculation: Speculation | None = None,
        events: SchedulerEvents | None = None,
    ) -> None:
        with engine._opens_scheduler():
            self._engine = engine
            self._process = os.getpid()
            self._sequences = int(engine.settings["sequences"])
            self._ctx = int(engine.settings["ctx"])
            if max_waiting < 0:
                raise PlanError(f"[scheduler] max_waiting is {max_waiting}; expected at least 0")
            self._room = room_of_step(engine.settings, step_tokens)
            self._max_waiting = max_waiting
            # Without a vocabulary there is no text, but token ids can still be generated.
            known = engine._file is None or has_vocabulary(engine._file)
            self._ends = engine.tokenizer.end_of_generation if known else frozenset()
            self._n_vocab = int(engine.model["n_vocab"])
            self._waiting: deque[Request] = deque()
            self._running: list[Request] = []
            self._cache_tokens = int(engine.settings.get("cache_tokens", 0))
            self._stateful = int(engine.model["recurrent_layers"]) > 0
            self._prefixes = Prefixes(
                engine._open().plan, self._sequences, self._cache_tokens, stateful=self._stateful
            )
            self._cache_bytes = int(engine._open().cache_memory)
            self._cache_bytes_most = int(engine._open().plan["kv_bytes"])
            self._lock = threading.RLock()
            self._changed = threading.Condition(self._lock)
            self._closing = False
            self._drafts_remain: Exception | None = None
            """The error by which the memory of drafts was not freed, for `close`."""
            speculation = speculation or speculation_of(engine.settings)
            self._drafting = None if speculation is None else Drafting(engine, speculation)
            self._events = events or SchedulerEvents()
            self._mean_s = 0.0
            """Running mean of the time in seconds that a request owns a sequence."""
            self._totals = dict.fromkeys(_TOTALS, 0)
            self.failure: BaseException | None = None
            """The error that ended the last failed step; None if the last step worked."""
            self.failed_at = 0.0
            """Time of that step on the monotonic clock."""
            self.failing_s = _FAILING_S
            """Seconds after that step in which the next step would probably fail, too."""
            self._teller = Teller()
            self._thread = threading.Thread(target=self._run, name="dyno-scheduler", daemon=True)
            try:
                self._thread.start()
            except BaseException:
                self._teller.close()
                if self._drafting is not None:
                    self._drafting.close()
                raise
            engine._scheduler = self

    # ---- for callers, in any thread ----

    def drawn(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        max_tokens: int,
        cancelled: threading.Event | None = None,
        handling: Handling | None = None,
    ) -> Generator[Drawn, None, None]:
        """The tokens after a prompt. The last one may be an end-of-generation token.

        Args:
            prompt: Token ids, at least one, and at most the context length.
            sampling: Settings for drawing tokens.
            max_tokens: The most tokens to draw.
            cancelled: An event; if any thread sets it, the generation ends.
            handling: Further options of the generation.

        Raises:
            QueueFullError: The queue is full.
            ClosedError: The scheduler is closed.
            PlanError: The prompt is impossible, or a signal handler calls this during a call of the
            scheduler, its engine or its tokenizer. If the handler wanted to continue a text, that text has
            ended.
            DeviceError: A forked child calls this.
        """
        cancelled = cancelled or threading.Event()
        if max_tokens == 0 or cancelled.is_set():
            return
        request = self._submit(prompt, sampling, max_tokens, cancelled, handling or Handling())
        try:
            while (each := request.take()) is not None:
                yield each
                self._check_may_wait("; this text has ended")
        finally:
            request.cancelled.set()

    def embed(
        self, texts: Sequence[Sequence[int]], poolers: Sequence[Pooler], cancelled: threading.Event
    ) -> None:
        """Compute the rows of texts for embeddings, with one text per sequence at a time.

        Args:
            texts: Token ids of each text, at least one, and at most the context length.
            poolers: Receivers of the rows, one for each text.
            cancelled: An event; if any thread sets it, the work ends. An error sets it as well.

        Raises:
            QueueFullError, PlanError: As in `drawn`.
        """
        begun: deque[Request] = deque()
        handling = Handling(reuse=False)
        try:
            for tokens, pooler in zip(texts, poolers, strict=True):
                if len(begun) == self._sequences:
                    begun.popleft().wait()
                    handling = Handling(reuse=False, follows=True)
                begun.append(self._submit(tokens, Sampling(), 0, cancelled, handling, pooler))
            while begun:
                begun.popleft().wait()
        except BaseException:
            cancelled.set()
            raise

    def load(self) -> dict[str, int]:
        """The current load: the numbers of running and waiting generations and their limits, and
        `held_tokens` of running ones in the cache. After the last step, the cache including kept prefixes
        takes `cache_bytes`, of at most `cache_bytes_most`.
        """
        with self._changed:
            return {
                "running": len(self._running),
                "waiting": len(self._waiting),
                "sequences": self._sequences,
                "max_waiting": self._max_waiting,
                "held_tokens": sum(len(request.held) for request in self._running),
                "cache_bytes": self._cache_bytes,
                "cache_bytes_most": self._cache_bytes_most,
            }

    @property
    def drafts(self) -> DraftCounts:
        """The counts of drafts since the scheduler was opened."""
        return DraftCounts() if self._drafting is None else self._drafting.counts

    def totals(self) -> dict[str, int]:
        """Counts since the scheduler was opened: `steps`, computed tokens of prompts (`prompt_tokens`),
        tokens that a sequence already held (`reused_tokens`, of which `copied_tokens` came from another
        sequence), drawn tokens (`generated_tokens`), and how often a text had to wait again for memory
        (`stopped`). Such a text is read again. Its prompt counts once, and the tokens that are read again are
        `recomputed_tokens`.
        """
        return dict(self._totals)

    def close(self) -> None:
        """End all generations with ClosedError. Closing twice does nothing, nor does it in a forked child.

        A signal handler may close the scheduler during a call of the scheduler, its engine or its tokenizer.
        The generations end when that call has returned.

        Raises:
            PlanError: A hook or a `wake` of the scheduler calls this, and would wait for itself.
            DynoError: The memory of drafts was not freed, because the GPU is lost. The scheduler is closed
                nevertheless.
        """
        if self._is_forked:
            return
        if threading.current_thread() is self._thread or self._teller.is_here():
            raise PlanError("[scheduler] a hook of the scheduler cannot close it; close it in another thread")
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._in_call:
            return
        self._thread.join()
        error, self._drafts_remain = self._drafts_remain, None
        if error is not None:
            raise error

    @property
    def _is_forked(self) -> bool:
        return os.getpid() != self._process

    @property
    def _in_call(self) -> bool:
        """Whether the caller is a signal handler that interrupted a call for which the scheduler's thread may
        have to wait.
        """
        drafts = self._drafting is not None and self._drafting.in_call
        return is_mine(self._lock) or self._engine._in_call or drafts

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        max_tokens: int,
        cancelled: threading.Event,
        handling: Handling,
        pooler: Pooler | None = None,
    ) -> Request:
        self._check_may_wait()
        tokens = [int(token) for token in prompt]
        if not 0 < len(tokens) <= self._ctx:
            raise PlanError(f"[scheduler] the prompt has {len(tokens)} tokens; expected 1 to {self._ctx}")
        outside = next((token for token in tokens if not 0 <= token < self._n_vocab), None)
        if outside is not None:
            raise PlanError(f"[scheduler] token {outside} is not one of 0 to {self._n_vocab - 1}")
        self._check_open_to_more(handling)
        # A grammar may take long to compile, so this happens in the thread of the caller.
        sampler = None
        if sampling.needs_logits:
            tokenizer = self._engine.tokenizer if sampling.needs_vocabulary else None
            sampler = HostSampler(sampling, tokenizer, self._n_vocab, tokens)
        request = Request(tokens, max_tokens, sampling, sampler, cancelled, handling, pooler=pooler)
        if self._drafting is not None:
            self._drafting.begin(request)
        with self._changed:
            self._check_open_to_more(handling)
            self._waiting.append(request)
            self._changed.notify_all()
        return request

    def _check_may_wait(self, outcome: str = "") -> None:
        """Raises an error if the caller would wait for something that the scheduler's thread cannot give.

        Args:
            outcome: Text for the end of the message.
        """
        if self._in_call:
            raise PlanError(
                "[scheduler] the handler of a signal runs in the middle of a call of this scheduler or its "
                f"engine, and can only close() them; ask for texts when that call has returned{outcome}"
            )
        if self._is_forked:
            raise DeviceError(
                f"[scheduler] the scheduler was opened in process {self._process}, and this is process "
                f"{os.getpid()}; open an engine and a scheduler in this one"
            )

    def _check_open_to_more(self, handling: Handling) -> None:
        with self._changed:
            if self._closing:
                raise ClosedError("[scheduler] the scheduler is closed")
            if handling.follows:
                return
            # If a sequence is free, the next step takes a request from the queue, so the limit does not
            # apply.
            free = max(self._sequences - len(self._running), 0)
            if len(self._waiting) >= self._max_waiting + free:
                raise QueueFullError(
                    f"[scheduler] {len(self._waiting)} generations wait and {len(self._running)} run; "
                    f"no more than {self._max_waiting} may wait: try again later",
                    min(max(math.ceil(self._mean_s / self._sequences), 1), _LONGEST_RETRY_S),
                )

    # ---- in the scheduler's thread ----

    def _run(self) -> None:
        try:
            self._run_steps()
        finally:
            self._teller.close()
            try:
                if self._drafting is not None:
                    self._drafting.close()
            except Exception as error:  # `close` raises it
                self._drafts_remain = error
            finally:
                self._engine._scheduler = None

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """The engine's lock. If another call holds it, readers get their tokens before the wait."""
        lock = self._engine._lock
        if not lock.acquire(blocking=False):
            self._teller.tell_all()
            lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def _run_steps(self) -> None:
        while True:
            with self._changed:
                while not (self._closing or self._waiting or self._running):
                    self._teller.tell_all()
                    self._changed.wait()
                if self._closing:
                    break
            try:
                self._step()
                self.failure = None
            except Exception as error:
                self._note(error)
                self._fail_all(told_of(error))
        self._fail_all(ClosedError("[scheduler] the scheduler is closed"))

    def _note(self, error: Exception) -> None:
        """Record a failed step. If a step fails after `failing_s` without a successful one in between,
        `failing_s` doubles."""
        now = time.monotonic()
        if self.failure is None:
            self.failing_s = _FAILING_S
        elif now - self.failed_at >= self.failing_s:
            self.failing_s = min(2 * self.failing_s, _LONGEST_FAILING_S)
        self.failed_at, self.failure = now, error

    def _step(self) -> None:
        self._drop_cancelled()
        self._admit()
        begun = time.monotonic()
        batch = self._batch()
        if not batch:
            self._teller.tell_all()
            with self._changed:
                if self._waiting and not self._closing:
                    self._changed.wait(_SECONDS_WITHOUT_SLOT)
            return
        generated = self._totals["generated_tokens"]
        with self._locked():
            session = self._engine._open()
            batch, stopped = self._that_fits(session, batch)
            drafts = self._drafting is not None
            drafted = drafts and any(is_drafted(request, tokens) for request, tokens in batch)
            texts = sum(not request.reads for request, _ in batch)
            marks = self._marks(session, batch)
            fed = time.monotonic()
            self._teller.tell_all()
            answers = computed(session, batch)
            seconds = time.monotonic() - fed
            self._engine._tell_failed_captures(session)
            for request, tokens in batch if texts < len(batch) else ():  # only prompts
                at_branch = request.branch and len(request.held) + len(tokens) == request.branch
                if at_branch or (self._prefixes.marks_ends and request.ends_prompt(tokens)):
                    self._prefixes.checkpoint(session, request.owner.slot)
            self._cache_bytes = int(session.cache_memory)
        self._put_back(stopped)
        self._totals["steps"] += 1
        self._events.stepped(described(batch, seconds))
        for (request, tokens), answer in zip(batch, answers, strict=True):
            if answer.checked is not None:
                self._take_checked(request, tokens, answer.checked, marks.get(request.owner.slot))
                continue
            if request.is_written(tokens):
                request.held += tokens
                request.pending = []
                self._take(request, answer)
                continue
            read = len(tokens) if request.reads else 0
            request.held += tokens
            del request.pending[: len(tokens)]
            request.taken_back = 0
            new = request.count()
            self._totals["prompt_tokens"] += new
            self._totals["recomputed_tokens"] += max(read - new, 0)
            if request.pooler is not None:
                if not request.pending:
                    self._end(request, "stop")
                continue
            if request.wants_all_rows and answer.rows is not None:
                try:
                    request.keep_prompt_logprobs(answer.rows)
                except Exception as error:  # as in _take()
                    self._end(request, "error", error)
                    continue
            if not request.pending:
                self._take(request, answer)
        if self._drafting is not None and texts == len(batch):
            drawn = self._totals["generated_tokens"] - generated
            self._drafting.stepped(texts, drafted, drawn, time.monotonic() - begun)

    def _drop_cancelled(self) -> None:
        for request in [r for r in self._running if r.cancelled.is_set()]:
            self._end(request, "abort")
        with self._changed:
            gone = [r for r in self._waiting if r.cancelled.is_set()]
            for request in gone:
                self._waiting.remove(request)
        for request in gone:
            self._teller.later(request.tell, None)

    def _admit(self) -> None:
        while len(self._running) < self._sequences:
            with self._changed:
                if not self._waiting:
                    return
                request = self._waiting[0]
            if self._shall_wait(request):
                return
            with self._locked():
                session = self._engine._open()
                if not self._take_slot(request, session):
                    return
            with self._changed:
                self._waiting.popleft()
                self._running.append(request)
            request.admitted = time.monotonic()
            self._events.admitted(request.admitted - request.came)

    def _shall_wait(self, request: Request) -> bool:
        """Whether a request should stay in the queue: until a prompt with the same beginning is read, or
        until there is memory."""
        if not self._running:
            return False
        if request.reuses and self._prefixes.awaited(request.pending, self._running):
            return True
        wanted = sum(len(each.held) + len(each.pending) for each in [*self._running, request])
        return 0 < self._cache_tokens < wanted + len(self._running) + 1

    def _take_slot(self, request: Request, session: Any) -> bool:
        """Give a request a free sequence, and return whether there is one. The caller holds the engine's
        lock."""
        place = self._prefixes.give(session, request, self._engine._slots, self._running)
        if place is None:
            return False
        reused = request.count()
        self._totals["reused_tokens"] += reused
        if place.source != place.slot:
            self._totals["copied_tokens"] += reused
        return True

    def _that_fits(
        self, session: Any, batch: list[tuple[Request, list[int]]]
    ) -> tuple[list[tuple[Request, list[int]]], list[Request]]:
        """The part of a step that fits into the cache, and the texts that lose their sequences and return to
        the queue. The caller holds the engine's lock.

        Drafts are dropped first, then unknown tokens and ended texts, and then running texts, the newest one
        first.
        """
        stopped: list[Request] = []
        if not self._cache_tokens:
            return batch, stopped
        if self._prefixes.lacks(session, sum(len(tokens) for _, tokens in batch)):
            batch = [(r, tokens[: len(r.pending)]) for r, tokens in batch]
        while self._prefixes.lacks(session, sum(len(tokens) for _, tokens in batch)):
            if self._prefixes.forget_oldest(session, self._engine._slots.free(self._sequences)):
                continue
            left = len(self._running) - len(stopped)
            if left == 1:
                break  # generations outside hold the other tokens, so the engine raises the error
            last = self._running[left - 1]
            batch = [each for each in batch if each[0] is not last]
            session.reset(last.owner.slot)
            self._engine._slots.give_back(last.owner)
            last.stop()
            stopped.append(last)
            self._totals["stopped"] += 1
        return batch, stopped

    def _put_back(self, stopped: Sequence[Request]) -> None:
        """Return texts that a step has stopped to the queue. The caller must not hold the engine's lock (see
        `_locks`)."""
        if stopped:
            with self._changed:
                del self._running[-len(stopped) :]
                self._waiting.extendleft(stopped)

    def _batch(self) -> list[tuple[Request, list[int]]]:
        """The tokens of a step: first of each running text, then of prompts in the order of arrival."""
        batch = [(r, list(r.pending)) for r in self._running if not r.reads]
        # Not together with a prompt, because the logits after each of its tokens would then be computed too.
        if batch and self._drafting is not None and len(batch) == len(self._running):
            self._teller.tell_all()  # a draft model or head computes next
            self._drafting.add(batch, self._room)
            return batch
        if len(batch) == len(self._running):
            return batch
        room = self._room - sum(len(tokens) for _, tokens in batch)
        if any(request.wants_all_rows for request in self._running):
            room = min(room, _ALL_ROWS_TOKENS)
        for request in self._running:
            if room <= 0:
                break
            if request.reads:
                chunk = request.pending[: request.until_branch(room)]
                batch.append((request, chunk))
                room -= len(chunk)
        return batch

    def _marks(self, session: Any, batch: list[tuple[Request, list[int]]]) -> dict[int, _core.Checkpoint]:
        """Checkpoints by slot, to which texts of a recurrent model return if their drafts are rejected."""
        if not self._stateful:
            return {}
        slots = [request.owner.slot for request, tokens in batch if is_drafted(request, tokens)]
        return {slot: session.checkpoint(slot) for slot in slots}

    def _take_checked(
        self, request: Request, tokens: list[int], checked: Checked, mark: _core.Checkpoint | None
    ) -> None:
        """Accept the next tokens of a text: each draw in turn, as long as the draft agrees.

        Args:
            request: The text.
            tokens: The fed tokens: the pending ones and a draft.
            checked: The draw after the pending tokens, and after each token of the draft.
            mark: The checkpoint before these tokens, for a model with recurrent state.
        """
        draft = tokens[len(request.pending) :]
        before, fed = len(request.held), len(request.held) + len(tokens)
        request.held += request.pending
        request.pending, request.taken_back = [], 0
        accepted = 0
        for answer in checked.answers:
            self._take(request, answer)
            if accepted == len(draft) or request.pending[:1] != [draft[accepted]]:
                break
            request.held.append(draft[accepted])
            request.pending = []
            accepted += 1
        request.give_back(checked.numbers[accepted + 1 :])
        if self._drafting is not None:
            self._drafting.counts.add(len(draft), accepted)
        if len(request.held) < fed:
            self._forget_rejected(request, before, mark)

    def _forget_rejected(self, request: Request, before: int, mark: _core.Checkpoint | None) -> None:
        """Rewind the sequence of a text to the accepted tokens.

        A recurrent state cannot be rewound. It returns to the checkpoint before the draft, and the accepted
        tokens are fed again with the next one.
        """
        runs = request in self._running
        with self._engine._lock:
            session = self._engine._open()
            if mark is None:
                if runs:
                    session.rewind(len(request.held), request.owner.slot)
                return
            if not runs and request.owner.slot in self._engine._slots.foreign:
                return  # the sequence of an ended text already belongs to another one
            session.restore(mark)
        again = request.held[before:]
        del request.held[before:]
        if runs:
            request.pending, request.taken_back = [*again, *request.pending], len(again)

    def _take(self, request: Request, answer: Answer) -> None:
        """Take the next token of a request. The engine has drawn it, or it is drawn here."""
        last = len(request.held) - 1
        try:
            token = answer.token if answer.rows is None else request.draw(finite(answer.rows[-1], last))
            if token < 0:
                raise not_finite(last)
        except Exception as error:  # any error, because other texts must get their tokens
            self._end(request, "error", error)
            return
        now = time.monotonic()
        self._totals["generated_tokens"] += 1
        if request.drafter is not None:
            request.drafter.extend([token])
        logprobs = request.sampler.logprobs if request.sampler else None
        if request.drawn:
            self._teller.later(self._tell_next, request, token, logprobs, now - request.last_token)
        else:
            prompt = None if request.handling.prompt_logprobs is None else request.prompt_logprobs
            self._teller.later(self._events.first_token, now - request.came)
            self._teller.later(request.tell, Drawn(token, logprobs, request.cached, prompt))
        request.last_token = now
        request.drawn += 1
        if token in self._ends and not request.handling.ignore_end:
            self._end(request, "stop")
        elif request.drawn >= request.max_tokens or len(request.held) >= self._ctx:
            self._end(request, "length")
        else:
            request.pending = [token]

    def _tell_next(
        self, request: Request, token: int, logprobs: TokenLogprobs | None, seconds: float
    ) -> None:
        """Give a text its next token, in one call of the teller, which runs while the engine computes."""
        self._events.next_token(seconds)
        request.tell(Drawn(token, logprobs))

    def _end(self, request: Request, reason: str, error: BaseException | None = None) -> None:
        """Free the slot of a running request. Its tokens stay there for the next prompt."""
        with self._changed:
            self._running.remove(request)
        self._prefixes.keep(request.owner.slot, request.held)
        self._engine._slots.give_back(request.owner)
        now = time.monotonic()
        self._mean_s += (now - request.admitted - self._mean_s) * (_WEIGHT_OF_NEWEST if self._mean_s else 1.0)
        self._teller.later(self._events.ended, request, reason, now - request.came)
        self._teller.later(request.tell, error)

    def _fail_all(self, error: BaseException) -> None:
        """End all requests with an error. Afterwards the contents of the slots are unknown."""
        with self._changed:
            ran = list(self._running)
            ended = [*ran, *self._waiting]
            self._running.clear()
            self._waiting.clear()
        self._prefixes.clear()
        for request in ran:
            self._teller.later(self._events.ended, request, "error", time.monotonic() - request.came)
        for request in ended:
            self._engine._slots.give_back(request.owner)
            # Callers raise it in their own threads, so each one gets its own instance.
            copy: BaseException = error
            with contextlib.suppress(Exception):
                copy = type(error)(*error.args)
            self._teller.later(request.tell, copy)
        self._teller.tell_all()
