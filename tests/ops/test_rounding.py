"""The tolerances of products of halves: what they assume of rounding, neither luck nor slack."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import numpy as np
import pytest
from dyno import _core

from ops import rounding
from ops.cache_types import to_bf16
from ops.cases import all_cases
from ops.harness import Case, allowing, expect_close, nmse
from ops.rounding import Arithmetic

HOPPER = {"kind": "cuda", "compute_capability": 90, "sm_count": 132, "shared_per_block_bytes": 232_448}
HALF = 0.18 * 2.0**-22
"""Mean squared relative error of rounding to 11 bits: u²/3 by E[1/m²] = 0.54 of mantissas m in [1, 2)."""


def pairs() -> list[tuple[Case, Arithmetic]]:
    """Every case with every arithmetic that one of its variants on a GPU has."""
    out = []
    for case in all_cases():
        legal = _core.ops.candidates(case.family, case.desc, HOPPER, "legal")
        kinds = {rounding.arithmetic_of(case.family, case.desc, config["variant"]) for config in legal}
        out += [(case, kind) for kind in sorted(kinds - {None}, key=str) if kind is not None]
    return out


def name_of(pair: tuple[Case, Arithmetic]) -> str:
    case, kind = pair
    return f"{case.family}:{case.id}-{kind.bits}"


@dataclass(frozen=True)
class Computed:
    """A case computed exactly and with one arithmetic."""

    case: Case
    kind: Arithmetic
    seed: int
    answers: rounding.Answers


@pytest.fixture(scope="module", params=pairs(), ids=name_of)
def computed(request: pytest.FixtureRequest) -> Computed:
    """A pair, computed once: both tests of a pair follow each other, because the module has the fixture."""
    case, kind = request.param
    seed = zlib.crc32(case.id.encode())
    return Computed(case, kind, seed, rounding.answers(case, kind, seed))


def test_bits_are_those_of_halves_and_bfloat16() -> None:
    x = np.random.default_rng(1).standard_normal(10_000).astype(np.float32)
    x = x[np.abs(x) > 1e-4]  # to_bits has no subnormal numbers
    np.testing.assert_array_equal(rounding.to_bits(x, 11), x.astype(np.float16).astype(np.float64))
    bf16 = (to_bf16(x).astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(rounding.to_bits(x, 8), bf16.astype(np.float64))
    assert np.mean((rounding.to_bits(x, 11) / x - 1) ** 2) == pytest.approx(HALF, rel=0.1)


def test_nothing_is_rounded_outside() -> None:
    x = np.random.default_rng(2).standard_normal(100)
    assert rounding.operand(x) is x
    assert rounding.softmax_weights(x) is x


@pytest.mark.parametrize("bits", [8, 11])
@pytest.mark.parametrize("dtype", ["q4_0", "q5_1", "q8_0", "q2_k", "q4_k", "q6_k", "iq4_nl"])
def test_a_product_of_many_numbers_loses_what_theory_says(dtype: str, bits: int) -> None:
    """Two operands, each rounded once; with sub-blocks a scale as well, with mins both parts."""
    wanted = f"matmul-{dtype}-n=37-k=768-layout=gpu-m=3-"
    case = next(c for c in all_cases() if c.id.startswith(wanted))
    loss = 4.0 ** (11 - bits) * HALF
    cost = np.median([rounding.answers(case, Arithmetic(bits, bits), seed).costs()[0] for seed in range(8)])
    assert 1.5 * loss < cost < (5 if bits == 11 else 4) * loss


def test_an_allowance_is_small(computed: Computed) -> None:
    """Far from what one wrong element in a hundred costs."""
    for value in computed.answers.allowances(computed.kind):
        assert 0 < value < (1e-3 if computed.kind.bits == 8 else 1e-4)
        if computed.case.family == "matmul" and computed.kind.bits >= 11:
            assert value < 2e-6


def test_a_rounded_answer_passes_and_twice_its_error_and_more_does_not(computed: Computed) -> None:
    exact, rounded = computed.answers.exact, computed.answers.rounded[1.0]
    allowed = computed.answers.allowances(computed.kind)
    for want, got, more in zip(exact, rounded, allowed, strict=True):
        with allowing([more]):
            expect_close(got, want, 1e-11)
        noise = np.random.default_rng(computed.seed).standard_normal(want.shape)
        wrong = want + noise * math.sqrt(2 * (more + 1e-11) / nmse(want + noise, want))
        with allowing([more]), pytest.raises(AssertionError, match="NMSE"):
            expect_close(wrong, want, 1e-11)
