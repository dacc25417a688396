"""Import of a shared row: it becomes a profile only by measurements on this machine."""

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
    """The measured entries of a row, and the profile of the ones that gain."""

    profile: profiles.Profile | None
    """None if no entry gains here, or if the gaining ones could not be measured together."""
    verdicts: list[Verdict]
    gain: Mapping[str, Estimate]
    unmeasured: str = ""
    """The reason why the remaining entries could not be measured together."""
    short: bool = False  # whether the reason is the budget, so that a longer one is the remedy


FIRST = 0.6  # share of the remaining time for a pass that is not the last


@dataclass
class _Allowance:
    """The common budget of all passes.

    Args:
        seconds: Total seconds of all passes; None: no limit.
    """

    seconds: float | None

    def __post_init__(self) -> None:
        self._begun = time.monotonic()

    def of_pass(self, last: bool) -> float | None:
        """Seconds of the next pass: all remaining ones if it is the last one."""
        if self.seconds is None:
            return None
        left = max(0.0, self.seconds - (time.monotonic() - self._begun))
        return left if last else FIRST * left


def adopt(
    claimed: profiles.Profile, place: Path, here: profiles.Match, command: str,
    run: Callable[[Path, float | None], tuple[list[Verdict], dict[str, Estimate]]] | None = None,
    budget: float | None = None,
) -> Adopted:  # fmt: skip
    """Measure the entries of a claimed profile, and keep the ones that pass the acceptance rule here.

    If rounds drop an entry, the rest is measured again, so that all numbers belong to the final profile.

    Args:
        claimed: The profile of a row.
        place: Temporary file for the profile during the measurement. The caller removes it.
        here: Device, model and engine of this machine.
        command: The command to record.
        run: Measures a profile within a number of seconds; None: `verify`.
        budget: Total seconds of all passes; None: no limit.

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
            if not verdicts:  # a budget in the error is the one of this pass
                raise BudgetError(error.reason) from error
            return Adopted(None, list(verdicts.values()), gain, error.reason, short=True)
        except TuneError as error:
            if not verdicts:
                raise
            return Adopted(None, list(verdicts.values()), gain, str(error))
        # From the second pass on, the recorded ratio is one of this machine, and not of the row.
        claims = {name: v.recorded for name, v in verdicts.items()}
        verdicts |= {v.entry: replace(v, recorded=claims.get(v.entry, v.recorded)) for v in found}
        kept = {v.entry: v.measured for v in found if v.verdict == KEEP and v.proven}
        if not kept:
            return Adopted(None, list(verdicts.values()), gain)
        settings, kernels = _with(left, kept)
        left = left.model_copy(update={"settings": settings, "kernels": kernels})
        # An entry without a verdict from the rounds was not part of the measured profile.
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
    """Settings and kernels of a profile: the kept ones with the ratios of this machine, and all others
    `default`."""
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
    """An entry with the ratio of this machine; without a ratio if it was kept because the rest needs it."""
    if estimate is None:
        return entry.model_copy(update={"ratio": None, "ci95": None, "n": None})
    interval = round(estimate.low, 4), round(estimate.high, 4)
    return entry.model_copy(update={"ratio": round(estimate.ratio, 4), "ci95": interval, "n": estimate.n})
