"""The outcome of a tune as a plain value, which is the input of emit, report and the final table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .options import SPEED
from .protocol import kind_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .crossing import Solved
    from .intervals import Estimate, Noise
    from .protocol import KernelChoice, Quality, TrialStatus, Value


@dataclass(frozen=True)
class Entry:
    """A proven setting. Its ratio is the speed of the whole profile / the speed without this entry."""

    name: str
    value: Value
    default: Value
    moves: tuple[str, ...]
    estimate: Estimate
    group: str | None = None
    note: str = ""  # for people: the difference of the ratio from this definition, if any


@dataclass(frozen=True)
class Screened:
    """The measurements that made a kernel a candidate. They are not written as its gain."""

    alone: Estimate | None = None  # of the single launch: time of the default / time of this one
    in_situ: Estimate | None = None  # in short runs of the engine, in addition to earlier choices
    together: int = 1  # number of kernels that were screened in situ together

    @property
    def how(self) -> str:
        return "alone" if self.in_situ is None else "in place"  # the word in journals

    def describe(self) -> str:
        """The text for the note in a profile."""
        said = []
        if self.in_situ is not None:
            others = f", {self.together} kernels as one" if self.together > 1 else ""
            said.append(f"screened in situ{others}: {self.in_situ}")
        if self.alone is not None:
            said.append(f"measured alone: {self.alone}")
        return "; ".join(said)

    def to_dict(self) -> dict[str, Any]:
        parts = {"alone": self.alone, "in_place": self.in_situ}
        return {"screened": self.how, **{n: e.to_dict() for n, e in parts.items() if e is not None}}


@dataclass(frozen=True)
class KernelEntry:
    """A proven kernel choice. Its group gains: the whole profile is slower without it."""

    choice: KernelChoice
    estimate: Estimate  # speed of the whole profile / speed without the group
    group: str
    screened: Screened


@dataclass(frozen=True)
class Failure:
    """A configuration that did not count, with the reason."""

    settings: Mapping[str, Value]
    status: TrialStatus
    message: str


@dataclass
class Outcome:
    """The outcome of a tune, however it ended."""

    settings: dict[str, Value]  # complete
    defaults: dict[str, Value]
    entries: list[Entry] = field(default_factory=list)
    searched: list[str] = field(default_factory=list)  # knobs with another value that was tried
    kernels: list[KernelEntry] = field(default_factory=list)
    kernel_defaults: list[tuple[str, str]] = field(
        default_factory=list
    )  # (op key, bucket) for which the default won
    gain: dict[str, Estimate] = field(default_factory=dict)  # whole profile / default, by metric
    baseline: dict[str, float] = field(default_factory=dict)  # tokens/s, medians of the confirming rounds
    tuned: dict[str, float] = field(default_factory=dict)
    objective: str = SPEED
    joules: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Joules per token of the default and of the profile by metric, if energy was counted."""
    memory: tuple[int, int] | None = None
    """Planned bytes of the default and of the profile, if memory decides."""
    noise: dict[str, Noise] = field(default_factory=dict)
    margin: dict[str, float] = field(default_factory=dict)
    quality: Quality | None = None
    default_quality: Quality | None = None
    failures: list[Failure] = field(default_factory=list)
    trials: int = 0  # number of distinct measured configurations
    voided: int = 0
    unstable: int = 0  # number of measurements that were not stable at their cap
    drift: float = 0.0
    seconds: float = 0.0
    routing: dict[str, Any] = field(default_factory=dict)  # the use of experts in the workload
    crossings: list[Solved] = field(default_factory=list)  # the solved thresholds
    conditions: dict[str, Any] = field(default_factory=dict)  # the state of the GPU during the tune
    status: str = "complete"
    """`complete`, `interrupted`, `budget` (the time did not suffice for all steps), or `unproven` (settings
    looked faster, but failed twice in rounds, or their answers could not be compared)."""
    unproven: bool = False  # something looked faster, and was neither proven nor refuted
    left_open: list[str] = field(default_factory=list)
    """Knobs of configurations that looked faster and are not written: without time, after two failures in
    rounds, or after losing their proof."""
    unanswered: str = ""
    """The reason why a faster-looking configuration is not written, other than lack of time: its answers
    could not be compared, or it failed twice in rounds."""
    unanswered_kernels: str = ""  # the same for kernels that looked faster
    missed: dict[str, Any] = field(default_factory=dict)  # settings and ratio, if only a part was proven
    # The parts that looked faster and were not proven: `settings` or `kernels` (their number), `ratio`, and,
    # if time was short, `needed`: seconds of a sufficient budget.
    promises: list[dict[str, Any]] = field(default_factory=list)
    too_short: dict[str, Any] = field(default_factory=dict)
    """If the budget was too short to measure the noise: `message`, and `needed`, the seconds that would
    suffice, if known."""
    stage: str = ""  # key of the comparison behind `gain`; empty without one
    afterwards: str = ""  # the interrupted step after the tune itself, with the remedy
    finished: str = ""  # the status of the tune itself in that case

    @property
    def judged(self) -> list[str]:
        """Knobs that the tune has judged. Judged knobs without an entry are `default`. A knob is left out if
        another value looked faster but was not proven: for lack of time, because answers could not be
        compared, or after two failures in rounds. If the tune was interrupted before the rounds decided, no
        default has won."""
        if self.status == "interrupted" and self.unproven:
            return [e.name for e in self.entries]
        looked_faster = [p for p in self.promises if "needed" in p or self.unproven]
        left_open = {name for p in [*looked_faster, self.missed] for name in p.get("settings", ())}
        left_open |= set(self.left_open)
        return [n for n in self.searched if n not in left_open or n in {e.name for e in self.entries}]

    @property
    def judges_nothing(self) -> bool:
        """Whether a profile of this outcome would have no setting and no kernel, not even as `default`."""
        return not (self.entries or self.kernels or self.kernel_defaults or self.judged)

    @property
    def untouched(self) -> set[str]:
        """Metrics of the gain that no entry affects; empty if no entry is written."""
        if not self.entries and not self.kernels:
            return set()
        moved = {m for e in self.entries for m in e.moves}
        kinds = {k.group.removeprefix("kernels_") for k in self.kernels}
        return {m for m in self.gain if m not in moved and kind_of(m) not in kinds}

    def describe(self) -> str:
        """One line for logs."""
        if not self.entries and not self.kernels:
            why = (
                self.unanswered
                or self.unanswered_kernels
                or (
                    "the time ran out before settings that looked faster could be proven"
                    if self.unproven
                    else "nothing beat it"
                )
            )
            return f"every entry is default: {why}"
        named = [f"{e.name}={e.value} ({e.estimate.ratio:.3f}×)" for e in self.entries]
        return ", ".join([*named, *(f"{len(self.kernels)} kernel choices" for _ in self.kernels[:1])])

    def to_dict(self) -> dict[str, Any]:
        return {
            "settings": self.settings,
            "entries": {
                e.name: {
                    "value": e.value,
                    "default": e.default,
                    **e.estimate.to_dict(),
                    "group": e.group,
                    **({"note": e.note} if e.note else {}),
                }
                for e in self.entries
            },
            "kernels": [
                {**k.choice.to_dict(), **k.estimate.to_dict(), "group": k.group, **k.screened.to_dict()}
                for k in self.kernels
            ],
            "gain": {m: g.to_dict() for m, g in self.gain.items()},
            "untouched": sorted(self.untouched),
            **({"objective": self.objective} if self.objective != SPEED else {}),
            **(
                {"joules_per_token": {m: list(pair) for m, pair in self.joules.items()}}
                if self.joules
                else {}
            ),
            **({"memory": list(self.memory)} if self.memory else {}),
            "margin": self.margin,
            "trials": self.trials,
            "voided": self.voided,
            "seconds": self.seconds,
            "routing": self.routing,
            "crossings": {c.knob: c.to_dict() for c in self.crossings},
            "conditions": self.conditions,
            "status": self.status,
            "unproven": self.unproven,
            **({"unanswered": self.unanswered} if self.unanswered else {}),
            **({"unanswered_kernels": self.unanswered_kernels} if self.unanswered_kernels else {}),
            "missed": self.missed,
            "promises": self.promises,
            **({"too_short": self.too_short} if self.too_short else {}),
            **({"afterwards": self.afterwards} if self.afterwards else {}),
            "stage": self.stage,
        }
