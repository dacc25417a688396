"""Two results of `tuner_statistics.py`: no row of the second may be worse than its interval in the first.

    python benchmarks/compare_statistics.py benchmarks/results/tuner_statistics.json new.json

A row is a count of successes (or failures) among trials. It has become worse if its share in the second file
lies outside the 95 % Wilson interval of the first, on the bad side. Medians have no interval in the files:
they are printed, not judged. The exit code is 1 if a row has become worse or is missing.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scipy import stats

if TYPE_CHECKING:
    from collections.abc import Iterator

PLAIN = (
    "regret_median",
    "margin_median",
    "seconds_median",
    "median",
    "p90",
    "measurements_max",
    "largest_share",
)
"""Figures without an interval."""


@dataclass(frozen=True)
class Row:
    """A share: `count` of `trials`, and whether a larger one is better."""

    count: float
    trials: int
    more_is_better: bool

    def worse_than(self, old: Row) -> bool:
        """Whether the share lies outside the interval of `old`, on the bad side."""
        if not self.trials or not old.trials:
            return False
        low, high = stats.binomtest(round(old.count), old.trials).proportion_ci(0.95, method="wilson")
        share = self.count / self.trials
        return bool(share < low if self.more_is_better else share > high)


def rows(report: dict[str, Any]) -> Iterator[tuple[str, Row]]:
    """The rows of a report by name.

    Raises:
        KeyError: The file is no result of `tuner_statistics.py`.
    """
    for name, r in report["null"].items():
        yield f"null {name}: changed", Row(r["changed"], r["tunes"], False)
    for name, r in report["tunes"].items():
        pairs = r["tunes"] // 2
        yield f"tunes {name}: entries_agree", Row(r["entries_agree"] * pairs, pairs, True)
        yield f"tunes {name}: harmful", Row(r["harmful"], r["written"], False)
        yield f"tunes {name}: truly_slower_at_all", Row(r["truly_slower_at_all"], r["written"], False)
        yield f"tunes {name}: intervals_hold_truth", Row(r["intervals_hold_truth"], r["intervals"], True)
    for name, r in report["interactions"].items():
        yield f"interactions {name}: both_found", Row(r["both_found"], r["tunes"], True)
        one = r["one_without_the_other"]
        yield f"interactions {name}: one_without_the_other", Row(one, r["tunes"], False)
    for surface, methods in report["regret"].items():
        for method, r in methods.items():
            share = r["within_2pct"] * r["runs"]
            yield f"regret {surface} {method}: within_2pct", Row(share, r["runs"], True)
    for name, r in report["thresholds"].items():
        for key in ("within_one_step", "ties_called"):
            yield f"thresholds {name}: {key}", Row(r[key] * r["runs"], r["runs"], True)
    for part, keys in (("drift", ("same_winner", "same_or_as_good")), ("budget", ("within_10pct",))):
        r = report[part]
        for key in keys:
            yield f"{part}: {key}", Row(r[key] * r["tunes"], r["tunes"], True)
    yield "budget: harmful", Row(report["budget"]["harmful"], report["budget"]["tunes"], False)
    r = report["interrupt"]
    yield "interrupt: valid", Row(r["valid"], r["tunes"], True)
    yield "interrupt: harmful", Row(r["harmful"], r["written"], False)


def plain(report: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """The figures without an interval, by path."""
    for key, value in report.items() if isinstance(report, dict) else ():
        if key in PLAIN:
            yield f"{path}{key}", value
        else:
            yield from plain(value, f"{path}{key} ")


def compare(old: dict[str, Any], new: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Lines of all differences, and the lines among them that fail the comparison."""
    lines, failed = [], []
    found = dict(rows(new))
    for name, before in rows(old):
        after = found.get(name)
        if after is None:
            failed.append(f"MISSING {name}")
            continue
        line = f"{name}: {before.count:.6g} of {before.trials} -> {after.count:.6g} of {after.trials}"
        if after.worse_than(before):
            failed.append(f"WORSE   {line}")
        elif (before.count, before.trials) != (after.count, after.trials):
            lines.append(f"        {line}")
    figures = dict(plain(new))
    for name, value in plain(old):
        if name in figures and figures[name] != value:
            lines.append(f"figure  {name}: {value:.4g} -> {figures[name]:.4g}")
    return lines + failed, failed


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("old", type=Path, help="the committed JSON file")
    parser.add_argument("new", type=Path, help="the JSON file of this tree")
    arguments = parser.parse_args()
    old, new = (json.loads(path.read_text(encoding="utf-8")) for path in (arguments.old, arguments.new))
    lines, failed = compare(old, new)
    print("\n".join(lines) or "the files hold the same figures")
    count = sum(1 for _ in rows(old))
    print(f"{count} rows, {new['runs']} runs, {new['runs_missing']} missing: {len(failed)} worse or missing")
    return 1 if failed or new["runs_missing"] else 0


if __name__ == "__main__":
    sys.exit(main())
