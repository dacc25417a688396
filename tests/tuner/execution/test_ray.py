"""Workers that Ray places, on a cluster of this machine alone that these tests start."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from conftest_tuner import WORKLOAD
from dyno import _core
from dyno_tuner.cli.commands import app
from dyno_tuner.core.errors import TuneError
from dyno_tuner.core.options import Options
from dyno_tuner.core.protocol import Measurement, OpContext
from dyno_tuner.execution.ray_workers import Cluster, Needs, RayExecutor
from dyno_tuner.record import journal
from dyno_tuner.run.session import Request, Result, run
from dyno_tuner.targets.simulated.target import SimulatedTarget
from real_faults import patient
from typer.testing import CliRunner
from waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.alone, pytest.mark.cluster]  # Ray starts its own processes on every core
ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'gguf-dyno[ray]'")


HANDLERS: list[object] = []
"""Who got SIGTERM before the cluster started, and who after."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    HANDLERS[:] = [signal.getsignal(signal.SIGTERM)]
    made = Cluster("local", num_cpus=2, object_store_memory=80_000_000)
    HANDLERS.append(signal.getsignal(signal.SIGTERM))
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other programs of this machine may keep its cluster from placing a worker for a while."""
    monkeypatch.setattr("dyno_tuner.execution.ray_workers.LOCAL_SECONDS", 300.0)


@pytest.fixture
def placed(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[list[RayExecutor]]:
    """Two workers of the simulated engine; `request.param` has what is other with each."""
    both = getattr(request, "param", ({}, {}))
    usual = {"surface": "saturating", "seed": 4}
    made = [patient(cluster.workers(1, "simulated", {**usual, **own}, Needs(cpus=0.5))[0]) for own in both]
    yield made
    for executor in made:
        executor.close()
    cluster.release()


def _tune(folder: Path, executors: list[RayExecutor], surface: str = "saturating", **more: Any) -> Result:
    options = Options(WORKLOAD, seed=4, **{"max_trials": 17, "rounds": 2, "max_rounds": 2, **more})
    request = Request("simulated", options, out=folder / "p.yaml", quiet=True)
    return run(request, executors[0], SimulatedTarget(surface).surface.space(), executors[1:])


def _operations(result: Result, device: int) -> list[dict[str, Any]]:
    path = journal.of_device(result.journal, device) if device else result.journal
    return [r for r in journal.load(path).records if "op" in r]


def test_workers_of_a_cluster_search_together(tmp_path: Path, placed: list[RayExecutor]) -> None:
    result = _tune(tmp_path, placed)
    assert result.outcome.status == "complete"
    assert result.outcome.entries
    for number in range(2):
        operations = _operations(result, number)
        searched = sum(r["key"].startswith("screen/t") for r in operations)
        assert searched == 8 or (
            number == 0 and searched > 8
        )  # the first also tries what is beside the winner
        assert {r["result"].get("status") for r in operations} == {"ok"}


def test_it_finds_what_workers_of_this_machine_find(tmp_path: Path, placed: list[RayExecutor]) -> None:
    from dyno_tuner.execution.inline_executor import InlineExecutor

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    here: Any = [InlineExecutor(SimulatedTarget("saturating", 4)) for _ in range(2)]
    assert _tune(tmp_path / "a", placed).outcome.to_dict() == _tune(tmp_path / "b", here).outcome.to_dict()


@pytest.mark.parametrize("placed", [({"surface": "faulty", "real_faults": True},) * 2], indirect=True)
def test_a_crash_on_a_node_costs_one_trial(tmp_path: Path, placed: list[RayExecutor]) -> None:
    result = _tune(tmp_path, placed, "faulty", max_trials=30)
    assert {str(f.status) for f in result.outcome.failures} & {"crash", "oom", "timeout"}
    assert result.outcome.status == "complete"


def test_a_node_that_is_lost_costs_one_trial(tmp_path: Path, placed: list[RayExecutor]) -> None:
    measurements = 0
    second = placed[1]
    real = second.measurement

    def is_gone(actor: Any) -> bool:
        try:
            ray.get(actor.call.remote("describe"))
        except ray.exceptions.RayActorError:
            return True
        return False

    def lost(*arguments: Any) -> Measurement:
        nonlocal measurements
        before, measurements = measurements, measurements + arguments[4].key.startswith("screen/t")
        if (before, measurements) == (1, 2):
            ray.kill(second._actor)
            until(lambda: is_gone(second._actor))  # a call that comes before the end would be answered
        return real(*arguments)

    second.measurement = lost  # type: ignore[method-assign]
    result = _tune(tmp_path, placed)
    (failure,) = result.outcome.failures
    assert str(failure.status) == "crash"
    assert "worker 1: its node or process was lost" in failure.message
    assert len([r for r in _operations(result, 1) if r["key"].startswith("screen/t")]) == 8
    assert result.outcome.status == "complete"


@pytest.mark.parametrize("placed", [({}, {"device": {"cores": 6}})], indirect=True)
def test_nodes_of_two_kinds_are_refused(tmp_path: Path, placed: list[RayExecutor]) -> None:
    with pytest.raises(TuneError, match=r"another kind of device than .*cores"):
        _tune(tmp_path, placed)


@pytest.mark.parametrize("placed", [({"surface": "nowhere"}, {})], indirect=True)
def test_what_the_node_says_is_one_line(placed: list[RayExecutor]) -> None:
    with pytest.raises(TuneError, match=r"^worker 1: .*no surface 'nowhere'") as caught:
        placed[0].describe()
    assert "\n" not in str(caught.value)


def test_the_gpu_is_watched_where_it_is(placed: list[RayExecutor]) -> None:
    """No GPU here: the window comes from the node all the same, and has nothing in it."""
    description = placed[0].describe()
    with placed[0].watch("0000:00:07.0") as watch, watch.window() as window:
        context = OpContext("k")
        space = SimulatedTarget("saturating").surface.space()
        measurement = placed[0].measurement(
            space.configuration(space.default), WORKLOAD, ["pp"], Options(WORKLOAD).policy, context, 30.0
        )
    assert str(measurement.status) == "ok"
    assert window.readings == 0
    seen = placed[0].look_around(__file__, description)
    assert "load" in seen.state
    assert seen.rates["memory_gbps"] > 0


IN_A_FOLDER_WITH_MODULES = """
import os, sys
from dyno_tuner.execution.ray_workers import Cluster, Needs
cluster = Cluster("local", num_cpus=2, object_store_memory=80_000_000)
assert os.getcwd() == sys.argv[2]
worker = cluster.workers(1, "dyno", {"model": sys.argv[1]}, Needs(cpus=0.5))[0]
try:
    print(worker.describe().device["cores"])
finally:
    worker.close()
    cluster.close()
"""


@pytest.mark.parametrize("omp", [None, "1"])
def test_a_module_beside_the_model_is_not_run_and_ray_limits_no_threads(
    tmp_path: Path, tiny_dir: Path, omp: str | None
) -> None:
    for name in ("numpy", "json", "ray", "yaml"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'taken')!r}, 'a').write('{name}')\n")
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    if omp is not None:
        environment["OMP_NUM_THREADS"] = omp
    words = [str(tiny_dir / "qwen3moe-tiny.gguf"), str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-P", "-c", IN_A_FOLDER_WITH_MODULES, *words],
        cwd=tmp_path, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert not (tmp_path / "taken").exists()
    assert done.returncode == 0, done.stderr
    # Ray itself sets OMP_NUM_THREADS to the CPUs that it books for an actor.
    assert int(done.stdout) == (_core.cpu_limits()["affinity"] if omp is None else int(omp))


def test_a_cluster_without_room_is_said(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dyno_tuner.execution.ray_workers.LOCAL_SECONDS", 2.0)
    with pytest.raises(TuneError, match="no room for 3 workers"):
        cluster.workers(3, "simulated", {}, Needs(cpus=1))
    with pytest.raises(TuneError, match="no room for 1 workers"):
        cluster.workers(1, "simulated", {}, Needs(gpus=1))


@pytest.mark.usefixtures("cluster")
def test_a_polite_kill_is_still_ours() -> None:
    """Ray puts a handler in the place of the command's own, which writes what is proven."""
    assert HANDLERS[1] is HANDLERS[0]


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_where_nobody_listens_is_said(scheme: str) -> None:
    with socket.socket() as bound:  # and never listens
        bound.bind(("127.0.0.1", 0))
        with pytest.raises(TuneError, match="no Ray cluster answers"):
            Cluster(f"{scheme}127.0.0.1:{bound.getsockname()[1]}")


def test_wrong_usage(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ["-m", str(tiny_dir / "qwen3moe-tiny.gguf")]
    for words in (
        ["--workers", "2"],
        ["--ray", "auto", "--gpu", "0"],
        ["--ray", "auto", "--device", "cuda:1"],
    ):
        assert CliRunner().invoke(app, [*model, *words]).exit_code == 2
    monkeypatch.setitem(sys.modules, "ray", None)
    done = CliRunner().invoke(app, [*model, "--ray", "auto"])
    assert isinstance(done.exception, TuneError)
    assert "gguf-dyno[ray]" in str(done.exception)
