"""Cases of the selection of sparse attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ops import reference
from ops.cases import F32, cases, normal
from ops.harness import Case

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray


def chosen_positions(rng: np.random.Generator, runs: list[reference.Run], most: int) -> NDArray[np.int32]:
    """Random ascending positions of each token, all where it sees no more than `most`, with -1 after them."""
    out = np.full((max(first + count for first, count, *_ in runs), most), -1, np.int32)
    for first, count, position, _ in runs:
        for t in range(count):
            seen = position + t + 1
            out[first + t, : min(seen, most)] = np.sort(rng.permutation(seen)[:most])
    return out


@cases("index_select")
def index_select_cases() -> Iterator[Case]:
    def make(
        heads: int,
        dk: int,
        most: int,
        runs: list[reference.Run],
        *,
        gap: int = 0,
        equal: int = 0,
        nan: int | None = None,
    ) -> Case:
        """`equal`: only so many different keys, small whole numbers, so that many scores are exactly equal.
        `nan`: a position whose key is NaN."""
        m = max(first + count for first, count, _, _ in runs)
        ctx = max(position + count for _, count, position, _ in runs) + 2
        slots = max(slot for *_, slot in runs) + 1

        def build(rng: np.random.Generator) -> Any:
            q, weights = normal(rng, m, heads * dk + gap), normal(rng, m, heads + gap)
            keys = normal(rng, slots, ctx, dk)
            if equal:
                q, weights = (rng.integers(-2, 3, each.shape).astype(F32) for each in (q, weights))
                keys = rng.integers(-2, 3, (equal, dk)).astype(F32)[rng.integers(0, equal, (slots, ctx))]
            if nan is not None:
                keys[:, nan] = np.nan
            exact = [
                np.where(np.isnan(scores), -np.inf, scores)
                for scores in reference.index_scores(
                    q[:, : heads * dk].reshape(m, heads, dk).astype(np.float64),
                    weights[:, :heads].astype(np.float64),
                    keys.astype(np.float64),
                    runs,
                )
            ]
            args = {
                "q": q,
                "q_stride": heads * dk + gap,
                "weights": weights,
                "weights_stride": heads + gap,
                "keys": keys.reshape(-1).view(np.uint8),
                "slot_positions": ctx,
                "runs": runs,
                "out_stride": most + gap,
            }

            def check(out: Any) -> None:
                for token, scores in enumerate(exact):
                    got, count = out["out"][token, :most], min(most, len(scores))
                    assert (got[count:] == -1).all(), f"token {token}: not -1 after its positions"
                    got = got[:count]
                    assert (np.diff(got) > 0).all(), f"token {token}: not in ascending order"
                    assert 0 <= got[0] <= got[-1] < len(scores), f"token {token}: not its positions"
                    best = np.argsort(-scores, kind="stable")[:count]
                    if equal:
                        assert (got == np.sort(best)).all(), f"token {token}: not the lower of equals"
                    # Rounding may only exchange positions whose scores differ by no more than it.
                    least, near = scores[best[-1]], 1e-5 * np.abs(scores[np.isfinite(scores)]).max()
                    assert (scores[got] >= least - near).all(), f"token {token}: worse positions"
                    must = np.flatnonzero(scores > least + near)
                    assert np.isin(must, got).all(), f"token {token}: better ones are missing"
                assert (out["out"][:, most:] == -7).all(), "the gap between rows was written"

            return args, {"out": np.full((m, most + gap), -7, np.int32)}, check

        desc = {"m": m, "heads": heads, "dk": dk, "selected": most}
        label = f"runs{len(runs)}-ctx{ctx}-equal{equal}" + ("" if nan is None else "-nan")
        return Case("index_select", desc, build, label)

    yield make(1, 1, 1, [(0, 1, 0, 0)])
    yield make(16, 64, 32, [(0, 70, 0, 0)])
    yield make(20, 72, 31, [(0, 1, 700, 0)], gap=3)
    yield make(64, 128, 300, [(0, 2, 1100, 1), (2, 1, 5, 0)])
    yield make(3, 17, 5, [(0, 1, 9, 2), (1, 17, 0, 0), (18, 1, 140, 1), (19, 2, 64, 3)], gap=1)
    yield make(33, 40, 1, [(0, 66, 30, 1)])
    yield make(7, 9, 50, [(0, 40, 90, 0)], equal=4)
    yield make(16, 32, 130, [(0, 3, 1200, 0)], equal=3)
    yield make(5, 24, 40, [(0, 2, 80, 0)], nan=7)
    # Lists that are cut several times, and lists of more positions than one tile has.
    yield make(9, 33, 60, [(0, 2, 2600, 0)], gap=1)
    yield make(5, 16, 100, [(0, 1, 1900, 1), (1, 3, 700, 0)], equal=40)
    yield make(64, 128, 2048, [(0, 1, 2999, 0)])
    yield make(20, 72, 130, [(0, 70, 200, 1)])
