"""Measures whether two profiles of one model agree: equal entries, or entries that are worth the same.

    python benchmarks/tunes_agree.py a.yaml b.yaml x.gguf --device cuda:0 --json agree.json

Each entry in which they differ is put alone from the second into the first, and the two are compared by
`tune ab` (ABBA rounds of fresh processes), as are both profiles as a whole. Two entries agree where no
measure's ratio differs from 1 by more than the margin, as in `tuner_statistics.py` for a simulated engine.
The JSON has every comparison with its interval. Exit code 1 where fewer than --share of the entries agree.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from dyno import profiles
from dyno.bench import machine_facts
from dyno.devices import resolve_device
from dyno_tuner.output.diff import compare_profiles


def swapped(first: profiles.Profile, second: profiles.Profile, entry: str) -> profiles.Profile:
    """The first profile with one entry of the second, named as `tune diff` names it."""
    kind, _, name = entry.partition(".")
    settings, kernels = dict(first.settings), {key: dict(of) for key, of in first.kernels.items()}
    if kind == "settings":
        settings[name] = second.settings.get(name, "default")
    else:
        key, _, tokens = name.rpartition(".")
        kernels.setdefault(key, {})[tokens] = second.kernels.get(key, {}).get(tokens, "default")
    return first.model_copy(update={"settings": settings, "kernels": kernels})


def compare(a: Path, b: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The result of `tune ab`: by measure the ratio b/a, its interval, and whether that is within the margin.

    Raises:
        RuntimeError: `tune ab` measured nothing; its error was printed.
    """
    command = [sys.executable, "-P", "-m", "dyno_tuner.cli", "ab", a, b, "--model", args.model]
    command += ["--device", args.device, "--workload", args.workload, "--rounds", args.rounds]
    command += ["--no-answers", "--json"]
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise RuntimeError(f"tune ab {a.name} {b.name} ended with {done.returncode} and measured nothing")
    found = json.loads(lines[-1])
    metrics = found["metrics"]
    for metric in metrics.values():
        metric["within_margin"] = abs(math.log(metric["ratio"])) <= math.log1p(metric["margin"])
    return {
        "rounds": found["rounds"],
        "metrics": metrics,
        "agrees": all(m["within_margin"] for m in metrics.values()),
    }


def main() -> int:
    """Exit code 1 where too few entries agree."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("first", type=Path, help="profile")
    parser.add_argument("second", type=Path, help="profile")
    parser.add_argument("model", type=Path, help="GGUF file that both were tuned for")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda:N")
    parser.add_argument("--workload", default="pp=512,tg=128", help="as of `tune`")
    parser.add_argument("--rounds", type=int, default=6, help="ABBA rounds of each comparison")
    parser.add_argument("--share", type=float, default=0.95, help="entries that have to agree")
    parser.add_argument(
        "--json", type=Path, required=True, help="write everything there, after every comparison"
    )
    args = parser.parse_args()
    first, second = profiles.load_profile(args.first), profiles.load_profile(args.second)
    rows = compare_profiles(args.first, args.second)
    differing = [row for row in rows if row.verdict != "equal"]
    report: dict[str, Any] = {
        "command": "python benchmarks/tunes_agree.py " + " ".join(os.path.basename(a) for a in sys.argv[1:]),
        "machine": machine_facts(resolve_device(args.device).name),
        "model": args.model.stem,
        "entries": len(rows),
        "equal": len(rows) - len(differing),
        "whole": compare(args.first, args.second, args),
        "swapped": [],
    }
    with tempfile.TemporaryDirectory(prefix="dyno-agree-") as folder:
        for n, row in enumerate(differing):
            mixed = Path(folder) / f"{n}.yaml"
            profiles.save_profile(swapped(first, second, row.entry), mixed)
            found = {**row.to_dict(), **compare(args.first, mixed, args)}
            report["swapped"].append(found)
            args.json.write_text(json.dumps(report, indent=1) + "\n")
            ratios = ", ".join(f"{name} {m['ratio']:.4f}" for name, m in found["metrics"].items())
            print(f"{row.entry}: {row.first} | {row.second}: {ratios}")
    agree = report["equal"] + sum(found["agrees"] for found in report["swapped"])
    report["agree"] = agree
    args.json.write_text(json.dumps(report, indent=1) + "\n")
    whole = ", ".join(f"{name} {m['ratio']:.4f}" for name, m in report["whole"]["metrics"].items())
    print(f"{agree} of {len(rows)} entries agree, {report['equal']} are equal; as a whole: {whole}")
    return 0 if agree >= args.share * len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
