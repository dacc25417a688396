"""The checks of a journal's records before they are used.

A checksum shows that a line is unchanged, but not that this tuner wrote it: another program, another version
or a person may have. So journals are checked here before use, and an invalid record gives one line with its
number instead of a traceback.
"""

from __future__ import annotations

import contextlib
import datetime
import math
from typing import TYPE_CHECKING, Any

from ..core.errors import JournalError, TuneError
from ..core.protocol import Configuration, KernelOp, Measurement, Quality, Sample, TrialStatus
from ..measure.machine_monitor import Conditions
from ..measure.measurement import MOST_JOULES

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
    from pathlib import Path

MOST_SECONDS = 1e8  # upper bound for a run
ODD = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""The errors that invalid content raises anywhere."""

_ADVICE = "leave out --resume to start again (the old journal is kept)"


class Odd(Exception):
    """The error that a record is not one that the tuner writes. The message has the reason."""


def named(record: Mapping[str, Any], number: int) -> str:
    """The name of a record in messages: its number among the complete records, from 1, and its kind."""
    of = next((n for n in ("op", "note", "run") if n in record), None)
    key = f" {_shown(record['key'])}" if of == "op" and "key" in record else ""
    return f"record {number}{f' ({_shown(record[of])}{key})' if of else ''}"


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def check_resumable(
    path: Path, records: Sequence[Mapping[str, Any]], identity: Callable[[Configuration], Hashable]
) -> None:
    """Check that all records of a journal can be replayed.

    Args: `identity`: key of a configuration in the searched space.

    Raises:
        JournalError: One line with the file, the first invalid record and its problem.
    """
    for place, record in enumerate(records, 1):
        try:
            flaw(record)
            if "run" in record and "incumbents" not in record:
                raise Odd("it has no 'incumbents'")
            if record.get("op") in ("visit", "quality"):
                _in_space(record, identity)
        except Odd as error:
            raise JournalError(f"journal {path}: {named(record, place)}: {error}; {_ADVICE}") from error


def check_outline(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Check the first and the last records of a run, and only the times of the others.

    Raises:
        JournalError: As in `check_resumable`.
    """
    for place, record in enumerate(records, 1):
        try:
            if "op" not in record:
                flaw(record)
            elif "t" in record:
                number(record["t"], "t", MOST_SECONDS)
        except Odd as error:
            raise JournalError(f"journal {path}: {named(record, place)}: {error}") from error


@contextlib.contextmanager
def fitting(path: Path, last: Callable[[], str]) -> Iterator[None]:
    """A context for the part of a run that comes only from records. If valid records are inconsistent
    together, it also gives one line.

    Args:
        last: Key of the last used record; empty once something new was measured.

    Raises:
        JournalError: Instead of the errors that invalid content raises.
    """
    try:
        yield
    except ODD as error:
        key = last()
        if not key:
            raise
        raise JournalError(
            f"journal {path}: the records up to {_shown(key)} are inconsistent "
            f"({type(error).__name__}: {_shown(str(error))}); {_ADVICE}"
        ) from error


def flaw(record: Mapping[str, Any]) -> None:
    """Raises Odd if a record of a tune is not one that the tuner writes."""
    try:
        if "op" in record:
            _operation(record)
        elif record.get("note") == "begun":
            datetime.datetime.fromisoformat(str(record["date"]))
        elif record.get("note") == "outcome":
            _outcome(record)
        elif "run" in record:
            _head(record)
    except KeyError as error:
        raise Odd(f"it has no {_shown(error.args[0] if error.args else '')}") from error
    except ODD as error:
        raise Odd(_shown(str(error))[1:-1]) from error


def number(value: object, what: str, most: float = math.inf) -> float:
    """A number of a record. Raises Odd if it is not a number, not finite, negative or above `most`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Odd(f"{what} is {_shown(value)}, which is not a number")
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if not (math.isfinite(found) and 0 <= found <= most):
        raise Odd(f"{what} is {_shown(value)}, which is out of range")
    return found


def _is(value: object, kind: type, what: str) -> None:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise Odd(f"{what} is {_shown(value)}, which is not of type {kind.__name__}")


def _scalar(value: object, what: str) -> None:
    if not isinstance(value, bool | int | float | str):
        raise Odd(f"{what} is {_shown(value)}, which no setting can have")


def _head(record: Mapping[str, Any]) -> None:
    for name in ("identity", "workload", "knobs", "held"):
        _is(record.get(name, {}), dict, name)
    for name in ("device", "model", "engine"):
        _is(record.get("identity", {}).get(name, {}), dict, f"identity.{name}")
    for name, share in (record.get("identity", {}).get("model", {}).get("types") or {}).items():
        number(share, f"the share of {_shown(name)}")
    _is(record.get("incumbents", []), list, "incumbents")
    for settings in record.get("incumbents", []):
        _is(settings, dict, "an incumbent")
        for name, value in settings.items():
            _scalar(value, f"incumbent {name}")


def _outcome(record: Mapping[str, Any]) -> None:
    _is(record.get("status"), str, "status")
    number(record.get("seconds", 0.0), "seconds", MOST_SECONDS)
    _is(record.get("gain") or {}, dict, "gain")
    for metric, gain in (record.get("gain") or {}).items():
        _is(gain, dict, f"gain.{metric}")
        number(gain.get("ratio"), f"gain.{metric}.ratio")


def _operation(record: Mapping[str, Any]) -> None:
    for name in ("op", "key"):
        _is(record[name], str, name)
    _is(record["process"], int, "process")
    for name in ("config", "args", "result"):
        _is(record[name], dict, name)
    number(record["t"], "t", MOST_SECONDS)
    op, result = record["op"], record["result"]
    if op in ("visit", "quality", "routing", "kernel_ops"):
        configuration = Configuration.from_dict(record["config"])
        for name, value in configuration.settings.items():
            _scalar(value, name)
        for choice in configuration.kernels:
            for name, value in choice.config.items():
                _scalar(value, f"{choice.key} {name}")
    if op == "visit":
        _measurement(Measurement.from_dict(result), record["args"]["metrics"])
    elif op == "quality":
        number(Quality.from_dict(result).seconds, "seconds", MOST_SECONDS)
    elif op == "kernel_ops":
        for each in result["ops"]:
            _kernel_op(KernelOp.from_dict(each))
    elif op == "time_ops":
        for times in result["times"]:
            for seconds in times:
                number(seconds, "a time", MOST_SECONDS)
    if "gpu" in result:
        Conditions().add(result["gpu"])
        number(result["gpu"]["power_limit_w"] or 0.0, "gpu.power_limit_w")
    if "cpu" in result:
        _is(result["cpu"], dict, "cpu")
        for name in ("others", "steal", "dropped", "lost"):
            number(result["cpu"].get(name, 0), f"cpu.{name}", MOST_SECONDS)
        _distances(result["cpu"])


def _distances(cpu: Mapping[str, Any]) -> None:
    """The distances between the CPUs around a window."""
    between = cpu.get("between_ns") or []
    _is(between, list, "cpu.between_ns")
    for figures in (*between, *([cpu["nearest_ns"]] if cpu.get("nearest_ns") else [])):
        _is(figures, list, "a distance between CPUs")
        if len(figures) != 2:
            raise Odd(f"a distance between CPUs has {len(figures)} figures; expected 2")
        for ns in figures:
            number(ns, "a distance between CPUs")


def _measurement(measurement: Measurement, metrics: object) -> None:
    number(measurement.seconds, "seconds", MOST_SECONDS)
    _is(metrics, list, "metrics")
    if measurement.status is not TrialStatus.OK:
        return
    for sample in (*measurement.samples, *measurement.warmup):
        if (why := odd_sample(sample)) is not None:
            raise Odd(why)
    missing = [m for m in metrics if not any(s.metric == m for s in measurement.samples)]  # type: ignore[attr-defined]
    if missing:
        raise Odd(f"it has no sample of {_shown(missing[0])}")


def odd_sample(sample: Sample) -> str | None:
    """The reason why a sample of a valid measurement gives no rate; None if it does."""
    for value in (sample.seconds, sample.clock_seconds):
        if not (math.isfinite(value) and 1e-12 < value < MOST_SECONDS):
            return f"a sample took {value!r} seconds"
    if sample.joules is not None and not 0 < sample.joules < MOST_JOULES:
        return f"a sample took {sample.joules!r} joules"
    if not 0 < sample.tokens < 1e12:
        return f"a sample is of {_shown(sample.tokens)} tokens"
    return None


def _kernel_op(op: KernelOp) -> None:
    for name, text in (("key", op.key), ("tokens", op.tokens), ("metric", op.metric)):
        _is(text, str, name)
    for name, count in (("m", op.m), ("count", op.count), ("depth", op.depth)):
        _is(count, int, name)
        number(count, name, 1e12)
    for config in (op.default, *op.candidates):
        _is(config, dict, "a config")
        for name, value in config.items():
            _scalar(value, name)


def _in_space(record: Mapping[str, Any], identity: Callable[[Configuration], Hashable]) -> None:
    try:
        identity(Configuration.from_dict(record["config"]))
    except (*ODD, TuneError) as error:
        raise Odd(f"its configuration does not belong to this search: {_shown(str(error))[1:-1]}") from error
