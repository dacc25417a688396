"""Distances between logits against values worked out by hand and by plain loops."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from dyno import _core, quality

if TYPE_CHECKING:
    from collections.abc import Callable

GPUS = [d for d in _core.devices() if d["kind"] == "cuda" and not _core.device_problem(d)]


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


class Foreign:
    """An array of another library, which never becomes one of NumPy by itself.

    Its namespace has only names of the array API standard."""

    device = "a device"

    def __init__(self, values: Any) -> None:
        self.values = np.asarray(values)

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("this array does not leave its device by itself")

    def __array_namespace__(self) -> Any:
        return Namespace

    def __getattr__(self, name: str) -> Any:
        return (
            getattr(self.values, name) if name in ("shape", "dtype") else object.__getattribute__(self, name)
        )

    def __getitem__(self, key: Any) -> Foreign:
        return Foreign(self.values[key])

    def __setitem__(self, key: Any, value: Foreign) -> None:
        self.values[key] = value.values

    def __int__(self) -> int:
        return int(self.values)


def _operator(name: str) -> Callable[[Foreign, Any], Foreign]:
    def apply(self: Foreign, other: Any) -> Foreign:
        return Foreign(getattr(self.values, name)(other.values if isinstance(other, Foreign) else other))

    return apply


for _name in ("__sub__", "__mul__", "__add__", "__gt__", "__and__", "__eq__"):
    setattr(Foreign, _name, _operator(_name))


def _function(name: str) -> Callable[..., Foreign]:
    def apply(*arrays: Any, **options: Any) -> Foreign:
        plain = [a.values if isinstance(a, Foreign) else a for a in arrays]
        return Foreign(getattr(np, name)(*plain, **options))

    return apply


STANDARD = ("asarray", "max", "exp", "log", "sum", "where", "zeros_like", "isfinite", "argmax", "empty")
Namespace = SimpleNamespace(
    __name__="foreign", float64=np.float64, **{name: _function(name) for name in STANDARD}
)


def rows_of_logits(seed: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    exact = rng.normal(size=(37, 91)).astype(np.float32)
    exact[3, :] = -np.inf
    exact[4, 7], exact[5, :50] = np.nan, -np.inf
    return exact, (exact + rng.normal(scale=0.1, size=exact.shape)).astype(np.float32)


def test_kld_is_computed_where_the_arrays_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "_DEVICE_BLOCK_ELEMENTS", 8 * 91)  # several blocks, the last one short
    exact, ours = rows_of_logits(3)
    with np.errstate(invalid="ignore"):
        found = quality.kld_rows(Foreign(exact), Foreign(ours))
    assert isinstance(found, Foreign)
    np.testing.assert_allclose(found.values, quality.kld_rows(exact, ours), rtol=1e-12)
    assert np.isinf(found.values[[3, 4]]).all()
    assert quality.same_top1(Foreign(exact), Foreign(ours)) == quality.same_top1(exact, ours)


def test_arrays_of_two_libraries_are_not_compared() -> None:
    with pytest.raises(TypeError, match="one library"):
        quality.kld_rows(Foreign([[0.0, 1.0]]), np.array([[0.0, 1.0]]))
    with pytest.raises(ValueError, match=r"\(1, 2\) and \(1, 3\)"):
        quality.kld_rows(Foreign([[0.0, 1.0]]), Foreign([[0.0, 1.0, 2.0]]))


@pytest.mark.gpu
@pytest.mark.skipif(not GPUS, reason=f"no GPU: {_core.no_cuda_reason()}")
def test_kld_on_a_gpu_is_that_of_the_cpu() -> None:
    cupy = pytest.importorskip("cupy")
    exact, ours = rows_of_logits(4)
    wide = np.random.default_rng(5).normal(scale=4, size=(2, 64, 60_000)).astype(np.float32)
    for a, b in ((exact, ours), (wide[0], wide[0] + 0.01 * wide[1])):
        found = quality.kld_rows(cupy.asarray(a), cupy.asarray(b))
        assert isinstance(found, cupy.ndarray)
        np.testing.assert_allclose(found.get(), quality.kld_rows(a, b), rtol=1e-6)
        assert quality.same_top1(cupy.asarray(a), cupy.asarray(b)) == quality.same_top1(a, b)
