"""The process that tells good points by the trials so far."""

from __future__ import annotations

import numpy as np
import pytest
from dyno_tuner.search.surrogate import Surrogate


def test_its_scales_are_the_best_of_their_neighbours_and_no_point_is_computed_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The coordinate search ends where no step of 0.2 along one scale has more evidence."""
    seen: dict[bytes, float] = {}
    real = Surrogate._evidence

    def evidence(
        self: Surrogate, squares: np.ndarray, y: np.ndarray, noise: np.ndarray, theta: np.ndarray,
        start: np.ndarray,
    ) -> float:  # fmt: skip
        assert theta.tobytes() not in seen
        value = seen[theta.tobytes()] = real(self, squares, y, noise, theta, start)
        return value

    monkeypatch.setattr(Surrogate, "_evidence", evidence)
    rng = np.random.default_rng(4)
    x = rng.integers(0, 5, (20, 4)) / 4.0
    y = 0.3 * x[:, 0] - 0.1 * x[:, 1] * x[:, 3] + rng.normal(0, 0.01, 20)
    theta = Surrogate([0, 1, 1, 2]).learn(x, y, np.full(20, 0.01))
    best = seen[theta.tobytes()]
    assert best == pytest.approx(max(seen.values()), abs=1e-6)
    for n in range(len(theta)):
        for sign in (-1.0, 1.0):
            beside = theta.copy()
            beside[n] += sign * 0.2
            assert seen[beside.tobytes()] <= best + 1e-9
