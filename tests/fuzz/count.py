"""Counts the executions of a fuzz run and, if asked to, adds them to a JSON file.

    python tests/fuzz/count.py LOG TARGET [--crashed] [--json benchmarks/results/fuzz.json] [--commit HASH]

LOG is what the target printed. The JSON has a row for each run and the sums by target.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

# libFuzzer's final statistics, its lines of progress, and the last line of `mutation_driver.cpp`.
FINAL = re.compile(r"^stat::number_of_executed_units:\s*(\d+)", re.MULTILINE)
PROGRESS = re.compile(r"^#(\d+)\s", re.MULTILINE)
DRIVER = re.compile(r"^Done (\d+) runs on", re.MULTILINE)


def executions(log: str) -> int:
    """Executions that a log tells of. After a crash libFuzzer's last progress counts.

    Raises:
        ValueError: it tells of none.
    """
    for pattern in (FINAL, DRIVER, PROGRESS):
        if found := pattern.findall(log):
            return max(map(int, found))
    raise ValueError("the log tells of no execution")


def add(path: Path, row: dict[str, Any]) -> dict[str, Any]:
    """Adds a row to the file and sums up; the file is replaced as a whole."""
    report: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"runs": []}
    report["runs"].append(row)
    report["totals"] = {}
    for run in report["runs"]:
        total = report["totals"].setdefault(run["target"], {"executions": 0, "crashes": 0})
        total["executions"] += run["executions"]
        total["crashes"] += run["crashes"]
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    draft.write_text(json.dumps(report, indent=1) + "\n")
    draft.replace(path)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("log", type=Path)
    parser.add_argument("target")
    parser.add_argument("--crashed", action="store_true", help="the run ended with a finding")
    parser.add_argument("--json", type=Path, help="file to add the run to")
    parser.add_argument("--commit", default="", help="of this source, for the JSON")
    args = parser.parse_args()
    try:
        count = executions(args.log.read_text(errors="replace"))
    except (OSError, ValueError) as error:
        print(f"count.py: {args.log}: {error}", file=sys.stderr)
        return 1
    row = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"), "target": args.target,
        "executions": count, "crashes": int(args.crashed), "commit": args.commit,
    }  # fmt: skip
    said = f"fuzz {args.target}: {count:,} executions, {row['crashes']} crashes"
    if args.json is not None:
        total = add(args.json, row)["totals"][args.target]
        said += f"; in {args.json} {total['executions']:,} executions, {total['crashes']} crashes"
    print(said)
    return 0


if __name__ == "__main__":
    sys.exit(main())
