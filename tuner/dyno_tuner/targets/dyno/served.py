"""The scheduler of this project under the load of a server, in one process with the clients."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any, cast

from dyno._effective import EffectiveSettings
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
    """The parts of an engine that a scheduler uses, based on the session of a target."""

    _in_call = False

    def __init__(self, session: Any, settings: Mapping[str, Any]) -> None:
        self._session = session
        # A step that is too small for the sequences of a trial gets room for them, so it is no argument here.
        self.settings = EffectiveSettings(settings, dict.fromkeys(settings, "tune"))
        self.model = session.model
        self._file = None  # texts of a load do not end at a token
        self.tokenizer = _NoEnds()
        self._scheduler: Scheduler | None = None
        self._lock = threading.Lock()
        self._slots = Slots()

    def _open(self) -> Any:
        return self._session

    def _opens_scheduler(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()  # nothing else uses this session

    def _tell_failed_captures(self, session: Any) -> None:
        """Do nothing, because the target checks for them itself."""


def serve(
    session: Any,
    settings: Mapping[str, Any],
    source: Prompts,
    load: ServedLoad,
    metric: str,
    number: int,
    failure: Callable[[Exception], Exception],
) -> Sample:
    """Run a load on an open session, whose sequences are empty before and after it. The sample has all output
    tokens, and the time from the first request to the last token.

    Args:
        session: The session of the engine, with the number of sequences in `settings`.
        settings: Settings in force.
        source: Source of the tokens of prompts.
        load: The load of the clients.
        metric: Metric of the sample.
        number: Number of the set of prompts.
        failure: Converts an error of the engine to the error of the trial.

    Raises:
        TargetFailure: A latency exceeds its limit.
        TargetUnusable: the load is cut from a text, and there is none.
        Exception: The error that `failure` makes.
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
