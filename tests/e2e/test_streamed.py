"""Prompts with experts on the CPU: copies cross to the main device, and answers stay the same bit for bit."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from dyno import _core
from dyno.errors import OutOfMemoryError, PlanError
from random_models import SHAPES, Shape, random_model
from random_newer import RECURRENT

if TYPE_CHECKING:
    from numpy.typing import NDArray

TINY = Path(__file__).resolve().parents[1] / "data" / "tiny"
NAMES = sorted(p.name.removesuffix("-tiny.gguf") for p in TINY.glob("*-tiny.gguf"))
MANY = Shape(
    "qwen3moe", ("q4_0", "q8_0"), 96, 3, 1, 32, 0, 100, n_layers=4, experts=16, used=2, n_ff_expert=64
)
NEVER = 1 << 24


def opened(path: Path, *, streams: bool = True, **given: Any) -> _core.Session:
    placement = {"virtual_devices": [{"streams": streams}], **given.pop("placement", {"cpu_moe": True})}
    session = {"ubatch": 8, "threads": 2, "offload_min_tokens": 1, **given.pop("session", {})}
    return _core.Session(
        path,
        load={"device": "cpu:1"},
        context={"ctx": 96, "sequences": 3},
        session=session,
        placement=placement,
        **given,
    )


def tokens(session: _core.Session, count: int, seed: int = 0) -> NDArray[np.int32]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, session.model["n_vocab"], count).astype(np.int32)


def answers(session: _core.Session) -> list[NDArray[np.float32]]:
    """Prompts of several u-batches, of several sequences at once, and single tokens behind them."""
    found = [session.decode([(0, tokens(session, 21))], "all")[0]]
    batch = [(slot, tokens(session, count, slot)) for slot, count in enumerate((3, 9, 6))]
    found.append(session.decode(batch, "last")[0])
    found.append(session.decode([(slot, tokens(session, 1, slot)) for slot in range(3)], "last")[0])
    session.decode([(1, tokens(session, 5))], "none")
    return [*found, session.decode([(1, tokens(session, 2))], "all")[0]]


def same(got: list[NDArray[np.float32]], want: list[NDArray[np.float32]], what: str) -> None:
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other, err_msg=what)


@pytest.mark.parametrize("name", NAMES)
def test_every_architecture(name: str) -> None:
    path = TINY / f"{name}-tiny.gguf"
    want = answers(
        _core.Session(path, context={"ctx": 96, "sequences": 3}, session={"ubatch": 8, "threads": 2})
    )
    experts = any(
        "_exps" in tensor["name"] for tensor in opened(path, placement={}, plan_only=True).plan["tensors"]
    )
    placements: list[dict[str, Any]] = [{"n_gpu_layers": 1}, {"n_gpu_layers": 3}]
    placements += [{"cpu_moe": True}, {"rules": [r"blk\.1\..*_exps=CPU"]}] if experts else []
    for placement in placements:
        session = opened(path, placement=placement)
        moved = [
            node for node in session.nodes() if node["list"] == "streamed" and node["key"].startswith("mat")
        ]
        assert moved, placement
        same(answers(session), want, str(placement))
        assert session.streamed["bytes"] > 0, placement


PLACES: list[dict[str, Any]] = [
    {"n_gpu_layers": 1},
    {"n_gpu_layers": 3},
    {"rules": [r"blk\.1\.=CPU", r"_norm\.weight=cpu:1"]},
]


@pytest.mark.parametrize("architecture", sorted(RECURRENT))
def test_a_state_passes_between_streamed_prompts_and_tokens(architecture: str, tmp_path: Path) -> None:
    """All lists of a plan work on one state, where the general list has it."""
    shape = next(shape for shape in SHAPES if shape.architecture == architecture)
    path = random_model(tmp_path / "m.gguf", shape)
    alone = _core.Session(path, context={"ctx": 96, "sequences": 3}, session={"ubatch": 8, "threads": 2})

    def parts(session: _core.Session) -> list[NDArray[np.float32]]:
        cuts = np.split(tokens(session, 40), [19, 20, 21, 34, 35])
        return [session.decode([(0, part)], "all")[0] for part in cuts]

    want = parts(alone)
    for placement in PLACES:
        session = opened(path, placement=placement, session={"offload_min_tokens": 2})
        lists = [{op["list"] for op in session.ops(count)} for count in (1, 8)]
        assert lists == [{"general"}, {"streamed"}]
        assert session.plan["state_bytes"] == alone.plan["state_bytes"]
        same(parts(session), want, str(placement))


def test_few_tokens_stay_with_the_cpu() -> None:
    """From offload_min_tokens x experts / used tokens of a u-batch on, here 6."""
    session = opened(TINY / "qwen3moe-tiny.gguf", plan_only=True)
    router = next(op for op in session.ops(1) if op["family"] == "moe_route")["key"]
    experts, used = (
        int(word.split("=")[1]) for word in router.split() if word.startswith(("experts=", "used="))
    )
    first = -(-experts // used)
    at = {count: {op["list"] for op in session.ops(count)} for count in range(1, 9)}
    assert at == {count: {"streamed" if count >= first else "general"} for count in range(1, 9)}
    assert f"at least {first} tokens" in session.describe_plan()
    session.set({"offload_min_tokens": NEVER})
    assert {op["list"] for op in session.ops(8)} == {"general"}
    assert {
        op["list"] for op in opened(TINY / "qwen3moe-tiny.gguf", streams=False, plan_only=True).ops(8)
    } == {"general"}


def test_each_op_by_its_name() -> None:
    def on_main(**off: bool) -> set[str]:
        session = opened(
            TINY / "qwen3moe-tiny.gguf",
            plan_only=True,
            session={f"op_offload.{op}": on for op, on in off.items()},
        )
        nodes = [node for node in session.nodes() if node["list"] == "streamed" and node["device"] == "cpu:1"]
        return {node["key"].split()[0] for node in nodes} & {"moe_up_gate", "matmul_id"}

    assert on_main() == {"moe_up_gate", "matmul_id"}
    assert on_main(moe_up_gate=False) == {"matmul_id"}
    assert on_main(matmul_id=False) == {"moe_up_gate"}
    assert on_main(matmul_id=False, moe_up_gate=False) == set()


def test_settings_may_change_between_calls(tmp_path: Path) -> None:
    path = random_model(tmp_path / "m.gguf", MANY)
    plain, session = opened(path, streams=False), opened(path)
    changes: list[dict[str, Any]] = [
        {},
        {"op_offload.matmul_id": False},
        {"ubatch": 5},
        {"offload_min_tokens": NEVER},
        {"offload_min_tokens": 0, "op_offload.matmul_id": True},
    ]
    for change in changes:
        for one in (plain, session):
            one.set(change)
            one.set_context({"ctx": 96, "sequences": 3})
        same(answers(session), answers(plain), str(change))


def test_only_experts_that_tokens_were_routed_to_cross(tmp_path: Path) -> None:
    path = random_model(tmp_path / "m.gguf", MANY)
    session = opened(path, session={"ubatch": 16, "offload_min_tokens": 0})
    prompt = tokens(session, 3)
    routing = session.decode([(0, prompt)], "last", capture_routing=True)[1]
    layers = routing.shape[0]
    chosen = sum(len(np.unique(routing[layer])) for layer in range(layers))
    counts = session.streamed
    # Gate, up and down of each chosen expert; nothing was known of any layer before.
    assert counts["matrices"] == counts["wanted"] == 3 * chosen
    assert counts["predicted"] == 0
    experts = [t for t in session.plan["tensors"] if "_exps" in t["name"]]
    assert counts["bytes"] < sum(t["bytes"] for t in experts) * chosen / (layers * 16) * 1.01

    # The same tokens again: the experts of the next layer come before its routing is known, and no others.
    session.reset()
    session.decode([(0, prompt)], "last", capture_routing=True)
    again = session.streamed
    assert again["wanted"] == 2 * counts["wanted"]
    assert again["matrices"] <= 2 * counts["matrices"]
    assert again["predicted"] > 0


def test_a_layer_comes_whole_where_all_experts_are_likely(tmp_path: Path) -> None:
    path = random_model(tmp_path / "m.gguf", MANY)
    session = opened(path, session={"ubatch": 64})
    session.decode([(0, tokens(session, 64))], "none")
    counts = session.streamed
    assert counts["predicted"] == 3 * 16 * 3  # of all layers but the first; rows end at the last attention
    assert counts["matrices"] >= counts["predicted"]


def test_pinned_routing_decides_what_crosses(tmp_path: Path) -> None:
    path = random_model(tmp_path / "m.gguf", MANY)
    session = opened(path, session={"ubatch": 16, "offload_min_tokens": 0})
    pinned = np.full((session.model["moe_layers"], 4, 2), 5, np.int32)
    pinned[:, :, 1] = 11
    got = session.decode([(0, tokens(session, 4))], "all", pinned_routing=pinned)[0]
    assert session.streamed["matrices"] == 3 * 2 * session.model["moe_layers"]
    plain = opened(path, streams=False, session={"ubatch": 16})
    np.testing.assert_array_equal(plain.decode([(0, tokens(plain, 4))], "all", pinned_routing=pinned)[0], got)


def test_copies_take_memory_of_the_main_device(tmp_path: Path) -> None:
    path = random_model(tmp_path / "m.gguf", MANY)
    session = opened(path, plan_only=True)
    main = session.plan["devices"][0]
    layers = {
        layer: sum(
            t["bytes"] for t in session.plan["tensors"] if re.match(rf"blk\.{layer}\..*_exps", t["name"])
        )
        for layer in range(4)
    }
    assert 2 * max(layers.values()) <= main["stream_bytes"] < 2 * max(layers.values()) + 4096
    assert opened(path, streams=False, plan_only=True).plan["devices"][0]["stream_bytes"] == 0
    big = Shape("qwen3moe", ("q4_0", "q8_0"), 256, 3, 1, 32, 0, 100, experts=64, used=2, n_ff_expert=128)
    path = random_model(tmp_path / "big.gguf", big)
    limited = {"virtual_devices": [{"streams": True, "memory_mib": 2}], "cpu_moe": True}
    with pytest.raises(OutOfMemoryError, match="copies of the CPU's weights"):
        opened(path, placement=limited)
    opened(path, placement=limited, session={"op_offload.matmul_id": False, "op_offload.moe_up_gate": False})


def test_what_cannot_be_is_an_error() -> None:
    with pytest.raises(PlanError, match="offload_min_tokens is -1"):
        opened(TINY / "qwen3moe-tiny.gguf", plan_only=True, session={"offload_min_tokens": -1})


WITH_EXPERTS = [
    name for name in NAMES if int(_core.describe_model(str(TINY / f"{name}-tiny.gguf"))["experts"]) > 0
]


def nmse(got: NDArray[np.float32], want: NDArray[np.float32]) -> float:
    g, w = got.astype(np.float64), want.astype(np.float64)
    return float(((g - w) ** 2).sum() / ((w - w.mean()) ** 2).sum())


CPU = next(device for device in _core.devices() if device["kind"] == "cpu")
LIMITS = {
    "avx512_vnni": 1e-9,
    "avx2": 2e-9,
    "portable": 1e-8,
}  # measured: 1.1e-9 with AVX2, 5.6e-9 without vectors


@pytest.mark.parametrize("share", [-1, 1, 30, 100])
@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_the_cpu_shares_the_experts_of_prompts(name: str, share: int) -> None:
    """Each device adds the slots of its own experts, so sums of a few terms round in another order, unless
    one device has all. Layers make that larger; the limit is as for other u-batches, and above it where sums
    have fewer lanes (`LIMITS`). Routing is pinned: the last bit may decide it."""
    path = TINY / f"{name}-tiny.gguf"
    plain = _core.Session(
        path, load={"numerics": "exact"}, context={"ctx": 96, "sequences": 3},
        session={"ubatch": 8, "threads": 2},
    )  # fmt: skip
    prompt = tokens(plain, 43)
    want, routing = plain.decode([(0, prompt)], "all", capture_routing=True)
    rates = {"cpu": {"memory_gbps": 10.0, "gflops_one": 10.0, "gflops_many": 100.0}}
    session = _core.Session(
        path, load={"device": "cpu:1", "numerics": "exact"}, context={"ctx": 96, "sequences": 3},
        session={"ubatch": 8, "threads": 2, "offload_min_tokens": 1, "cpu_share": share},
        placement={"virtual_devices": [{"streams": True, "link_gbps": 1}], "cpu_moe": True, "rates": rates},
    )  # fmt: skip
    got = session.decode([(0, prompt)], "all", pinned_routing=routing)[0]
    if share == 100:  # all experts on one device: one order
        np.testing.assert_array_equal(got, want)
    assert nmse(got, want) < LIMITS[CPU["isa"]]
    counts = session.streamed
    if share == 100:
        assert counts["matrices"] == 0
    if share in (30, 100):
        assert counts["shared"] > 0
    session.set({"cpu_share": 0})
    session.reset()
    np.testing.assert_array_equal(session.decode([(0, prompt)], "all", pinned_routing=routing)[0], want)


def test_the_share_of_the_cpu_has_the_fewest_rows(tmp_path: Path) -> None:
    path = random_model(tmp_path / "m.gguf", MANY)
    session = opened(path, session={"ubatch": 16, "offload_min_tokens": 0, "cpu_share": 50})
    prompt = tokens(session, 16)
    routing = session.decode([(0, prompt)], "last", capture_routing=True)[1]
    routed = [len(np.unique(layer)) for layer in routing]
    counts = session.streamed
    # Nothing was known of any layer, so half of the experts crossed ahead where all were expected.
    assert 0 < counts["shared"] <= sum(n // 2 for n in routed)
    assert counts["wanted"] == 3 * (sum(routed) - counts["shared"])


def pinned(session: _core.Session, *pairs: tuple[tuple[int, int], int]) -> NDArray[np.int32]:
    """Routing of so many tokens to each pair of experts, alike in all layers."""
    rows = [pair for pair, count in pairs for _ in range(count)]
    return np.ascontiguousarray(np.broadcast_to(np.int32(rows), (session.model["moe_layers"], len(rows), 2)))


def test_an_expert_with_many_rows_does_not_stay_with_the_cpu(tmp_path: Path) -> None:
    session = opened(random_model(tmp_path / "m.gguf", MANY), session={"ubatch": 8, "cpu_share": 33})
    prompt = tokens(session, 8)

    def crossed(*pairs: tuple[tuple[int, int], int]) -> tuple[int, int]:
        """Matrices, and experts that the CPU took."""
        before = session.streamed
        session.decode([(0, prompt)], "all", pinned_routing=pinned(session, *pairs))
        after = session.streamed
        return after["matrices"] - before["matrices"], after["shared"] - before["shared"]

    layers = session.model["moe_layers"]
    # Of four experts the CPU takes one: 0, which has one row.
    assert crossed(((0, 1), 1), ((1, 2), 2), ((1, 3), 2), ((2, 3), 3)) == (9 * layers, layers)
    # Behind the first layer 1, 2 and 3 crossed ahead, so the CPU takes 0 again, now with half of all rows.
    assert crossed(((0, 1), 2), ((0, 2), 3), ((0, 3), 3)) == (9 * layers, layers)
    # Of three it takes none. 0 is expected now, and 1 is not.
    assert crossed(((0, 2), 4), ((0, 3), 4)) == (9 * layers, 0)


@pytest.mark.parametrize("share", [30, 100])
def test_cached_experts_stay_with_the_main_device(tmp_path: Path, share: int) -> None:
    """A MiB holds 6 of 64 experts."""
    shape = replace(MANY, types=("q4_0", "q4_0"), n_embd=384, n_ff_expert=256)
    path = random_model(tmp_path / "m.gguf", shape)
    load = {"device": "cpu:1", "numerics": "exact", "expert_cache_mib": 1}
    context = {"ctx": 96, "sequences": 3}
    plain = _core.Session(path, load={"numerics": "exact"}, context=context, session={"ubatch": 16})
    session = _core.Session(
        path, load=load, context=context, session={"ubatch": 16, "offload_min_tokens": 0, "cpu_share": share},
        placement={"virtual_devices": [{"streams": True}], "cpu_moe": True},
    )  # fmt: skip
    prompt = tokens(plain, 43)
    want, routing = plain.decode([(0, prompt)], "all", capture_routing=True)
    assert nmse(session.decode([(0, prompt)], "all", pinned_routing=routing)[0], want) < 1e-9
    counts = session.streamed
    assert counts["cached"] > 0
    assert counts["shared"] > 0
    if share == 100:
        assert counts["matrices"] == 0  # all others are the CPU's
        assert counts["wanted"] == counts["cached"]


@pytest.mark.parametrize(("link", "some"), [(1000.0, False), (0.01, True)])
def test_a_balanced_share_follows_from_the_link(tmp_path: Path, link: float, some: bool) -> None:
    rates = {"cpu": {"memory_gbps": 10.0, "gflops_one": 10.0, "gflops_many": 100.0}}
    session = opened(
        random_model(tmp_path / "m.gguf", MANY),
        session={"ubatch": 16, "cpu_share": -1},
        placement={
            "virtual_devices": [{"streams": True, "link_gbps": link}], "cpu_moe": True, "rates": rates,
        },
    )  # fmt: skip
    session.decode([(0, tokens(session, 16))], "last")
    assert (session.streamed["shared"] > 0) == some


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_a_share_of_none_costs_nothing(name: str) -> None:
    """Its rows do not cross, and the CPU writes none. On an H100 they took two thirds of a prompt's time."""
    path = TINY / f"{name}-tiny.gguf"
    rates = {"cpu": {"memory_gbps": 10.0, "gflops_one": 10.0, "gflops_many": 100.0}}
    where = {"virtual_devices": [{"streams": True, "link_gbps": 1000}], "cpu_moe": True, "rates": rates}
    session = _core.Session(
        path, load={"device": "cpu:1"}, context={"ctx": 96, "sequences": 3},
        session={"ubatch": 43, "threads": 2, "offload_min_tokens": 0, "cpu_share": -1}, placement=where,
    )  # fmt: skip
    prompt = tokens(session, 43)
    layers = int(session.model["moe_layers"])

    def sums() -> int:
        """Launches that add rows of experts: one a layer on the main device, and two for the CPU's share."""
        session.reset()
        rows = session.time_ops([(0, prompt)], rows="all")
        return sum(int(row["count"]) for row in rows if row["key"].startswith("moe_sum"))

    assert sums() == layers
    session.reset()
    got = session.decode([(0, prompt)], "all")[0]
    assert session.streamed["shared"] == 0
    session.set({"cpu_share": 50})
    # The first layer's alone: experts of the others cross ahead, as the last prompt used them.
    assert sums() == layers + 2
    session.set({"cpu_share": 0})
    session.reset()
    np.testing.assert_array_equal(got, session.decode([(0, prompt)], "all")[0])


def test_a_share_that_cannot_be() -> None:
    for share in (-2, 101):
        with pytest.raises(PlanError, match=f"cpu_share is {share}"):
            opened(TINY / "qwen3moe-tiny.gguf", plan_only=True, session={"cpu_share": share})
