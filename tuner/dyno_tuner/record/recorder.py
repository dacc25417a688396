"""The recorder, through which all operations of a run go: they are found in the journal, or carried out and
written to it.

This is how a run is resumed. The decisions of the tuner are a pure function of (seed, results so far, time so
far). After a kill, it runs again from the beginning, and the recorder answers from the journal up to the
point of the kill. The time is always the time of the last record, and never read from a clock in between. So
decisions by budget are repeated, too.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import threading
import time
from typing import TYPE_CHECKING, Any

from ..core.errors import BudgetError, JournalError
from ..core.options import BESIDE
from ..core.protocol import (
    Configuration,
    KernelOp,
    Measurement,
    OpContext,
    Quality,
    TrialStatus,
    Value,
    Workload,
    kind_of,
)
from ..measure.machine_monitor import PATIENCE, Careful, Conditions
from ..measure.measurement import REST_SECONDS, generation_first, judge_plausibility
from .clocks import Clocks

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Mapping, Sequence

    from ..core.executor import Executor
    from ..core.options import MeasurementPolicy
    from ..measure.machine_monitor import Watch
    from .journal import Journal


OVERRUN = 1.05  # multiple of the budget after which an operation is ended at once


def _is_cut(record: Mapping[str, Any]) -> bool:
    result = record.get("result")
    return isinstance(result, dict) and bool(result.get("cut"))


def _marked(result: dict[str, Any], cut: bool) -> dict[str, Any]:
    """A result, marked if the budget has cut it short.

    Args: `cut`: whether the budget left less time than the usual deadline."""
    return {**result, "cut": True} if cut and result["status"] == TrialStatus.TIMEOUT else result


def _slowness_spoils(measurement: Mapping[str, Any]) -> bool:
    """Whether a slow machine may have spoilt a measurement. One that the budget has cut short does not
    count."""
    return measurement["status"] in (TrialStatus.OK, TrialStatus.TIMEOUT) and not measurement.get("cut")


def _again(message: str) -> str:
    return message if message.startswith("not tried again") else f"not tried again: {message}"


FIRST_ANSWERS = 600.0
"""Least deadline in seconds of the first comparison of answers. It also computes the answers of the exact
path, whose time does not depend on the speed of the default."""


@dataclasses.dataclass(frozen=True)
class Begun:
    """The parameters of a run that is continued.

    Args:
        first_prompts: Samples per measurement of A/A; None: there is none.
        prompts: Samples per later measurement.
        rounds: By the key of a round, the positions of each measured configuration in its order.
    """

    first_prompts: int | None = None
    prompts: int | None = None
    rounds: Mapping[str, Mapping[str, Collection[str]]] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, past: Sequence[Mapping[str, Any]]) -> Begun:
        """The beginning, from the records of a journal. If the noise was measured several times, the first
        time counts, so that a further --resume repeats the same steps."""
        first = kept = None
        again = False
        rounds: dict[str, dict[str, set[str]]] = {}
        for record in past:
            if record.get("op") == "visit":
                if record["key"] == FIRST_OF_NOISE:
                    prompts = int(record["args"]["policy"]["prompts"])
                    again = again or (first is not None and prompts != first)
                    first, kept = (prompts, prompts) if first is None else (first, kept)
                elif (match := _ROUND.match(record["key"])) is not None:
                    of_round = rounds.setdefault(match[1], {})
                    of_round.setdefault(json.dumps(record["config"], sort_keys=True), set()).add(match[2])
            elif record.get("note") == "samples" and not again:
                kept = int(record["prompts"])
        return cls(first, kept, rounds)


FIRST_OF_NOISE = "aa/p0/v0"  # key of the first measurement of A/A that counts
_ROUND = re.compile(r"(.+/r\d+)/(\d+)(?:/\w+)?$")


class Recorder:
    """The recorder of a run: it answers an operation from the journal, or carries it out and writes it.

    Args:
    journal: The journal for records; None: they are only kept in memory.
    past: Records of the journal that is continued.
    identity: Key of a configuration, for configurations that must not be tried again.
    deadline_floor: Least deadline of an operation in seconds, however fast the default is.
    watch: looks at the machine while it is measured; a window in which the GPU was throttled or others used
    the CPUs is dropped and measured again. patience: seconds that a measurement waits for the machine to come
    to rest; None: it does not wait, and the run is marked as disturbed. limit: seconds of the run after which
    an operation is ended wherever it stands; None: it may end late. budget: seconds of the run; what is
    tried, and the very first measurement, are ended when they are over. sleep: waits for a GPU to cool down.
    rests:
    whether prompts are read after a rest from the first window on in which the GPU reaches its power limit;
    not for targets of which every measurement begins with a load. begun_with: seconds of the budget that the
    run began with; the number of answers that are compared depends on it.
    """

    def __init__(
        self,
        executor: Executor,
        workload: Workload,
        *,
        journal: Journal | None = None,
        past: Sequence[Mapping[str, Any]] = (),
        identity: Callable[[Configuration], Hashable] | None = None,
        bounds: Mapping[str, float] | None = None,
        virtual_time: bool = False,
        deadline_floor: float = 6.0,
        watch: Watch | None = None,
        patience: float | None = PATIENCE,
        sleep: Callable[[float], None] = time.sleep,
        limit: float | None = None,
        budget: float | None = None,
        begun_with: float | None = None,
        rests: bool = True,
    ) -> None:
        self._begun_with = begun_with
        self._limit = limit
        self._budget = budget
        self._rests = rests and any(kind_of(m) == "pp" for m in workload.metrics)
        self._executor = executor
        self._workload = workload
        self._journal = journal
        self._identity = identity or (lambda c: json.dumps(c.to_dict(), sort_keys=True))
        self._bounds = dict(bounds or {})
        self._virtual = virtual_time
        self._deadline_floor = deadline_floor

        def pause(seconds: float) -> None:
            sleep(seconds)
            if self._stopped.is_set():
                raise KeyboardInterrupt

        self._careful: Careful | None = None
        if watch is not None:
            self._careful = Careful(watch, self.note, self._show, pause, patience, self._budget_left)
        self._seen = Conditions()  # conditions from the journal, if nothing is monitored now
        self.lost = 0.0  # seconds of disturbed measurements, and of waiting for a quiet machine
        # Work that an earlier budget has cut short is repeated if there is more time now.
        end = None if budget is None else OVERRUN * budget - 0.5
        past = [r for r in past if not _is_cut(r) or (end is not None and float(r.get("t", 0.0)) >= end)]
        operations = [r for r in past if "op" in r]
        self._past = {self._find_key(r): r for r in operations}
        ends = [0.0, *(float(r["t"]) for r in operations)]
        self._took = {
            self._find_key(r): max(0.0, end - begin)
            for r, begin, end in zip(operations, ends, ends[1:], strict=False)
        }
        self.begun = Begun.of(past)
        self._replanned = budget != begun_with  # so operations may come in another order than in the journal
        self._origin: dict[int, int] = {}  # process in the records, by process of this run
        self._live: set[int] = set()  # processes in which an operation was carried out
        self._cut: set[str] = set()
        self._notes = {json.dumps(r, sort_keys=True) for r in past if "note" in r}
        self._killed: dict[Hashable, Measurement] = {}
        self._forgiven: set[Hashable] = set()
        self._compared = False  # whether the answers of the exact path exist
        for record in past:
            if record.get("op") in ("visit", "quality") and not _is_cut(record):
                self._remember(
                    Configuration.from_dict(record["config"]),
                    TrialStatus(record["result"]["status"]),
                    str(record["result"]["message"]),
                )
        self.now = 0.0
        self._base: tuple[float, float] | None = None  # (run time, clock) at the first live operation
        self.replayed = 0
        self.last = ""  # key of the last record that was found
        self.performed = 0
        self.on_note: Callable[[str, Mapping[str, Any]], None] | None = None
        self.expected_measurement = 0.0  # seconds of a measurement of the default; 0 while unknown
        self._first_check = self._later_checks = 0.0  # seconds; of the later ones, the longest
        self._stopped = threading.Event()

    def _remember(self, configuration: Configuration, status: TrialStatus, message: str) -> None:
        """Remember whether a configuration kills its worker. One that has run since, as a baseline, does
        not."""
        identity = self._identity(configuration)
        if status.kills:
            self._killed.setdefault(identity, Measurement(status, message=message))
        elif status is TrialStatus.OK:
            self._killed.pop(identity, None)
            self._forgiven.discard(identity)  # so its next failure counts as a new one

    def forgive(self, configuration: Configuration, always: bool = False) -> None:
        """Allow one more try of a configuration that has killed its worker, but not a second one unless it
        has run since.

        Args: `always`: even if that was already allowed before."""
        identity = self._identity(configuration)
        if identity in self._killed and (always or identity not in self._forgiven):
            self._forgiven.add(identity)
            del self._killed[identity]

    # ---- beside other recorders

    def follow(self, first: Recorder) -> None:
        """Synchronise the recorder of a further device before parallel work: it takes the time of the first
        recorder, and configurations that killed a worker there."""
        if self._killed is not first._killed:
            for identity, measurement in self._killed.items():
                first._killed.setdefault(identity, measurement)
            self._killed = first._killed
        self.expected_measurement = first.expected_measurement
        self.catch_up(first.now)

    def catch_up(self, now: float) -> None:
        """Record that time has passed in other recorders."""
        if now > self.now:
            self.now = now
            if self._base is not None and not self._virtual:
                self._base = (now, time.monotonic())

    def stop(self) -> None:
        """Give up the running operation, from another thread. It is not written to the journal."""
        self._stopped.set()
        self._executor.abort()

    @staticmethod
    def _find_key(record: Mapping[str, Any]) -> str:
        """The key by which an operation is found. A longer budget changes process numbers and deadlines,
        which do not make it another measurement."""
        args = dict(record["args"])
        if isinstance(args.get("policy"), dict):
            args["policy"] = {k: v for k, v in args["policy"].items() if k != "longest"}
        return json.dumps([record["op"], record["key"], record["config"], args], sort_keys=True)

    @property
    def _mixes(self) -> bool:
        """Whether records may follow after live operations."""
        return self._replanned and self.performed > 0

    def _found(self, key: str, op: str, process: int) -> Mapping[str, Any] | None:
        """The record of an operation. Measurements of a process are compared with each other, so they must
        come from one process of the journal, or all be carried out."""
        found = self._past.get(key)
        if found is None or op != "visit" or not self._mixes:
            return found
        if process in self._live or self._origin.get(process, found["process"]) != found["process"]:
            return None
        return found

    def begin_round(self, key: str, process: int, configurations: Collection[Configuration]) -> None:
        """Begin a round, which is taken from the journal as a whole or measured as a whole. Half a round in
        another process at another time would mean nothing. If a run is continued where it was killed, the
        rest of its round follows at once."""
        if not self._mixes:
            return
        known = self.begun.rounds.get(key, {})
        last = str(2 * len(configurations))
        wanted = {json.dumps(c.to_dict(), sort_keys=True) for c in configurations}
        if not wanted <= known.keys() or not any(last in places for places in known.values()):
            self._live.add(process)

    # ---- operations

    def measurement(
        self,
        key: str,
        configuration: Configuration,
        metrics: Sequence[str],
        policy: MeasurementPolicy,
        *,
        process: int,
        baseline: bool = False,
        workload: Workload | None = None,
    ) -> Measurement:
        """A measurement of a configuration.

        Args: `baseline`: carry it out even if the same configuration has killed a worker before. A run cannot
        continue without its default, and the caller decides how often to try. `workload`: another workload
        than the run's, only for this measurement. Generation is always measured first, whatever the order of
        `metrics`. If a measurement shows that the GPU must rest, it is repeated with rests, because later
        ones are compared with it."""
        rested = self.resting
        result = self._measurement(key, configuration, metrics, policy, process, baseline, workload)
        again = self._limit is None or self.now + result.seconds < self._limit
        if self.resting and not rested and result.status is TrialStatus.OK and again:
            result = self._measurement(key, configuration, metrics, policy, process, baseline, workload)
        return result

    def _measurement(
        self, key: str, configuration: Configuration, metrics: Sequence[str], policy: MeasurementPolicy,
        process: int, baseline: bool, workload: Workload | None,
    ) -> Measurement:  # fmt: skip
        metrics = generation_first(metrics)
        rests = sum(kind_of(m) == "pp" for m in metrics) if self.resting else 0
        if rests:
            policy = dataclasses.replace(policy, rest=REST_SECONDS)
        identity = self._identity(configuration)
        # Joules that do not decide may be missing, so a journal without them can be continued.
        told = policy if policy.energy != BESIDE else dataclasses.replace(policy, energy=None)
        args: dict[str, Any] = {"metrics": list(metrics), "policy": told.to_dict()}
        if workload is not None:
            args["workload"] = workload.to_dict()

        def perform(context: OpContext) -> dict[str, Any]:
            known = self._killed.get(identity)
            if known is not None and not baseline:
                return Measurement(known.status, message=_again(known.message)).to_dict()

            usual = self._deadline(rests * REST_SECONDS)
            deadline = self._within_budget(usual, not baseline or self.expected_measurement == 0)

            def measure() -> dict[str, Any]:
                begun = time.monotonic()
                measurement = self._executor.measurement(
                    configuration,
                    workload or self._workload,
                    metrics,
                    policy,
                    context,
                    deadline,
                )
                elapsed = None if self._virtual else time.monotonic() - begun
                result = judge_plausibility(measurement, self._bounds, elapsed).to_dict()
                return _marked(result, deadline < usual)

            return self._watched(key, measure, _slowness_spoils)

        result = self._do("visit", key, configuration.to_dict(), args, process, perform)
        measurement = Measurement.from_dict(result)
        self._learn_of_machine(result)
        self._in_time(measurement.status)
        self._settle(key, result, configuration, measurement)
        return measurement

    def _watched(
        self, key: str, measure: Callable[[], dict[str, Any]], good: Callable[[dict[str, Any]], bool]
    ) -> dict[str, Any]:
        """A measurement, with the state of the machine under `gpu` and `cpu`."""
        if self._careful is None:
            return measure()
        result, seen = self._careful.measure(key, measure, good)
        return {**result, **seen}

    def _learn_of_machine(self, result: Mapping[str, Any]) -> None:
        """Update the conditions from a result, live or from the journal."""
        if "cpu" in result:
            self.conditions.add_load(result["cpu"])
            self.lost += float(result["cpu"].get("lost") or 0.0)
        if "gpu" not in result:
            return
        rested = self.resting
        (self._careful.learn if self._careful is not None else self._seen.add)(result["gpu"])
        if self.resting and not rested:
            limit = float(result["gpu"]["power_limit_w"])
            self.note(
                "power_limited",
                message=f"the GPU reaches its power limit of {limit:.0f} W: from now on it rests for "
                f"{REST_SECONDS:g} s before short prompts, which makes them as fast as in a fresh process",
            )

    @property
    def useful(self) -> float:
        """Seconds of the run without those lost by other load. The duration of an operation is their
        difference."""
        return self.now - self.lost

    @property
    def resting(self) -> bool:
        """Whether the GPU rests before prompts."""
        return self._rests and self.conditions.power_limited > 0

    @property
    def conditions(self) -> Conditions:
        """The summary of all windows of the run."""
        return self._careful.conditions if self._careful is not None else self._seen

    def killed(self, configuration: Configuration) -> bool:
        return self._identity(configuration) in self._killed

    def quality(self, key: str, configuration: Configuration, *, process: int) -> Quality:
        def perform(context: OpContext) -> dict[str, Any]:
            known = self._killed.get(self._identity(configuration))
            if known is not None:
                return Quality(known.status, message=_again(known.message)).to_dict()
            usual = 4 * self._deadline()
            deadline = self._within_budget(usual, self._compared)
            cut = deadline < usual
            if not self._compared and not self._virtual:
                deadline = max(deadline, FIRST_ANSWERS)
            deadline = self._within_limit(deadline)
            return _marked(self._executor.quality(configuration, context, deadline).to_dict(), cut)

        begun = self.now
        result = self._do("quality", key, configuration.to_dict(), {}, process, perform)
        quality = Quality.from_dict(result)
        if quality.status is TrialStatus.OK and self._compared:
            self._later_checks = max(self._later_checks, self.now - begun)
        elif quality.status is TrialStatus.OK:
            self._first_check = self.now - begun
        self._compared |= quality.status is TrialStatus.OK
        self._in_time(quality.status)
        self._settle(key, result, configuration, quality)
        return quality

    def _settle(
        self, key: str, result: Mapping[str, Any], configuration: Configuration, found: Measurement | Quality
    ) -> None:
        """Finish an operation. One that the end of the budget has cut short does not count as a killer."""
        if result.get("cut"):
            self._cut.add(key)
        else:
            self._remember(configuration, found.status, found.message)

    def was_cut(self, key: str) -> bool:
        """Whether the end of the budget has cut this operation short, which says nothing about it."""
        return key in self._cut

    @property
    def check_seconds(self) -> float:
        """Expected seconds of a comparison of answers: the longest one so far, except the first if there are
        others. The first one also computes the exact path. Comparisons that cannot change answers take no
        time."""
        return self._later_checks or self._first_check

    def routing(self, key: str, configuration: Configuration, *, process: int) -> dict[str, Any]:
        return self._do(
            "routing", key, configuration.to_dict(), {}, process,
            lambda context: self._executor.routing(configuration, self._workload, context),
        )  # fmt: skip

    def kernel_ops(self, key: str, configuration: Configuration, *, process: int) -> list[KernelOp]:
        def perform(context: OpContext) -> dict[str, Any]:
            return {"ops": [op.to_dict() for op in self._executor.kernel_ops(configuration, self._workload)]}

        result = self._do("kernel_ops", key, configuration.to_dict(), {}, process, perform)
        return [KernelOp.from_dict(op) for op in result["ops"]]

    def time_ops(
        self, key: str, op: KernelOp, configs: Sequence[Mapping[str, Value]], *, threads: int, seconds: float,
        process: int,
    ) -> list[list[float]]:  # fmt: skip
        """Seconds per launch of each config; empty lists if the worker died."""
        request = {"key": op.key, "m": op.m, "configs": [dict(c) for c in configs], "threads": threads,
                   "seconds": seconds}  # fmt: skip
        if op.depth > 0:  # older journals have no depth
            request["depth"] = op.depth

        def perform(context: OpContext) -> dict[str, Any]:
            deadline = 20.0 + 20 * seconds * len(configs)

            def measure() -> dict[str, Any]:
                return {"times": self._executor.time_ops(request, context, deadline)}

            return self._watched(key, measure, lambda result: any(result["times"]))

        result = self._do("time_ops", key, {}, request, process, perform)
        self._learn_of_machine(result)
        return [list(t) for t in result["times"]]

    def recall(self, op: str, key: str, perform: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The answer of something outside of the run, such as a database. It is asked once, and then in the
        journal."""
        return self._do(op, key, {}, {}, 0, lambda context: perform())

    def note(self, kind: str, **data: Any) -> None:
        """Write a note for people and reports. A resumed run does not write it twice."""
        if self.on_note is not None:
            self.on_note(kind, data)
        record = {"note": kind, **data}
        text = json.dumps(record, sort_keys=True)
        if text not in self._notes:
            self._notes.add(text)
            if self._journal is not None:
                self._journal.append(record)

    def _show(self, seen: Mapping[str, Any]) -> None:
        if self.on_note is not None:
            self.on_note("gpu", seen)

    # ---- the one door

    def _deadline(self, rest: float = 0.0) -> float:
        """The deadline of an operation: five times the duration of the default, because slower configurations
        are not worth waiting for, and a floor for loading and for a busy machine."""
        if self._virtual:
            return self._deadline_floor
        known = self.expected_measurement
        usual = 600.0 if known == 0 else max(self._deadline_floor, 5 * known)
        return self._within_limit(usual + rest)

    def _within_limit(self, seconds: float) -> float:
        return seconds if self._limit is None else min(seconds, max(1.0, self._limit - self.now))

    def _budget_left(self) -> float:
        return math.inf if self._budget is None else max(0.0, OVERRUN * self._budget - self.now)

    def _within_budget(self, deadline: float, bounded: bool) -> float:
        """Limit a deadline to the end of the budget plus a twentieth, so that the run does not wait longer
        for a hanging operation."""
        if not bounded or self._virtual:
            return deadline
        return min(deadline, max(1.0, self._budget_left()))

    def _in_time(self, status: TrialStatus) -> None:
        """Raises BudgetError if the limit has cut a configuration short, because it does not count as
        slow."""
        if status is TrialStatus.TIMEOUT and self._limit is not None and self.now >= self._limit:
            raise BudgetError(f"the budget of {self._limit:.0f} s ended during a measurement")

    def _do(
        self,
        op: str,
        key: str,
        config: dict[str, Any],
        args: dict[str, Any],
        process: int,
        perform: Callable[[OpContext], dict[str, Any]],
    ) -> dict[str, Any]:
        record: dict[str, Any] = {"op": op, "key": key, "process": process, "config": config, "args": args}
        place = self._find_key(record)
        found = self._found(place, op, process)
        if found is not None:
            self.replayed += 1
            self.last = key
            self._origin.setdefault(process, found["process"])
            result = found["result"]
            # An earlier operation may have been carried out. Its time then counts, and is recorded for a
            # continued run.
            self.catch_up(self.now + self._took[place] if self._mixes else float(found["t"]))
            if self._mixes and self._journal is not None:
                self._journal.append({**record, "result": result, "t": self.now})
            if not isinstance(result, dict):
                raise JournalError(f"journal: the record {key!r} has no result")
            return result
        if self._stopped.is_set():
            raise KeyboardInterrupt
        self.performed += 1
        self._live.add(process)
        if self._base is None:
            self._base = (self.now, time.monotonic())
        clocks = Clocks.read()
        result = perform(OpContext(key, process, self.now, self._begun_with))
        if self._stopped.is_set():
            raise KeyboardInterrupt
        if not self._virtual and (message := clocks.disagreement(Clocks.read())):
            self.note("clock", key=key, message=message)
        if self._virtual:
            # Rounded, so that sums do not depend on earlier sums of a target.
            self.now = round(self.now + float(result.get("seconds", 0.0)), 6)
        else:
            self.now = self._base[0] + time.monotonic() - self._base[1]
        if self._journal is not None:
            self._journal.append({**record, "result": result, "t": self.now})
        return result
