"""Bench results as md, json, jsonl or csv, with the names that parsers of llama-bench look for."""

from __future__ import annotations

import csv
import io
import json
import statistics
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dyno.bench import BenchResult

FORMATS = ("md", "json", "jsonl", "csv")


def record(result: BenchResult, machine: dict[str, Any], model: dict[str, Any]) -> dict[str, Any]:
    """One result as a flat dict, with all facts needed to reproduce it.

    Args:
        result: Samples of one case.
        machine: `build_version`, `build_info`, `cpu_info`, `backends`.
        model: `model_filename`, `model_type`, `model_size` (bytes), `model_n_params`.
    """
    case, settings = result.case, result.settings
    return {
        **machine,
        **model,
        "n_batch": case.batch,
        "n_ubatch": settings["ubatch"],
        "n_threads": settings["threads"],
        "n_threads_batch": settings["threads_batch"],
        "type_k": settings["kv_type_k"],
        "type_v": settings["kv_type_v"],
        "n_prompt": case.n_prompt,
        "n_gen": case.n_gen,
        "n_depth": case.depth,
        "test": case.test,
        "settings": settings,
        "warm_up_runs": result.warm_up_runs,
        "test_time": result.time,
        "avg_ns": round(statistics.fmean(result.samples_ns)),
        "stddev_ns": round(statistics.stdev(result.samples_ns)) if len(result.samples_ns) > 1 else 0,
        "avg_ts": result.avg_ts,
        "stddev_ts": result.stddev_ts,
        "samples_ns": result.samples_ns,
        "samples_ts": result.samples_ts,
        "energy": result.energy,
        "expert_choices": result.expert_choices,
    }


def as_json(records: Sequence[dict[str, Any]]) -> str:
    """A JSON array."""
    return json.dumps(list(records), indent=2)


def as_jsonl(records: Sequence[dict[str, Any]]) -> str:
    """JSON Lines: one object for each result."""
    return "\n".join(json.dumps(r) for r in records)


def as_csv(records: Sequence[dict[str, Any]]) -> str:
    """CSV: a header and one line for each result. Lists and dicts are JSON."""
    out = io.StringIO()
    if records:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(records[0])
        for r in records:
            writer.writerow([json.dumps(v) if isinstance(v, (dict, list)) else v for v in r.values()])
    return out.getvalue().rstrip("\n")


# Columns that are always shown, and columns that are shown only if their values differ between results.
_ALWAYS = ("model", "size", "params", "backend", "threads")
_WHEN_VARIED = {
    "threads_batch": "n_threads_batch",
    "n_batch": "n_batch",
    "n_ubatch": "n_ubatch",
    "type_k": "type_k",
    "type_v": "type_v",
}
_TEXT_COLUMNS = ("model", "backend", "type_k", "type_v")


def as_markdown(records: Sequence[dict[str, Any]]) -> str:
    """The table of llama-bench: model, size, params, backend, threads, varying settings, test, t/s."""
    varied = [name for name, key in _WHEN_VARIED.items() if len({r[key] for r in records}) > 1]
    sources = sorted({source for r in records for source in r["energy"]})
    power = [f"{source.upper()} {unit}" for source in sources for unit in ("J/t", "W")]
    columns = [*_ALWAYS, *varied, "test", "t/s", *power]
    rows = []
    for r in records:
        cells = {
            "model": r["model_type"],
            "size": f"{r['model_size'] / 2**30:.2f} GiB"
            if r["model_size"] >= 2**30
            else f"{r['model_size'] / 2**20:.2f} MiB",
            "params": human_count(r["model_n_params"]),
            "backend": r["backends"],
            "threads": str(r["n_threads"]),
            "test": r["test"],
            "t/s": f"{r['avg_ts']:.2f} ± {r['stddev_ts']:.2f}",
        }
        cells |= {name: str(r[_WHEN_VARIED[name]]) for name in varied}
        for source in sources:
            told = r["energy"].get(source)
            cells[f"{source.upper()} J/t"] = "" if told is None else f"{told['joules_per_token']:.3g}"
            cells[f"{source.upper()} W"] = "" if told is None else f"{told['watts']:.0f}"
        rows.append([cells[c] for c in columns])
    widths = [max(len(c), *(len(row[i]) for row in rows)) if rows else len(c) for i, c in enumerate(columns)]

    def line(cells: Sequence[str]) -> str:
        padded = (
            c.ljust(w) if name in _TEXT_COLUMNS else c.rjust(w)
            for c, w, name in zip(cells, widths, columns, strict=True)
        )
        return "| " + " | ".join(padded) + " |"

    rule = (
        "|"
        + "|".join(
            " " + "-" * w + (" " if name in _TEXT_COLUMNS else ":")
            for w, name in zip(widths, columns, strict=True)
        )
        + "|"
    )
    return "\n".join([line(columns), rule, *(line(row) for row in rows)])


def human_count(number: float) -> str:
    """12.3 M, 30.5 B."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return str(int(number))
