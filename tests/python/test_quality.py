"""Distances between logits against values worked out by hand and by plain loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dyno import quality


def test_log_softmax_is_stable_and_normalised() -> None:
    x = np.array([[1e4, 1e4 - 1.0, -1e4], [0.0, 0.0, 0.0]], dtype=np.float32)
    result = quality.log_softmax(x)
    assert result.dtype == np.float64
    np.testing.assert_allclose(np.exp(result).sum(axis=-1), 1.0)
    np.testing.assert_allclose(result[1], -math.log(3))


def test_kld_of_two_coins() -> None:
    p, q = np.log([[0.5, 0.5]]), np.log([[0.9, 0.1]])
    expected = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    assert quality.kld(p, q) == pytest.approx(expected, rel=1e-12)
    assert quality.kld(q, p) == pytest.approx(0.9 * math.log(1.8) + 0.1 * math.log(0.2), rel=1e-12)


def test_kld_ignores_a_constant_and_is_zero_for_equals() -> None:
    x = np.random.default_rng(1).normal(size=(7, 50)).astype(np.float32)
    assert quality.kld(x, x) == 0.0
    assert abs(quality.kld(x, x.astype(np.float64) + 5.0)) < 1e-12


def test_kld_of_nearly_certain_rows_is_not_negative() -> None:
    """All but the certain token's share rounds away, and the rest alone sums to less than nothing."""
    p, q = np.array([[0.0, -600.0]]), np.array([[0.0, -599.0]])
    assert quality.kld(p, q) == 0.0


@pytest.mark.parametrize(
    "bad",
    [[np.nan, 1.0, 0.0], [0.0, np.inf, 1.0], [-np.inf, -np.inf, -np.inf], [np.nan, np.inf, 0.0]],
    ids=["NaN", "plus infinity", "nothing", "both"],
)
def test_a_row_without_probabilities_is_infinitely_far_and_never_perfect(bad: list[float]) -> None:
    good, row = [0.5, 1.0, 2.0], np.array([bad], np.float32)
    for a, b in ((row, np.array([good])), (np.array([good]), row), (row, row)):
        assert quality.kld_rows(a, b).tolist() == [math.inf]
        assert quality.top1_agreement(a, b) == 0.0
    found = quality.compare(np.array([good, bad, good]), np.array([good] * 3))
    assert (found.mean_kld, found.max_kld, found.top1_agreement) == (math.inf, math.inf, 2 / 3)


def test_kld_against_a_loop_over_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(2)
    p, q = rng.normal(size=(9, 33)), rng.normal(size=(9, 33))
    loop = 0.0
    for a, b in zip(p, q, strict=True):
        pa, pb = np.exp(a) / np.exp(a).sum(), np.exp(b) / np.exp(b).sum()
        loop += sum(x * math.log(x / y) for x, y in zip(pa, pb, strict=True)) / len(p)
    assert quality.kld(p, q) == pytest.approx(loop, rel=1e-10)
    monkeypatch.setattr(quality, "_BLOCK_ELEMENTS", 70)  # two rows a block
    assert quality.kld(p, q) == pytest.approx(loop, rel=1e-10)


def test_excluded_tokens_do_not_make_the_kld_undefined() -> None:
    p = np.array([[0.0, 1.0, -np.inf]])
    q = np.array([[0.0, 0.5, 0.25]])
    assert math.isfinite(quality.kld(p, q))
    assert quality.kld(q, p) == math.inf


def test_top1_agreement() -> None:
    a = np.array([[1, 2, 3], [3, 2, 1], [1, 3, 2], [9, 1, 1]], dtype=np.float32)
    b = np.array([[1, 2, 3], [3, 2, 1], [3, 1, 2], [9, 1, 1]], dtype=np.float32)
    assert quality.top1_agreement(a, b) == 0.75


def test_comparer_in_parts_is_compare_of_all() -> None:
    rng = np.random.default_rng(3)
    p = rng.normal(size=(20, 40)).astype(np.float32)
    q = (p + 0.1 * rng.normal(size=p.shape)).astype(np.float32)
    parts = quality.Comparer()
    for part in (slice(0, 3), slice(3, 19), slice(19, 20)):
        parts.add(p[part], q[part])
    whole, merged = quality.compare(p, q), parts.result()
    assert merged == whole
    assert whole.rows == 20
    assert whole.max_kld >= whole.mean_kld > 0
    assert whole.kld_stderr > 0


@pytest.mark.parametrize(("a", "b"), [((2, 3), (2, 4)), ((3,), (3,)), ((0, 3), (0, 3))])
def test_shapes_must_agree(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    for function in (quality.kld, quality.top1_agreement):
        with pytest.raises(ValueError, match="shape"):
            function(np.zeros(a), np.zeros(b))


def test_nmse() -> None:
    r = np.array([1.0, 2.0, 3.0])
    assert quality.nmse(r, r + 0.1) == pytest.approx(0.03 / 2.0)
    with pytest.raises(ValueError, match="constant"):
        quality.nmse(np.ones(3), np.ones(3))
