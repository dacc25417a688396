"""Sharing of profiles: a profile as one row of JSON, and a foreign row as a claimed profile.

A row has properties, shapes, gains with intervals, and versions. It has no paths, no names of files, machines
or persons, and no free text. Its digest detects changes, but does not show who wrote the row.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dyno import profiles
from pydantic import ValidationError

from .. import __version__
from ..core.errors import TuneError
from ..core.serve_load import ServedLoad
from ..core.workload import MIXES
from ..output.emit import workload_of

if TYPE_CHECKING:
    from collections.abc import Mapping

FORMAT = "dyno-row-1"
MOST_BYTES = 1 << 20
_ENTRY = ("value", "default", "ratio", "ci95", "n", "moves", "group", "variant")
_VERSIONS = ("engine_commit", "driver", "cuda", "compiler")


def row_of(profile: profiles.Profile) -> dict[str, Any]:
    """The row of a profile, with its digest.

    Raises:
        TuneError: The profile has no entry, or no measured gain.
    """
    whole = profile.model_dump(mode="json", by_alias=True, exclude_none=True)
    settings = {n: e for n, e in whole.get("settings", {}).items() if isinstance(e, dict)}
    kernels = {
        key: kept
        for key, by in whole.get("kernels", {}).items()
        if (kept := {tokens: _kernel(e) for tokens, e in by.items() if isinstance(e, dict)})
    }
    evidence, provenance = whole.get("evidence", {}), whole.get("provenance", {})
    if not settings and not kernels:
        raise TuneError("every entry of this profile is default: there is nothing to share")
    if not evidence.get("gain"):
        raise TuneError("this profile has no measured gain; share a profile of a tune that ran to its end")
    match = whole["match"]
    row = {
        "format": FORMAT,
        "device": match["device"],
        "model": match["model"],
        "engine": {**match["engine"], "build": _build(match["engine"].get("build", {}))},
        "settings": {n: _part(e, _ENTRY) for n, e in settings.items()},
        "kernels": kernels,
        "workload": _work(evidence),
        "gain": evidence["gain"],
        **_part(evidence, ("objective",)),
        "noise": _part(evidence.get("noise", {}), ("margin", "half_width")),
        "quality": {k: v for k, v in evidence.get("quality", {}).items() if k != "reference"},
        "versions": _part(provenance, _VERSIONS),
        "tuner": provenance.get("tuner", __version__),
        "date": provenance.get("date", "")[:10],
    }  # fmt: skip
    return {**row, "sha256": digest(row)}


_EVIDENCE = ("workload", "gain", "objective", "noise", "quality")


def _part(values: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: values[name] for name in names if name in values}


def _work(evidence: Mapping[str, Any]) -> dict[str, Any]:
    """The workload of a row. A mix has its measures in the order of the weights, and a server its load.

    A name is included only if it can be parsed. The load of a server loses the name of its text file.
    """
    work = evidence.get("workload", {})
    told = _part(work, ("pp", "tg", "depth", "weights"))
    name = work.get("name", "")
    if name.startswith("serve:"):
        told["name"] = str(replace(ServedLoad.parse(name), text=None))
        told.pop("weights", None)  # it has only one measure
    elif name in MIXES:
        told["name"] = name
    if told.get("weights"):
        told["metrics"] = list(evidence.get("baseline") or evidence["gain"])
    return told


def _kernel(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in entry.items() if k != "note"}


def _build(switches: Mapping[str, Any]) -> dict[str, Any]:
    """Build switches, with paths replaced by a mark."""
    return {n: True if isinstance(v, str) and ("/" in v or "\\" in v) else v for n, v in switches.items()}


def digest(row: Mapping[str, Any]) -> str:
    """SHA-256 of a row without its digest, in a canonical form."""
    plain = {k: v for k, v in row.items() if k != "sha256"}
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def read_row(text: str) -> dict[str, Any]:
    """Read a row from its JSON.

    Raises:
        TuneError: It is not a row of this format, or it was changed after its digest was made.
    """
    if len(text) > MOST_BYTES:
        raise TuneError(f"a row has at most {MOST_BYTES} characters; this one has {len(text)}")
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TuneError(f"this is not a row, as `tune share PROFILE` prints one: {error}") from error
    if not isinstance(row, dict) or row.get("format") != FORMAT:
        told = row.get("format") if isinstance(row, dict) else type(row).__name__
        raise TuneError(f"this is not a row: its format is {told!r}, expected {FORMAT!r}")
    try:
        found = digest(row)
    except ValueError as error:
        raise TuneError(f"this row holds a number that cannot be read: {error}") from error
    if row.get("sha256") != found:
        raise TuneError(f"this row was changed: its content has the digest {found[:16]}…")
    return row


def profile_of(row: Mapping[str, Any]) -> profiles.Profile:
    """The profile that a row claims. Its gains do not count before they are measured here.

    Raises:
        TuneError: An entry, the device, the model or the engine is invalid.
    """
    try:
        profile = profiles.Profile.model_validate({
            "schema": 1,
            "label": f"imported row {row['sha256'][:12]}",
            "match": {"device": row["device"], "model": row["model"], "engine": row["engine"]},
            "settings": row["settings"],
            "kernels": row["kernels"],
            "evidence": {k: row[k] for k in _EVIDENCE if row.get(k)} | _ordered(row),
            "provenance": {"tuner": row["tuner"], "date": row["date"], **row["versions"]},
        })  # fmt: skip
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"] if not str(part).startswith("<"))
        raise TuneError(f"this row is invalid: {place}: {first['msg']}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise TuneError(f"this row is incomplete: {type(error).__name__}: {error}") from error
    _check_work(profile)
    return profile


def _ordered(row: Mapping[str, Any]) -> dict[str, Any]:
    """The workload without its measures, and the gains in the order of the measures, by which a mix is
    read."""
    work, gain = row["workload"], row["gain"]
    metrics = work.get("metrics")
    if metrics is None:
        return {}
    if not isinstance(metrics, list) or sorted(map(str, metrics)) != sorted(gain):
        raise TuneError("this row is invalid: workload.metrics does not name the measures of its gain")
    plain = {k: v for k, v in work.items() if k != "metrics"}
    return {"workload": plain, "gain": {m: gain[m] for m in metrics}}


def _check_work(profile: profiles.Profile) -> None:
    """Check that all gains belong to measures of the workload.

    Raises:
        TuneError: A gain belongs to another workload, or the workload cannot be read.
    """
    assert profile.evidence is not None  # each row has a workload
    workload = workload_of(profile)
    known = {*workload.metrics, *map(workload.label, workload.metrics)}
    other = [m for m in profile.evidence.gain if m not in known]
    if other:
        raise TuneError(
            f"this row does not give the workload of its gain of {', '.join(other)}; share the profile again "
            "with this version"
        )
