"""Verification of a profile: an ablation of each entry, or its group, in ABBA rounds as in a tune."""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dyno import profiles
from dyno.settings import SETTINGS

from ..core.errors import BudgetError, TuneError
from ..core.model_file import check_model
from ..core.options import ENERGY, MEMORY, SPEED
from ..core.protocol import METRICS, Configuration, KernelChoice, Switch, TrialStatus, Workload, kind_of
from ..core.recorded_command import held_with
from ..core.scratch import scratch_folder
from ..decide.ablation import FULL, Part, left_out, rest_of, rests, variants, without
from ..decide.acceptance import Evidence, accept, gains
from ..execution.worker import WorkerExecutor
from ..measure.machine_monitor import Machine, patience_of
from ..measure.paired_rounds import WIDEST_MARGIN, measurements_in_round
from ..output.emit import workload_of
from ..output.progress import Progress
from ..record.recorder import Recorder
from ..space.knobs import Fidelity, Kind, Knob
from ..space.search_space import Space
from ..targets import declared
from ..targets.declaration import TargetRequest
from ..targets.ggml.export import binaries_folder, tuned_with
from .profile_device import check_device
from .tune import Options, Tune

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from ..core.executor import Executor
    from ..core.intervals import Estimate
    from ..core.protocol import Description, Measurement
    from ..measure.comparison import Comparison
    from ..measure.paired_rounds import Bar

USUAL = -1.0  # the default budget, which depends on the engine
KEEP, STALE, HARMFUL, UNSUPPORTED = "keep", "stale", "harmful", "unsupported"
UNCLEAR = "unclear"  # the noise of this machine is too large for a verdict


@dataclass(frozen=True)
class Verdict:
    """The verdict on one entry."""

    entry: str
    verdict: str  # keep | stale | harmful | unsupported | unclear
    reason: str
    recorded: float | None = None  # the ratio in the profile
    measured: Estimate | None = None
    proven: bool = False  # whether today's rounds pass the acceptance rule of a tune
    memory: tuple[int, int] | None = None
    """Planned bytes of the default and of all proven entries together, if memory decides."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "entry": self.entry, "verdict": self.verdict, "reason": self.reason, "recorded": self.recorded,
            "measured": self.measured.to_dict() if self.measured else None,
        }  # fmt: skip


@dataclass
class Unit:
    """Entries that are judged together."""

    label: str
    settings: dict[str, Any]
    kernels: list[KernelChoice]
    moves: tuple[str, ...]
    recorded: float | None
    lost: tuple[str, ...] = ()  # entries of the group that the engine does not accept

    @property
    def part(self) -> Part:
        return Part(self.label, self.moves, tuple(self.settings), "kernels" if self.kernels else "")

    def entries(self) -> list[str]:
        return [
            *(f"settings.{name}" for name in self.settings),
            *(f"kernels.{k.key}.{k.tokens}" for k in self.kernels),
        ]

    def only(self, entries: Collection[str]) -> Unit:
        """The unit with only these entries."""
        return replace(
            self,
            settings={n: v for n, v in self.settings.items() if f"settings.{n}" in entries},
            kernels=[k for k in self.kernels if f"kernels.{k.key}.{k.tokens}" in entries],
        )

    def without(self, entries: Collection[str]) -> Unit:
        """The unit without entries that the engine does not accept."""
        left = self.only([e for e in self.entries() if e not in entries])
        return replace(left, lost=(*self.lost, *entries))


def units_of(profile: profiles.Profile, metrics: Sequence[str]) -> list[Unit]:
    """The entries that are not `default`, by group; kernels without a group are one."""
    units: dict[str, Unit] = {}
    for name, entry in profile.settings.items():
        if isinstance(entry, profiles.SettingEntry):
            said: list[str] = list(entry.moves)
            moves = tuple(m for m in metrics if kind_of(m) in said) or tuple(metrics)
            label = entry.group or name
            unit = units.setdefault(label, Unit(label, {}, [], moves, entry.ratio))
            unit.settings[name] = ",".join(entry.value) if isinstance(entry.value, list) else entry.value
            unit.moves = tuple(m for m in metrics if m in unit.moves or m in moves)
    for key, buckets in profile.kernels.items():
        for tokens, kernel in buckets.items():
            if isinstance(kernel, profiles.KernelEntry):
                label = kernel.group or "kernels"
                own = tuple(m for m in metrics if label == f"kernels_{kind_of(m)}") or tuple(metrics)
                unit = units.setdefault(label, Unit(label, {}, [], own, kernel.ratio))
                unit.kernels.append(KernelChoice(key, tokens, kernel.config))
    return list(units.values())


class Verification(Tune):
    """A verification of `units` with the executor of the recorder. `verdicts` is complete when `run` has
    ended.

    Args:
        disturbed: Whether other programs used the machine while the profile was made, so that nothing is
            kept.
        needs: Gives the planned bytes of settings, for a profile that was written for its memory.
    """

    def __init__(
        self,
        recorder: Recorder,
        space: Space,
        options: Options,
        units: Sequence[Unit],
        *,
        disturbed: bool = False,
        needs: Callable[[Mapping[str, Any]], int | None] | None = None,
    ) -> None:
        super().__init__(recorder, space, options)
        self._disturbed = disturbed
        self._needs = needs
        self._units = list(units)
        self.verdicts: list[Verdict] = []
        self._by_the_whole: set[str] = set()
        """Entries that the gain of the whole profile proves, because the rest does not run without them."""
        self.gain: dict[str, Estimate] = {}

    def _configuration(self, units: Sequence[Unit]) -> Configuration:
        settings = self.space.settings(self.space.default)
        for unit in units:
            settings.update(unit.settings)
        return Configuration(settings, tuple(k for u in units for k in u.kernels))

    def _say(
        self, unit: Unit, verdict: str, reason: str, measured: Estimate | None = None, proven: bool = False
    ) -> None:
        if unit.lost:
            lost = ", ".join(unit.lost)
            reason += f"; measured without {lost}, because the runtime drops its whole group with them"
        self.verdicts += [
            Verdict(e, verdict, reason, unit.recorded, measured, proven) for e in unit.entries()
        ]

    def _run(self) -> None:
        self.stage("noise")
        if not self._measure_noise():
            raise BudgetError("the budget is too short to distinguish a gain from noise")
        self.stage("verify")
        units = self._answering(self._running(self._units))
        if not units:
            return
        configurations = variants(
            self._configuration([]), self._configuration(units), [u.part for u in units],
            lambda part: self._configuration([u for u in units if u.part != part]),
        )  # fmt: skip
        self.context.budget.until_the_end()
        result = self._compared("verify", configurations)
        if any(result.untold(name) for name in configurations):
            result = self._compared_again(result, configurations)
        if not _decides(result):
            failed = result.failed.get(FULL)
            for name, end in result.halted.items():
                how = "failed twice" if result.untold(name) else "ran at first and then failed twice"
                raise TuneError(
                    f"{name} the profile {how} ({end.message}). Check whether a program fills the memory, "
                    "and verify again"
                )
            if failed is None:
                needed = self.context.recorder.now + self.context.rounds().seconds(
                    2 * measurements_in_round(len(configurations))
                )
                raise BudgetError(
                    "the budget is too short for two rounds", f"give --budget {1 + int(needed / 60)}m"
                )
            for unit in units:
                self._say(unit, HARMFUL, f"the whole profile fails ({failed.status}): {failed.message}")
            return
        self.gain = {m: result.ratio(FULL, [m], self.context.weights) for m in self.context.weights}
        for unit in units:
            self._verdict(result, unit, units)
        self._forget_savings_that_went(units)
        self._note_memory(units)

    def _compared(self, key: str, configurations: Mapping[str, Configuration]) -> Comparison:
        context = self.context
        return context.rounds().compare(key, configurations, context.round_count, rests=rests(configurations))

    def _compared_again(self, first: Comparison, configurations: Mapping[str, Configuration]) -> Comparison:
        """A second comparison, or the first one if the time ends before the second one has a result."""
        try:
            again = self._compared("verify/again", configurations)
        except BudgetError:
            if not _decides(first):
                raise
            return first
        if _decides(again) or FULL in again.failed:
            return again
        return first if _decides(first) or again.begun == 0 else again

    def _forget_savings_that_went(self, units: Sequence[Unit]) -> None:
        """An entry that is proven by the saving of the whole stays proven only if the proven entries save."""
        if self._by_the_whole and not self._saves(self._sizes(self._proven(units))):
            self.verdicts = [
                replace(v, proven=False) if v.entry in self._by_the_whole else v for v in self.verdicts
            ]

    def _sizes(self, units: Sequence[Unit]) -> tuple[int, int] | None:
        """Planned bytes of the default and of these units; None if only speed counts, or the engine refuses
        one of them."""
        if self._needs is None:
            return None
        usual, size = (self._needs(self._configuration(which).settings) for which in ([], units))
        return None if usual is None or size is None else (usual, size)

    @staticmethod
    def _saves(sizes: tuple[int, int] | None) -> bool:
        return sizes is not None and sizes[1] < sizes[0]

    def _proven(self, units: Sequence[Unit]) -> list[Unit]:
        entries = {v.entry for v in self.verdicts if v.proven}
        return [unit.only([e for e in unit.entries() if e in entries]) for unit in units]

    def _note_memory(self, units: Sequence[Unit]) -> None:
        """Add the memory of the proven entries to each proven verdict."""
        sizes = self._sizes(self._proven(units))
        self.verdicts = [replace(v, memory=sizes) if v.proven else v for v in self.verdicts]

    def _whole_saves(self, result: Comparison, units: Sequence[Unit], bar: Bar) -> bool:
        """Whether the profile needs less memory than the default, and rounds show that no metric becomes
        slower; False if only speed counts."""
        # With noise above the widest margin, nothing can be shown.
        shows = bar.proves(tuple(self.context.weights))
        slower = any(self._may_be_slower(result, m, bar) for m in self.context.weights)
        return self._saves(self._sizes(units)) and shows and not slower

    def _saved(self, unit: Unit, units: Sequence[Unit]) -> int:
        """Bytes that a unit saves in the whole profile; 0 if only speed counts."""
        if self._needs is None:
            return 0
        with_it = self._needs(self._configuration(units).settings)
        without = self._needs(self._configuration([u for u in units if u is not unit]).settings)
        return max(0, without - with_it) if with_it is not None and without is not None else 0

    def _running(self, units: Sequence[Unit]) -> list[Unit]:
        """The units that the engine accepts. Entries that it refuses, or that kill it, get their verdict at
        once."""
        whole = self._try("runs/full", self._configuration(units))
        if whole.status is TrialStatus.OK:
            return list(units)
        taken = [self._taken(f"runs/{number}", unit) for number, unit in enumerate(units)]
        good = [unit for unit in taken if unit is not None]
        if good == list(units):
            for unit in units:
                self._say(
                    unit,
                    HARMFUL,
                    f"together with the other entries it fails ({whole.status}): {whole.message}",
                )
            return []
        return good

    def _taken(self, key: str, unit: Unit) -> Unit | None:
        """The entries of a unit that run. If all together do not run, they are tried one by one."""
        measurement = self._try(key, self._configuration([unit]))
        if measurement.status is TrialStatus.OK:
            return unit
        entries, bad = unit.entries(), []
        for number, entry in enumerate(entries if len(entries) > 1 else []):
            part = unit.only([entry])
            alone = self._try(f"{key}/{number}", self._configuration([part]))
            if alone.status is not TrialStatus.OK:
                self._fails(part, alone)
                bad.append(entry)
        if not bad:
            self._fails(unit, measurement)
            return None
        return self._taken(f"{key}/rest", unit.without(bad)) if len(bad) < len(entries) else None

    def _try(self, key: str, configuration: Configuration) -> Measurement:
        """A measurement. If it fails, it is repeated in a fresh process, because other programs can kill a
        worker."""
        context, metrics = self.context, tuple(self.context.weights)
        found = context.measure(key, configuration, metrics)
        if not found.status.kills or context.recorder.was_cut(key):
            return found
        context.recorder.forgive(configuration)
        return context.measure_in(f"{key}/retry", configuration, context.processes.next(), False, metrics)

    def _fails(self, unit: Unit, measurement: Measurement) -> None:
        refused = measurement.status is TrialStatus.INVALID
        self._say(unit, UNSUPPORTED if refused else HARMFUL, measurement.message or str(measurement.status))

    def _answering(self, units: Sequence[Unit]) -> list[Unit]:
        """The units whose answers are as close to the exact path as the default."""
        if not units or not self._wrong("all", units):
            return list(units)
        good = []
        for unit in units:
            reason = self._wrong(unit.label, [unit])
            if reason:
                self._say(unit, HARMFUL, f"answers refused: {reason}")
            else:
                good.append(unit)
        if len(good) == len(units):
            for unit in units:
                self._say(unit, HARMFUL, "the entries together change the answers")
            return []
        return good

    def _wrong(self, key: str, units: Sequence[Unit]) -> str:
        return self.context.gate.why_not_now(f"quality/verify/{key}", self._configuration(units))

    def _verdict(self, result: Comparison, unit: Unit, units: Sequence[Unit]) -> None:
        bar: Bar = self.context.bar(result.rounds)
        over, weights = rest_of(result, unit.part), self.context.weights
        found = left_out(result, unit.part, bar, weights, over)
        whole = gains(result, FULL, list(weights), bar, weights)
        proven = accept(Evidence(result, FULL, weights, whole, (found,)))
        if found.needed:
            verdict = UNCLEAR if self._disturbed else KEEP
            # The saving of the whole counts for each entry without which the rest does not run.
            if not proven and self._whole_saves(result, units, bar):
                proven = accept(Evidence(result, FULL, weights, whole, (found,), saves=True))
                self._by_the_whole.update(unit.entries() if proven else ())
            self._say(unit, verdict, "the rest of the profile does not run without it", proven=proven)
            return
        gain = found.gain
        if result.untold(without(unit.label)):
            why = "the rest of the profile failed twice, and a third try did not decide whether it runs"
            self._say(unit, UNCLEAR, f"{why}; verify again", gain)
        elif not bar.proves(unit.moves):
            noise, most = 100 * bar.of(unit.moves), 100 * WIDEST_MARGIN
            why = f"today's noise is {noise:.0f} %, and with noise above {most:.0f} % nothing can be proven"
            self._say(unit, UNCLEAR, f"{why}; stop other programs and verify again", gain)
        elif any(bar.harms(result.ratio(FULL, [m], weights, over), m) for m in weights):
            self._say(unit, HARMFUL, "the profile is faster without it", gain)
        elif saved := self._saved(unit, units):
            saves = f"saves {saved / 2**20:,.1f} MiB"
            slower = [m for m in unit.moves if self._may_be_slower(result, m, bar, over)]
            kept = accept(Evidence(result, FULL, weights, whole, (replace(found, saves=True),), saves=True))
            # Several entries may each be within the margin, but together exceed it.
            together = any(self._may_be_slower(result, m, bar) for m in unit.moves)
            if self._disturbed:
                self._say(
                    unit, UNCLEAR, f"{_DISTURBED}; it {saves}: tune again and use the new profile", gain
                )
            elif slower or not kept:
                why = f"the rounds do not show that {', '.join(slower or unit.moves)} is not slower"
                self._say(unit, UNCLEAR, f"{saves}, and {why}; give a longer --budget", gain)
            else:
                self._say(unit, KEEP, f"{saves} and costs no speed", gain, not together)
        elif self._disturbed and (found.missed or gain.ratio > 1):
            why = f"{_DISTURBED}; it gains now: tune again and use the new profile"
            self._say(unit, UNCLEAR, why, gain)
        elif found.missed:
            self._say(unit, KEEP, "still gains", gain, proven)
        elif unit.recorded is not None and gain.ratio > 1 and gain.low <= unit.recorded <= gain.high:
            margin = 100 * bar.of(unit.moves)
            self._say(unit, KEEP, f"as recorded, though within today's noise ({margin:.1f} %)", gain)
        else:
            self._say(unit, STALE, "has no gain left that exceeds the noise", gain)

    def _may_be_slower(self, result: Comparison, metric: str, bar: Bar, over: str | None = None) -> bool:
        """Whether, by the rounds, a metric may be slower by more than its margin."""
        return result.ratio(FULL, [metric], self.context.weights, over).low < 1 - bar.margin[metric]


def _decides(result: Comparison) -> bool:
    """Whether the rounds have shown the speed of the whole profile."""
    return result.rounds >= 2 and FULL in result.logs


_DISTURBED = "the profile was written on a disturbed machine (tune --force)"


def _knob(name: str, value: Any, default: Any) -> Knob:
    setting = SETTINGS[name]
    moves: frozenset[str] = frozenset(m for m in METRICS if m in setting.moves) or frozenset(METRICS)
    placed = name in ("placement", "n_cpu_moe", "split_mode")  # CPU and GPU round differently
    fidelity = Fidelity.ROUNDING if placed else Fidelity(setting.fidelity)
    return Knob(name, (default, value), default, Kind(setting.kind), moves, fidelity, ordinal=False)


def sort_out(
    units: Sequence[Unit], defaults: Mapping[str, Any]
) -> tuple[list[Unit], list[Verdict], dict[str, Any]]:
    """Sort units without measuring: units to measure, verdicts on the others, and settings to search by
    name."""
    left, verdicts, values = [], [], {}
    for unit in units:
        missing = {f"settings.{n}": n for n in unit.settings if n not in defaults}
        verdicts += [
            Verdict(e, UNSUPPORTED, f"this engine has no setting {n} on this device", unit.recorded)
            for e, n in missing.items()
        ]
        unit = unit.without(tuple(missing)) if missing else unit
        if not unit.entries():
            continue
        if not unit.kernels and all(defaults[n] == v for n, v in unit.settings.items()):
            why = "it is now the default of the engine"
            verdicts += [Verdict(e, STALE, why, unit.recorded) for e in unit.entries()]
        else:
            left.append(unit)
            values.update({n: v for n, v in unit.settings.items() if defaults[n] != v})
    return left, verdicts, values


def model_file(path: Path, profile: profiles.Profile) -> str:
    """The model file that a profile was made with, from its command. Raises TuneError."""
    said = profile.provenance
    places: list[Path] = []
    try:
        words = shlex.split(said.command) if said and said.command else []
    except ValueError:  # edited by hand, or cut to the maximum length in a profile
        words = []
    for flag, value in itertools.pairwise(words):
        if flag in ("--model", "-m"):
            places.append(Path(value))
    if said and said.model_file:
        places += [Path(said.model_file), path.parent / said.model_file]
    for place in places:
        if place.is_file():
            return str(place)
    raise TuneError(f"profile {path}: the model of the profile is not found here; give --model")


def verify(
    path: Path, model: str | None = None, *, budget: float | None = USUAL, seed: int = 0, quiet: bool = False,
    executor: Executor | None = None, knob: Callable[[str, Any, Any], Knob] = _knob,
    options: Mapping[str, Any] | None = None, device: str | None = None, binaries: str | None = None,
) -> tuple[list[Verdict], dict[str, Estimate]]:  # fmt: skip
    """Verify a profile. Returns verdicts on its entries in their order, unreadable ones last, and the gain of
    the whole by metric.

    Args:
        model: GGUF file; default: the one that the profile names.
        budget: Seconds after which running work is ended; None: no limit. Default: two minutes, or ten if
            each measurement is a process of another engine that loads the model.
        executor: The engine; default: a worker process with dyno.
        options: Further fields of `Options`.
        device: `cpu` or `cuda:N`; default: the first device of the profile's kind.
        binaries: Folder of the other engine's binaries; default: the recorded one, if the user confirms it.

    Raises:
        ProfileError: The file is not a profile.
        TuneError: Nothing could be verified. The message has the reason.
    """
    profile, wrong = profiles.load_readable(path)
    unread = [Verdict(entry, UNSUPPORTED, why) for entry, why in wrong.items()]
    if budget == USUAL:
        budget = declared(profile.match.engine.name).verify_seconds
    workload = workload_of(profile)
    units = units_of(profile, workload.metrics)
    if not units:
        return unread, {}
    with scratch_folder("dyno-verify-") as scratch:
        own = executor is None
        if executor is None:
            file = model or model_file(path, profile)
            check_model(file)
            where, engine = device or profile.match.device.kind, profile.match.engine.name
            target = declared(engine)
            if device is None and not target.foreign:
                check_device(profile, where)
            own_options = _binaries(path, profile, where, binaries) if target.foreign else {}
            text = text_beside(workload, path)
            if target.foreign and text is not None:
                own_options["text"] = text
            asked = TargetRequest(
                os.path.abspath(file), where, workload.longest, settings=held_with(profile), scratch=scratch,
                options=own_options, served=workload.served is not None,
                text=None if target.foreign else text,
            )  # fmt: skip
            executor = WorkerExecutor(engine.replace(".", "_"), target.worker_options(asked))
        try:
            found, gain = _verify(
                profile, units, workload, executor, budget, seed, quiet, knob, options or {}
            )  # fmt: skip
            return [*found, *unread], gain
        finally:
            if own:
                executor.close()


def text_beside(workload: Workload, profile: Path) -> str | None:
    """The text file for the prompts of a served load, next to the profile or in the current folder.

    Raises:
        TuneError: The file is in neither folder.
    """
    if workload.served is None or workload.served.text is None:
        return None
    name = workload.served.text
    for found in (profile.absolute().parent / name, Path(name)):
        if found.is_file():
            return os.path.abspath(found)
    raise TuneError(
        f"the prompts of this profile's server load come from {name}, which is neither beside the profile "
        "nor in this folder; put it there"
    )


def _binaries(path: Path, profile: profiles.Profile, device: str, binaries: str | None) -> dict[str, Any]:
    """The options of the target for a profile of another engine. Raises TuneError."""
    command = tuned_with(profile)[2]
    folder = binaries_folder(path, profile, binaries)
    number = int(device.removeprefix("cuda:")) if device.startswith("cuda:") else 0
    gpu = number if device.startswith("cuda") else None
    return {"binaries": folder, "command": command, "gpu": gpu}


def _verify(
    profile: profiles.Profile, units: list[Unit], workload: Workload, executor: Executor,
    budget: float | None, seed: int, quiet: bool, knob: Callable[[str, Any, Any], Knob],
    extra: Mapping[str, Any],
) -> tuple[list[Verdict], dict[str, Estimate]]:  # fmt: skip
    description: Description = executor.describe()
    wanted = (profile.match.model.architecture, profile.match.device.kind)
    found = (description.model.get("architecture"), description.device.get("kind"))
    if wanted != found:
        raise TuneError(f"the profile is for {' on '.join(wanted)}, not for {' on '.join(map(str, found))}")
    defaults = description.engine["defaults"]
    left, verdicts, values = sort_out(units, defaults)
    gain: dict[str, Estimate] = {}
    if left:
        space = Space(tuple(knob(n, v, defaults[n]) for n, v in values.items()))
        quality = profile.evidence.quality if profile.evidence else None
        approx = any(k.fidelity is Fidelity.APPROX for k in space.knobs)
        objective = profile.evidence.objective if profile.evidence else None
        limit = 1.5 * (quality.mean_kld or 0.0) + 1e-5 if approx and quality is not None else None
        can = description.capabilities
        given = Options(
            workload,
            budget=budget,
            seed=seed,
            approx_limit=limit,
            objective=ENERGY if objective == ENERGY else SPEED,
            **{"check": can.answers, "apart": can.switch is Switch.CALL, **extra},
        )
        bus = (description.engine.get("gpu") or {}).get("pci_bus_id")
        with (
            Progress(description.label, budget, quiet=quiet) as progress,
            contextlib.nullcontext()
            if description.virtual_time
            else Machine(bus, host_weights=bool(description.limits)) as watch,
        ):
            recorder = Recorder(
                executor, workload, identity=space.identity, bounds=workload.bounds(description.bounds),
                virtual_time=description.virtual_time,
                deadline_floor=6.0 if can.switch is Switch.CALL else 120.0, watch=watch, limit=budget,
                patience=patience_of(budget), rests=can.rests,
            )  # fmt: skip
            recorder.on_note = progress.note
            planned = {"ctx": description.engine.get("ctx"), **defaults}

            def needs(settings: Mapping[str, Any]) -> int | None:
                return executor.memory({**planned, **settings})

            run = Verification(
                recorder, space, given, left, disturbed=profile.disturbed,
                needs=needs if objective == MEMORY else None,
            )  # fmt: skip
            run.run()
        if run.disturbance:
            raise TuneError(f"{run.disturbance}; stop these programs and try again")
        if run.status == "interrupted":
            raise KeyboardInterrupt
        verdicts += run.verdicts
        gain = run.gain
    order = [e for u in units for e in u.entries()]
    return sorted(verdicts, key=lambda v: order.index(v.entry)), gain
