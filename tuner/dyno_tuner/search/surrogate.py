"""A small Gaussian process over points of a space, which predicts untried points from a few noisy trials."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..space.search_space import Point, Space
    from .observation import Observation


class Surrogate:
    """A Gaussian process on log ratios: the effect of each knob plus their joint effect, both with Matérn 5/2
    kernels and one length scale per knob (the first and the full order of an additive process, Duvenaud et
    al. 2011). The gains of settings mostly multiply, so their logarithms add, and a few trials show the main
    effects. The product term covers interactions. The noise of each observation is known."""

    def __init__(self, groups: Sequence[int]) -> None:
        self._groups = np.asarray(groups, dtype=int)
        self._knobs = int(self._groups.max()) + 1 if len(groups) else 0
        # Matrix that sums the squared differences over the coordinates of a knob: (coordinates, knobs).
        self._gather = np.zeros((len(self._groups), self._knobs))
        self._gather[np.arange(len(self._groups)), self._groups] = 1.0
        self._theta: np.ndarray | None = None

    def _squares(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Squared distance by knob: (knobs, len(a), len(b))."""
        difference = a[:, None, :] - b[None, :, :]
        return np.ascontiguousarray(np.moveaxis((difference * difference) @ self._gather, 2, 0))

    def _kernel(self, squares: np.ndarray, theta: np.ndarray) -> np.ndarray:
        scaled = 5.0 * squares * np.exp(-2 * theta[:-2])[:, None, None]
        alone = np.sqrt(scaled)
        together = np.sqrt(scaled.sum(axis=0))
        main = ((1 + alone + scaled / 3) * np.exp(-alone)).sum(axis=0) / max(1, self._knobs)
        product = (1 + together + together * together / 3) * np.exp(-together)
        return np.asarray(math.exp(2 * theta[-2]) * main + math.exp(2 * theta[-1]) * product)

    def _evidence(
        self, squares: np.ndarray, y: np.ndarray, noise: np.ndarray, theta: np.ndarray, start: np.ndarray
    ) -> float:
        """Log marginal likelihood with weak priors: length scales around the whole range of a knob, and
        amplitudes around the spread of the data."""
        k = self._kernel(squares, theta)
        k.flat[:: len(k) + 1] += noise**2
        try:
            chol = np.linalg.cholesky(k)
        except np.linalg.LinAlgError:
            return -math.inf
        z = np.linalg.solve(chol, y)
        prior = -0.5 * float(((theta - start) ** 2).sum()) / 0.8**2
        return float(-0.5 * z @ z - np.log(chol.diagonal()).sum()) + prior

    def learn(self, x: np.ndarray, y: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """Fit length scales and amplitudes by a coordinate search on the evidence from a fixed start, so that
        they depend only on the data."""
        centred = y - float(np.median(y))
        spread = math.log(max(float(y.std()), 0.02))
        start = np.concatenate([np.full(self._knobs, -0.4), [spread, spread - 0.5]])
        squares = self._squares(x, x)
        known: dict[bytes, float] = {}  # a round of the search meets many points of the one before

        def evidence(theta: np.ndarray) -> float:
            key = theta.tobytes()
            if key not in known:
                known[key] = self._evidence(squares, centred, noise, theta, start)
            return known[key]

        theta = start
        best = evidence(theta)
        step = 0.8
        while step > 0.15:
            improved = False
            for n in range(len(theta)):
                for sign in (-1.0, 1.0):
                    trial = theta.copy()
                    trial[n] += sign * step
                    value = evidence(trial)
                    if value > best + 1e-9:
                        theta, best, improved = trial, value, True
                        break
            if not improved:
                step /= 2
        return np.asarray(theta)

    def condition(self, x: np.ndarray, y: np.ndarray, noise: np.ndarray, theta: np.ndarray) -> None:
        """The process given these observations."""
        self._theta = theta
        self._mean = float(np.median(y))
        k = self._kernel(self._squares(x, x), theta)
        k.flat[:: len(k) + 1] += noise**2
        self._x = x
        self._chol = np.linalg.cholesky(k)
        self._alpha = np.linalg.solve(self._chol.T, np.linalg.solve(self._chol, y - self._mean))

    def predict(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of the noise-free value. Raises RuntimeError before `condition`."""
        if self._theta is None:
            raise RuntimeError("predict() before condition()")
        cross = self._kernel(self._squares(x, self._x), self._theta)
        mean = self._mean + cross @ self._alpha
        solved = np.linalg.solve(self._chol, cross.T)
        amplitude = math.exp(2 * self._theta[-2]) + math.exp(2 * self._theta[-1])
        variance = np.maximum(amplitude - np.einsum("ij,ij->j", solved, solved), 1e-12)
        return mean, np.sqrt(variance)


def predicted(
    space: Space, history: Sequence[Observation], points: Sequence[Point]
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of the log ratio of `points`, given the trials; without information if
    fewer than two trials have run."""
    known = [o for o in history if o.score is not None]
    if len(known) < 2:
        return np.zeros(len(points)), np.full(len(points), np.inf)
    x = np.stack([space.features(o.point) for o in known])
    y = np.array([o.score for o in known], dtype=float)
    noise = np.array([max(o.sigma, 1e-3) for o in known])
    surrogate = Surrogate(space.feature_groups())
    surrogate.condition(x, y, noise, surrogate.learn(x, y, noise))
    return surrogate.predict(np.stack([space.features(p) for p in points]))
