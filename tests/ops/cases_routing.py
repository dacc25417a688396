"""Cases of the families that choose: experts for tokens, and the next token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from dyno import _core

from ops import byte_rows, reference
from ops.cache_types import to_cache
from ops.cases import EXACT, F32, cases, normal
from ops.harness import Case, expect_close

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray


def router_weights(
    rng: np.random.Generator, dtype: str, experts: int, k: int
) -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
    """A plain matrix [experts, k] as bytes, and its values."""
    packed, values = to_cache(normal(rng, experts, k) / F32(np.sqrt(k)), dtype)
    return np.ascontiguousarray(packed).reshape(-1), values


@cases("moe_route")
def moe_route_cases() -> Iterator[Case]:
    def make(
        m: int,
        experts: int,
        used: int,
        gating: str,
        *,
        groups: int = 1,
        groups_used: int = 1,
        normalize: bool = False,
        bias: bool = False,
        pinned: bool = False,
        by_expert: bool = False,
    ) -> Case:
        def build(rng: np.random.Generator) -> Any:
            # Distinct logits at steps well above rounding, so that every order is decided.
            logits = (rng.permuted(np.tile(np.arange(experts), (m, 1)), axis=1) * (8.0 / experts) - 4).astype(
                F32
            )
            args: dict[str, Any] = {"logits": logits, "scale": 2.5}
            if bias:
                args["selection_bias"] = (rng.permutation(experts) * (0.37 / experts)).astype(F32)
            if pinned:
                picks = rng.permuted(np.tile(np.arange(experts), (m, 1)), axis=1)[:, :used]
                args["pinned"] = np.ascontiguousarray(picks, np.int32)
            if by_expert:
                args["expert_scale"] = np.exp(normal(rng, experts))

            def check(out: Any) -> None:
                wide = logits.astype(np.float64)
                ids = args.get("pinned")
                if ids is None:
                    bias64 = args["selection_bias"].astype(np.float64) if bias else None
                    ids = reference.route_choice(
                        wide, bias64, used=used, groups=groups, groups_used=groups_used, gating=gating
                    )
                np.testing.assert_array_equal(out["ids"], ids)
                want = reference.route_weights(wide, ids, gating=gating, normalize=normalize, scale=2.5)
                if by_expert:
                    want = want * args["expert_scale"][ids]
                np.testing.assert_allclose(out["weights"], want, rtol=2e-6)

            outputs = {"ids": np.full((m, used), -1, np.int32), "weights": np.empty((m, used), F32)}
            return args, outputs, check

        desc = {
            "m": m,
            "experts": experts,
            "used": used,
            "groups": groups,
            "groups_used": groups_used,
            "gating": gating,
            "normalize": normalize,
        }
        return Case("moe_route", desc, build, f"bias={bias}-pinned={pinned}-by_expert={by_expert}")

    for gating in ("softmax", "sigmoid", "softmax_selected"):
        yield make(1, 1, 1, gating)
        yield make(5, 13, 3, gating, normalize=True)
        yield make(9, 128, 8, gating, bias=True)
        yield make(4, 10, 10, gating, pinned=True, normalize=True)
        yield make(6, 32, 4, gating, groups=8, groups_used=2, bias=True, normalize=True)
    yield make(70, 256, 8, "sigmoid", groups=8, groups_used=4, bias=True, normalize=True)
    yield make(7, 20, 4, "softmax", normalize=True, by_expert=True)
    yield make(3, 300, 40, "sigmoid", normalize=True, by_expert=True)


@cases("moe_split")
def moe_split_cases() -> Iterator[Case]:
    def make(m: int, experts: int, used: int, counts: bool = False) -> Case:
        def build(rng: np.random.Generator) -> Any:
            ids = rng.integers(0, experts, (m, used)).astype(np.int32)
            before = rng.integers(0, 99, experts).astype(np.int32)
            places = np.full(experts, -1, np.int32)
            cached = rng.permutation(experts)[: experts // 3]
            places[cached] = np.arange(len(cached))

            def check(out: Any) -> None:
                here, there = reference.moe_split(ids, places)
                np.testing.assert_array_equal(out["here"], here)
                np.testing.assert_array_equal(out["there"], there)
                if counts:
                    chosen = np.bincount(ids.reshape(-1), minlength=experts)
                    np.testing.assert_array_equal(out["counts"], before + chosen)

            outputs = {name: np.full((m, used), 77, np.int32) for name in ("here", "there")}
            if counts:
                outputs["counts"] = before.copy()
            return {"ids": ids, "places": places}, outputs, check

        desc = {"m": m, "experts": experts, "used": used}
        return Case("moe_split", desc, build, f"counts={counts}" if counts else "")

    yield make(1, 1, 1)
    yield make(1, 128, 8)
    yield make(7, 13, 3)
    yield make(700, 60, 4)
    yield make(1, 128, 8, counts=True)
    yield make(700, 60, 4, counts=True)


@cases("norm_route")
def norm_route_cases() -> Iterator[Case]:
    def make(
        m: int,
        k: int,
        experts: int,
        used: int,
        gating: str,
        dtype: str = "f32",
        layout: str = "plain",
        *,
        groups: int = 1,
        groups_used: int = 1,
        normalize: bool = False,
        bias: bool = False,
        pinned: bool = False,
        weight: bool = True,
        gap: int = 0,
        twins: bool = False,
        as_bytes: bool = False,
    ) -> Case:
        """`as_bytes`: the normalised rows are also written as byte rows. `twins`: of every two neighbouring
        experts the logits are the same, to the last bit."""

        def build(rng: np.random.Generator) -> Any:
            x = normal(rng, m, k + gap)
            plain, wide = router_weights(rng, dtype, experts, k)
            if twins:
                for rows in (plain.reshape(experts, -1), wide):
                    rows[1::2] = rows[: experts - 1 : 2]
            gain = np.abs(normal(rng, k)) + F32(0.5)
            args: dict[str, Any] = {
                "x": x,
                "x_stride": k + gap,
                "eps": 1e-5,
                "scale": 2.5,
                "w": plain if layout == "plain" else _core.ops.repack(dtype, plain, experts, k, layout),
                "normed_stride": k + gap,
            }
            if weight:
                args["norm"] = gain
            if bias:
                args["bias"] = normal(rng, experts)
                args["selection_bias"] = normal(rng, experts) * F32(0.2)
            if pinned:
                picks = rng.permuted(np.tile(np.arange(experts), (m, 1)), axis=1)[:, :used]
                args["pinned"] = np.ascontiguousarray(picks, np.int32)
            want = reference.rms_norm(
                x[:, :k].astype(np.float64), gain.astype(np.float64) if weight else None, None, 1e-5
            )
            logits = want @ wide.T + (args["bias"].astype(np.float64) if bias else 0.0)
            if twins:
                logits[:, 1::2] = logits[:, : experts - 1 : 2]
            chosen = {"used": used, "groups": groups, "groups_used": groups_used, "gating": gating}
            bias64 = args["selection_bias"].astype(np.float64) if bias else None
            ids = args.get("pinned")
            if ids is None:
                ids = reference.route_choice(logits, bias64, **chosen)

            def check(out: Any) -> None:
                # Sums in another order may swap experts that are equal but for rounding; the weights tell.
                np.testing.assert_array_equal(np.sort(out["ids"]), np.sort(ids))
                weights = reference.route_weights(
                    logits, out["ids"], gating=gating, normalize=normalize, scale=2.5
                )
                np.testing.assert_allclose(out["weights"], weights, rtol=2e-5)
                expect_close(out["normed"][:, :k], want, EXACT)
                assert (out["normed"][:, k:] == 77).all(), "the gap between rows was written"
                if as_bytes:
                    as_written = byte_rows.encode(np.ascontiguousarray(out["normed"][:, :k]))
                    np.testing.assert_array_equal(out["bytes"].reshape(m, -1), as_written)

            outputs = {
                "ids": np.full((m, used), -1, np.int32),
                "weights": np.empty((m, used), F32),
                "normed": np.full((m, k + gap), 77, F32),
            }
            if as_bytes:
                outputs["bytes"] = np.full((m, byte_rows.encode(np.zeros((1, k), F32)).size), 77, np.uint8)
            return args, outputs, check

        desc = {
            "type": dtype,
            "layout": layout,
            "m": m,
            "k": k,
            "experts": experts,
            "used": used,
            "groups": groups,
            "groups_used": groups_used,
            "gating": gating,
            "normalize": normalize,
        } | ({"bytes": True} if as_bytes else {})
        return Case("norm_route", desc, build, f"bias={bias}-pinned={pinned}-gap={gap}" + "-twins" * twins)

    for gating in ("softmax", "sigmoid", "softmax_selected"):
        yield make(1, 1, 1, 1, gating)
        yield make(3, 30, 13, 3, gating, normalize=True, weight=False, gap=2)
        yield make(2, 256, 128, 8, gating, bias=True)
        yield make(2, 96, 40, 7, gating, normalize=True, twins=True)
    yield make(1, 2048, 128, 8, "softmax", normalize=True)
    yield make(1, 2048, 128, 7, "softmax", normalize=True, twins=True)
    yield make(1, 640, 255, 9, "softmax", twins=True)
    yield make(8, 96, 10, 10, "softmax", "f16", pinned=True, normalize=True)
    yield make(2, 34, 33, 4, "sigmoid", "bf16", gap=1)
    yield make(5, 64, 256, 8, "sigmoid", groups=8, groups_used=4, bias=True, normalize=True)
    yield make(2, 96, 40, 6, "softmax", "f16", "gpu", normalize=True)
    yield make(1, 1056, 300, 5, "softmax", "bf16", "gpu", gap=4)
    yield make(4, 64, 17, 2, "softmax_selected", "f16", "gpu", bias=True)
    yield make(2, 64, 33, 4, "softmax", "q8_0")
    for k in (4, 384, 2048):
        yield make(1, k, 64, 6, "softmax", as_bytes=True)
    yield make(3, 2880, 32, 4, "softmax_selected", bias=True, as_bytes=True)
    yield make(2, 130, 33, 4, "sigmoid", "bf16", as_bytes=True)
    yield make(5, 640, 40, 6, "softmax", "f16", "gpu", as_bytes=True)


@cases("sample")
def sample_cases() -> Iterator[Case]:
    def make(
        m: int,
        n: int,
        label: str,
        *,
        ties: bool = False,
        holes: float = 0.0,
        spread: float = 3.0,
        finite_only: bool = False,
        **settings: float,
    ) -> Case:
        """`ties`: few distinct logits. `holes`: this share is NaN, and as much minus infinity. `spread`:
        standard deviation; 0 makes all logits equal. `finite_only`: some rows hold a value that is not
        finite."""
        chosen = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **settings}

        def build(rng: np.random.Generator) -> Any:
            logits = normal(rng, m, n) * F32(spread)
            if ties:
                logits = np.round(logits)
            if holes:
                share = rng.random((m, n))
                logits[share < 2 * holes] = -np.inf
                logits[share < holes] = np.nan
                logits[-1] = np.nan  # a row without any number gives its first id
            if finite_only:
                for row in range(m):
                    at, kind = rng.integers(n), row % 5
                    if kind:
                        logits[row, at] = (np.nan, -np.nan, np.inf, -np.inf)[kind - 1]
                logits[-1] = -np.inf
            uniform = rng.random(m).astype(F32)
            uniform[0] = 0.0

            def check(out: Any) -> None:
                for row in range(m):
                    top = logits[row].max()  # NaN if any is
                    if finite_only and not np.isfinite(top):
                        assert out["out"][row] == -1, f"row {row}"
                        continue
                    wide = logits[row].astype(np.float64)
                    wide[np.isnan(wide)] = -np.inf  # such are never drawn
                    want = (
                        reference.sample(wide, uniform=float(uniform[row]), **chosen)  # type: ignore[arg-type]
                        if np.isfinite(wide).any()
                        else 0
                    )
                    assert out["out"][row] == want, f"row {row}"

            given = {"logits": logits, "uniform": uniform, **chosen}
            if finite_only:
                given["finite_only"] = True
            return given, {"out": np.full(m, -1, np.int32)}, check

        return Case("sample", {"m": m, "n_vocab": n}, build, label)

    yield make(3, 1, "one-token")
    yield make(40, 77, "greedy", temperature=0.0)
    yield make(40, 77, "plain")
    yield make(40, 77, "hot", temperature=2.5)
    yield make(40, 77, "top_k", top_k=5)
    yield make(40, 77, "top_k-past-the-end", top_k=100)
    yield make(40, 77, "top_p", top_p=0.7)
    yield make(40, 77, "min_p", min_p=0.1)
    yield make(40, 300, "all", top_k=40, top_p=0.9, min_p=0.05, temperature=0.8)
    yield make(40, 300, "tiny-top_p", top_p=1e-6)
    yield make(2, 40_000, "large", top_k=40, top_p=0.95, temperature=0.7)
    yield make(2, 151_937, "odd-greedy", temperature=0.0)
    yield make(2, 151_937, "odd-plain")
    yield make(2, 151_937, "odd-all", top_k=40, top_p=0.95, min_p=0.05, temperature=0.8)
    yield make(2, 151_937, "odd-top_p", top_p=0.9)
    yield make(2, 151_937, "flat-top_p", top_p=0.95, spread=0.5)
    yield make(2, 9_001, "flat-hot-top_p", top_p=0.8, min_p=0.2, temperature=1.7, spread=1.0)
    yield make(2, 9_001, "cold-top_p", top_p=0.99, temperature=0.05, spread=40.0)
    yield make(3, 9_001, "equal-top_p", top_p=0.37, spread=0.0)
    yield make(3, 9_001, "equal-holes-top_p", top_p=0.37, spread=0.0, holes=0.3)
    yield make(2, 40_001, "few-values-top_p", top_p=0.73, min_p=0.001, ties=True)
    yield make(2, 1_031, "all-but-rounding", top_p=0.9999999)
    yield make(1, 600_011, "more-chunks-than-are-kept-at-hand", top_p=0.6, spread=0.7)
    yield make(2, 40_001, "odd-many", top_k=3000, top_p=0.99, temperature=1.5)
    for filters in (
        {"temperature": 0.0},
        {},
        {"top_k": 11},
        {"top_p": 0.61},
        {"top_k": 30, "top_p": 0.83, "min_p": 0.01},
    ):
        label = "-".join(filters) or "plain"
        yield make(20, 333, f"ties-{label}", ties=True, **filters)
        yield make(20, 1031, f"holes-{label}", ties=True, holes=0.2, **filters)
        yield make(20, 1031, f"finite-only-{label}", finite_only=True, **filters)
    yield make(6, 151_937, "finite-only-many-blocks", finite_only=True, top_p=0.9)
