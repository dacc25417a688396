"""A journal for the report: operations and notes that were checked one by one.

A journal may come from an interrupted run, be cut or damaged, or not be written by the tuner at all. Unusable
records are counted and reported on the page, and never guessed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...core.errors import JournalError, TuneError
from ...core.protocol import METRICS, Configuration, Measurement, Quality, Workload
from ...kernels import in_situ
from ...record import journal, validation

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from ...core.protocol import Value

SECOND, JOULE = "t/s", "tokens/J"


def number(value: Any) -> float | None:
    """A finite number, or None for anything else (bools and the journal's "nan" included)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def mapping(value: Any) -> dict[str, Any]:
    return {str(k): v for k, v in value.items()} if isinstance(value, dict) else {}


@dataclass(frozen=True)
class Seen:
    """A measurement of the journal."""

    key: str
    process: int
    configuration: Configuration
    measurement: Measurement
    t: float  # seconds of the run at its end
    device: int = 0  # number of the device, if several searched together

    def settings(self) -> dict[str, Value]:
        return dict(self.configuration.settings)


@dataclass(frozen=True)
class Checked:
    """A comparison of answers with the exact path."""

    key: str
    configuration: Configuration
    quality: Quality


@dataclass
class Run:
    """The content of a journal."""

    path: str
    sha256: str
    head: dict[str, Any] = field(default_factory=dict)
    workload: Workload | None = None
    measurements: list[Seen] = field(default_factory=list)  # in order of time
    qualities: list[Checked] = field(default_factory=list)
    notes: list[dict[str, Any]] = field(default_factory=list)
    times: dict[int, list[float]] = field(default_factory=dict)  # ends of a device's operations, ascending
    absent: list[str] = field(default_factory=list)  # missing journals of further devices
    operations: int = 0
    seconds: float = 0.0
    damaged: int = 0  # incomplete lines
    odd: list[str] = field(default_factory=list)  # complete lines with invalid content, each with the reason

    def noted(self, kind: str) -> Iterator[dict[str, Any]]:
        return (n for n in self.notes if n["note"] == kind)

    def last(self, kind: str) -> dict[str, Any]:
        """The last note of a kind; empty if there is none."""
        return next((n for n in reversed(self.notes) if n["note"] == kind), {})

    @property
    def identity(self) -> dict[str, Any]:
        return mapping(self.head.get("identity"))

    @property
    def knobs(self) -> dict[str, list[Any]]:
        return {k: list(v) for k, v in mapping(self.head.get("knobs")).items() if isinstance(v, list)}

    @property
    def defaults(self) -> dict[str, Any]:
        """The default settings: as measured in the A/A stage, or else as reported by the engine."""
        for seen in self.measurements:
            if seen.key.startswith("aa/"):
                return seen.settings()
        stated = mapping(mapping(self.identity.get("engine")).get("defaults"))
        return {name: stated[name] for name in self.knobs if name in stated}

    @property
    def metrics(self) -> tuple[str, ...]:
        if self.workload is not None:
            return self.workload.metrics
        measured = {s.metric for seen in self.measurements for s in seen.measurement.samples}
        return tuple(m for m in METRICS if m in measured)

    @property
    def unit(self) -> str:
        """The unit of the deciding values."""
        return JOULE if any(seen.measurement.by_energy for seen in self.measurements) else SECOND

    def value(self, rate: float) -> str:
        """A deciding value in that unit."""
        return f"{rate:,.1f}" if self.unit == SECOND else f"{rate:.4g}"

    def named(self, metric: str) -> str:
        """The name of a metric, such as `pp512` or, with a depth, `tg64 @ d4096`."""
        if self.workload is None:
            return metric
        return self.workload.label(metric).replace("@d", " @ d")


def read(path: Path) -> Run:
    """Read a journal. Raises JournalError if the file cannot be read or has no record of a tune."""
    loaded = journal.load(path)
    if not loaded.records:
        beside = path.with_name(f"{path.name}.journal.jsonl")
        right = f"its journal, {beside}" if beside.is_file() else "a file *.journal.jsonl"
        raise JournalError(f"journal {path}: the file has no complete record of a tune; give {right}")
    run = Run(str(path), journal.sha256(path), damaged=loaded.damaged)
    for place, record in enumerate(loaded.records, 1):
        if "run" in record:
            run.head = run.head or record
        elif isinstance(record.get("note"), str):
            run.notes.append(record)
        elif "op" in record:
            _operation(run, path, place, record, 0)
        else:
            run.odd.append(f"journal {path}: {validation.named(record, place)}: its kind is unknown")
    if "workload" in run.head:
        try:
            run.workload = Workload.from_dict(run.head["workload"])
        except (KeyError, TypeError, ValueError, OverflowError, TuneError):
            run.odd.append(f"journal {path}: record 1 ('run'): its workload is not valid")
    if not (run.head or run.operations or run.notes):
        raise JournalError(f"journal {path}: holds {len(loaded.records)} records, but none of a tune")
    _read_devices(run, path)
    run.measurements.sort(key=lambda seen: seen.t)
    for times in run.times.values():
        times.sort()
    return run


def _read_devices(run: Run, path: Path) -> None:
    """The measurements of further devices in the search, from their own journals next to this one."""
    devices = number(run.head.get("devices")) or 1
    for device in range(1, int(min(devices, journal.MOST_DEVICES))):
        name = journal.of_device(path, device)
        beside = journal.present(name)
        if beside is None:
            run.absent.append(name.name)
            continue
        loaded = journal.load(beside)
        if loaded.records and loaded.records[0].get("id") != run.head.get("id"):
            run.absent.append(beside.name)  # it belongs to another run
            continue
        run.damaged += loaded.damaged
        for place, record in enumerate(loaded.records, 1):
            if "op" in record:
                _operation(run, beside, place, record, device)


def _operation(run: Run, path: Path, place: int, record: Mapping[str, Any], device: int) -> None:
    try:
        validation.flaw(record)
        t = float(record["t"])
        if record["op"] == "visit" and str(record["key"]).startswith(in_situ.KEY):
            _measurement(record, t, device)  # another workload, whose result is in a note
        elif record["op"] == "visit":
            run.measurements.append(_measurement(record, t, device))
        elif record["op"] == "quality":
            run.qualities.append(_quality(record))
    except (*validation.ODD, validation.Odd) as error:
        run.odd.append(f"journal {path}: {validation.named(record, place)}: {error}")
        return
    run.operations += 1
    run.times.setdefault(device, []).append(t)
    run.seconds = max(run.seconds, t)


def _measurement(record: Mapping[str, Any], t: float, device: int) -> Seen:
    configuration = Configuration.from_dict(record["config"])
    measurement = Measurement.from_dict(record["result"])
    return Seen(str(record["key"]), int(record["process"]), configuration, measurement, t, device)


def _quality(record: Mapping[str, Any]) -> Checked:
    configuration = Configuration.from_dict(record["config"])
    return Checked(str(record["key"]), configuration, Quality.from_dict(record["result"]))
