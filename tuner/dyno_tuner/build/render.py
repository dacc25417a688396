"""The result of `tune build` as a table, JSON or a page, with the command to use."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from ..core.protocol import settings_text
from ..output.html_report.elements import Page, section, table, text
from ..output.html_report.figures import forest
from ..output.html_report.page import document

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .builder import Built
    from .measure import Loading, Measured
    from .search import Outcome, Search

MIB = 2**20


def command_of(engine: str, given: Mapping[str, str], result: Search) -> str:
    """The command that builds the chosen variant: with pip, or with CMake in the tree of another engine.

    Args:
        given: Defines of all builds that differ from the engine's defaults.
    """
    whole = {**given, **{switch.name: switch.value for switch in result.chosen}}
    if engine == "dyno":
        return shlex.join(
            ["pip", "install", ".", *(w for n, v in whole.items() for w in ("-C", f"cmake.define.{n}={v}"))]
        )
    return shlex.join(["cmake", "-B", "build", *(f"-D{n}={v}" for n, v in whole.items())])


def to_dict(result: Search, command: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The result as plain values."""
    return {
        "verdicts": {row.switch.name: _outcome(row) for row in result.outcomes},
        "command": command,
        "settings": dict(result.knobs),
        "chosen": None if result.confirmed is None or result.built is None else {
            "defines": {s.name: s.value for s in result.chosen},
            **_measured(result.confirmed), **_cost(result.built, None),
        },
        "together": None if result.together is None else _measured(result.together),
        "default": _cost(result.base, result.base_loading),
        **facts,
    }  # fmt: skip


def _outcome(row: Outcome) -> dict[str, Any]:
    told: dict[str, Any] = {
        "verdict": row.verdict, "tried": row.tried, "reason": row.reason, "value": row.switch.value,
        "default": row.switch.default,
        "ratio": {}, "ci95": {}, **_cost(row.built, row.loading),
    }  # fmt: skip
    if row.measured is not None:
        told |= _measured(row.measured)
    if row.tuned is not None:
        retuned = {} if row.tuned.measured is None else _measured(row.tuned.measured)
        told["retuned"] = {"default": dict(row.tuned.base), "variant": dict(row.tuned.variant), **retuned}
    return told


def _measured(found: Measured) -> dict[str, Any]:
    return {
        "ratio": {n: round(e.ratio, 4) for n, e in found.ratios.items()},
        "ci95": {n: [round(e.low, 4), round(e.high, 4)] for n, e in found.ratios.items()},
        "margin": {n: round(m, 4) for n, m in found.margins.items()},
        "rates": {n: {"default": round(a, 2), "variant": round(b, 2)} for n, (a, b) in found.rates.items()},
        "joules_per_token": {
            n: {source: {"default": a, "variant": b} for source, (a, b) in by.items()}
            for n, by in found.joules.items()
        },
        "rounds": found.rounds,
        "disturbed": found.disturbed,
        "mean_kld": None if found.kld is None else {"default": found.kld[0], "variant": found.kld[1]},
    }


def _cost(built: Built | None, loading: Loading | None) -> dict[str, Any]:
    names = (
        "seconds", "bytes", "device_bytes", "link_seconds", "link_mib", "process_mib", "compiler_cache",
        "gpu_types", "gpu_groups",
    )  # fmt: skip
    return {
        **{name: getattr(built, name, None) for name in names},
        "load_seconds": None if loading is None else round(loading.seconds, 3),
        "host_mib": None if loading is None else round(loading.host_mib, 1),
        "gpu_mib": None if loading is None or loading.gpu_mib is None else round(loading.gpu_mib, 1),
    }


COLUMNS = (
    "switch", "value", "verdict", "#rate", "#build s", "#link MiB", "#MiB", "#load s", "#host MiB", "~reason",
)  # fmt: skip


def rows(result: Search) -> list[list[str]]:
    """Cells of the table, the default build first."""
    found = [["default build", "", "", "", *_cells(result.base, result.base_loading), ""]]
    for row in result.outcomes:
        rates = "" if row.measured is None else " ".join(
            f"{n} {e.ratio:.3f}×" for n, e in row.measured.ratios.items()
        )  # fmt: skip
        cells = _cells(row.built, row.loading)
        found.append([row.switch.name, row.switch.value, row.verdict, rates, *cells, row.reason])
    return found


def _cells(built: Built | None, loading: Loading | None) -> list[str]:
    mark = "*" if built is not None and built.compiler_cache else ""
    return [
        "" if built is None else f"{built.seconds:,.0f}{mark}",
        "" if built is None or not built.link_mib else f"{built.link_mib:,}",
        "" if built is None else f"{built.bytes / MIB:.1f}",
        "" if loading is None else f"{loading.seconds:.2f}",
        "" if loading is None else f"{loading.host_mib:,.0f}",
    ]


def markdown(result: Search, command: str, facts: Mapping[str, Any]) -> str:
    """The table in Markdown, with the command to use."""
    names = [c.lstrip("#~") for c in COLUMNS]
    marks = ["--:" if c.startswith("#") else "---" for c in COLUMNS]
    lines = [f"| {' | '.join(names)} |", f"|{'|'.join(marks)}|"]
    lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows(result)]
    lines += ["", *notes(result, facts), "", f"    {command}"]
    return "\n".join(lines)


def notes(result: Search, facts: Mapping[str, Any]) -> list[str]:
    """Sentences about the result as a whole."""
    found = [f"{facts['model']} on {facts['device']}, {facts['workload']}."]
    if result.base is None:
        found.append("Known facts decide every switch, so nothing was built. Keep the default build.")
    elif result.confirmed is None:
        found.append("No build was faster than the default build. Keep the default build.")
    else:
        named = " ".join(s.define for s in result.chosen)
        gains = ", ".join(f"{n} {e}" for n, e in result.confirmed.ratios.items())
        head = f"{named} against the default build" if named else "New rounds did not confirm a gain"
        found.append(f"{head}, in {result.confirmed.rounds} rounds: {gains}.")
    if result.built is not None and (only := result.built.runs_only):
        found.append(f"{only[0].upper()}{only[1:]}. That holds for a draft model, too.")
    late = [row.switch.define for row in result.outcomes if not row.tried]
    if late:
        found.append(f"Not tried: {', '.join(late)} (the table has the reasons).")
    if result.knobs:
        told = settings_text(result.knobs)
        found.append(f"With that build, also set {told}.")
    builds = [result.base, *(row.built for row in result.outcomes)]
    if any(b is not None and b.compiler_cache for b in builds):
        found.append("* A compiler cache was in use. Without it, the build takes longer.")
    return found


def page(result: Search, command: str, facts: Mapping[str, Any]) -> str:
    """The HTML page."""
    made = Page(title="tune build")
    head = "".join(f"<p>{text(line)}</p>\n" for line in notes(result, facts))
    made.parts.append(section("Build switches", head, f"<pre>{text(command, 4000)}</pre>\n"))
    made.section("Verdicts", table(COLUMNS, rows(result)))
    points = _points(result.outcomes)
    if points:
        made.section("Ratios to the default build", made.plot("ratios", forest(points, None)))
    return document(made)


def _points(outcomes: Sequence[Outcome]) -> list[tuple[str, Any]]:
    return [
        (f"{row.switch.name} {name}", e)
        for row in outcomes
        if row.measured is not None
        for name, e in row.measured.ratios.items()
    ]
