"""Kernel choices: every op of the model timed alone with cold weights; those of generation then screened in
place (`in_situ`), because launches of a token overlap; what is left confirmed end to end, group by group.

A kernel that wins by itself need not win in the engine, so no choice is written because of its own time:
the choices for prefill and those for generation each have to gain the margin as a group, as part of the
whole profile, in paired rounds (`decide.end_to_end`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.intervals import Estimate, estimate
from ..core.outcome import Screened
from ..core.protocol import Configuration, KernelChoice, KernelOp, Value, kind_of
from ..decide.end_to_end import WholeProfile
from ..decide.unproven import budget
from ..measure.paired_rounds import visits_in_round
from .in_situ import BLOCK, CHECKS, Config, Contest, InPlace, Place, frozen, shortened

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ..core.outcome import KernelEntry, Outcome
    from ..core.protocol import Visit, Workload
    from ..decide.acceptance import Choice
    from ..measure.paired_rounds import Bar, Rounds
    from ..record.recorder import Ledger
    from ..space.search_space import Space

MIN_GAIN = 1.02  # of one launch over the default's; less is not worth a line in a profile
TG = "kernels_tg"  # the group of generation
BATCH = 6  # candidates timed in one request, the default with them
IN_PLACE = 0.5  # of what is left beside the confirmation, kept from the times alone
CONFIRM = 0.45  # of what is left after them, for all rounds of the confirmation
GROWING = (
    "attention",
    "rope_attention",
    "mla_expand",
)  # families whose launches take longer behind a context
ROOM = 0.5  # of what is left, for the least confirmation of all groups; else one group is planned for
# Rounds that a gain beyond doubt gets before anything else is looked for. Two leave one degree of freedom, so
# their interval is six times as wide as that of three; the rest is for what is disturbed.
SURE_ROUNDS = 3.4
GLIMPSE = 0.25  # of what is left, for a first look at most
LOOK_VISITS = 5  # two settings between two visits of the default, and the spare one that a trial asks for
HOPEFUL = 0.5  # of the margin: launches whose shares of a pass promise less together are not confirmed


def least_visits(kinds: int, settings: bool = True) -> float:
    """Of two rounds of the whole profile: the default, the whole, the whole without each group of kernels and
    without all of them. Less proves nothing.

    Args: `settings`: whether the profile changes settings, too; if not, without kernels it is the default.
    """
    return 2 * visits_in_round(1 + settings + kinds + (kinds > 1))


@dataclass
class KernelStage:
    """Args:
    more, left: whether so many more seconds fit into the budget, and how many there are.
    check: gives the reason why a configuration's answers are not acceptable, or nothing.
    process: number of the running worker process.
    glance: a visit of the running process with another workload than the run's: key, configuration, workload,
        whether a failure may be repeated.
    sigma, void_over: of a visit, in log, and by how much an anchor may move.
    """

    ledger: Ledger
    space: Space
    rounds: Rounds
    weights: Mapping[str, float]
    bar: Callable[[int], Bar]
    more: Callable[[float], bool]
    note: Callable[..., None]
    check: Callable[[Configuration], str]
    count: Callable[[], int]
    process: Callable[[], int]
    left: Callable[[], float]
    glance: Callable[[str, Configuration, Workload, bool], Visit]
    workload: Workload
    sigma: float
    void_over: float
    seconds_per_config: float = 0.015
    cost_per_config: float = 0.1  # with all that is around the timing; learned from what it took
    chosen: list[tuple[KernelOp, KernelChoice, Estimate]] = field(default_factory=list)
    alone: dict[Place, dict[Config, Estimate]] = field(default_factory=dict)  # first looks
    shares: dict[Place, float] = field(default_factory=dict)  # seconds of a pass that an op takes alone
    planned: bool = False  # whether there is time to screen generation in place
    won: dict[Place, Config] = field(default_factory=dict)  # alone, at the first look, of generation
    groups: int = 1  # that there is time to confirm
    in_place: InPlace | None = None
    whole: WholeProfile | None = None
    looked_at: list[KernelOp] = field(default_factory=list)
    written: list[KernelEntry] = field(default_factory=list)
    cut: bool = False  # there was no time for any op, or none to confirm what was found
    settings: bool = False  # whether the profile changes some
    listed: list[KernelOp] | None = None  # that have several kernels, heaviest first

    @property
    def kinds(self) -> list[str]:
        """`pp`, `tg`: what kernels are chosen for; a mix has several metrics of each."""
        return list(dict.fromkeys(kind_of(m) for m in self.weights))

    def run(self, choice: Choice) -> None:
        """Brings `choice` to the whole profile where kernels gain; leaves it as it is where they do not."""
        configuration = self.space.configuration(choice.point)
        self.settings = choice.point != self.space.default
        ops = self._ops(configuration)
        generation = [op for op in ops if op.metric == "tg"]
        self.groups = len(self.kinds)
        if self._confirming() > ROOM * self.left():
            self.groups = 1
        kept = IN_PLACE * (self.left() - self._confirming()) if generation else 0.0
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
            self._screen_in_place(generation, choice, min(self.groups, 1 + self._hopeful("pp", choice)))
        elif any(op.metric == "tg" for op in self.looked_at):
            self.note("kernels_alone", ops=len(generation))
        self.cut = bool(ops) and not self.looked_at
        self._confirm(choice)

    def glimpse(self, choice: Choice) -> float:
        """A first look at what won alone for generation, as one, before settings are searched. Gives the
        seconds to keep for its proof: more than 0 if it gains beyond doubt more than the margin. If the least
        proof leaves room, some settings are tried before it."""
        configuration = self.space.configuration(choice.point)
        ops = self._ops(configuration)
        generation = [op for op in ops if op.metric == "tg"]
        end = self.ledger.now + GLIMPSE * self.left()
        looking = (2 * CHECKS + 4) * self._glance_cost(choice)
        self.planned = bool(generation)
        self.groups = 1
        for number, op in enumerate(ops):
            if op.metric == "tg" and self.ledger.now + self._timing(op) + looking <= end:
                self._timed(number, op, configuration)
        if not self.won:
            return 0.0
        self.in_place = self._placed(choice, lambda seconds: self.more(seconds))
        self.in_place.look(self._contests(generation), self.won)
        keep = self.ledger.check_seconds + SURE_ROUNDS * self._round(1)
        if not self._sure(choice) or self.left() <= keep:
            return 0.0
        shared = self.left() - LOOK_VISITS * self.ledger.expected_visit
        return min(keep, shared) if shared >= self._confirming(1) else keep

    def promise(self) -> float:
        """Of what was seen in place, in log, by the weights."""
        total = sum(self.weights.values())
        share = sum(w for m, w in self.weights.items() if kind_of(m) == "tg") / total
        return share * math.log(self.in_place.sure) if self.in_place is not None else 0.0

    def _sure(self, choice: Choice) -> bool:
        """Whether generation gains in place more than the margin beyond doubt."""
        metrics = [m for m in self.weights if kind_of(m) == "tg"]
        return self.in_place is not None and self.in_place.sure >= 1 + self.bar(self.count()).of(metrics)

    def _round(self, kinds: int) -> float:
        return self.rounds.seconds(least_visits(kinds, self.settings)) / 2

    def _ops(self, configuration: Configuration) -> list[KernelOp]:
        if self.listed is None:
            ops = self.ledger.kernel_ops("kernels/ops", configuration, process=self.process())
            self.listed = [op for op in ops if len(op.candidates) > 1 and op.metric in self.kinds]
        return self.listed

    def _timing(self, op: KernelOp) -> float:
        """Seconds that timing an op takes."""
        return (len(op.candidates) + 9) * self.cost_per_config

    def _timed(self, number: int, op: KernelOp, configuration: Configuration) -> None:
        begun, configs = self.ledger.useful, len(op.candidates) + 9
        self._time(number, op, configuration)
        self.cost_per_config = max(0.2 * self.cost_per_config, (self.ledger.useful - begun) / configs)

    def _confirming(self, kinds: int | None = None) -> float:
        """Seconds of the least that proves anything: of the answers of each group and of all together, and of
        two rounds.

        Args: `kinds`: so many groups; default: as many as are planned for.
        """
        kinds = self.groups if kinds is None else kinds
        return (kinds + (kinds > 1)) * self.ledger.check_seconds + 2 * self._round(kinds)

    def _glance_cost(self, choice: Choice) -> float:
        """Seconds of a short visit, before there was one: a cold sample and three to keep of each metric."""
        short = shortened(self.workload, choice.baseline)
        rates = [r for m, r in choice.baseline.items() if kind_of(m) == "tg" and r]
        runs = [max(0.1, short.tokens(m) / min(rates)) for m in short.metrics if rates]
        return min(self.ledger.expected_visit, 0.2 + 4 * sum(runs))

    def _screen_in_place(self, ops: Sequence[KernelOp], choice: Choice, kinds: int) -> None:
        """The kernels of generation, for as long as leaves time to confirm them and the other groups of
        `kinds`."""
        least = self._confirming(kinds)
        rounds = least + max(0, self.count() - 2) * self._round(kinds)
        left = self.left()
        last = self.ledger.now + left - least
        end = min(last, self.ledger.now + left - min(rounds, CONFIRM * left))
        sure = min(end, last - (SURE_ROUNDS - 2) * self._round(kinds))

        def more(seconds: float) -> bool:
            """As long as there is nothing to confirm, there is no need for all of its rounds."""
            found = self.chosen or (self.in_place is not None and self.in_place.chosen)
            until = end if found else last
            return self.ledger.now + seconds <= (sure if self._sure(choice) else until)

        if self.in_place is None:
            self.in_place = self._placed(choice, more)
        self.in_place.more = more
        self.in_place.move_to(self.space.settings(choice.point))
        contests = self._contests(ops)
        self.in_place.run(contests, self.won)
        seen = {c.place for c in contests if c.seen} | set(self.in_place.chosen)
        self.looked_at = [op for op in self.looked_at if op.metric != "tg"]
        self.looked_at += [op for op in ops if (op.key, op.tokens) in seen]

    def _placed(self, choice: Choice, more: Callable[[float], bool]) -> InPlace:
        workload = shortened(self.workload, choice.baseline)
        return InPlace(
            lambda key, configuration, incumbent: self.glance(key, configuration, workload, incumbent),
            workload.weights, self.space.settings(choice.point), self.sigma, self.void_over,
            lambda: self.ledger.now, more, self.note, self._glance_cost(choice),
        )  # fmt: skip

    def _contests(self, ops: Sequence[KernelOp]) -> list[Contest]:
        share, contests = 0.0, []
        for op in ops:  # heaviest first: what was not timed takes no more than those before it
            share = self.shares.get((op.key, op.tokens), share)
            contests.append(Contest(op, self.alone.get((op.key, op.tokens), {}), share))
        return contests

    def _time(self, number: int, op: KernelOp, configuration: Configuration) -> None:
        """Two passes: all candidates once, then the best few again beside the default, on which alone they
        count. The second is spared where the engine itself will tell."""
        threads_of = {"pp": "threads_batch", "tg": "threads"}[op.metric]
        threads = int(configuration.settings.get(threads_of, configuration.settings.get("threads", 1)))
        others = [c for c in op.candidates if dict(c) != dict(op.default)]
        first: list[tuple[float, Mapping[str, Value]]] = []
        looks = self.alone.setdefault((op.key, op.tokens), {})
        for start in range(0, len(others), BATCH):
            batch = others[start : start + BATCH]
            times = self.ledger.time_ops(
                f"kernels/{number}/a{start}", op, [op.default, *batch], threads=threads,
                seconds=self.seconds_per_config, process=self.process(),
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
            times = self.ledger.time_ops(
                f"kernels/{number}/b{repeat}", op, order, threads=threads,
                seconds=self.seconds_per_config, process=self.process(),
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
        self.whole = WholeProfile(
            self.space, self.rounds, self.weights, self.bar, self.note, self.check, self.count, groups
        )
        self.written = self.whole.run(choice)
        if self.whole.unmeasured:
            self._unconfirmed(list(groups))

    def _time_for(self, groups: int) -> bool:
        """To compare the answers of all groups together, and for two rounds."""
        visits = least_visits(groups)
        together = self.ledger.check_seconds + self.rounds.seconds(visits)
        return self.rounds.affordable(visits) and self.more(together)

    def _unconfirmed(self, kinds: Sequence[str]) -> None:
        """Nothing is known of these: not even that the default is as good."""
        self.cut = True
        self.looked_at = [op for op in self.looked_at if op.metric not in kinds]

    def _right(
        self, metric: str, chosen: list[tuple[KernelChoice, Screened]], choice: Choice
    ) -> list[tuple[KernelChoice, Screened]]:
        """Those whose answers are acceptable together. One that is wrong does not take the others with it, if
        there is time to find it."""
        settings = self.space.settings(choice.point)
        begun = self.ledger.useful
        reason = self.check(Configuration(settings, tuple(kernel for kernel, _ in chosen)))
        cost = self.ledger.useful - begun
        if not reason:
            return chosen
        self.note("incorrect", kernels=metric, reason=reason)
        if len(chosen) < 2 or not self.more((len(chosen) + 1) * cost + self._confirming()):
            return []
        kept = [one for one in chosen if not self.check(Configuration(settings, (one[0],)))]
        if not 0 < len(kept) < len(chosen):
            return []
        return [] if self.check(Configuration(settings, tuple(kernel for kernel, _ in kept))) else kept

    def _hopeful(self, kind: str, choice: Choice) -> bool:
        promise, enough = self._promise(kind, choice)
        return promise >= enough

    def _worth(self, kind: str, choice: Choice) -> float:
        """Its promise, of which launches that were timed alone keep less."""
        measured = kind == "tg" and self.in_place is not None
        return (self._promise(kind, choice)[0] - 1) * (1.0 if measured else HOPEFUL)

    def _promise(self, kind: str, choice: Choice) -> tuple[float, float]:
        """What the choices for `kind` can gain at most, and what is worth a confirmation. Launches of a
        prompt run one after the other, so together they gain what each does of its share of a pass. Those of
        a token overlap; what they gain shows in place, where there was time for that."""
        metrics = [m for m in self.weights if kind_of(m) == kind]
        if not metrics:
            return 1.0, math.inf
        margin = self.bar(self.count()).of(metrics)
        if kind == "tg" and self.in_place is not None:
            return self.in_place.gained, 1 + margin
        rate = max(choice.tuned.get(m, choice.baseline[m]) for m in metrics)
        saved = 0.0
        for op, _, alone in self.chosen:
            if op.metric == kind:
                share = min(1.0, self.shares[op.key, op.tokens] * rate / op.m)
                if op.key.split()[0] in GROWING and (self.workload.depth or self.workload.pp > op.m):
                    share = 1.0  # timed over its own tokens alone, and there are others before them
                saved += share * (1 - 1 / alone.high)
        return 1 / max(1e-3, 1 - saved), 1 + HOPEFUL * margin

    def _chosen_for(self, metric: str) -> list[tuple[KernelChoice, Screened]]:
        if metric == "tg" and self.in_place is not None:
            found = sorted(self.in_place.chosen.items())
            return [(KernelChoice(*place, dict(config)), how) for place, (_, config, how) in found]
        return [(kernel, Screened(alone)) for op, kernel, alone in self.chosen if op.metric == metric]

    def unproven(self) -> dict[str, Any]:
        """Kernels that are faster in the engine and are not written: how many, by how much, and the budget in
        seconds that would have done. Empty where rounds have shown that they gain nothing."""
        if self.in_place is None or not self.in_place.chosen or any(w.group == TG for w in self.written):
            return {}
        ratio = math.sqrt(self.in_place.sure * self.in_place.gained)
        enough = 1 + self.bar(self.count()).of([m for m in self.weights if kind_of(m) == "tg"])
        if self.whole is not None and TG in self.whole.seen:
            ratio = self.whole.seen[TG].ratio
        if ratio < enough:
            return {}
        proof = len(self.kinds) * self.ledger.check_seconds + (SURE_ROUNDS + 1) * self._round(1)
        return {
            "kernels": len(self.in_place.chosen), "ratio": ratio, "needed": budget(self.ledger.now + proof),
        }  # fmt: skip

    def add_to(self, outcome: Outcome) -> None:
        """Writes what was proven into `outcome`, and `default` for all else that was looked at."""
        outcome.kernels = list(self.written)
        if unproven := self.unproven():
            outcome.promises.append(unproven)
        named = {(e.choice.key, e.choice.tokens) for e in self.written}
        outcome.kernel_defaults = [
            (o.key, o.tokens) for o in self.looked_at if (o.key, o.tokens) not in named
        ]
