"""Workers on the nodes of a Ray cluster: Ray places them, one GPU (or, for the CPU engine, one node) each.

An actor on the node holds an ordinary `WorkerExecutor`, so that deadlines, crashes and statuses are what they
are on one machine; only plain values cross the network. The model is read from the same path on every node.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ..core.errors import TargetUnusable, TuneError
from ..core.machine_match import differences, match_of
from ..core.protocol import Description, Measurement, Quality, TrialStatus
from ..core.scratch import scratch_folder
from ..measure.environment import Surroundings, look_around
from ..measure.machine_monitor import Machine, Window
from .worker import WorkerExecutor

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import TracebackType

    from ..core.options import MeasurementPolicy
    from ..core.protocol import Configuration, KernelOp, OpContext, Value, Workload

START_SECONDS = 300.0  # for the cluster to find a place
LOCAL_SECONDS = 30.0  # for the cluster on this machine, which is idle
_REACH_SECONDS = 10.0  # for a host to accept a connection
_OMP = "OMP_NUM_THREADS"  # where the tune was started, it holds on every node
_AWAY = 60.0  # seconds beyond an operation's own deadline after which its node counts as gone


@dataclasses.dataclass(frozen=True)
class Needs:
    """The resources that a worker takes of the cluster."""

    gpus: float = 0.0
    cpus: float = 1.0
    alone: bool = False  # on its node, because workers of the CPU engine would disturb each other


def import_ray() -> Any:
    """Raises TuneError where the package is not installed."""
    try:
        import ray
    except ImportError as error:
        raise TuneError(
            "--ray needs the package ray: pip install 'gguf-dyno[ray]', here and on every node"
        ) from error
    return ray


class _Host:
    """An actor that lives on a node. Methods take and give plain values of this package."""

    def __init__(self, target: str, options: Mapping[str, Any], omp: str | None) -> None:
        # Ray sets it to the CPUs that it books for an actor, which limits no engine.
        os.environ.pop(_OMP, None)
        if omp is not None:
            os.environ[_OMP] = omp
        self._held = contextlib.ExitStack()  # what Ray ends without asking is removed by the next one there
        scratch = self._held.enter_context(scratch_folder("dyno-ray-"))
        own = {"scratch": scratch} if "scratch" in options else {}
        self._executor = WorkerExecutor(target, {**options, **own})
        self._watch: Machine | None = None
        self._open: tuple[contextlib.AbstractContextManager[Window], Window] | None = None

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self._executor, method)(*arguments)

    def begin_window(self, pci_bus_id: str | None, host_weights: bool) -> None:
        if self._watch is None:
            self._watch = Machine(pci_bus_id, host_weights=host_weights).__enter__()
        window = self._watch.window()
        self._open = window, window.__enter__()

    def end_window(self) -> Window:
        if self._open is None:
            raise RuntimeError("end_window() before begin_window()")
        context, window = self._open
        self._open = None
        context.__exit__(None, None, None)
        return window

    def look_around(self, model: str, description: Description) -> Surroundings:
        return look_around(model, description)

    def close(self) -> None:
        self._executor.close()
        if self._watch is not None:
            self._watch.__exit__(None, None, None)
        self._held.close()


class RayExecutor:
    """An Executor whose worker is on a node of the cluster. A node that is lost costs one trial: the next
    operation has a worker elsewhere, if there is a place of the same kind.

    Args:
        ray: the module, connected to a cluster.
        target: as of `Worker`; a scratch folder among its options is replaced by one of the node's own.
        name: for people.
    """

    def __init__(
        self, ray: Any, target: str, options: Mapping[str, Any], needs: Needs, name: str, group: Any = None
    ) -> None:
        self._ray = ray
        self._make = (target, dict(options))
        self._needs = needs
        self._group = group
        self.name = name
        self._actor: Any = None
        self._first: Description | None = None

    def _place(self) -> Any:
        if self._actor is None:
            options: dict[str, Any] = {"num_cpus": self._needs.cpus, "num_gpus": self._needs.gpus}
            if self._group is not None:
                strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
                options["scheduling_strategy"] = strategy(self._group)
            self._actor = self._ray.remote(_Host).options(**options).remote(*self._make, os.environ.get(_OMP))
            if self._first is not None:
                self._check(self._first, self._answer("describe", START_SECONDS))
        return self._actor

    def _check(self, first: Description, now: Description) -> None:
        differs = differences(match_of(first), now)
        if differs:
            raise TuneError(f"{self.name} is on a node of another kind than before: {'; '.join(differs)}")

    def _answer(self, method: str, seconds: float, *arguments: Any) -> Any:
        """Raises what the node raised; _Gone where there is no node any more."""
        ray = self._ray
        method_of = self._place().call if method in _OF_EXECUTOR else getattr(self._place(), method)
        words = (method, *arguments) if method in _OF_EXECUTOR else arguments
        try:
            return ray.get(method_of.remote(*words), timeout=seconds)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, TuneError):
                raise type(cause)(f"{self.name}: {cause}") from None
            raise TuneError(f"{self.name}: {type(cause).__name__}: {cause}") from error
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            self._drop()
            late = isinstance(error, ray.exceptions.GetTimeoutError)
            why = " ".join(str(error).split())[:300]  # a node without dyno, say, is told here alone
            raise _Gone(
                f"its node did not answer within {seconds:.0f} s"
                if late
                else f"its node or process was lost: {why}"
            ) from error

    def _drop(self) -> None:
        actor, self._actor = self._actor, None
        if actor is not None:
            self._ray.kill(actor)

    def _must(self, method: str, *arguments: Any) -> Any:
        try:
            return self._answer(method, START_SECONDS, *arguments)
        except _Gone as gone:
            raise TargetUnusable(f"{self.name}: {gone}; see `ray status`") from gone

    # ---- an Executor

    def describe(self) -> Description:
        found: Description = self._must("describe")
        self._first = self._first or found
        return found

    def measurement(
        self,
        configuration: Configuration,
        workload: Workload,
        metrics: Sequence[str],
        policy: MeasurementPolicy,
        context: OpContext,
        deadline: float,
    ) -> Measurement:
        arguments = (configuration, workload, metrics, policy, context, deadline)
        try:
            found: Measurement = self._answer("measurement", deadline + _AWAY, *arguments)
        except _Gone as gone:
            return Measurement(TrialStatus.CRASH, message=f"{self.name}: {gone}")
        return found

    def quality(self, configuration: Configuration, context: OpContext, deadline: float) -> Quality:
        try:
            found: Quality = self._answer("quality", deadline + _AWAY, configuration, context, deadline)
        except _Gone as gone:
            return Quality(TrialStatus.CRASH, message=f"{self.name}: {gone}")
        return found

    def routing(self, configuration: Configuration, workload: Workload, context: OpContext) -> dict[str, Any]:
        return dict(self._must("routing", configuration, workload, context))

    def memory(self, settings: Mapping[str, Value], where: str = "device") -> int | None:
        found: int | None = self._must("memory", dict(settings), where)
        return found

    def expected(self, settings: Mapping[str, Value], workload: Workload) -> dict[str, float] | None:
        found: dict[str, float] | None = self._must("expected", dict(settings), workload)
        return found

    def kernel_ops(self, configuration: Configuration, workload: Workload) -> list[KernelOp]:
        return list(self._must("kernel_ops", configuration, workload))

    def time_ops(self, request: Mapping[str, Any], context: OpContext, deadline: float) -> list[list[float]]:
        try:
            found: list[list[float]] = self._answer(
                "time_ops", deadline + _AWAY, dict(request), context, deadline
            )
        except _Gone:
            return [[] for _ in request["configs"]]
        return found

    def watch(self, pci_bus_id: str | None) -> RayWatch:
        """Looks at the machine that computes."""
        return RayWatch(self, pci_bus_id)

    def begin_window(self, pci_bus_id: str | None) -> Any:
        """The mark that `end_window` takes back."""
        try:
            planned = self._first is not None and bool(self._first.limits)
            self._answer("begin_window", START_SECONDS, pci_bus_id, planned)
        except _Gone:
            return None
        return self._actor

    def end_window(self, place: Any) -> Window | None:
        if place is None or place is not self._actor:
            return None
        try:
            found: Window = self._answer("end_window", START_SECONDS)
        except _Gone:
            return None
        return found

    def look_around(self, model: str, description: Description) -> Surroundings:
        """As `environment.look_around`, on the node."""
        found: Surroundings = self._must("look_around", model, description)
        return found

    def abort(self) -> None:
        actor = self._actor
        if actor is not None:
            self._ray.kill(actor)

    def close(self) -> None:
        if self._actor is not None:
            try:
                self._answer("close", 30.0)
            except _Gone:
                return
            self._drop()


_OF_EXECUTOR = frozenset(
    {"describe", "measurement", "quality", "routing", "memory", "expected", "kernel_ops", "time_ops"}
)


class _Gone(Exception):
    """The node, or the process there, does not answer any more."""


class RayWatch:
    """A `Machine` whose readings are made on the node. Nothing is seen of a node that is lost meanwhile."""

    def __init__(self, executor: RayExecutor, pci_bus_id: str | None) -> None:
        self._bus = pci_bus_id
        self._executor = executor

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is held here: the node ends its own."""

    @contextlib.contextmanager
    def window(self) -> Iterator[Window]:
        seen = Window()
        place = self._executor.begin_window(self._bus)
        try:
            yield seen
        finally:
            found = self._executor.end_window(place)
            if found is not None:
                seen.__dict__.update(found.__dict__)


def _check_reachable(address: str) -> None:
    """Ray would try for minutes, and fill the terminal with its log."""
    found = re.fullmatch(r"(?:ray://)?\[?([^/\[\]]+?)\]?:([0-9]{1,5})", address)
    if found:
        try:
            socket.create_connection((found[1], int(found[2])), timeout=_REACH_SECONDS).close()
        except (OSError, OverflowError) as error:
            raise TuneError(f"--ray {address}: no Ray cluster answers at this address: {error}") from error


@contextlib.contextmanager
def _kept_signals() -> Iterator[None]:
    """Ray takes SIGTERM for itself and aborts on it: nothing that was proven would be written."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)


class Cluster:
    """A connection to a Ray cluster; closing it leaves the cluster as it is.

    Args:
        address: `local` starts one on this machine; `auto`, `HOST:PORT` or `ray://HOST:PORT` joins one.

    Raises:
        TuneError: ray is not installed, or there is no such cluster.
    """

    def __init__(self, address: str, **local: Any) -> None:
        self._ray = import_ray()
        _check_reachable(address)
        self._local = address == "local"
        if self._local:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a cluster of ours reports to nobody
        how = {"address": address, **({"include_dashboard": False, **local} if self._local else {})}
        try:
            # Ray adds the current folder to where workers find modules: one that the user did not choose for
            # that, where a downloaded model may have company. This package's own folder adds nothing.
            with _kept_signals(), contextlib.chdir(Path(__file__).parents[2]):
                self._ray.init(logging_level="ERROR", log_to_driver=False, **how)
        except (ConnectionError, ValueError, RuntimeError, OSError) as error:
            raise TuneError(f"--ray {address}: {' '.join(str(error).split())[:300]}") from error
        self._groups: list[Any] = []

    @property
    def gpus(self) -> int:
        return int(self._ray.cluster_resources().get("GPU", 0))

    @property
    def nodes(self) -> list[int]:
        """The cores of every node."""
        alive = [n["Resources"] for n in self._ray.nodes() if n["Alive"]]
        return [int(r["CPU"]) for r in alive if r.get("CPU")]

    def device(self, name: str) -> str:
        """The device of `auto`: a GPU if the cluster has one."""
        if name == "auto":
            return "cuda:0" if self.gpus else "cpu"
        return name

    def needs(self, device: str) -> Needs:
        """Of a worker: a GPU of its own, or for the CPU engine a node of its own."""
        if device.startswith("cuda"):
            return Needs(gpus=1)
        return Needs(cpus=min(self.nodes, default=1), alone=True)

    def workers(self, count: int, target: str, options: Mapping[str, Any], needs: Needs) -> list[RayExecutor]:
        """`count` workers; those that need a node alone are spread over as many nodes.

        Raises:
            TuneError: the cluster has no room for them within some minutes.
        """
        bundle = {"CPU": needs.cpus, **({"GPU": needs.gpus} if needs.gpus else {})}
        strategy = "STRICT_SPREAD" if needs.alone else "PACK"
        group = self._ray.util.placement_group([bundle] * count, strategy=strategy)
        self._groups.append(group)
        # A cluster may grow, or its machines get free; the one on this machine does neither.
        if not group.wait(timeout_seconds=LOCAL_SECONDS if self._local else START_SECONDS):
            self.release()
            raise TuneError(
                f"the cluster has no room for {count} workers of {bundle} ({strategy}); it has "
                f"{self._ray.cluster_resources()}: give fewer --workers"
            )
        return [
            RayExecutor(self._ray, target, options, needs, f"worker {n + 1}", group) for n in range(count)
        ]

    def release(self) -> None:
        """Gives back the room of all workers."""
        for group in self._groups:
            self._ray.util.remove_placement_group(group)
        self._groups.clear()

    def close(self) -> None:
        self.release()
        self._ray.shutdown()
