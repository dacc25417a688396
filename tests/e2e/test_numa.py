"""Weights and threads over NUMA nodes: the same bits for every mode, the memory of copies, refusals."""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dyno
import numpy as np
import pytest
from dyno import _core
from dyno.cli import app
from dyno.errors import OutOfMemoryError, PlanError
from numa_tree import Node, cores, write_nodes
from own_process import found_by
from random_models import Shape, random_model
from typer.testing import CliRunner
from waiting import LONG

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

TINY = Path(__file__).resolve().parents[1] / "data" / "tiny"
NAMES = sorted(p.name.removesuffix("-tiny.gguf") for p in TINY.glob("*-tiny.gguf"))
MODES = ("interleave", "pin", "mirror")
TOKENS = list(range(3, 40))
# Several pages of each matrix, experts, and an output that is the embedding table as well.
SHAPES = {
    "dense": Shape("llama", ("q4_0", "q6_k"), 256, 4, 2, 64, 512, 300, tied=True),
    "experts": Shape("qwen3moe", ("q4_0", "q8_0"), 128, 4, 2, 32, 0, 200, experts=8, used=2, n_ff_expert=64),
}


@pytest.fixture
def two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of two nodes with the same cores. The system refuses pages on the second one."""
    root = write_nodes(tmp_path / "machine", [Node(cores()), Node(cores())])
    monkeypatch.setenv("DYNO_NUMA_ROOT", str(root))
    return root


def opened(path: Path, mode: str, **settings: Any) -> dyno.Engine:
    given: dict[str, Any] = {"ctx": 96, "ubatch": 16, "threads": 4, "threads_batch": 3, **settings}
    return dyno.Engine(path, device=given.pop("device", "cpu"), profile=None, numa=mode, **given)


def logits(engine: dyno.Engine) -> NDArray[np.float32]:
    rows = [engine.logits(TOKENS, rows="all")]
    rows += [engine.logits([token], rows="last", reset=False).reshape(1, -1) for token in (5, 9, 11)]
    return np.concatenate([row.reshape(-1, row.shape[-1]) for row in rows])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_the_same_bit_for_bit(two_nodes: Path, name: str, mode: str) -> None:
    with opened(TINY / f"{name}-tiny.gguf", "off") as engine:
        want = logits(engine)
    with opened(TINY / f"{name}-tiny.gguf", mode) as engine:
        assert engine.plan["numa_nodes"] == 2
        np.testing.assert_array_equal(logits(engine), want)
        engine.set(threads=2, threads_batch=5)  # threads change their nodes
        np.testing.assert_array_equal(logits(engine), want)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("repack", [True, False])
def test_quantised_weights_too(
    tmp_path: Path, two_nodes: Path, shape: Shape, mode: str, repack: bool
) -> None:
    random_model(tmp_path / "random.gguf", shape, seed=4)
    with opened(tmp_path / "random.gguf", "off", cpu_repack=repack) as engine:
        want = logits(engine)
    with opened(tmp_path / "random.gguf", mode, cpu_repack=repack) as engine:
        np.testing.assert_array_equal(logits(engine), want)
        # A table that rows are read from stays in the file; everything else is a copy.
        mapped = {t["name"] for t in engine.plan["tensors"] if t["mapped"]}
        assert mapped <= {"token_embd.weight"}


def test_over_virtual_devices_that_stream_as_well(two_nodes: Path) -> None:
    where: dict[str, Any] = {
        "device": "cpu:1",
        "virtual_devices": {"cpu:1": {"streams": 1}},
        "cpu_moe": True,
        "offload_min_tokens": 1,
    }
    with opened(TINY / "qwen3moe-tiny.gguf", "off", **where) as engine:
        want = logits(engine)
        assert engine.diagnostics.weights_by_node()
    with opened(TINY / "qwen3moe-tiny.gguf", "mirror", **where) as engine:
        np.testing.assert_array_equal(logits(engine), want)


# ---- which memory ----


def plan_of(path: Path, mode: str, nodes: int, **placement: Any) -> dict[str, Any]:
    session = _core.Session(
        str(path), load={"numa": mode}, session={"cuda_graphs": False}, plan_only=True,
        device={**_core.cpu_info(), "numa_nodes": nodes}, placement=placement,
    )  # fmt: skip
    return {**session.plan, "text": session.describe_plan()}


def test_the_plan_counts_a_copy_for_each_node(tmp_path: Path) -> None:
    path = tmp_path / "random.gguf"
    random_model(path, SHAPES["experts"], seed=1)
    one = plan_of(path, "off", 4)
    for nodes in (2, 3, 4):
        plan = plan_of(path, "mirror", nodes)
        copied = sum(t["bytes"] for t in plan["tensors"] if not t["mapped"])
        assert plan["mirror_bytes"] == (nodes - 1) * copied
        assert plan["weights_bytes"] == one["weights_bytes"] + plan["mirror_bytes"]
        assert plan["devices"][0]["weights_bytes"] == plan["weights_bytes"]
        assert plan["total_bytes"] >= plan["weights_bytes"]
        mib = f"{plan['mirror_bytes'] / 2**20:.1f} MiB"
        assert f"a copy of the CPU's weights on each of {nodes} nodes, {mib} more" in plan["text"]
    for mode in ("off", "interleave", "pin"):
        plan = plan_of(path, mode, 2)
        assert (plan["mirror_bytes"], plan["weights_bytes"]) == (0, one["weights_bytes"])


def test_one_node_is_nothing_to_place(caplog: pytest.LogCaptureFixture) -> None:
    path = TINY / "llama-tiny.gguf"
    assert "numa pin: not used, because there is one node" in plan_of(path, "pin", 1)["text"]
    assert "numa" not in plan_of(path, "off", 1)["text"]
    if _core.cpu_info()["numa_nodes"] > 1:
        pytest.skip("this machine has several nodes")
    with caplog.at_level(logging.WARNING), opened(path, "mirror") as engine:
        assert engine.plan["mirror_bytes"] == 0
    assert "numa=mirror changes nothing: this process may use one NUMA node" in caplog.text


def test_copies_that_do_not_fit_are_an_error_that_names_the_way_out(two_nodes: Path) -> None:
    path = TINY / "qwen3moe-tiny.gguf"
    with opened(path, "mirror") as engine:
        plan = engine.plan
    need = plan["total_bytes"]
    with pytest.raises(OutOfMemoryError, match=r"numa=interleave \(frees \d+\.\d MiB\)"):
        opened(path, "mirror", ram=need - plan["mirror_bytes"] // 2)
    with opened(path, "interleave", ram=need - plan["mirror_bytes"] // 2) as engine:
        assert engine.plan["numa_nodes"] == 2


def test_a_node_that_is_smaller_than_a_copy_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [Node(cores()), Node(cores(), mib=1)]
    monkeypatch.setenv("DYNO_NUMA_ROOT", str(write_nodes(tmp_path / "machine", nodes)))
    shape = Shape("llama", ("f32",), 512, 4, 2, 128, 512, 300)
    random_model(tmp_path / "large.gguf", shape, seed=3)
    with pytest.raises(OutOfMemoryError, match=r"on each node, but node 1 has 1 MiB; use numa=interleave"):
        opened(tmp_path / "large.gguf", "mirror")
    with opened(tmp_path / "large.gguf", "interleave") as engine:
        logits(engine)


@pytest.mark.parametrize("mode", MODES)
def test_a_refusal_is_one_warning(two_nodes: Path, mode: str, caplog: pytest.LogCaptureFixture) -> None:
    """The second node of the made-up machine is none of this one."""
    if any(node.name == "node1" for node in Path("/sys/devices/system/node").glob("node*")):
        pytest.skip("this machine has a second node")
    with caplog.at_level(logging.WARNING), opened(TINY / "llama-tiny.gguf", mode) as engine:
        logits(engine)
        copies = engine.diagnostics.weights_by_node()
    assert len(copies) == (2 if mode == "mirror" else 1)
    if mode == "interleave":  # the system takes the nodes that there are
        return
    told = [line for line in caplog.messages if "refuses to place pages on nodes" in line]
    assert len(told) == 1, caplog.messages


# mbind and sched_setaffinity, by the number of the machine.
CALLS = {"x86_64": {"mbind": 237, "setaffinity": 203}, "aarch64": {"mbind": 235, "setaffinity": 122}}
TOLD = {"mbind": "refuses to place pages on nodes", "setaffinity": "refuses to bind threads to their nodes"}


@pytest.mark.skipif(
    os.uname().machine not in CALLS, reason="the numbers of its system calls are not known here"
)
@pytest.mark.parametrize("refused", [["mbind"], ["setaffinity"], ["mbind", "setaffinity"]], ids=" ".join)
@pytest.mark.parametrize("mode", MODES)
def test_a_container_that_refuses_is_told_and_the_answers_stay(
    two_nodes: Path, mode: str, refused: list[str]
) -> None:
    numbers = [str(CALLS[os.uname().machine][name]) for name in refused]
    found, _ = found_by(
        Path(__file__).with_name("numa_refused.py"), str(TINY / "qwen3moe-tiny.gguf"), mode, *numbers
    )
    if "no filter" in found:
        pytest.skip("the system takes no filter of system calls")
    assert found["same"]
    for name in refused:
        lines = [line for line in found["told"] if TOLD[name] in line]
        assert len(lines) == 1, found
        assert "Operation not permitted" in lines[0]
    assert len(found["told"]) == len({*refused} | ({"mbind"} if mode != "interleave" else set()))


def test_each_copy_holds_as_much(tmp_path: Path, two_nodes: Path) -> None:
    random_model(tmp_path / "random.gguf", SHAPES["dense"], seed=2)
    with opened(tmp_path / "random.gguf", "mirror") as engine:
        logits(engine)
        first, second = (sum(copy.values()) for copy in engine.diagnostics.weights_by_node())
    assert first == second > 0


# ---- threads ----


def affinities(during: Callable[[], object], wanted: set[frozenset[int]]) -> set[frozenset[int]]:
    """The affinities that threads of this process have while `during` runs: again and again, until a thread
    has looked a few times and has seen the `wanted` ones.
    """
    found: set[frozenset[int]] = set()
    done = threading.Event()
    looks: list[None] = []

    def watch() -> None:
        while not done.is_set():
            for task in os.listdir("/proc/self/task"):
                try:
                    found.add(frozenset(os.sched_getaffinity(int(task))))
                except ProcessLookupError:
                    continue  # it has ended
            looks.append(None)
            done.wait(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    end = time.monotonic() + LONG
    try:
        while (len(looks) < 4 or not wanted <= found) and time.monotonic() < end:
            during()
    finally:
        done.set()
        watcher.join()
    return found


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_threads_stay_on_their_nodes_and_the_caller_gets_its_cores_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained_model: Path
) -> None:
    first, *others = sorted(os.sched_getaffinity(0))
    nodes = [Node(str(first)), Node(",".join(map(str, others)))]
    monkeypatch.setenv("DYNO_NUMA_ROOT", str(write_nodes(tmp_path / "machine", nodes)))
    before = os.sched_getaffinity(0)
    with opened(trained_model, "pin", threads=2, threads_batch=2) as engine:
        pinned = {frozenset({first}), frozenset(others)}
        assert pinned <= affinities(lambda: logits(engine), pinned)
        assert os.sched_getaffinity(0) == before
        with pytest.raises(PlanError):
            engine.logits(list(range(97)))
        assert os.sched_getaffinity(0) == before
    with opened(trained_model, "off", threads=2, threads_batch=2) as engine:
        usual = {frozenset(before)}
        assert affinities(lambda: logits(engine), usual) == usual


# ---- the command line ----


@pytest.mark.parametrize(
    ("value", "answer"),
    [
        ("distribute", "interleave distributes"),
        ("isolate", "numactl --cpunodebind"),
        ("numactl", "every value respects"),
        ("both", "must be one of"),
    ],
)
def test_values_of_llama_cpp_are_answered(value: str, answer: str) -> None:
    found = CliRunner().invoke(app, ["run", str(TINY / "llama-tiny.gguf"), "-p", "x", "--numa", value])
    assert found.exit_code == 2
    assert answer in " ".join(found.output.replace("│", " ").split())


def test_explain_plan_prints_the_copies(two_nodes: Path) -> None:
    arguments = ["explain", "plan", str(TINY / "llama-tiny.gguf"), "--no-profile", "--device", "cpu"]
    found = CliRunner().invoke(app, [*arguments, "--numa", "mirror"])
    assert found.exit_code == 0, found.output
    assert "numa mirror: a copy of the CPU's weights on each of 2 nodes" in found.output
