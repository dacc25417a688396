"""Tunes of the real engine, on a machine that may be busy."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from dyno_tuner.run.session import Request, Result, run

if TYPE_CHECKING:
    from collections.abc import Callable


def tuned(request: Request, engine: Callable[[], Any] = lambda: None) -> Result:
    """The first result with a profile; if a budget was too short for this machine, a longer one follows.

    Args:
        request: Names the profile and a budget that is usually enough.
        engine: Makes the executor of a tune; by default, the tune makes its own.
    """
    for times in (1, 5, 25):
        budget = times * (request.options.budget or 0.0)
        options = dataclasses.replace(request.options, budget=budget)
        executor = engine()
        try:
            result = run(dataclasses.replace(request, options=options), executor)
        finally:
            if executor is not None:
                executor.close()
        if result.path is not None:
            break
    return result
