"""A tune on a slice of the model's layers, followed by a proof on the whole model.

The slice has the same shapes but fewer layers, so measurements are shorter and loads faster. Memory limits
are scaled by the bytes of the slice. The winner of the slice is then compared with the default on the whole
model. The profile only has entries that these rounds prove.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import Interrupted, TuneError
from ..execution.worker import WorkerExecutor
from ..space.search_space import Space
from .session import judged_nothing, limit_memory, output_path, run, space_for, target_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ..core.executor import Executor
    from ..core.protocol import Value
    from .session import Request, Result

SLICE_SHARE = 0.6  # share of the budget for the slice; the rest is for the proof
_ON_DEVICE: dict[str, Value] = {"placement": "", "cpu_moe": False, "n_cpu_moe": 0, "n_gpu_layers": -1}


def run_on_slice(
    request: Request, layers: int, executor_of: Callable[[Request], Executor] | None = None
) -> Result:
    """Tune on the first `layers` layers, and prove the winner on all layers.

    Args:
        executor_of: Makes the engine of a request; default: a worker process.

    Raises:
        TuneError: The model has no more layers than that, or as in `session.run`.
        Interrupted: Ctrl-C or SIGTERM ended the tune on the slice.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dyno-slice-")))

        def opened(asked: Request) -> Executor:
            if executor_of is not None:
                made = executor_of(asked)
            else:
                made = WorkerExecutor(*target_of(asked, asked.device, str(folder)))
            stack.callback(made.close)
            return made

        whole = opened(request)
        description = whole.describe()
        of = int(description.model["layers"])
        if not 1 <= layers < of:
            raise TuneError(f"--layers {layers}: the model has {of}; give 1 to {of - 1}")
        share = _bytes(whole, layers) / _bytes(whole, 0)
        small = _scaled(request, layers, share, folder / "slice.yaml")
        out = output_path(request, description)
        kept = out.with_name(out.name + ".slice.journal.jsonl")
        ended = f"interrupted on the first {layers} layers, before anything was proven on the whole model"
        try:
            found = run(small, opened(small))
        except Interrupted as error:
            raise Interrupted(f"{ended}; the same command starts from the beginning") from error
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(found.journal, kept)
        if found.outcome.status == "interrupted":  # the tune itself has caught the signal
            raise Interrupted(f"{ended}; the same command starts from the beginning. Journal: {kept}")
        space, _ = limit_memory(description, request, whole, space_for(description, request))
        winner = on_whole(found.outcome.settings, space, layers, of)
        narrow = narrowed(space, winner)
        left = f"{out} is unchanged" if out.exists() else "no profile was written"
        if not narrow.knobs:
            return _without_winner(replace(found, path=None, journal=kept), left, layers)
        seconds = round(found.outcome.seconds, 1)
        budget = request.options.budget
        final = replace(
            request,
            out=out,
            first=(winner,),
            slice={"layers": layers, "of": of, "memory_share": round(share, 4), "seconds": seconds},
            options=replace(
                request.options, kernels=False, max_trials=2,
                budget=None if budget is None else budget * (1 - SLICE_SHARE),
            ),
        )  # fmt: skip
        rest = 1 - SLICE_SHARE
        return _by_whole_budget(run(final, whole, narrow), left, "the proof on the whole model", rest, rest)


def _without_winner(found: Result, left: str, layers: int) -> Result:
    """The result of a tune whose slice has nothing to confirm."""
    # The proof on the whole model needs at least as much time as the slice, but gets less.
    found = _by_whole_budget(
        found, left, "the search on the first layers", SLICE_SHARE, min(SLICE_SHARE, 1 - SLICE_SHARE)
    )
    if found.outcome.judges_nothing:
        return found
    said = "nothing was proven" if found.outcome.unproven else "the defaults won"
    return replace(found, why_none=f"{left}, because {said} on the first {layers} layers")


def _by_whole_budget(found: Result, left: str, who: str, share: float, least: float) -> Result:
    """The result of one of the two tunes, in which budgets are converted to the total budget of both.

    Args:
        left: The state of the profile file, if the tune has judged nothing.
        who: Name of the tune, which had `share` of the budget.
        least: The share that must be as long as the tune needs.
    """

    def whole(short: Mapping[str, Any]) -> dict[str, Any]:
        if "needed" not in short:
            return dict(short)
        needed = math.ceil(short["needed"] / least)
        why = f"{who} has {100 * share:.0f} % of the budget, which is too short to prove anything"
        told = {"message": f"{why}; give at least --budget {needed}s"} if "message" in short else {}
        return {**short, "needed": needed, **told}

    outcome = replace(
        found.outcome,
        too_short=whole(found.outcome.too_short),
        promises=[whole(promise) for promise in found.outcome.promises],
    )
    if not outcome.judges_nothing:
        return replace(found, outcome=outcome)
    return replace(found, outcome=outcome, why_none=f"{left}{judged_nothing(outcome, resumes=False)}")


def _bytes(executor: Executor, layers: int) -> int:
    size = executor.memory({**_ON_DEVICE, "layers": layers})
    if size is None:
        raise TuneError(f"--layers {layers}: the engine cannot run only a part of this model")
    return size


def _scaled(request: Request, layers: int, share: float, out: Path) -> Request:
    """The request for the slice, with less memory and time, and without kernels."""

    def less(size: int) -> int:
        return max(1, math.ceil(size * share))

    placement = {n: less(v) if n in ("vram", "ram") else v for n, v in request.placement.items()}
    virtual = placement.get("virtual_devices")
    if isinstance(virtual, dict):
        placement["virtual_devices"] = {
            name: {n: less(v) if n == "memory_mib" else v for n, v in one.items()}
            for name, one in virtual.items()
        }
    budget = request.options.budget
    return replace(
        request,
        out=out,
        held={**request.held, "layers": layers},
        placement=placement,
        memory_limit=None if request.memory_limit is None else less(request.memory_limit),
        options=replace(
            request.options, kernels=False, budget=None if budget is None else budget * SLICE_SHARE
        ),
    )


def on_whole(settings: Mapping[str, Value], space: Space, layers: int, of: int) -> dict[str, Any]:
    """The winner of the slice in the space of the whole model. Numbers of layers are scaled up. If it does
    not fit, more experts or layers go to the CPU until it does, or their values become the default."""
    found: dict[str, Any] = {k.name: settings.get(k.name, k.default) for k in space.knobs}
    if "n_cpu_moe" in found:
        found["n_cpu_moe"] = math.ceil(int(found["n_cpu_moe"]) * of / layers)
    if int(found.get("n_gpu_layers", -1)) >= 0:
        found["n_gpu_layers"] = int(found["n_gpu_layers"]) * (of + 1) // (layers + 1)
    for _ in range(of + 1):
        if space.allowed({**space.fixed, **found}):
            return found
        if int(found.get("n_cpu_moe", of)) < of:
            found["n_cpu_moe"] += 1
        elif int(found.get("n_gpu_layers", 0)) > 0:
            found["n_gpu_layers"] -= 1
        else:
            break
    return {**found, **{k.name: k.default for k in space.knobs if k.name in ("n_cpu_moe", "n_gpu_layers")}}


def narrowed(space: Space, winner: Mapping[str, Value]) -> Space:
    """The space with only the default and the winning value of each knob. Thresholds are already solved."""
    knobs = [
        replace(k, values=tuple(dict.fromkeys((k.default, winner[k.name]))), threshold_of=None, ordinal=False)
        for k in space.knobs
        if winner[k.name] != k.default
    ]
    return Space(knobs, space.allowed, space.fixed)
