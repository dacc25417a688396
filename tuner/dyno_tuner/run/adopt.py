"""A stranger's row becomes a profile only by measurements on this machine."""

from __future__ import annotations

import datetime
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dyno import profiles

from .. import __version__
from ..core.errors import BudgetError, TuneError
from ..output.emit import workload_of
from .verify import KEEP, Verdict, units_of, verify

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from ..core.intervals import Estimate


@dataclass(frozen=True)
class Adopted:
    """The entries of a row that were measured here, and the profile of those that gain."""

    profile: profiles.Profile | None
    """None where no entry gains here, or where what gains could not be measured as a whole."""
    verdicts: list[Verdict]
    gain: Mapping[str, Estimate]
    unmeasured: str = ""
    """Why what is left of the row could not be measured as a whole."""
    short: bool = False  # whether the reason is the budget, so that more time is the remedy


FIRST = 0.6  # of the time that is left, for a pass that another one may follow


@dataclass
class _Allowance:
    """One budget for all passes.

    Args:
        seconds: of all passes together; None: as long as they take.
    """

    seconds: float | None

    def __post_init__(self) -> None:
        self._begun = time.monotonic()

    def of_pass(self, last: bool) -> float | None:
        """Seconds of the next pass: all that is left if it is the last one."""
        if self.seconds is None:
            return None
        left = max(0.0, self.seconds - (time.monotonic() - self._begun))
        return left if last else FIRST * left


def adopt(
    claimed: profiles.Profile, place: Path, here: profiles.Match, command: str,
    run: Callable[[Path, float | None], tuple[list[Verdict], dict[str, Estimate]]] | None = None,
    budget: float | None = None,
) -> Adopted:  # fmt: skip
    """Measures the entries of a claimed profile, and keeps the ones that pass here the rule of every tune.

    If rounds drop an entry, the rest is measured again, so that no number is that of another profile.

    Args:
        claimed: the profile of a row.
        place: file to write it to for the measurement; the caller removes it.
        here: device, model and engine of this machine.
        command: what is recorded as the command.
        run: measures a profile within so many seconds; None: `verify`.
        budget: seconds of all passes together; None: as long as they take.

    Raises:
        TuneError: The row is for another kind of device, engine or model; or nothing could be measured.
    """
    said = claimed.evidence
    if said is None:
        raise TuneError("this row does not say which workload it was measured with")
    fit = profiles.compare(claimed.match, here.device, here.model, here.engine)
    if fit.other_model:
        raise TuneError(f"this row is for another model: {'; '.join(fit.other_model)}")
    if fit.level is profiles.Level.DEFAULT:
        raise TuneError(f"this row is not for this machine: {'; '.join(fit.reasons)}")
    workload = workload_of(claimed)
    left, verdicts = claimed.model_copy(update={"match": here}), dict[str, Verdict]()
    measure = run or (lambda path, seconds: verify(path, budget=seconds))
    allowance = _Allowance(budget)
    gain: Mapping[str, Estimate] = {}
    while True:
        profiles.save_profile(left, place)
        seconds = allowance.of_pass(last=len(units_of(left, workload.metrics)) < 2)
        try:
            found, gain = measure(place, seconds)
        except BudgetError as error:
            if not verdicts:  # a budget that the error names is of this pass
                raise BudgetError(error.reason) from error
            return Adopted(None, list(verdicts.values()), gain, error.reason, short=True)
        except TuneError as error:
            if not verdicts:
                raise
            return Adopted(None, list(verdicts.values()), gain, str(error))
        # From the second pass on, what is recorded is a ratio of this machine, not the row's.
        claims = {name: v.recorded for name, v in verdicts.items()}
        verdicts |= {v.entry: replace(v, recorded=claims.get(v.entry, v.recorded)) for v in found}
        kept = {v.entry: v.measured for v in found if v.verdict == KEEP and v.proven}
        if not kept:
            return Adopted(None, list(verdicts.values()), gain)
        settings, kernels = _with(left, kept)
        left = left.model_copy(update={"settings": settings, "kernels": kernels})
        # Without a verdict from the rounds an entry was no part of the whole that they measured.
        whole = {v.entry for v in found if v.measured is not None or v.verdict == KEEP}
        if whole <= kept.keys():
            break
    memory = next((v.memory for v in found if v.memory is not None), None)
    profile = left.model_copy(update={
        "label": f"{claimed.label}, measured here",
        "evidence": profiles.Evidence(workload=said.workload, objective=said.objective, gain={
            workload.label(m): profiles.Gain(
                ratio=round(g.ratio, 4), ci95=(round(g.low, 4), round(g.high, 4)), n=g.n,
            ) for m, g in gain.items()
        }, memory_mib=[round(size / 2**20, 1) for size in memory] if memory is not None else None),
        "provenance": profiles.Provenance(
            tuner=__version__, date=datetime.datetime.now(datetime.UTC).date().isoformat(), command=command,
        ),
    })  # fmt: skip
    return Adopted(profile, list(verdicts.values()), gain)


def _with(
    profile: profiles.Profile, kept: Mapping[str, Estimate | None]
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Settings and kernels of a profile: these with the ratios of this machine, all others `default`."""
    settings: dict[str, Any] = {}
    for name, entry in profile.settings.items():
        path = profiles.setting_path(name)
        chosen = isinstance(entry, profiles.SettingEntry) and path in kept
        settings[name] = _measured(entry, kept[path]) if chosen else "default"
    kernels: dict[str, dict[str, Any]] = {}
    for key, by in profile.kernels.items():
        for tokens, kernel in by.items():
            path = profiles.kernel_path(key, tokens)
            chosen = isinstance(kernel, profiles.KernelEntry) and path in kept
            kernels.setdefault(key, {})[tokens] = _measured(kernel, kept[path]) if chosen else "default"
    return settings, kernels


def _measured(entry: Any, estimate: Estimate | None) -> Any:
    """An entry with the ratio of this machine; without one if it was kept because the rest needs it."""
    if estimate is None:
        return entry.model_copy(update={"ratio": None, "ci95": None, "n": None})
    interval = round(estimate.low, 4), round(estimate.high, 4)
    return entry.model_copy(update={"ratio": round(estimate.ratio, 4), "ci95": interval, "n": estimate.n})
