"""The outcome of a tune, as a plain value: the input of emit, report and the closing table."""

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
    """A setting that beat its default: the whole profile over the whole profile without this entry."""

    name: str
    value: Value
    default: Value
    moves: tuple[str, ...]
    estimate: Estimate
    group: str | None = None
    note: str = ""  # for people: in which way the ratio is another one than the definition says


@dataclass(frozen=True)
class Screened:
    """The times that made a kernel a candidate. None of them is written as its gain."""

    alone: Estimate | None = None  # of the launch by itself: time of the default / time of this one
    in_situ: Estimate | None = None  # of short runs of the engine, on top of what was chosen before it
    together: int = 1  # kernels that were screened in situ as one

    @property
    def how(self) -> str:
        return "alone" if self.in_situ is None else "in place"  # as journals have it

    def describe(self) -> str:
        """For the note of a profile."""
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
    """A kernel choice of a group without which the whole profile is slower."""

    choice: KernelChoice
    estimate: Estimate  # the whole profile over the whole profile without the group
    group: str
    screened: Screened


@dataclass(frozen=True)
class Failure:
    """A configuration that did not count, and why."""

    settings: Mapping[str, Value]
    status: TrialStatus
    message: str


@dataclass
class Outcome:
    """Everything that is known when a tune ends, however it ends."""

    settings: dict[str, Value]  # complete
    defaults: dict[str, Value]
    entries: list[Entry] = field(default_factory=list)
    searched: list[str] = field(default_factory=list)  # knobs of which another value was tried
    kernels: list[KernelEntry] = field(default_factory=list)
    kernel_defaults: list[tuple[str, str]] = field(
        default_factory=list
    )  # (op key, bucket) where the default won
    gain: dict[str, Estimate] = field(default_factory=dict)  # whole profile / default, by metric
    baseline: dict[str, float] = field(default_factory=dict)  # tokens/s, medians of the confirming rounds
    tuned: dict[str, float] = field(default_factory=dict)
    objective: str = SPEED
    joules: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Joules per token of the default and of the profile, by metric, where energy was counted."""
    memory: tuple[int, int] | None = None
    """Bytes of the default and of the profile by the engine's plan, where they decide."""
    noise: dict[str, Noise] = field(default_factory=dict)
    margin: dict[str, float] = field(default_factory=dict)
    quality: Quality | None = None
    default_quality: Quality | None = None
    failures: list[Failure] = field(default_factory=list)
    trials: int = 0  # distinct configurations that were measured
    voided: int = 0
    unstable: int = 0  # measurements that were still warming up at their cap
    drift: float = 0.0
    seconds: float = 0.0
    routing: dict[str, Any] = field(default_factory=dict)  # how a router spread the workload
    crossings: list[Solved] = field(default_factory=list)  # of the thresholds that were solved
    conditions: dict[str, Any] = field(default_factory=dict)  # what the GPU did meanwhile
    status: str = "complete"
    """`complete`, `interrupted`, `budget` (something was left undone for lack of time), or `unproven`:
    settings looked faster, but failed twice in rounds, or their answers could not be compared."""
    unproven: bool = False  # something that looked faster is not written, and nothing refutes it
    left_open: list[str] = field(default_factory=list)
    """Knobs of all that looked faster then, failed twice in rounds, or was proven and lost its proof."""
    unanswered: str = ""
    """Why what looked faster is not written, if it was no lack of time: nobody could compare its answers, or
    it failed twice in rounds."""
    unanswered_kernels: str = ""  # the same for kernels that looked faster
    missed: dict[str, Any] = field(default_factory=dict)  # settings and ratio of what was proven in part only
    # The parts that looked faster and were not proven: `settings` or `kernels` (how many), `ratio`, and,
    # where time was short, `needed`: seconds of a budget that would do.
    promises: list[dict[str, Any]] = field(default_factory=list)
    too_short: dict[str, Any] = field(default_factory=dict)
    """If the budget had no time for the noise: `message`, and `needed`, seconds that would do, if known."""
    stage: str = ""  # key of the comparison that `gain` is from; empty where it is from none
    afterwards: str = ""  # the step behind the tune itself that was interrupted, with the remedy
    finished: str = ""  # the status of the tune itself then

    @property
    def judged(self) -> list[str]:
        """Knobs about which the tune can speak: those without entry are `default`. A knob whose other value
        looked faster, without the time to prove it, is left out: its default has won nothing. So is one whose
        answers could not be compared, or that failed twice in rounds. If the tune was interrupted before
        rounds could tell, no default has won."""
        if self.status == "interrupted" and self.unproven:
            return [e.name for e in self.entries]
        looked_faster = [p for p in self.promises if "needed" in p or self.unproven]
        left_open = {name for p in [*looked_faster, self.missed] for name in p.get("settings", ())}
        left_open |= set(self.left_open)
        return [n for n in self.searched if n not in left_open or n in {e.name for e in self.entries}]

    @property
    def judges_nothing(self) -> bool:
        """Whether a profile of this outcome would hold no setting and no kernel, not even as `default`."""
        return not (self.entries or self.kernels or self.kernel_defaults or self.judged)

    @property
    def untouched(self) -> set[str]:
        """Metrics of the gain that no entry moves; none where nothing is written."""
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
