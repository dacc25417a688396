"""This project's scheduler under the load of a server, in one process with its clients."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any, cast

from dyno._requests import Handling
from dyno._sampling import Sampling
from dyno._slots import Slots
from dyno.errors import DynoError
from dyno.scheduler import Scheduler

from ...core.protocol import Sample
from ...measure.served_limits import check_limits
from ...measure.served_load import Timing, drive, figures, other_clock
from .prompts import served_prompts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dyno.engine import Engine

    from ...core.serve_load import ServedLoad
    from .prompts import Prompts

__all__ = ["serve"]


class _NoEnds:
    end_of_generation: frozenset[int] = frozenset()


class _SessionEngine:
    """The parts of an engine that a scheduler uses, over a session that a target holds."""

    _in_call = False

    def __init__(self, session: Any, settings: Mapping[str, Any]) -> None:
        self._session = session
        self.settings = dict(settings)
        self.model = session.model
        self._file = None  # texts of a load end at no token
        self.tokenizer = _NoEnds()
        self._scheduler: Scheduler | None = None
        self._lock = threading.Lock()
        self._slots = Slots()

    def _open(self) -> Any:
        return self._session

    def _opens_scheduler(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()  # nobody else has this session

    def _tell_failed_captures(self, session: Any) -> None:
        """The target looks for them itself."""


def serve(
    session: Any,
    settings: Mapping[str, Any],
    source: Prompts,
    load: ServedLoad,
    metric: str,
    number: int,
    failure: Callable[[Exception], Exception],
) -> Sample:
    """A load on an open session, whose sequences are empty before and after it: all output tokens, by the
    time from the first request to the last token.

    Args:
        session: of the engine, with as many sequences as `settings` says.
        settings: in force.
        source: of the tokens of prompts.
        load: of the clients.
        metric: of the sample.
        number: of the sample's prompts; another one takes others.
        failure: makes the error of the trial from one of the engine.

    Raises:
        TargetFailure: a latency exceeds its limit.
        TargetUnusable: the load is cut from a text, and there is none.
        Exception: of `failure`.
    """
    prompts = served_prompts(load, source, number)
    try:
        session.reset(None)
        engine = cast("Engine", _SessionEngine(session, settings))
        with Scheduler(engine, max_waiting=load.concurrency) as scheduler:

            def client(prompt: Sequence[int], tokens: int) -> Timing:
                begun, clock_begun = time.perf_counter(), other_clock()
                first = last = clock_last = 0.0
                count = cached = 0
                greedy, to_the_end = Sampling(), Handling(ignore_end=True)
                for drawn in scheduler.drawn(prompt, greedy, tokens, handling=to_the_end):
                    last, clock_last = time.perf_counter(), other_clock()
                    first, count, cached = first or last, count + 1, cached + drawn.cached
                return Timing(begun, first, last, count, cached, (clock_begun, clock_last))

            timings = drive(load, prompts, client)
        session.reset(None)
    except (DynoError, MemoryError) as error:
        raise failure(error) from error
    found = figures(timings)
    check_limits(load, found)
    return Sample(metric, number, found.output_tokens, found.seconds, found.clock_seconds)
