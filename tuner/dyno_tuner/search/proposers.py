"""Proposers of the next point to try. Each one sees the whole history, and draws from a generator keyed by
the trial, so that any trial can be repeated alone.

`tpe` is Optuna's multivariate TPE, one trial at a time. `gp` is a small Gaussian process over the classes of
the space. `guided`, the default, lets the process choose among proposals of TPE, neighbours of the best
points and, if the space is small enough to list, all points. `random` and `coordinate` are for comparison.
"""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import optuna

from ..core.intervals import keyed_rng
from ..space.search_space import with_index
from .starting_points import Doubts
from .surrogate import Surrogate

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from ..space.search_space import Point, Space
    from .observation import Observation

optuna.logging.set_verbosity(optuna.logging.WARNING)


class Proposer(Protocol):
    def propose(self, history: Sequence[Observation], key: Sequence[object]) -> Point | None:
        """A legal point of a class that is not in the history; None if there is none, or no need."""
        ...


def distributions(space: Space) -> dict[str, optuna.distributions.BaseDistribution]:
    """The Optuna distributions of a space: ordered knobs as the number of the value, others as a choice of
    numbers."""
    return {
        k.name: optuna.distributions.IntDistribution(0, len(k.values) - 1)
        if k.ordinal
        else optuna.distributions.CategoricalDistribution(tuple(range(len(k.values))))
        for k in space.knobs
    }


def params(space: Space, point: Point) -> dict[str, int]:
    return {k.name: i for k, i in zip(space.knobs, point, strict=True)}


class _Pool:
    """The tried points and, if the space can be listed, the remaining ones."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.classes: dict[Hashable, Point] | None = space.classes() if space.enumerable() else None

    def tried(self, history: Sequence[Observation]) -> set[Hashable]:
        return {self.space.code_class(o.point) for o in history}

    def left(self, tried: set[Hashable]) -> list[Point] | None:
        if self.classes is None:
            return None
        return [p for c, p in self.classes.items() if c not in tried]

    def exhausted(self, tried: set[Hashable]) -> bool:
        return self.classes is not None and len(tried) >= len(self.classes)


class RandomProposer:
    def __init__(self, space: Space) -> None:
        self._pool = _Pool(space)

    def propose(self, history: Sequence[Observation], key: Sequence[object]) -> Point | None:
        rng = keyed_rng("random", *key)
        tried = self._pool.tried(history)
        left = self._pool.left(tried)
        if left is not None:
            return left[int(rng.integers(len(left)))] if left else None
        for _ in range(1000):
            point = self._pool.space.random(rng)
            if self._pool.space.code_class(point) not in tried:
                return point
        return None


class CoordinateProposer:
    """A sweep of one knob after the other from the best point so far, as in typical scripts. It ends after
    one pass."""

    def __init__(self, space: Space) -> None:
        self._space = space

    def propose(self, history: Sequence[Observation], key: Sequence[object]) -> Point | None:
        space = self._space
        scores: dict[Hashable, float] = {}
        for o in history:
            scores[space.code_class(o.point)] = -math.inf if o.score is None else o.score
        current = space.default
        for n, knob in enumerate(space.knobs):
            line = [with_index(current, n, i) for i in range(len(knob.values))]
            line = [p for p in line if space.legal(p)]
            for point in line:
                if space.code_class(point) not in scores:
                    return point
            current = max(line, key=lambda p: scores[space.code_class(p)])
        return None


class TpeProposer:
    """Optuna's multivariate TPE. The study is rebuilt from the history, so that only the history counts."""

    def __init__(self, space: Space) -> None:
        self._pool = _Pool(space)
        self._distributions = distributions(space)
        self._startup = max(4, min(10, len(space.knobs) + 2))
        self._trials: list[optuna.trial.FrozenTrial] = []
        self._seen: list[Observation] = []

    def _study(self, history: Sequence[Observation], seed: int) -> optuna.Study:
        if list(history[: len(self._seen)]) != self._seen:
            self._trials, self._seen = [], []
        for o in history[len(self._seen) :]:
            self._trials.append(frozen_trial(self._pool.space, o, self._distributions))
            self._seen.append(o)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = optuna.samplers.TPESampler(
                multivariate=True, seed=seed, n_startup_trials=self._startup, constant_liar=True
            )
            study = optuna.create_study(direction="maximize", sampler=sampler)
        study.add_trials(self._trials)
        return study

    def suggestions(self, history: Sequence[Observation], key: Sequence[object], count: int) -> list[Point]:
        """Up to `count` distinct legal points that TPE proposes, including tried ones."""
        rng = keyed_rng("tpe", *key)
        study = self._study(history, int(rng.integers(2**31)))
        space = self._pool.space
        found: dict[Point, None] = {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            for _ in range(count):
                trial = study.ask(self._distributions)
                point = tuple(int(trial.params[k.name]) for k in space.knobs)
                if space.legal(point):
                    found[point] = None
        return list(found)

    def propose(self, history: Sequence[Observation], key: Sequence[object]) -> Point | None:
        space = self._pool.space
        tried = self._pool.tried(history)
        if self._pool.exhausted(tried):
            return None
        for point in self.suggestions(history, key, 16):
            if space.code_class(point) not in tried:
                return point
        # If TPE only proposes tried points, take neighbours of the best points, closest first, and then any
        # point.
        scored = sorted((o for o in history if o.score is not None), key=lambda o: -(o.score or 0.0))
        for o in scored:
            for point in space.neighbours(o.point):
                if space.code_class(point) not in tried:
                    return point
        return RandomProposer(space).propose(history, key)


def frozen_trial(
    space: Space, o: Observation, dists: dict[str, optuna.distributions.BaseDistribution], **attrs: Any
) -> optuna.trial.FrozenTrial:
    """An observation as a finished Optuna trial. Failed ones have the state FAIL, which samplers ignore, and
    never a score of 0."""
    state = optuna.trial.TrialState.FAIL if o.score is None else optuna.trial.TrialState.COMPLETE
    return optuna.trial.create_trial(
        state=state,
        value=None if o.score is None else math.exp(o.score),
        params=params(space, o.point),
        distributions=dists,
        user_attrs={**attrs, "settings": {k: str(v) for k, v in space.settings(o.point).items()}},
    )


def _normal_pdf_cdf(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    from scipy.special import ndtr

    pdf = np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    return pdf, np.asarray(ndtr(z))


LISTED = 1500
"""Most untried classes for which all are considered. With more, TPE, neighbours and random points propose."""
STEP_LOSS = 0.1  # expected loss (log ratio) of a step towards a presumably slower value


class GuidedProposer:
    """A proposer that first covers the space, and then follows a surrogate model of the trials.

    Args:
    use_tpe: Whether to use proposals of TPE.
    whole: Whether the first points cover the whole space, including presumably slow points.
    """

    def __init__(self, space: Space, *, use_tpe: bool = True, whole: bool = False) -> None:
        self._space = space
        self._pool = _Pool(space)
        self._tpe = TpeProposer(space) if use_tpe else None
        self._groups = space.feature_groups()
        self._startup = 4  # number of covering trials at the start, which is enough for main effects
        self._doubts = None if whole else Doubts(space)
        self._features: dict[Point, np.ndarray] = {}
        self._learned: tuple[tuple[Observation, ...], np.ndarray] | None = None

    def _coordinates(self, points: Sequence[Point]) -> np.ndarray:
        """The features of points, one row each, which are cached because they never change."""
        for point in points:
            if point not in self._features:
                self._features[point] = self._space.features(point)
        return np.stack([self._features[p] for p in points])

    def _expected(self, points: Sequence[Point]) -> np.ndarray:
        """Presumed log ratios, which are the mean of the surrogate before any trial."""
        if self._doubts is None:
            return np.zeros(len(points))
        return np.array([-STEP_LOSS * self._doubts.of(p) for p in points])

    def _start(
        self, history: Sequence[Observation], key: Sequence[object], tried: set[Hashable]
    ) -> Point | None:
        """A covering point: the one farthest from all tried points among a few random ones that are
        presumably not slower than the default."""
        rng = keyed_rng("start", *key)
        # A failure suggests a wall, for example of memory, so the slow side counts again.
        doubts = self._doubts if all(o.score is not None for o in history) else None
        left = self._pool.left(tried)
        if left is None:
            left = [self._space.random(rng) for _ in range(24)]
            left = [doubts.without(p) for p in left] if doubts else left
            left = [p for p in left if self._space.code_class(p) not in tried] or left
        if not left:
            return None
        left = doubts.least(left) if doubts else left
        pool = [left[int(i)] for i in rng.choice(len(left), size=min(24, len(left)), replace=False)]
        seen = self._coordinates([o.point for o in history])
        points = self._coordinates(pool)
        nearest = np.abs(points[:, None, :] - seen[None, :, :]).sum(axis=2).min(axis=1)
        return pool[int(np.argmax(nearest))]

    def propose(self, history: Sequence[Observation], key: Sequence[object]) -> Point | None:
        space = self._space
        tried = self._pool.tried(history)
        if self._pool.exhausted(tried):
            return None
        known = [o for o in history if o.score is not None]
        startup = self._startup if len(known) == len(history) else 2
        if len(known) < 2 or len(history) < startup:
            return self._start(history, key, tried)
        pool = self._candidates(history, known, key, tried)
        if not pool:
            return RandomProposer(space).propose(history, key)
        y = np.array([o.score for o in known], dtype=float) - self._expected([o.point for o in known])
        noise = np.array([max(o.sigma, 1e-3) for o in known])
        x = self._coordinates([o.point for o in known])
        surrogate = Surrogate(self._groups)
        # With many observations, the parameters change little, so they are only fitted again at every fourth
        # trial.
        learned = len(known) if len(known) < 16 else 4 * (len(known) // 4)
        seen = tuple(known[:learned])
        if self._learned is None or self._learned[0] != seen:
            self._learned = (seen, surrogate.learn(x[:learned], y[:learned], noise[:learned]))
        surrogate.condition(x, y, noise, self._learned[1])
        candidates = self._coordinates(pool)
        mean, sigma = surrogate.predict(candidates)
        mean = mean + self._expected(pool)
        at_known, _ = surrogate.predict(x)
        best = float((at_known + self._expected([o.point for o in known])).max())
        z = (mean - best) / sigma
        pdf, cdf = _normal_pdf_cdf(z)
        gain = (mean - best) * cdf + sigma * pdf
        gain *= self._runs(history, candidates)
        return pool[int(np.argmax(gain))]

    def _runs(self, history: Sequence[Observation], x: np.ndarray) -> np.ndarray:
        """Probability that a point runs at all, from tried points around it. A failure has no rate, so the
        surrogate of rates cannot use it."""
        ran = np.array([o.score is not None for o in history], dtype=float)
        if ran.all():
            return np.ones(len(x))
        seen = self._coordinates([o.point for o in history])
        difference = x[:, None, :] - seen[None, :, :]
        votes = np.exp(-0.5 * np.einsum("ijk,ijk->ij", difference, difference) / 0.15**2)
        chance = np.asarray((0.5 + votes @ ran) / (0.5 + votes.sum(axis=1)))
        # If a value of an unordered knob has failed in all trials, the value itself causes it.
        for column in [c for c, g in enumerate(self._groups) if not self._space.knobs[g].ordinal]:
            with_value = seen[:, column] == 1.0
            share = (0.5 + float(ran[with_value].sum())) / (0.5 + int(with_value.sum()))
            chance = np.where(x[:, column] == 1.0, chance * share, chance)
        return chance

    def _candidates(
        self,
        history: Sequence[Observation],
        known: Sequence[Observation],
        key: Sequence[object],
        tried: set[Hashable],
    ) -> list[Point]:
        left = self._pool.left(tried)
        if left is not None and len(left) <= LISTED:
            return left
        rng = keyed_rng("pool", *key)
        pool: dict[Hashable, Point] = {}

        def add(points: Sequence[Point]) -> None:
            for point in points:
                kind = self._space.code_class(point)
                if kind not in tried:
                    pool.setdefault(kind, point)

        if self._tpe is not None:
            add(self._tpe.suggestions(history, key, 6))
        for o in sorted(known, key=lambda o: -(o.score or 0.0))[:4]:
            near = self._space.neighbours(o.point)
            add(near)
            for point in near:
                add([n for n in self._space.neighbours(point) if rng.random() < 0.3])
        add([self._space.random(rng) for _ in range(400)])
        return list(pool.values())


SAMPLERS: dict[str, Callable[[Space, bool], Proposer]] = {
    "guided": lambda space, whole: GuidedProposer(space, whole=whole),
    "tpe": lambda space, whole: TpeProposer(space),
    "gp": lambda space, whole: GuidedProposer(space, use_tpe=False, whole=whole),
    "random": lambda space, whole: RandomProposer(space),
    "coordinate": lambda space, whole: CoordinateProposer(space),
}


def proposer_of(sampler: str, space: Space, *, whole: bool = False) -> Proposer:
    """The proposer with a name.

    Args:
    sampler: A name of SAMPLERS.
    whole: Whether slow points are useful, too, such as ones that save memory.
    """
    return SAMPLERS[sampler](space, whole)
