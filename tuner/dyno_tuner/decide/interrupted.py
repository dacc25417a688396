"""What a search has shown when Ctrl-C ends a tune before any round has proven anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..core.intervals import estimate

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from ..core.intervals import Estimate, Noise
    from ..core.outcome import Entry
    from ..search.screen import Trial
    from ..space.search_space import Point
    from .acceptance import Choice, Judge


@dataclass
class FromScreen:
    """Args:
    noise: of visits, by metric.
    refused: whether a point's answers are wrong.
    """

    judge: Judge
    noise: Mapping[str, Noise]
    refused: Callable[[Point], object]

    def choose(self, trials: Sequence[Trial], choice: Choice) -> None:
        """Brings `choice` to the best point of the screen that was also tried without each of its entries, if
        its paired samples clear the margin over each of those points even at the lower end of their
        interval."""
        judge = self.judge
        by_class = {judge.space.code_class(t.point): t for t in trials}
        scored = [t for t in trials if t.log_ratio is not None and not self.refused(t.point)]
        for trial in sorted(scored, key=lambda t: -(t.log_ratio or 0.0)):
            entries = self._missed(trial, by_class)
            if not entries:
                continue
            choice.point, choice.entries = trial.point, entries
            choice.gain = {
                m: self._of_one_visit(estimate([pairs], "interrupted", m), m)
                for m in judge.weights if trial.score and (pairs := trial.score.pairs.get(m))
            }  # fmt: skip
            choice.tuned |= {m: gain.ratio * choice.baseline[m] for m, gain in choice.gain.items()}
            return

    def _missed(self, trial: Trial, by_class: Mapping[Hashable, Trial]) -> list[Entry]:
        """The entries of a trial, or none where one of them was not missed when it was left out."""
        judge, space = self.judge, self.judge.space
        bar = judge.bar(1)
        entries = []
        for n in space.entries(trial.point):
            without = by_class.get(space.code_class(space.without(trial.point, n)))
            if without is None or trial.score is None or without.log_ratio is None:
                return []
            gains = {}
            for metric in judge.weights:
                gain = estimate([trial.score.over(without.score, metric)], "interrupted", metric)
                if bar.harms(gain, metric):
                    return []
                gains[metric] = gain
            sure = [m for m in judge.moves(n) if gains[m].low >= 1 + bar.margin[m]]
            if not sure:
                return []
            gain = self._of_one_visit(gains[sure[0]], sure[0])
            if gain.low <= 1:
                return []
            entries.append(judge.entry(trial.point, n, gain, None))
        return entries

    def _of_one_visit(self, gain: Estimate, metric: str) -> Estimate:
        """With the noise between processes, of which the samples of a single one say nothing."""
        return gain.widened(self.noise[metric].half_width(1))
