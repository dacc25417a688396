"""What rounded operands cost a product: the tolerances of kernels that multiply in halves or bfloat16.

Such a kernel differs from float64 by the rounding of its operands and, far less, by float32 sums. How much
depends on the case: behind an activation one product of a few can be all there is. So no table of limits
stands here. A case is computed again in float64 with its operands rounded as the kernel rounds them, and
what that differs from the exact answer is what the kernel may differ, times MARGIN. (On an H200 most products
differ by just that, to two digits.)

In the data of the cases stand calls of operand(), softmax_weights() and weights(), which change nothing
outside of `emulated`.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ops.harness import nmse, recorded
from ops.weight_blocks import dequantize, geometry

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from ops.harness import Case

MARGIN = 4.0
"""A kernel may round in another order: an error twice as large in every element."""

STRETCHES = (1.0, 1.23, 1.57)
"""Operands are rounded at three scales, of which the worst counts: few values may be lucky at one."""

FLOAT_BITS = 24
"""Of a float32: as a weight's, the kernel multiplies bare codes and applies their scales to float32 sums."""

HALVES = (
    *("stream", "walk", "mma", "wgmma", "wgmma_split", "wgmma_ring"),
    *("wgmma_wide", "wgmma_wide_split", "wgmma_sorted"),
    *("wgmma_codes", "half_mma", "half_staged", "cublas"),
)
"""Variants of products whose operands are halves."""

DEPTH = 1536
"""Keys that the deepest case of attention has, and a few more."""

SUB_BLOCKS: dict[str, tuple[Any, Any, int]] = {
    "q2_k": (slice(16, 80), 0xFF, 3),
    "q3_k": (slice(0, 96), 0, -4),
    "q4_k": (slice(16, 144), 0xFF, 15),
    "q5_k": (slice(16, 176), 0xFF, 31),
    "q6_k": (slice(0, 192), 0, -32),
    "iq4_xs": (slice(8, 136), 0, -127),
    "q8_16": (slice(8, 72), 1, 1),
    "q4_16": ([*range(20, 36), 37], [1] * 16 + [0], 1),  # the table, and no shift
}
"""Types whose sub-blocks have scales of their own, whose product with the block's is rounded to a half first.
Where the codes stand in a block, a byte to put there, and the code that it makes of every element: so the
scale shows."""
MINS = {"q4_1": 2, "q5_1": 2, "q2_k": 82, "q4_k": 2, "q5_k": 2}
"""Where in a block the half stands that scales what is added to or subtracted from every element."""


@dataclass(frozen=True)
class Arithmetic:
    """Significant bits of what tensor cores multiply, and how many of their steps a sum takes."""

    bits: int  # of an operand: 8 of bfloat16, 11 of a half, 22 of two halves
    weight_bits: int = 11  # of a weight in a matrix, and of a softmax weight; FLOAT_BITS: not rounded
    steps: int = 0  # additions to a float32 sum, one after the other

    @property
    def sums(self) -> float:
        """NMSE of the sums: tensor cores cut off, so each step loses up to one unit in the last place."""
        return (self.steps * 2.0**-23) ** 2


PAIRS = Arithmetic(22, 22, steps=8)
"""Of kernels that split all operands into two halves. A sum stays in tensor cores for a few steps only."""


@dataclass(frozen=True)
class _Rounding:
    arithmetic: Arithmetic
    stretch: float


_rounding: contextvars.ContextVar[_Rounding | None] = contextvars.ContextVar("rounding", default=None)


def to_bits(x: NDArray[Any], bits: int, stretch: float = 1.0) -> NDArray[np.float64]:
    """x rounded to `bits` significant bits, ties to even, of any exponent; `stretch` moves the grid."""
    mantissa, exponent = np.frexp(np.asarray(x, np.float64) * stretch)
    return np.ldexp(np.rint(np.ldexp(mantissa, bits)), exponent - bits) / stretch


def operand(x: NDArray[Any]) -> NDArray[Any]:
    """x as a kernel multiplies it."""
    now = _rounding.get()
    return x if now is None else to_bits(x, now.arithmetic.bits, now.stretch)


def softmax_weights(x: NDArray[Any]) -> NDArray[Any]:
    """Weights of a softmax as a kernel multiplies them with values."""
    now = _rounding.get()
    return x if now is None else to_bits(x, now.arithmetic.weight_bits, now.stretch)


def weights(dtype: str, blocks: NDArray[np.uint8], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The values of rows of blocks as a kernel multiplies them: made in halves, then perhaps bfloat16.

    A code is exact; a scale of a sub-block is rounded, then code times scale, with a min in one rounding.
    """
    now = _rounding.get()
    if now is None or now.arithmetic.weight_bits >= FLOAT_BITS:
        return values

    def decoded(changed: NDArray[np.uint8]) -> NDArray[np.float64]:
        out = dequantize(dtype, changed.reshape(blocks.shape))
        return out.astype(np.float64).reshape(values.shape)

    changed = blocks.reshape(-1, geometry(dtype)[1]).copy()
    scaled = values
    if dtype in MINS:
        changed[:, MINS[dtype] : MINS[dtype] + 2] = 0
        scaled = decoded(changed)
    mins = values - scaled
    if dtype in SUB_BLOCKS:
        place, byte, code = SUB_BLOCKS[dtype]
        changed[:, place] = byte
        scale = decoded(changed) / code
        scaled = scaled * np.divide(to_bits(scale, 11), scale, out=np.ones_like(scale), where=scale != 0)
        mins = to_bits(mins, 11)
    halves = to_bits(scaled + mins, 11)
    bits = now.arithmetic.weight_bits
    return halves if bits == 11 else to_bits(halves, bits, now.stretch)


@contextlib.contextmanager
def emulated(arithmetic: Arithmetic, stretch: float = 1.0) -> Iterator[None]:
    """Within it, operand(), softmax_weights() and weights() round."""
    token = _rounding.set(_Rounding(arithmetic, stretch))
    try:
        yield
    finally:
        _rounding.reset(token)


@dataclass(frozen=True)
class Answers:
    """References that the check of a case compares with, exact and with rounded operands."""

    exact: list[NDArray[np.float64]]
    rounded: dict[float, list[NDArray[np.float64]]]
    """By stretch."""

    def costs(self) -> list[float]:
        """The NMSE that rounded operands cost each comparison, in their order."""
        worst = [0.0] * len(self.exact)
        for rounded in self.rounded.values():
            worst = [max(w, nmse(got, want)) for w, got, want in zip(worst, rounded, self.exact, strict=True)]
        return worst

    def allowances(self, arithmetic: Arithmetic) -> list[float]:
        """The NMSE that each comparison may have beyond its allowance for float32."""
        return [MARGIN * (value + arithmetic.sums) for value in self.costs()]


def answers(case: Case, arithmetic: Arithmetic, seed: int) -> Answers:
    """The references of a case whose operands an arithmetic rounds."""

    def references() -> list[NDArray[np.float64]]:
        _, outputs, check = case.make(np.random.default_rng(seed))
        return recorded(check, outputs)

    exact, found = references(), {}
    for stretch in STRETCHES:
        with emulated(arithmetic, stretch):
            found[stretch] = references()
    return Answers(exact, found)


def allowances(case: Case, arithmetic: Arithmetic, seed: int) -> list[float]:
    """The NMSE that each comparison of a case's check may have beyond its allowance for float32."""
    return answers(case, arithmetic, seed).allowances(arithmetic)


def arithmetic_of(
    family: str, desc: dict[str, Any], variant: str, *, force_bf16: bool = False
) -> Arithmetic | None:
    """The arithmetic of a CUDA variant; None: float32 throughout.

    Args:
        force_bf16: the build has GGML_CUDA_FORCE_BF16, so that attention over q8_0 caches is in bfloat16.
    """
    if family in ("attention", "rope_attention"):
        if variant == "rows":
            return None
        cache = desc["k_type"]
        if variant == "flash_pairs":
            return PAIRS
        if variant == "flash_wgmma_pairs":  # the sums of a whole score, or of the values of 64 keys
            return dataclasses.replace(PAIRS, steps=_steps(max(desc["dk"], 64)))
        if variant in ("latent", "latent_cluster") and cache == "f32":
            return Arithmetic(22, steps=3 * _steps(desc["dk"] + DEPTH))
        narrow = cache == "bf16" or (
            force_bf16 and cache == "q8_0" and variant.startswith(("flash", "adaptive", "stored"))
        )
        bits = 8 if narrow else 11
        return Arithmetic(bits, bits, steps=_steps(desc["dk"] + DEPTH))
    if family == "mla_expand" and variant == "pairs":
        return dataclasses.replace(PAIRS, weight_bits=FLOAT_BITS)
    if family == "mla_expand" and variant == "wgmma" and desc["cache_type"] == "f32":
        steps = _steps(max(desc["nope"], desc["lora"]))
        return dataclasses.replace(PAIRS, weight_bits=FLOAT_BITS, steps=steps)
    if variant == "ring":
        # Codes stand at 1024 and above, and what that adds is taken off again: sums are cut off
        # 1024 times as high.
        return Arithmetic(11, FLOAT_BITS, steps=1024)
    if variant == "tf32_pairs":
        return dataclasses.replace(PAIRS, weight_bits=FLOAT_BITS, steps=16)
    if variant in HALVES:
        floats = desc.get("type") in ("f16", "bf16")  # rows are two halves a number then
        if family == "mla_expand":
            return Arithmetic(11, steps=_steps(max(desc["nope"], desc["lora"])))
        steps = _steps(desc["k"])
        return Arithmetic(22, steps=2 * steps) if floats else Arithmetic(11, steps=steps)
    return None


def _steps(k: int) -> int:
    """Matrix instructions that go over k: 16 numbers each, or 8."""
    return -(-k // 8)
