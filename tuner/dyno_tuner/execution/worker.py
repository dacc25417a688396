"""The engine in a child process, with requests over a pipe, a deadline for each, and a status for each kind
of death.

The child starts in its own session, so that Ctrl-C reaches only the tuner, and asks the kernel to kill it
when the tuner dies. The standard output of the engine goes to standard error. Its last lines are kept for
messages.
"""

from __future__ import annotations

import collections
import concurrent.futures
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import dyno

from ..core.errors import TargetUnusable, TuneError
from ..core.protocol import (
    Configuration,
    Description,
    KernelOp,
    Measurement,
    OpContext,
    Quality,
    TrialStatus,
    Value,
    Workload,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..core.options import MeasurementPolicy

START_DEADLINE = 120.0  # seconds for imports and the first use of a device
_STARTS = 3  # attempts to start a worker that is killed during its start
_KEPT_LINES = 20
_PAUSE = 5.0  # seconds beyond a wait of one second that load cannot explain


_log = logging.getLogger("dyno.tuner")


class WorkerDied(Exception):
    """The error that the child has died or was killed at its deadline."""

    def __init__(self, status: TrialStatus, message: str, *, killed: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.killed = killed  # whether SIGKILL from outside ended it


class _StartFailed(TargetUnusable):
    """The error that the child died before it could answer. `killed`: a signal ended it, so another start may
    succeed."""

    def __init__(self, died: WorkerDied) -> None:
        super().__init__(f"the worker process did not start ({died.status}): {died.message}")
        self.killed = died.killed


class Reply(NamedTuple):
    value: Any
    error: str  # "", "failure", "unusable" or "bug"
    status: str
    message: str


_spawners: dict[int, concurrent.futures.ThreadPoolExecutor] = {}  # by process, because a fork has no threads
_spawning = threading.Lock()


def _spawn(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a child from a thread that lives as long as this process, because the kernel takes the end of the
    starting thread as the end of the parent."""
    with _spawning:
        pool = _spawners.setdefault(os.getpid(), concurrent.futures.ThreadPoolExecutor(1, "spawner"))

    handing_over = threading.Lock()
    made: list[subprocess.Popen[bytes]] = []
    unwanted = threading.Event()

    def start() -> subprocess.Popen[bytes]:
        child = subprocess.Popen(command, **options)
        with handing_over:
            if unwanted.is_set():
                _discard(child)
            made.append(child)
        return child

    try:
        return pool.submit(start).result()
    except KeyboardInterrupt:  # at any stage of the start in the other thread
        with handing_over:
            unwanted.set()
            for child in made:
                _discard(child)
        raise


def _discard(child: subprocess.Popen[bytes]) -> None:
    """End and reap a child that is no longer needed."""
    child.kill()
    child.wait()
    if child.stdout is not None:
        child.stdout.close()


def _import_path() -> list[str]:
    """The module path of a child: the same as here, but without the current folder, which may contain
    downloaded files. A folder in PYTHONPATH, or the folder of this package, was chosen by the user and
    stays."""
    here = os.getcwd()
    chosen = [*os.environ.get("PYTHONPATH", "").split(os.pathsep), str(Path(__file__).parents[2])]
    chosen += [str(Path(dyno.__file__).parents[1])]
    return [p for p in sys.path if p and (os.path.abspath(p) != here or p in chosen)]


class Worker:
    """A child process. It is not reused after it has died.

    Args:
        target: A name in `targets.MODULES`.
        options: Plain values for the target.
    """

    def __init__(self, target: str, options: Mapping[str, Any]) -> None:
        to_child, self._to = os.pipe()
        self._from, from_child = os.pipe()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(_import_path())}
        environment["PYTHONUNBUFFERED"] = "1"
        command = [sys.executable, "-P", "-m", "dyno_tuner.execution.worker_main"]
        try:
            self._process = _spawn(
                [*command, str(to_child), str(from_child), str(os.getpid())], env=environment,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                pass_fds=(to_child, from_child), start_new_session=True,
            )  # fmt: skip
        except BaseException as error:
            os.close(self._to)
            os.close(self._from)
            if isinstance(error, OSError):
                raise TuneError(f"the worker process cannot be started: {error}") from error
            raise
        finally:
            os.close(to_child)
            os.close(from_child)
        self._buffer = b""
        self._lines: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
        self._reader = threading.Thread(target=self._keep_output, daemon=True)
        self._reader.start()
        self.alive = True
        try:
            reply = self.call("start", {"target": target, "options": dict(options)}, START_DEADLINE)
        except WorkerDied as died:
            raise _StartFailed(died) from died
        except BaseException:
            self.kill()
            raise
        if reply.error:
            self.kill()
            raise TargetUnusable(reply.message)

    def _keep_output(self) -> None:
        """Keep the last output. This runs in a thread, which also closes the stream, because another thread
        could close it too early."""
        stream = self._process.stdout
        if stream is None:
            return
        with stream:
            for line in stream:
                text = line.decode(errors="replace").strip()
                if text:
                    self._lines.append(text[:300])

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, method: str, arguments: Mapping[str, Any], deadline: float) -> Reply:
        """Call a method of the child. Raises WorkerDied if it dies, or says that it cannot continue, which
        also ends it."""
        if not self.alive:
            raise WorkerDied(TrialStatus.CRASH, "the worker process has already ended")
        end = time.monotonic() + deadline
        request = json.dumps({"method": method, **arguments}).encode() + b"\n"
        try:
            while request:
                request = request[os.write(self._to, request) :]
            line = self._read_line(end)
        except BrokenPipeError:
            line = None
        if line is None:
            raise self._cause()
        data = json.loads(line)
        for said in data.get("said", ()):
            _log.warning("%s", said)
        if data.get("error") == "lost":
            self.kill()
            raise WorkerDied(TrialStatus.CRASH, data["message"])
        return Reply(
            data.get("value"), data.get("error", ""), data.get("status", ""), data.get("message", "")
        )

    def _read_line(self, end: float) -> bytes | None:
        """A line, or None at the end of the stream. Raises WorkerDied after the time `end`."""
        while b"\n" not in self._buffer:
            left = max(end - time.monotonic(), 0.0)
            asked, waited = min(left, 1.0), time.monotonic()
            ready, _, _ = select.select([self._from], [], [], asked)
            if not ready and left == 0:  # an answer that has arrived is in time
                self.kill()
                raise WorkerDied(TrialStatus.TIMEOUT, "no answer before the deadline; the worker was killed")
            lost = time.monotonic() - waited - asked
            if lost > _PAUSE:
                # A wait of one second took much longer: this process was stopped, the machine slept, or its
                # clock jumped. The child did not run either, so the time does not count for it.
                end += lost
            if ready:
                piece = os.read(self._from, 1 << 16)
                if not piece:
                    return None
                self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _cause(self) -> WorkerDied:
        """The cause of death of a child that has closed its pipe."""
        try:
            code = self._process.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()
            return WorkerDied(TrialStatus.CRASH, "the worker closed its pipe but did not end")
        self.kill()
        self._reader.join(1)
        last = f"; its last line: {self._lines[-1]}" if self._lines else ""
        if code == -signal.SIGKILL:
            # This process did not send it. On Linux, the kernel does so when memory runs out.
            message = f"the worker was killed from outside (SIGKILL: out of memory?){last}"
            return WorkerDied(TrialStatus.OOM, message, killed=True)
        if code < 0:
            try:
                name = signal.Signals(-code).name
            except ValueError:
                name = str(-code)
            return WorkerDied(TrialStatus.CRASH, f"{name} ended the worker{last}")
        return WorkerDied(TrialStatus.CRASH, f"the worker ended with exit code {code}{last}")

    def kill(self) -> None:
        """End the child and all processes that it has started."""
        if not self.alive:
            return
        self.alive = False
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            self._process.poll()
        self._process.wait()
        for fd in (self._to, self._from):
            os.close(fd)
        self._reader.join(1)

    def abort(self) -> None:
        """End the running call of another thread with WorkerDied."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return  # it has just ended by itself

    def close(self) -> None:
        """Let the child end by itself, or kill it after a while."""
        if self.alive:
            try:
                self.call("close", {}, 5.0)
            except WorkerDied:
                self.alive = False if self._process.poll() is not None else self.alive
            self.kill()


class WorkerExecutor:
    """An Executor whose target lives in a worker. A new worker is started if the process number changes or
    the last one has died."""

    def __init__(self, target: str, options: Mapping[str, Any]) -> None:
        self._target = target
        self._options = dict(options)
        self._worker: Worker | None = None
        self._number = 0
        self.starts = 0

    def _get(self, number: int) -> Worker:
        if self._worker is None or not self._worker.alive or self._number != number:
            if self._worker is not None:
                self._worker.close()
            self._worker = self._start()
            self._number = number
            self.starts += 1
        return self._worker

    def _start(self) -> Worker:
        """Start a worker that answers. Raises TargetUnusable if it cannot, or is killed at each start."""
        for left in range(_STARTS - 1, -1, -1):
            try:
                return Worker(self._target, self._options)
            except _StartFailed as error:
                if not (error.killed and left):
                    raise
                _log.warning("%s; restarting the worker", error)
        raise AssertionError("unreachable: the last start returns or raises")

    def describe(self) -> Description:
        """The description of the target. Raises TargetUnusable."""
        for left in range(_STARTS - 1, -1, -1):
            try:
                reply = self._get(self._number).call("describe", {}, START_DEADLINE)
                break
            except WorkerDied as died:
                if not (died.killed and left):
                    raise _StartFailed(died) from died
                _log.warning("%s; restarting the worker", died)
        if reply.error:
            raise TargetUnusable(reply.message)
        return Description.from_dict(reply.value)

    def measurement(
        self,
        configuration: Configuration,
        workload: Workload,
        metrics: Sequence[str],
        policy: MeasurementPolicy,
        context: OpContext,
        deadline: float,
    ) -> Measurement:
        begun = time.monotonic()
        arguments = {
            "configuration": configuration.to_dict(),
            "workload": workload.to_dict(),
            "metrics": list(metrics),
            "policy": policy.to_dict(),
            "context": context.to_dict(),
        }
        try:
            reply = self._get(context.process).call("measurement", arguments, deadline)
        except WorkerDied as died:
            return Measurement(died.status, message=died.message, seconds=time.monotonic() - begun)
        if reply.error:
            return Measurement(self._status(reply), message=reply.message, seconds=time.monotonic() - begun)
        return Measurement.from_dict(reply.value)

    def quality(self, configuration: Configuration, context: OpContext, deadline: float) -> Quality:
        arguments = {"configuration": configuration.to_dict(), "context": context.to_dict()}
        try:
            reply = self._get(context.process).call("quality", arguments, deadline)
        except WorkerDied as died:
            return Quality(died.status, message=died.message)
        if reply.error:
            return Quality(self._status(reply), message=reply.message)
        return Quality.from_dict(reply.value)

    def routing(self, configuration: Configuration, workload: Workload, context: OpContext) -> dict[str, Any]:
        """The use of experts in the workload; empty if there are no experts or the worker died."""
        arguments = {"configuration": configuration.to_dict(), "workload": workload.to_dict()}
        try:
            reply = self._get(context.process).call("routing", arguments, START_DEADLINE)
        except WorkerDied:
            return {}
        return {} if reply.error else dict(reply.value)

    def expected(self, settings: Mapping[str, Value], workload: Workload) -> dict[str, float] | None:
        """Seconds by metric that the cost model expects. Raises TuneError if the engine does not answer."""
        asked = {"settings": dict(settings), "workload": workload.to_dict()}
        told = self._told("expected", asked, "expected times")
        return None if told is None else {str(k): float(v) for k, v in told.items()}

    def memory(self, settings: Mapping[str, Value], where: str = "device") -> int | None:
        """Planned bytes; None if the engine refuses the settings. Raises TargetUnusable if the target has no
        plan."""
        asked = {"settings": dict(settings), "where": where}
        told = self._told("memory", asked, "memory plan", TargetUnusable)
        return None if told is None else int(told)

    def kernel_ops(self, configuration: Configuration, workload: Workload) -> list[KernelOp]:
        arguments = {"configuration": configuration.to_dict(), "workload": workload.to_dict()}
        return [KernelOp.from_dict(op) for op in self._told("kernel_ops", arguments, "list of ops")]

    def _told(
        self, method: str, arguments: Mapping[str, Any], what: str, refused: type[TuneError] = TuneError
    ) -> Any:
        """The answer of the running worker to a query outside of trials. Raises TuneError if the worker dies,
        and `refused` if it has no answer."""
        try:
            reply = self._get(self._number).call(method, arguments, START_DEADLINE)
        except WorkerDied as died:
            raise TuneError(f"the engine gave no {what} ({died.status}): {died.message}") from died
        if reply.error:
            raise refused(f"the engine gave no {what}: {reply.message}")
        return reply.value

    def time_ops(self, request: Mapping[str, Any], context: OpContext, deadline: float) -> list[list[float]]:
        empty: list[list[float]] = [[] for _ in request["configs"]]
        try:
            reply = self._get(context.process).call("time_ops", {"request": dict(request)}, deadline)
        except WorkerDied:
            return empty
        return empty if reply.error else [[float(x) for x in times] for times in reply.value]

    @staticmethod
    def _status(reply: Reply) -> TrialStatus:
        """The status of a reply. `unusable` and `bug` are raised, because no other configuration would work
        either."""
        if reply.error == "failure":
            return TrialStatus(reply.status)
        raise TargetUnusable(reply.message)

    def watch(self, pci_bus_id: str | None) -> None:
        """The worker runs on this machine."""

    def look_around(self, model: str, description: Description) -> None:
        """The worker runs on this machine."""

    def abort(self) -> None:
        worker = self._worker
        if worker is not None and worker.alive:
            worker.abort()

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None
