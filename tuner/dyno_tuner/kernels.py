"""Kernel choices: every op of the model timed alone with cold weights, then confirmed end to end, group by
group.

A kernel that wins by itself need not win in the engine, so no choice is written because of its own time:
the choices for prefill and those for generation each have to gain the margin as a group, as part of the
whole profile, in paired rounds (`whole`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from .confirm import visits_in_round
from .stats import Estimate, estimate
from .target import Configuration, KernelChoice, KernelOp, Value, kind_of
from .whole import WholeProfile

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .choose import Choice
    from .confirm import Bar, Rounds
    from .ledger import Ledger
    from .outcome import KernelEntry, Outcome
    from .space import Space

MIN_GAIN = 1.02  # of one launch over the default's; less is not worth a line in a profile
BATCH = 6  # candidates timed in one request, the default with them


def least_visits(kinds: int) -> int:
    """Of two rounds of the whole profile: the default, the whole, the whole without each group of kernels and
    without all of them. Less proves nothing."""
    return 2 * visits_in_round(2 + kinds + (kinds > 1))


@dataclass
class KernelStage:
    """Args:
    more: whether so many more seconds fit into the budget.
    check: gives the reason why a configuration's answers are not acceptable, or nothing.
    process: number of the running worker process.
    """

    ledger: Ledger
    space: Space
    rounds: Rounds
    weights: Mapping[str, float]
    bar: Callable[[int], Bar]
    more: Callable[[float], bool]
    note: Callable[..., None]
    check: Callable[[Configuration], str]
    count: int
    process: Callable[[], int]
    seconds_per_config: float = 0.015
    cost_per_config: float = 0.1  # with all that is around the timing; learned from what it took
    chosen: list[tuple[KernelOp, KernelChoice, Estimate]] = field(default_factory=list)
    looked_at: list[KernelOp] = field(default_factory=list)
    written: list[KernelEntry] = field(default_factory=list)
    untried: bool = False  # there was no time for any op

    @property
    def kinds(self) -> list[str]:
        """`pp`, `tg`: what kernels are chosen for; a mix has several metrics of each."""
        return list(dict.fromkeys(kind_of(m) for m in self.weights))

    def run(self, choice: Choice) -> None:
        """Brings `choice` to the whole profile where kernels gain; leaves it as it is where they do not."""
        configuration = self.space.configuration(choice.point)
        ops = self.ledger.kernel_ops("kernels/ops", configuration, process=self.process())
        ops = [op for op in ops if len(op.candidates) > 1 and op.metric in self.kinds]
        for number, op in enumerate(ops):
            begun, configs = self.ledger.now, len(op.candidates) + 9
            confirming = least_visits(len(self.kinds)) * self.ledger.expected_visit
            if not self.more(configs * self.cost_per_config + confirming):
                self.note("kernels_cut", done=number, of=len(ops))
                self.untried = number == 0
                break
            self._time(number, op, configuration)
            self.cost_per_config = max(0.2 * self.cost_per_config, (self.ledger.now - begun) / configs)
        self._confirm(choice)

    def _time(self, number: int, op: KernelOp, configuration: Configuration) -> None:
        """Two passes: all candidates once, then the best few again beside the default, on which alone they
        count."""
        threads_of = {"pp": "threads_batch", "tg": "threads"}[op.metric]
        threads = int(configuration.settings.get(threads_of, configuration.settings.get("threads", 1)))
        others = [c for c in op.candidates if dict(c) != dict(op.default)]
        first: list[tuple[float, Mapping[str, Value]]] = []
        for start in range(0, len(others), BATCH):
            batch = others[start : start + BATCH]
            times = self.ledger.time_ops(
                f"kernels/{number}/a{start}", op, [op.default, *batch], threads=threads,
                seconds=self.seconds_per_config, process=self.process(),
            )  # fmt: skip
            if not times[0]:
                continue
            base = float(np.median(times[0]))
            first += [
                (base / float(np.median(t)), c)
                for t, c in zip(times[1:], batch, strict=True)
                if t and min(t) > 0
            ]
        self.looked_at.append(op)
        first.sort(key=lambda entry: -entry[0])
        best = [c for ratio, c in first[:2] if ratio > MIN_GAIN]
        if not best:
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
        groups: dict[str, list[tuple[KernelChoice, Estimate]]] = {}
        for metric in self.kinds:
            chosen = [(kernel, alone) for op, kernel, alone in self.chosen if op.metric == metric]
            if not chosen:
                continue
            reason = self.check(
                Configuration(self.space.settings(choice.point), tuple(kernel for kernel, _ in chosen))
            )
            if reason:
                self.note("incorrect", kernels=metric, reason=reason)
            else:
                groups[metric] = chosen
        self.whole = WholeProfile(
            self.space, self.rounds, self.weights, self.bar, self.note, self.check, self.count, groups
        )
        self.written = self.whole.run(choice)

    def add_to(self, outcome: Outcome) -> None:
        """Writes what was proven into `outcome`, and `default` for all else that was looked at."""
        outcome.kernels = list(self.written)
        named = {(e.choice.key, e.choice.tokens) for e in self.written}
        outcome.kernel_defaults = [
            (o.key, o.tokens) for o in self.looked_at if (o.key, o.tokens) not in named
        ]
