"""The shapes that the contract suite runs, by family: small, odd, and one for each thing a Desc can say.

To add a family: write a generator of cases and decorate it with @cases("its name").
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from ops.harness import Case

F32 = np.float32
EXACT = 1e-11  # NMSE of f32 arithmetic against float64

GENERATORS: dict[str, Callable[[], Iterator[Case]]] = {}


def cases(family: str) -> Callable[[Callable[[], Iterator[Case]]], Callable[[], Iterator[Case]]]:
    """Registers a generator of a family's cases."""

    def register(generator: Callable[[], Iterator[Case]]) -> Callable[[], Iterator[Case]]:
        assert family not in GENERATORS, f"{family} has two generators"
        GENERATORS[family] = generator
        return generator

    return register


def all_cases() -> list[Case]:
    """Every case of every family, in a stable order."""
    from ops import (  # noqa: F401  (register themselves)
        cases_attention,
        cases_index_select,
        cases_products,
        cases_recurrent,
        cases_rope_attention,
        cases_routing,
        cases_rows,
    )

    return [case for family in sorted(GENERATORS) for case in GENERATORS[family]()]


def normal(rng: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    """Standard normal values as f32."""
    return rng.standard_normal(shape).astype(F32)


def device(**properties: Any) -> dict[str, Any]:
    """A DeviceInfo dict of a plain CPU, with some properties replaced."""
    return {
        "kind": "cpu",
        "isa": "avx2",
        "cores": 8,
        "l1d_bytes": 32 << 10,
        "l2_bytes": 1 << 20,
        **properties,
    }
