"""Workers on the nodes of a Ray cluster, each with its own GPU (or, for the CPU engine, its own node).

An actor on the node has an ordinary `WorkerExecutor`, so deadlines, crashes and statuses work as on one
machine. Only plain values cross the network. The model is read from the same path on all nodes.
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

START_SECONDS = 300.0  # seconds for the cluster to find a place
LOCAL_SECONDS = 30.0  # seconds for the cluster on this machine, which is idle
_REACH_SECONDS = 10.0  # seconds for a host to accept a connection
_OMP = "OMP_NUM_THREADS"  # its value where the tune was started applies on all nodes
_AWAY = 60.0  # seconds beyond the deadline of an operation after which its node counts as lost


@dataclasses.dataclass(frozen=True)
class Needs:
    """The resources that a worker needs from the cluster."""

    gpus: float = 0.0
    cpus: float = 1.0
    alone: bool = False  # alone on its node, because workers of the CPU engine would disturb each other


def import_ray() -> Any:
    """Import Ray. Raises TuneError if the package is not installed."""
    try:
        import ray
    except ImportError as error:
        raise TuneError(
            "--ray needs the package ray: pip install 'gguf-dyno[ray]', here and on every node"
        ) from error
    return ray


class _Host:
    """An actor on a node. Methods take and return plain values of this package."""

    def __init__(self, target: str, options: Mapping[str, Any], omp: str | None) -> None:
        # Ray sets it to the CPUs that it reserves for an actor, which must not limit the engine.
        os.environ.pop(_OMP, None)
        if omp is not None:
            os.environ[_OMP] = omp
        self._held = contextlib.ExitStack()  # if Ray kills this actor, the next one on the node removes them
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
    """An Executor whose worker is on a node of the cluster. If the node is lost, one trial fails. The next
    operation gets a worker on another node of the same kind, if there is one.

    Args:
        ray: The module, connected to a cluster.
        target: As in `Worker`. A scratch folder among its options is replaced by one of the node.
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
        """The answer of the node. Raises the error of the node, or _Gone if the node is lost."""
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
            why = " ".join(str(error).split())[:300]  # the only report of, for example, a node without dyno
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
        """A monitor of the measuring machine."""
        return RayWatch(self, pci_bus_id)

    def begin_window(self, pci_bus_id: str | None) -> Any:
        """Begin a window, and return the mark for `end_window`."""
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
        """As `environment.look_around`, but on the node."""
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
    """The error that the node, or the process there, does not answer any more."""


class RayWatch:
    """A `Machine` whose readings are made on the node. If the node is lost meanwhile, there are no
    readings."""

    def __init__(self, executor: RayExecutor, pci_bus_id: str | None) -> None:
        self._bus = pci_bus_id
        self._executor = executor

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to end here, because the node ends its own window."""

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
    """Check that an address answers. Ray would try for minutes, and fill the terminal with its log."""
    found = re.fullmatch(r"(?:ray://)?\[?([^/\[\]]+?)\]?:([0-9]{1,5})", address)
    if found:
        try:
            socket.create_connection((found[1], int(found[2])), timeout=_REACH_SECONDS).close()
        except (OSError, OverflowError) as error:
            raise TuneError(f"--ray {address}: no Ray cluster answers at this address: {error}") from error


@contextlib.contextmanager
def _kept_signals() -> Iterator[None]:
    """Keep the signal handlers. Ray replaces the one for SIGTERM and would abort, so that proven entries
    would not be written."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)


class Cluster:
    """A connection to a Ray cluster. Closing it does not change the cluster.

    Args:
        address: `local` starts one on this machine; `auto`, `HOST:PORT` or `ray://HOST:PORT` joins one.

    Raises:
        TuneError: Ray is not installed, or the cluster does not exist.
    """

    def __init__(self, address: str, **local: Any) -> None:
        self._ray = import_ray()
        _check_reachable(address)
        self._local = address == "local"
        if self._local:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # our own cluster sends no usage statistics
        how = {"address": address, **({"include_dashboard": False, **local} if self._local else {})}
        try:
            # Ray adds the current folder to the module path of workers. The user did not choose it for that,
            # and it may contain downloaded files. The folder of this package adds nothing.
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
        """The cores of each node."""
        alive = [n["Resources"] for n in self._ray.nodes() if n["Alive"]]
        return [int(r["CPU"]) for r in alive if r.get("CPU")]

    def device(self, name: str) -> str:
        """The device for `auto`: a GPU if the cluster has one."""
        if name == "auto":
            return "cuda:0" if self.gpus else "cpu"
        return name

    def needs(self, device: str) -> Needs:
        """The resources of a worker: its own GPU, or its own node for the CPU engine."""
        if device.startswith("cuda"):
            return Needs(gpus=1)
        return Needs(cpus=min(self.nodes, default=1), alone=True)

    def workers(self, count: int, target: str, options: Mapping[str, Any], needs: Needs) -> list[RayExecutor]:
        """Start `count` workers. Workers that need a whole node are spread over as many nodes.

        Raises:
            TuneError: The cluster has no room for them within a few minutes.
        """
        bundle = {"CPU": needs.cpus, **({"GPU": needs.gpus} if needs.gpus else {})}
        strategy = "STRICT_SPREAD" if needs.alone else "PACK"
        group = self._ray.util.placement_group([bundle] * count, strategy=strategy)
        self._groups.append(group)
        # A remote cluster may grow, or its machines may become free. The cluster on this machine does
        # neither.
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
        """Release the resources of all workers."""
        for group in self._groups:
            self._ray.util.remove_placement_group(group)
        self._groups.clear()

    def close(self) -> None:
        self.release()
        self._ray.shutdown()
