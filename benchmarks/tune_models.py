"""Tunes models one after the other and checks each profile with `dyno bench` in processes of its own.

    python benchmarks/tune_models.py a.gguf b.gguf … --device cuda:0 --budget 90s \\
        --out profiles --prefix h200 --json benchmarks/results/tune_h200.json

For every model: `tune` writes PREFIX-NAME.yaml and its journal (packed as .gz) into --out. After that fresh
processes of `dyno bench` run the engine's defaults and the profile in turn (default, profile, profile,
default; --rounds times). The JSON, written after every model, has what the profile claims, what bench found,
whether that lies in the profile's 95 % interval (give or take its margin), how long everything took, where
the two ways to multiply cross at which routing, and the kernels that were chosen. Exit code 1 where a tune
failed or a gain was not reproduced.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dyno import profiles
from dyno.bench import machine_facts
from dyno_tuner.core.intervals import estimate
from dyno_tuner.output.emit import workload_of

if TYPE_CHECKING:
    from dyno_tuner.core.workload import Workload

ORDER = ("default", "profile", "profile", "default")


def child(module: str, *arguments: object) -> tuple[str, float]:
    """Standard output and seconds of a Python module; its standard error is shown.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    begun = time.monotonic()
    command = [sys.executable, "-P", "-m", module, *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout, time.monotonic() - begun


def bench(
    model: Path, profile: Path | None, workload: Workload, args: argparse.Namespace
) -> dict[str, list[float]]:
    """Tokens/s of all repetitions in a new process, by measure."""
    chosen = ("--profile", profile) if profile else ("--no-profile",)
    measures = ("-p", workload.pp, "-n", workload.tg, "-d", workload.depth, "-b", max(workload.pp, 1))
    common = ("--device", args.device, "-r", args.repetitions, "-o", "json")
    out, _ = child("dyno", "bench", "-m", model, *measures, *common, *chosen)
    found: dict[str, list[float]] = {}
    for record in json.loads(out):
        kind = "pp" if record["n_prompt"] else "tg"
        found[workload.label(kind)] = [float(rate) for rate in record["samples_ts"]]
    return found


def reproduce(model: Path, profile: Path, workload: Workload, args: argparse.Namespace) -> dict[str, Any]:
    """By measure: medians, the ratio with its interval, all samples. Two processes of either side a round."""
    logs: dict[str, list[list[float]]] = {}
    samples: dict[str, dict[str, list[list[float]]]] = {}
    for _ in range(args.rounds):
        took = [bench(model, profile if side == "profile" else None, workload, args) for side in ORDER]
        for measure in took[0]:
            for default, tuned in ((took[0], took[1]), (took[3], took[2])):
                pairs = zip(default[measure], tuned[measure], strict=True)
                logs.setdefault(measure, []).append([math.log(b / a) for a, b in pairs])
            kept = samples.setdefault(measure, {"default": [], "profile": []})
            for side, rates in zip(ORDER, took, strict=True):
                kept[side].append([round(rate, 2) for rate in rates[measure]])
    ratios = {measure: estimate(groups, "tune_models", measure) for measure, groups in logs.items()}
    return {m: {**ratios[m].to_dict(), "samples": samples[m]} for m in ratios}


def agrees(claimed: profiles.Gain | None, ratio: float, margin: float) -> bool:
    """Whether bench's ratio lies in the profile's interval, give or take the margin below which the profile
    calls a difference none. What it claims nothing for must not be slower."""
    low, high = (1.0, math.inf) if claimed is None else claimed.ci95 or (claimed.ratio, claimed.ratio)
    return low * (1 - margin) <= ratio <= high * (1 + margin)


def tune(model: Path, out: Path, args: argparse.Namespace) -> tuple[dict[str, Any], float]:
    """The output of `tune --json`, and seconds from start to end."""
    more = [word for option in args.tune for word in option.split()]
    how = ("--device", args.device, "--budget", args.budget, "--seed", args.seed, *more)
    text, seconds = child("dyno_tuner.cli", "--model", model, *how, "--out", out, "--json")
    return json.loads(text.splitlines()[-1]), seconds


def pack(journal: Path) -> Path:
    """Replace the journal with a .gz file. The same journal gives the same bytes."""
    packed = journal.with_name(journal.name + ".gz")
    with packed.open("wb") as file, gzip.GzipFile(fileobj=file, mode="wb", filename="", mtime=0) as stream:
        stream.write(journal.read_bytes())
    journal.unlink()
    return packed


def row_of(model: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Tune and check one model; returns its row of the JSON."""
    name = re.sub(r"[^a-z0-9._-]+", "-", f"{args.prefix}-{model.stem}".lower()).strip("-")
    out = args.out / f"{name}.yaml"
    outcome, seconds = tune(model, out, args)
    profile = profiles.load_profile(out)
    evidence = profile.evidence
    assert evidence is not None
    begun = time.monotonic()
    found = reproduce(model, out, workload_of(profile), args) if args.rounds else {}
    margin = evidence.noise.margin if evidence.noise else 0.01
    for measure, entry in found.items():
        claimed = evidence.gain.get(measure)
        entry["claimed"] = claimed.model_dump(mode="json") if claimed else None
        entry["agrees"] = agrees(claimed, entry["ratio"], margin)
    return {
        "model": model.stem,
        "profile": out.name,
        "journal": pack(Path(outcome["journal"])).name,
        "weights": profile.match.model.weights,
        "status": outcome["status"],
        "seconds_tune": round(seconds, 1),
        "seconds_bench": round(time.monotonic() - begun, 1),
        "trials": outcome["trials"],
        "baseline": evidence.baseline,
        "tuned": evidence.tuned,
        "margin": margin,
        "settings": {n: e.value for n, e in profile.settings.items() if isinstance(e, profiles.SettingEntry)},
        "kernels": [
            {"op": key, "tokens": tokens, **entry.config}
            for key, ranges in profile.kernels.items()
            for tokens, entry in ranges.items()
            if isinstance(entry, profiles.KernelEntry)
        ],
        "kernels_kept_default": sum(
            e == "default" for ranges in profile.kernels.values() for e in ranges.values()
        ),
        "crossings": outcome["crossings"],
        "routing": outcome["routing"],
        "conditions": outcome["conditions"],
        "bench": found,
    }


def line(row: dict[str, Any]) -> str:
    """A row as one line of text."""
    words = [f"{row['model']:28} {row['seconds_tune']:5.0f} s"]
    for measure, entry in row["bench"].items():
        claimed = entry["claimed"]["ratio"] if entry["claimed"] else 1.0
        verdict = "as claimed" if entry["agrees"] else "NOT as claimed"
        words.append(f"{measure} {entry['ratio']:.3f} x ({claimed:.3f}: {verdict})")
    words += [f"{name}={value}" for name, value in row["settings"].items()]
    return "  ".join([*words, f"{len(row['kernels'])} kernel choices"])


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", type=Path, help="GGUF files")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda:N")
    parser.add_argument("--budget", default="90s", help="of each tune")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--tune", action="append", default=[], metavar="OPTIONS", help="further options of tune"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for profiles and journals")
    parser.add_argument("--prefix", default="", help="of the profiles' names: the device")
    parser.add_argument("--rounds", type=int, default=1, help="of bench, four processes each; 0: none")
    parser.add_argument("-r", "--repetitions", type=int, default=5, help="samples of a process of bench")
    parser.add_argument("--commit", default="", help="of the sources")
    parser.add_argument("--json", type=Path, required=True, help="write everything there, after every model")
    return parser.parse_args()


def main() -> int:
    """Exit code 1 where a tune failed or a gain was not reproduced."""
    args = parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {
        "command": "python benchmarks/tune_models.py " + " ".join(os.path.basename(a) for a in sys.argv[1:]),
        "commit": args.commit,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine_facts(args.device),
        "models": [],
        "failed": {},
    }
    for model in args.models:
        try:
            row = row_of(model, args)
        except (subprocess.CalledProcessError, profiles.ProfileError) as error:
            print(f"{model.stem}: {error}", file=sys.stderr, flush=True)
            report["failed"][model.stem] = str(error)
        else:
            report["models"].append(row)
            print(line(row), flush=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    wrong = [m for row in report["models"] for m in row["bench"].values() if not m["agrees"]]
    return 1 if wrong or report["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
