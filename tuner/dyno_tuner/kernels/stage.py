"""The kernel stage. All ops of the model are timed alone with cold weights. The ops of generation are then
screened in situ (`in_situ`), because launches of a token overlap. The results are confirmed end to end, group
by group.

A kernel that wins alone need not win in the engine, so no choice is written because of its own time. The
choices for prompts and the choices for generation must each gain the margin as a group, as part of the whole
profile, in paired rounds (`decide.end_to_end`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.intervals import Estimate, estimate
from ..core.outcome import Screened
from ..core.protocol import Configuration, KernelChoice, KernelOp, Value, kind_of
from ..decide.end_to_end import EndToEnd
from ..decide.unproven import budget
from ..measure.paired_rounds import measurements_in_round
from .in_situ import BLOCK, CHECKS, Config, Contest, InSituScreen, Place, frozen, shortened

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..core.outcome import KernelEntry, Outcome
    from ..decide.acceptance import Choice
    from ..record.context import Context
    from ..space.search_space import Space

MIN_GAIN = 1.02  # least gain of a single launch over the default; less is not worth a line in a profile
TG = "kernels_tg"  # the group of kernels for generation
BATCH = 6  # candidates per timing request, including the default
IN_SITU = 0.5  # share of the rest after the confirmation that is reserved for the screen in situ
CONFIRM = 0.45  # share of the rest for all rounds of the confirmation
GROWING = (
    "attention",
    "rope_attention",
    "mla_expand",
)  # families whose launches take longer with a longer context
ROOM = 0.5  # share of the rest for the least confirmation of all groups; else one is planned
# Rounds that a sure gain gets before other kernels are searched. Two rounds leave one degree of freedom, so
# their interval is six times as wide as with three. One more is a reserve for disturbed rounds.
SURE_ROUNDS = 3.4
GLIMPSE = 0.25  # largest share of the rest for the first look
# two settings between two measurements of the default, and the spare one that a trial needs
LOOK_VISITS = 5
HOPEFUL = 0.5  # share of the margin; launches that promise less in total are not confirmed


def least_measurements(kinds: int, settings: bool = True) -> float:
    """The number of measurements in two rounds of the whole profile: the default, the whole, the whole
    without each group of kernels, and without all of them. Fewer prove nothing.

    Args: `settings`: whether the profile also changes settings. If not, it is the default without kernels.
    """
    return 2 * measurements_in_round(1 + settings + kinds + (kinds > 1))


@dataclass
class KernelStage:
    """The kernel stage: single launches, then in situ, then end to end."""

    context: Context
    seconds_per_config: float = 0.015
    cost_per_config: float = 0.1  # seconds per config, including overhead; updated from actual ones
    chosen: list[tuple[KernelOp, KernelChoice, Estimate]] = field(default_factory=list)
    alone: dict[Place, dict[Config, Estimate]] = field(default_factory=dict)  # first timings
    shares: dict[Place, float] = field(default_factory=dict)  # seconds per pass of an op alone
    planned: bool = False  # whether there is time to screen generation in situ
    won: dict[Place, Config] = field(default_factory=dict)  # single-launch winners for generation
    groups: int = 1  # number of groups that there is time to confirm
    in_situ: InSituScreen | None = None
    whole: EndToEnd | None = None
    looked_at: list[KernelOp] = field(default_factory=list)
    written: list[KernelEntry] = field(default_factory=list)
    cut: bool = False  # there was no time for any op, or none to confirm the results
    unanswered: str = ""  # the reason why answers could not be compared, other than lack of time
    ended: bool = False  # whether the confirmation has ended; before that, no default has won
    settings: bool = False  # whether the profile changes settings
    listed: list[KernelOp] | None = None  # ops with several kernels, heaviest first

    def __post_init__(self) -> None:
        context = self.context
        self.recorder, self.rounds, self.weights = context.recorder, context.rounds(), context.weights
        self.bar, self.count, self.note = context.bar, context.round_count, context.note
        self.check, self.more = context.gate.why_not, context.budget.more_seconds
        self.workload = context.options.workload

    @property
    def space(self) -> Space:
        return self.context.space

    @property
    def kinds(self) -> list[str]:
        """The kinds (`pp`, `tg`) for which kernels are chosen. A mix has several metrics of each."""
        return list(dict.fromkeys(kind_of(m) for m in self.weights))

    def run(self, choice: Choice) -> None:
        """Bring `choice` to the whole profile if kernels gain. Otherwise it does not change."""
        configuration = self.space.configuration(choice.point)
        self.settings = choice.point != self.space.default
        ops = self._ops(configuration)
        generation = [op for op in ops if op.metric == "tg"]
        self.groups = len(self.kinds)
        if self._confirming() > ROOM * self.context.budget.left:
            self.groups = 1
        kept = IN_SITU * (self.context.budget.left - self._confirming()) if generation else 0.0
        self.planned = bool(generation) and kept >= (BLOCK + 2 + 2 * CHECKS) * self._glance_cost(choice)
        kept = kept if self.planned and math.isfinite(kept) else 0.0
        for number, op in enumerate(ops):
            if op in self.looked_at:
                continue
            if not self.more(self._timing(op) + self._confirming() + kept):
                self.note("kernels_cut", done=number, of=len(ops))
                break
            self._timed(number, op, configuration)
        if self.planned:
            self._screen_in_situ(generation, choice, min(self.groups, 1 + self._hopeful("pp", choice)))
        elif any(op.metric == "tg" for op in self.looked_at):
            self.note("kernels_alone", ops=len(generation))
        self.cut = bool(ops) and not self.looked_at
        self._confirm(choice)

    def glimpse(self, choice: Choice) -> float:
        """A first look at the single-launch winners for generation, all together, before settings are
        searched. Returns the seconds to reserve for their proof, which are above 0 if they surely gain more
        than the margin. If the least proof leaves room, some settings are tried before it."""
        configuration = self.space.configuration(choice.point)
        ops = self._ops(configuration)
        generation = [op for op in ops if op.metric == "tg"]
        end = self.recorder.now + GLIMPSE * self.context.budget.left
        looking = (2 * CHECKS + 4) * self._glance_cost(choice)
        self.planned = bool(generation)
        self.groups = 1
        for number, op in enumerate(ops):
            if op.metric == "tg" and self.recorder.now + self._timing(op) + looking <= end:
                self._timed(number, op, configuration)
        if not self.won:
            return 0.0
        self.in_situ = self._begin_in_situ(choice)
        self.in_situ.look(self._contests(generation), self.won, self.more)
        keep = self._keep
        if not self._sure() or not self.time_to_keep():
            return 0.0
        shared = self.context.budget.left - LOOK_VISITS * self.recorder.expected_measurement
        return min(keep, shared) if shared >= self._confirming(1) else keep

    @property
    def _keep(self) -> float:
        """Seconds for the proof of the result of a first look."""
        return self.recorder.check_seconds + SURE_ROUNDS * self._round(1)

    def time_to_keep(self) -> bool:
        """Whether the stage has time for the proof of the result of a first look."""
        return self.context.budget.left > self._keep

    def promise(self) -> float:
        """The promise of the results in situ, as a weighted log ratio."""
        total = sum(self.weights.values())
        share = sum(w for m, w in self.weights.items() if kind_of(m) == "tg") / total
        return share * math.log(self.in_situ.sure) if self.in_situ is not None else 0.0

    def _sure(self) -> bool:
        """Whether generation surely gains more than the margin in situ."""
        metrics = [m for m in self.weights if kind_of(m) == "tg"]
        return self.in_situ is not None and self.in_situ.sure >= 1 + self.bar(self.count()).of(metrics)

    def _round(self, kinds: int) -> float:
        return self.rounds.seconds(least_measurements(kinds, self.settings)) / 2

    def _ops(self, configuration: Configuration) -> list[KernelOp]:
        if self.listed is None:
            ops = self.recorder.kernel_ops(
                "kernels/ops", configuration, process=self.context.processes.number
            )
            self.listed = [op for op in ops if len(op.candidates) > 1 and op.metric in self.kinds]
        return self.listed

    def _timing(self, op: KernelOp) -> float:
        """Seconds for timing an op."""
        return (len(op.candidates) + 9) * self.cost_per_config

    def _timed(self, number: int, op: KernelOp, configuration: Configuration) -> None:
        begun, configs = self.recorder.useful, len(op.candidates) + 9
        self._time(number, op, configuration)
        self.cost_per_config = max(0.2 * self.cost_per_config, (self.recorder.useful - begun) / configs)

    def _confirming(self, kinds: int | None = None) -> float:
        """Seconds of the least possible proof: the answer checks of each group and of all together, and two
        rounds.

        Args: `kinds`: the number of groups; default: as many as are planned.
        """
        kinds = self.groups if kinds is None else kinds
        return (kinds + (kinds > 1)) * self.recorder.check_seconds + 2 * self._round(kinds)

    def _glance_cost(self, choice: Choice) -> float:
        """Estimated seconds of a short measurement before the first one: a cold sample and three kept samples
        per metric."""
        short = shortened(self.workload, choice.baseline)
        rates = [r for m, r in choice.baseline.items() if kind_of(m) == "tg" and r]
        runs = [max(0.1, short.tokens(m) / min(rates)) for m in short.metrics if rates]
        return min(self.recorder.expected_measurement, 0.2 + 4 * sum(runs))

    def _screen_in_situ(self, ops: Sequence[KernelOp], choice: Choice, kinds: int) -> None:
        """Screen the kernels of generation in situ, but leave time to confirm them and the other groups of
        `kinds`."""
        least = self._confirming(kinds)
        rounds = least + max(0, self.count() - 2) * self._round(kinds)
        left = self.context.budget.left
        last = self.recorder.now + left - least
        end = min(last, self.recorder.now + left - min(rounds, CONFIRM * left))
        sure = min(end, last - (SURE_ROUNDS - 2) * self._round(kinds))

        def more(seconds: float) -> bool:
            """As long as there is nothing to confirm, not all its rounds are needed."""
            found = self.chosen or (self.in_situ is not None and self.in_situ.chosen)
            until = end if found else last
            return self.recorder.now + seconds <= (sure if self._sure() else until)

        if self.in_situ is None:
            self.in_situ = self._begin_in_situ(choice)
        self.in_situ.move_to(self.space.settings(choice.point))
        contests = self._contests(ops)
        self.in_situ.run(contests, self.won, more)
        seen = {c.place for c in contests if c.seen} | set(self.in_situ.chosen)
        self.looked_at = [op for op in self.looked_at if op.metric != "tg"]
        self.looked_at += [op for op in ops if (op.key, op.tokens) in seen]

    def _begin_in_situ(self, choice: Choice) -> InSituScreen:
        settings = self.space.settings(choice.point)
        workload = shortened(self.workload, choice.baseline)
        return InSituScreen(self.context, workload, settings, self._glance_cost(choice))

    def _contests(self, ops: Sequence[KernelOp]) -> list[Contest]:
        share, contests = 0.0, []
        for op in ops:  # heaviest first, so an untimed op takes no more than earlier ones
            share = self.shares.get((op.key, op.tokens), share)
            contests.append(Contest(op, self.alone.get((op.key, op.tokens), {}), share))
        return contests

    def _time(self, number: int, op: KernelOp, configuration: Configuration) -> None:
        """Time an op in two passes: all candidates once, and then the best few again together with the
        default. Only the second pass counts. It is skipped if measurements in situ will follow."""
        threads_of = {"pp": "threads_batch", "tg": "threads"}[op.metric]
        threads = int(configuration.settings.get(threads_of, configuration.settings.get("threads", 1)))
        others = [c for c in op.candidates if dict(c) != dict(op.default)]
        first: list[tuple[float, Mapping[str, Value]]] = []
        looks = self.alone.setdefault((op.key, op.tokens), {})
        for start in range(0, len(others), BATCH):
            batch = others[start : start + BATCH]
            times = self.recorder.time_ops(
                f"kernels/{number}/a{start}", op, [op.default, *batch], threads=threads,
                seconds=self.seconds_per_config, process=self.context.processes.number,
            )  # fmt: skip
            if not times[0]:
                continue
            base = float(np.median(times[0]))
            self.shares.setdefault((op.key, op.tokens), base * op.count)
            for t, c in zip(times[1:], batch, strict=True):
                if t and min(t) > 0:
                    first.append((base / float(np.median(t)), c))
                    looks[frozen(c)] = estimate([[math.log(base / x) for x in t]], "look", number, *frozen(c))
        self.looked_at.append(op)
        first.sort(key=lambda entry: -entry[0])
        best = [c for ratio, c in first[:2] if ratio > MIN_GAIN]
        if not best:
            return
        if op.metric == "tg" and self.planned:
            self.won[op.key, op.tokens] = frozen(best[0])
            return
        groups: dict[int, list[list[float]]] = {i: [] for i in range(len(best))}
        for repeat in range(3):
            order = [op.default, *best] if repeat % 2 == 0 else [*reversed(best), op.default]
            times = self.recorder.time_ops(
                f"kernels/{number}/b{repeat}", op, order, threads=threads,
                seconds=self.seconds_per_config, process=self.context.processes.number,
            )  # fmt: skip
            if not all(times):
                continue
            medians = [float(np.median(t)) for t in times]
            if repeat % 2:
                medians.reverse()
            for i in range(len(best)):
                groups[i].append([float(np.log(medians[0] / medians[i + 1]))])
        results = [(estimate(g, "kernel", number, i), i) for i, g in groups.items() if len(g) > 1]
        if not results:
            return
        gain, index = max(results, key=lambda r: r[0].ratio)
        if gain.ratio > MIN_GAIN and gain.low > 1:
            self.chosen.append((op, KernelChoice(op.key, op.tokens, dict(best[index])), gain))

    def _confirm(self, choice: Choice) -> None:
        groups: dict[str, list[tuple[KernelChoice, Screened]]] = {}
        for metric in self.kinds:
            chosen = self._chosen_for(metric)
            if not chosen:
                continue
            if not self._hopeful(metric, choice):
                promise, enough = self._promise(metric, choice)
                self.note("kernels_small", group=metric, choices=len(chosen), promise=promise, enough=enough)
                continue
            right = self._right(metric, chosen, choice)
            if right:
                groups[metric] = right
        while len(groups) > 1 and not self._time_for(len(groups)):
            dropped = min(groups, key=lambda kind: self._worth(kind, choice))
            del groups[dropped]
            self.note("kernels_dropped", group=dropped)
            self._unconfirmed([dropped])
        self.whole = EndToEnd(self.context, groups)
        self.whole.run(choice)
        self.written = choice.kernels
        if self.whole.unmeasured:
            self._unconfirmed(list(groups), self.whole.unanswered)
        self.ended = True

    def _time_for(self, groups: int) -> bool:
        """Whether there is time to compare the answers of all groups together, and for two rounds."""
        measurements = least_measurements(groups)
        together = self.recorder.check_seconds + self.rounds.seconds(measurements)
        return self.rounds.affordable(measurements) and self.more(together)

    def _unconfirmed(self, kinds: Sequence[str], reason: str = "") -> None:
        """Record that nothing is known about these kinds, not even that the default is as good.

        Args: `reason`: the reason why their answers could not be compared."""
        self.cut = True
        if not self.context.gate.kernels_cut:
            self.unanswered = reason or self.unanswered
        self.looked_at = [op for op in self.looked_at if op.metric not in kinds]

    def _right(
        self, metric: str, chosen: list[tuple[KernelChoice, Screened]], choice: Choice
    ) -> list[tuple[KernelChoice, Screened]]:
        """The choices whose answers are acceptable together. If one is wrong, the others stay, provided that
        there is time to find it."""
        settings = self.space.settings(choice.point)
        begun = self.recorder.useful

        def together(some: Sequence[tuple[KernelChoice, Screened]]) -> Configuration:
            return Configuration(settings, tuple(kernel for kernel, _ in some))

        reason = self.check(together(chosen))
        cost = self.recorder.useful - begun
        if not reason:
            return chosen
        gate = self.context.gate
        undecided = gate.undecided(together(chosen))
        if not undecided:
            self.note("incorrect", kernels=metric, reason=reason)
        kept: list[tuple[KernelChoice, Screened]] = []
        if len(chosen) > 1 and self.more((len(chosen) + 1) * cost + self._confirming()):
            kept = [one for one in chosen if not self.check(together([one]))]
        if 0 < len(kept) < len(chosen) and not self.check(together(kept)):
            open_ = {(k.key, k.tokens) for k, how in chosen if gate.undecided(together([(k, how)]))}
            self.looked_at = [op for op in self.looked_at if (op.key, op.tokens) not in open_]
            return kept
        if undecided or (kept and gate.undecided(together(kept))):
            self._unconfirmed([metric], reason)
        return []

    def _hopeful(self, kind: str, choice: Choice) -> bool:
        promise, enough = self._promise(kind, choice)
        return promise >= enough

    def _worth(self, kind: str, choice: Choice) -> float:
        """The expected gain of a group: its promise, reduced for launches that were only timed alone."""
        measured = kind == "tg" and self.in_situ is not None
        return (self._promise(kind, choice)[0] - 1) * (1.0 if measured else HOPEFUL)

    def _promise(self, kind: str, choice: Choice) -> tuple[float, float]:
        """The largest possible gain of the choices for `kind`, and the smallest one worth a confirmation.
        Launches of a prompt run one after the other, so each gains in proportion to its share of a pass.
        Launches of a token overlap. Their gain shows in situ, if there was time for that."""
        metrics = [m for m in self.weights if kind_of(m) == kind]
        if not metrics:
            return 1.0, math.inf
        margin = self.bar(self.count()).of(metrics)
        if kind == "tg" and self.in_situ is not None:
            return self.in_situ.gained, 1 + margin
        rate = max(choice.tuned.get(m, choice.baseline[m]) for m in metrics)
        saved = 0.0
        for op, _, alone in self.chosen:
            if op.metric == kind:
                share = min(1.0, self.shares[op.key, op.tokens] * rate / op.m)
                if op.key.split()[0] in GROWING and (self.workload.depth or self.workload.pp > op.m):
                    share = 1.0  # it was timed only with its own tokens, but there are others before them
                saved += share * (1 - 1 / alone.high)
        return 1 / max(1e-3, 1 - saved), 1 + HOPEFUL * margin

    def _chosen_for(self, metric: str) -> list[tuple[KernelChoice, Screened]]:
        if metric == "tg" and self.in_situ is not None:
            found = sorted(self.in_situ.chosen.items())
            return [(KernelChoice(*place, dict(config)), how) for place, (_, config, how) in found]
        return [(kernel, Screened(alone)) for op, kernel, alone in self.chosen if op.metric == metric]

    def unproven(self) -> dict[str, Any]:
        """Kernels that are faster in the engine but are not written: their number, their ratio, and a
        sufficient budget in seconds. Empty if rounds have shown that they do not gain."""
        if self.in_situ is None or not self.in_situ.chosen or any(w.group == TG for w in self.written):
            return {}
        ratio = math.sqrt(self.in_situ.sure * self.in_situ.gained)
        enough = 1 + self.bar(self.count()).of([m for m in self.weights if kind_of(m) == "tg"])
        if self.whole is not None and TG in self.whole.seen:
            ratio = self.whole.seen[TG].ratio
        if ratio < enough:
            return {}
        proof = len(self.kinds) * self.recorder.check_seconds + (SURE_ROUNDS + 1) * self._round(1)
        found: dict[str, Any] = {"kernels": len(self.in_situ.chosen), "ratio": ratio}
        return found if self.unanswered else {**found, "needed": budget(self.recorder.now + proof)}

    def add_to(self, outcome: Outcome) -> None:
        """Add the proven kernels to `outcome`, and `default` for all others that were tried, if the
        confirmation has ended."""
        outcome.kernels, outcome.unanswered_kernels = list(self.written), self.unanswered
        if unproven := self.unproven():
            outcome.promises.append(unproven)
        named = {(e.choice.key, e.choice.tokens) for e in self.written}
        outcome.kernel_defaults = [
            (o.key, o.tokens) for o in self.looked_at if self.ended and (o.key, o.tokens) not in named
        ]
