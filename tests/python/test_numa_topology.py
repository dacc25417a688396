"""NUMA nodes as the process may use them, and pages on them."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import TYPE_CHECKING

import numpy as np
import pytest
from dyno import _core, info
from numa_tree import Node, cores, write_nodes

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

PAGE = os.sysconf("SC_PAGESIZE")
HERE = cores()
FIRST = HERE.split(",")[0]


def numbers(root: Path) -> list[tuple[int, list[int]]]:
    return [(node["number"], node["cpus"]) for node in _core.numa_nodes(str(root))]


def mine() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def test_each_node_has_its_cores_and_memory(tmp_path: Path) -> None:
    write_nodes(tmp_path, [Node(HERE, 2048, "10 21"), Node(FIRST, 512, "21 10")])
    first, second = _core.numa_nodes(str(tmp_path))
    assert first == {"number": 0, "cpus": mine(), "memory_bytes": 2048 << 20}
    assert second == {"number": 1, "cpus": [int(FIRST)], "memory_bytes": 512 << 20}


def test_cores_that_the_affinity_forbids_do_not_count(tmp_path: Path) -> None:
    absent = max(mine()) + 1
    write_nodes(tmp_path, [Node(f"{HERE},{absent}-{absent + 3}"), Node(f"{absent + 4}-{absent + 7}")])
    assert numbers(tmp_path) == [(0, mine())]


def test_cores_of_a_node_without_memory_belong_to_the_nearest_one(tmp_path: Path) -> None:
    write_nodes(
        tmp_path,
        [Node(FIRST, 1024, "10 40 20"), Node(FIRST, 1024, "40 10 30"), Node(HERE, 0, "30 20 10")],
    )
    assert numbers(tmp_path) == [(0, [int(FIRST)]), (1, sorted([int(FIRST), *mine()]))]


def test_a_cpuset_takes_nodes_away(tmp_path: Path) -> None:
    write_nodes(tmp_path, [Node(HERE, 1024, "10 20"), Node(HERE, 1024, "20 10")], allowed="1")
    assert [node for node, _ in numbers(tmp_path)] == [1]


def test_memory_without_cores_is_no_node(tmp_path: Path) -> None:
    write_nodes(tmp_path, [Node(HERE), Node("")])
    assert numbers(tmp_path) == [(0, mine())]


@pytest.mark.parametrize("text", ["", "x", "3-1", "0-99999999999", "-"])
def test_a_list_that_makes_no_sense_names_no_core(tmp_path: Path, text: str) -> None:
    write_nodes(tmp_path, [Node(HERE), Node(text)])
    assert numbers(tmp_path) == [(0, mine())]


def test_a_machine_that_tells_nothing_has_one_node(tmp_path: Path) -> None:
    assert _core.numa_nodes(str(tmp_path)) == [{"number": 0, "cpus": [], "memory_bytes": 0}]


def test_this_machine_has_a_node_of_its_own() -> None:
    assert {cpu for node in _core.numa_nodes() for cpu in node["cpus"]} <= set(mine())
    assert _core.cpu_info()["numa_nodes"] == len(_core.numa_nodes())


@pytest.mark.parametrize(
    ("threads", "nodes"),
    [(1, [0]), (2, [0, 1]), (3, [0, 0, 1]), (4, [0, 0, 1, 1]), (5, [0, 0, 0, 1, 1])],
)
def test_threads_stand_together_in_proportion_to_cores(
    tmp_path: Path, threads: int, nodes: list[int]
) -> None:
    write_nodes(tmp_path, [Node(HERE), Node(HERE)])
    assert [_core.numa_of_thread(i, threads, str(tmp_path)) for i in range(threads)] == nodes


def test_info_names_several_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_nodes(tmp_path / "two", [Node(HERE, 2048), Node(FIRST, 512)])
    monkeypatch.setenv("DYNO_NUMA_ROOT", str(root))
    lines = info.text(info.collect("cpu")).splitlines()
    assert f"    NUMA node 0: {len(mine())} of the CPUs, 2.0 GiB" in lines
    assert "    NUMA node 1: 1 of the CPUs, 0.5 GiB" in lines
    monkeypatch.setenv("DYNO_NUMA_ROOT", str(write_nodes(tmp_path / "one", [Node(HERE)])))
    assert "NUMA" not in info.text(info.collect("cpu"))


# ---- pages of this machine ----


def fresh(pages: int) -> NDArray[np.uint8]:
    """Pages that nobody has touched."""
    return np.frombuffer(mmap.mmap(-1, pages * PAGE), np.uint8)


def policy_of(memory: NDArray[np.uint8]) -> int:
    """The number of the policy of the first page, as linux/mempolicy.h has it."""
    mode = ctypes.c_int(-1)
    libc = ctypes.CDLL(None, use_errno=True)
    by_address, number = 2, {"x86_64": 239, "aarch64": 236}[os.uname().machine]
    address = ctypes.c_void_p(memory.ctypes.data)
    if libc.syscall(number, ctypes.byref(mode), None, 0, address, by_address):
        pytest.skip(f"the system tells no policy: {os.strerror(ctypes.get_errno())}")
    return mode.value


@pytest.mark.parametrize(("interleave", "policy"), [(False, 1), (True, 3)])
def test_pages_lie_on_the_node_that_was_asked_for(interleave: bool, policy: int) -> None:
    node = _core.numa_nodes()[0]["number"]
    memory = fresh(8)
    refused = _core.place_pages(memory, interleave, [node])
    if refused:
        pytest.skip(f"pages cannot be placed here: {refused}")
    assert policy_of(memory) == policy
    assert set(_core.nodes_of_pages(memory)) == {-1}  # nothing was touched
    memory[: 4 * PAGE : PAGE] = 1
    assert _core.nodes_of_pages(memory) == [node] * 4 + [-1] * 4


def test_a_part_of_a_page_at_the_end_stays_with_its_neighbour() -> None:
    node = _core.numa_nodes()[0]["number"]
    memory = fresh(3)
    if refused := _core.place_pages(memory[: PAGE + 100], False, [node]):
        pytest.skip(f"pages cannot be placed here: {refused}")
    assert policy_of(memory) == 1
    assert policy_of(memory[PAGE:]) == 0
    assert _core.place_pages(memory[2 * PAGE : 2 * PAGE + 50], False, [node]) == ""
    assert policy_of(memory[2 * PAGE :]) == 0


def test_a_node_that_is_not_there_is_refused_with_a_reason() -> None:
    assert _core.place_pages(fresh(2), False, [200])
