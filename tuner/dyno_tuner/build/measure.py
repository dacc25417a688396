"""Comparison of two builds, with the ABBA rounds, the answers and the margins of `tune ab`."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ..ab.answers import compare_answers
from ..ab.compare import FASTER, SAME, SLOWER, Compared, Options, compare
from ..ab.dyno_side import DynoSide
from ..ab.ggml_side import GgmlSide
from ..ab.run import watched
from ..core.errors import TuneError
from ..core.intervals import Estimate
from ..decide.ablation import LeftOut, Part
from ..decide.answer_check import rounding_limit
from ..measure.machine_monitor import Careful, Machine, patience_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ..ab.run import Answers, Run, Side
    from ..core.protocol import Workload
    from .builder import Built

T = TypeVar("T")


class VariantFailed(TuneError):
    """The error of a variant that does not run on this machine."""


@dataclass(frozen=True)
class SwitchProof:
    """The proof of build switches, for `decide.acceptance.accept`."""

    rounds: int
    gains: bool
    parts: tuple[LeftOut, ...]
    saves: bool = False


@dataclass(frozen=True)
class Measured:
    """The comparison of build B with build A."""

    ratios: Mapping[str, Estimate]
    """Comparisons by metric with its length, such as "pp512"."""
    verdicts: Mapping[str, str]
    margins: Mapping[str, float]
    rounds: int
    changed: str = ""
    """The reason why B's answers are less close than A's; "" if they are not."""
    kld: tuple[float, float] | None = None
    """Mean KLD of A and B from A's most exact path, in nats per token; None if it is unknown."""
    rates: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Median tokens/s of A and B."""
    joules: Mapping[str, Mapping[str, tuple[float, float]]] = field(default_factory=dict)
    """Joules per token of A and B by metric and source, for counters that could be read."""
    disturbed: int = 0
    """Number of processes that count although other programs used the machine (`--force`)."""

    def proof(self, *defines: str) -> SwitchProof:
        """The proof of all these switches together, compared with the default build."""
        moves = tuple(n for n, verdict in self.verdicts.items() if verdict == FASTER)
        best = max(self.ratios.values(), key=lambda e: e.ratio)
        whole = LeftOut(Part(" ".join(defines), moves, defines), best, missed=self.faster)
        return SwitchProof(self.rounds, self.faster, (whole,))

    @property
    def faster(self) -> bool:
        """Whether B gains in a metric, loses in none, and its answers are as close as A's."""
        found = set(self.verdicts.values())
        return FASTER in found and SLOWER not in found and not self.changed

    def to_dict(self) -> dict[str, Any]:
        return {
            "ratios": {n: [e.ratio, e.low, e.high, e.n] for n, e in self.ratios.items()},
            "verdicts": dict(self.verdicts), "margins": dict(self.margins), "rounds": self.rounds,
            "changed": self.changed, "kld": list(self.kld) if self.kld else None,
            "rates": {n: list(r) for n, r in self.rates.items()},
            "joules": {n: {s: list(pair) for s, pair in by.items()} for n, by in self.joules.items()},
            "disturbed": self.disturbed,
        }  # fmt: skip

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Measured:
        return Measured(
            {n: Estimate(*e) for n, e in data["ratios"].items()}, data["verdicts"], data["margins"],
            data["rounds"], data["changed"], tuple(data["kld"]) if data["kld"] else None,
            {n: (r[0], r[1]) for n, r in data["rates"].items()},
            {n: {s: (p[0], p[1]) for s, p in by.items()} for n, by in data["joules"].items()},
            data["disturbed"],
        )  # fmt: skip

    @staticmethod
    def of(result: Compared, changed: str, kld: tuple[float, float] | None, disturbed: int = 0) -> Measured:
        found = result.metrics
        return Measured(
            {n: m.ratio for n, m in found.items()}, {n: m.verdict for n, m in found.items()},
            {n: m.margin for n, m in found.items()}, result.rounds, changed, kld,
            {n: (m.a, m.b) for n, m in found.items()},
            {n: {s: (a.joules_per_token, b.joules_per_token) for s, (a, b) in by.items()}
             for n, by in result.energy.items()},
            disturbed,
        )  # fmt: skip


@dataclass(frozen=True)
class Loading:
    """The cost of a process that only opens the model."""

    seconds: float
    host_mib: float
    gpu_mib: float | None = None


class Bench(Protocol):
    """The protocol for measuring builds. Methods raise TuneError.

    An argument `profile` is the path of the profile to run with, or "" for the engine's defaults.
    """

    workload: Workload

    def compare(
        self, a: Built, b: Built, a_settings: Mapping[str, Any], b_settings: Mapping[str, Any],
        budget: float | None, *, answers: bool, profile: str = "",
    ) -> Measured:  # fmt: skip
        """Compare B with A. Raises VariantFailed if B does not run, and DisturbedError if the machine stays
        busy."""
        ...

    def rate(self, build: Built, settings: Mapping[str, Any], metric: str) -> float:
        """Median tokens/s of one process."""
        ...

    def loading(self, build: Built, profile: str = "") -> Loading | None:
        """The cost of loading the model; None for an engine whose programs cannot only load it."""
        ...


class _Variant:
    """A side whose failures are failures of the variant, and not of the run."""

    def __init__(self, make: Callable[[], Side]) -> None:
        self._side = self._named(make)
        self.kind, self.facts = self._side.kind, self._side.facts

    @staticmethod
    def _named(work: Callable[[], T]) -> T:
        try:
            return work()
        except TuneError as error:
            raise VariantFailed(str(error)) from error

    def run(self, workload: Workload) -> Run:
        return self._named(lambda: self._side.run(workload))

    def answers(self, reference: Path, *, first: bool) -> Answers | None:
        return self._named(lambda: self._side.answers(reference, first=first))

    def close(self) -> None:
        self._side.close()


@dataclass
class RealBench:
    """The measurements of builds of dyno or of another engine, on one device.

    Args:
        engine: "dyno", "llama.cpp" or "ik_llama.cpp".
        model: GGUF file.
        gpu: Number of the GPU; None: the CPU.
        settings: Runtime settings of both sides.
        rounds: Maximum number of ABBA rounds.
        log: File for the output of another engine's programs.
        bus: PCI bus id of the GPU to monitor.
        say: Receives a line about each round.
        force: Whether to measure even while other programs use the machine. Such results are marked.
    """

    engine: str
    model: str
    workload: Workload
    gpu: int | None
    settings: Mapping[str, Any]
    rounds: int
    least: float
    deadline: float
    seed: int
    log: Path
    bus: str | None
    say: Callable[[str], None]
    force: bool = False

    def _side(self, name: str, build: Built, settings: Mapping[str, Any], profile: str = "") -> Side:
        whole = {**self.settings, **settings}
        if self.engine == "dyno":
            folder = Path(build.folder)
            return DynoSide(
                name, self.model, build=folder, profile=Path(profile) if profile else None, settings=whole,
                gpu=self.gpu, deadline=self.deadline,
            )  # fmt: skip
        return GgmlSide(
            name, self.engine, self.model, build.folder, settings=whole, gpu=self.gpu, deadline=self.deadline,
            log=str(self.log),
        )  # fmt: skip

    def compare(
        self, a: Built, b: Built, a_settings: Mapping[str, Any], b_settings: Mapping[str, Any],
        budget: float | None, *, answers: bool, profile: str = "",
    ) -> Measured:  # fmt: skip
        sides: dict[str, Side] = {"A": self._side("A", a, a_settings, profile)}
        try:
            sides["B"] = _Variant(lambda: self._side("B", b, b_settings, profile))
            told, changed = None, ""
            if answers:
                told, changed = compare_answers(sides, rounding_limit, self.say)
            kld = (told[0].mean_kld, told[1].mean_kld) if told else None
            options = Options(self.workload, self.rounds, budget, self.least, self.seed)
            # The engine's defaults, or the settings of both sides, may keep weights in host memory.
            with Machine(self.bus, host_weights=True) as watch:
                patience = None if self.force else patience_of(budget)
                careful = Careful(watch, self._note, lambda _: None, time.sleep, patience)
                result = compare(
                    lambda name: watched("build", sides[name], self.workload, careful), options, self.say
                )
        finally:
            for side in sides.values():
                side.close()
        if result.interrupted:
            raise KeyboardInterrupt
        return Measured.of(result, changed, kld, careful.conditions.disturbed)

    def _note(self, kind: str, **data: Any) -> None:
        self.say(str(data["message"]))

    def rate(self, build: Built, settings: Mapping[str, Any], metric: str) -> float:
        side = self._side("A", build, settings)
        try:
            rates = sorted(side.run(self.workload).rates[metric])
        finally:
            side.close()
        return rates[len(rates) // 2]

    def loading(self, build: Built, profile: str = "") -> Loading | None:
        side = self._side("A", build, {}, profile)
        try:
            if not isinstance(side, DynoSide):
                return None
            side.load()  # the first load reads the files from disk
            found = sorted(side.load() for _ in range(3))[1]
        finally:
            side.close()
        return Loading(*found)


def summary(measured: Measured) -> str:
    """A comparison in words, such as `pp512 1.042 × [1.031, 1.054], tg64 no difference (margin 2.1 %)`."""
    parts = []
    for name, e in measured.ratios.items():
        if measured.verdicts[name] == SAME:
            parts.append(f"{name} no difference (margin {100 * measured.margins[name]:.1f} %)")
        else:
            parts.append(f"{name} {e}")
    return ", ".join([*parts, *([measured.changed] if measured.changed else [])])
