"""The knob `numa`: only where weights of the CPU have two nodes or more."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from dyno import _core
from dyno_tuner.core.protocol import Workload
from dyno_tuner.run.session import Request, space_for
from dyno_tuner.run.tune import Options
from dyno_tuner.targets.dyno.target import DynoTarget
from numa_tree import Node, cores, write_nodes

if TYPE_CHECKING:
    from dyno_tuner.space.knobs import Knob

MODEL = Path(__file__).parents[2] / "data" / "tiny" / "qwen3moe-tiny.gguf"
LIMITS = {"link_gbps": 8, "latency_us": 10, "streams": 1}


def knob(target: DynoTarget) -> Knob | None:
    request = Request(str(MODEL), Options(Workload(pp=128, tg=4)), ctx=256)
    return next((k for k in space_for(target.describe(), request).knobs if k.name == "numa"), None)


def test_there_is_no_knob_on_one_node() -> None:
    if len(_core.numa_nodes()) > 1:
        pytest.skip("this machine has several nodes")
    target = DynoTarget(str(MODEL), device="cpu", ctx=256)
    assert knob(target) is None
    assert "host_nodes" not in target.describe().engine


@pytest.mark.parametrize("device", ["cpu", "cpu:1"])
def test_two_nodes_make_a_knob(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setenv("DYNO_NUMA_ROOT", str(write_nodes(tmp_path, [Node(cores()), Node(cores())])))
    given = {} if device == "cpu" else {"virtual_devices": {"cpu:1": LIMITS}}
    target = DynoTarget(str(MODEL), device=device, ctx=256, **given)  # type: ignore[arg-type]
    found = knob(target)
    assert found is not None
    assert (found.default, set(found.values)) == ("off", {"off", "interleave", "pin", "mirror"})
    assert found.fidelity == "exact"
    one, two = target.memory({}), target.memory({"numa": "mirror"})
    assert one is not None
    assert two is not None
    assert two > one
    assert target.memory({"numa": "pin"}) == one
