"""Decodes several sequences in one batch with dyno and with the batched bench of other engines, in turn.

    python benchmarks/batches_vs_peers.py model.gguf --threads 2 --json out.json \\
        --peer llama.cpp=build/bin/llama-batched-bench \\
        --peer 'ik_llama.cpp -rtr=build/bin/llama-batched-bench -rtr'

Each measurement is a process that decodes 1, 2, 4, 8 and 16 sequences. Each round begins with another engine,
so that a drift of the machine affects all of them. In a step, each sequence gets one token behind --depth
tokens, and the logits of all sequences come to the host.

The result is dyno's rate over that of the faster other engine, as the median over the rounds. A process
beside which other programs used the CPUs is repeated, at most --repeats times; a round counts only if all of
its processes were undisturbed. With --force every round counts, and the file says so.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from dyno_tuner.measure.cpu_monitor import CpuWatch

if TYPE_CHECKING:
    from collections.abc import Iterable

OWN = "dyno"
RATE, COUNT = "S_TG t/s", "B"
"""Columns in the table of a batched bench: rate of the tokens, and number of sequences."""


def rates_of(table: str) -> dict[int, float]:
    """Tokens per second by number of sequences, from the table of a batched bench.

    Raises:
        RuntimeError: There is no row.
    """
    found: dict[int, float] = {}
    header: list[str] = []
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.lstrip().startswith("|"):
            continue
        if RATE in cells:
            header = cells
        elif header and len(cells) == len(header) and cells[0].isdigit():
            row = dict(zip(header, cells, strict=True))
            found[int(row[COUNT])] = float(row[RATE])
    if not found:
        raise RuntimeError(f"the batched bench printed no row with {COUNT} and {RATE}: {table[-500:]}")
    return found


def of_peer(words: str, given: argparse.Namespace) -> dict[int, float]:
    """Run a batched bench once. Raises RuntimeError if it fails or leaves out a number of sequences."""
    room = max(given.sequences) * (given.depth + given.steps)
    command = [
        *shlex.split(words),
        *("-m", str(given.model), "-c", str(room), "-b", "2048", "-ub", "512", "-ngl", "0"),
        *("-t", str(given.threads), "-tb", str(given.threads)),
        *("-npp", str(given.depth), "-ntg", str(given.steps), "-npl", ",".join(map(str, given.sequences))),
    ]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)} failed ({done.returncode}):\n{done.stderr[-2000:]}")
    found = rates_of(done.stdout + done.stderr)
    if missing := set(given.sequences) - set(found):
        raise RuntimeError(f"{shlex.join(command)} printed no row of {min(missing)} sequences")
    return found


def of_dyno(given: argparse.Namespace) -> dict[int, float]:
    """Run this file as a child. Raises RuntimeError if it fails."""
    command = [
        *(sys.executable, "-P", __file__, str(given.model), "--child", "--threads", str(given.threads)),
        *("--depth", str(given.depth), "--steps", str(given.steps)),
        *("--sequences", ",".join(map(str, given.sequences))),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"dyno failed ({done.returncode}):\n{done.stderr[-2000:]}")
    return {int(count): rate for count, rate in json.loads(done.stdout.splitlines()[-1]).items()}


def child(given: argparse.Namespace) -> dict[int, float]:
    """Tokens per second by number of sequences, over all steps, as a batched bench counts them."""
    from dyno import Engine

    random, found = np.random.default_rng(0), {}
    settings = {"threads": given.threads, "threads_batch": given.threads, "profile": None}
    with Engine(given.model, "cpu", ctx=given.depth + given.steps + 8, **settings) as engine:
        vocabulary = int(engine.model["n_vocab"])
        for count in given.sequences:
            engine.set_context(sequences=count)
            for slot in range(count):
                engine.logits_batch({slot: random.integers(0, vocabulary, given.depth, np.int32)})
            steps = random.integers(0, vocabulary, (given.steps, count, 1), np.int32)
            begun = time.perf_counter()
            for tokens in steps:
                engine.logits_batch(dict(enumerate(tokens)), reset=False, rows="last")
            found[count] = given.steps * count / (time.perf_counter() - begun)
    return found


def undisturbed(name: str, given: argparse.Namespace) -> tuple[dict[int, float], str]:
    """The rates of one engine, and the disturbance of the last attempt; empty if there was none."""
    watch = CpuWatch(needed=given.threads)
    for attempt in range(given.repeats + 1):
        with watch.window() as load:
            rates = of_dyno(given) if name == OWN else of_peer(given.peers[name], given)
        if not load.disturbed or given.force or attempt == given.repeats:
            return rates, load.disturbed
        print(f"  {name}: {load.disturbed}; measuring again", file=sys.stderr, flush=True)
    raise AssertionError("unreachable")


def summary(rounds: Iterable[dict[str, dict[int, float]]], sequences: Iterable[int]) -> dict[str, Any]:
    """By number of sequences: medians of the engines, and dyno's rate over the faster other one's, as the
    median and the extremes of the rounds."""
    kept, rows = list(rounds), {}
    for count in sequences if kept else ():
        medians = {name: statistics.median(each[name][count] for each in kept) for name in kept[0]}
        ratios = [
            each[OWN][count] / max(rate[count] for name, rate in each.items() if name != OWN) for each in kept
        ]
        rows[str(count)] = {
            **{name: round(rate, 2) for name, rate in medians.items()},
            "ratio": round(statistics.median(ratios), 3),
            "ratio_of_rounds": [round(ratio, 3) for ratio in ratios],
        }
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Exit code 1 if no round was undisturbed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="GGUF file")
    parser.add_argument(
        "--peer", action="append", default=[], metavar="NAME=WORDS", help="a batched bench with its flags"
    )
    parser.add_argument("--commit", action="append", default=[], metavar="NAME=HASH", help="for the record")
    parser.add_argument(
        "--sequences", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2, 4, 8, 16]
    )
    parser.add_argument("--threads", type=int, default=2, help="(default %(default)s)")
    parser.add_argument("--depth", type=int, default=128, help="tokens before (default %(default)s)")
    parser.add_argument("--steps", type=int, default=32, help="timed (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(default %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="of a disturbed process (default %(default)s)")
    parser.add_argument("--force", action="store_true", help="count disturbed rounds, too")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.child:
        print(json.dumps(child(given)))
        return 0
    from serve import cpu_name, named  # beside this file, which a child does not search

    given.peers = named(given.peer)
    if not given.peers:
        parser.error("give --peer NAME=WORDS, such as --peer llama.cpp=build/bin/llama-batched-bench")
    names, rounds, disturbances = [OWN, *given.peers], [], []
    for number in range(given.rounds):
        first = number % len(names)
        found, wrong = {}, []
        for name in names[first:] + names[:first]:
            found[name], why = undisturbed(name, given)
            wrong += [f"{name}: {why}"] if why else []
        disturbances.append(wrong)
        print(number, {n: [round(r, 1) for r in found[n].values()] for n in names}, *wrong[:1], flush=True)
        rounds.append({name: found[name] for name in names})
    kept = [each for each, wrong in zip(rounds, disturbances, strict=True) if given.force or not wrong]
    rows = summary(kept, given.sequences)
    for count, row in rows.items():
        low, high = min(row["ratio_of_rounds"]), max(row["ratio_of_rounds"])
        print(f"{count:>3} sequences: {row['ratio']:.2f} times the faster other ({low:.2f} to {high:.2f})")
    if given.json is not None:
        about = {
            "command": shlex.join(["python", "benchmarks/batches_vs_peers.py", *(arguments or sys.argv[1:])]),
            "date": time.strftime("%Y-%m-%d"),
            "machine": {"cpu": cpu_name(), "cores": os.cpu_count()},
            "model": given.model.name,
            "commits": named(given.commit),
            "threads": given.threads,
            "depth": given.depth,
            "steps": given.steps,
            "rounds": len(kept),
            "left_out": len(rounds) - len(kept),
            "disturbed": bool(given.force and any(disturbances)),
            "sequences": rows,
        }
        given.json.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    if not rows:
        print("no round was undisturbed; measure on a quiet machine, or give --force", file=sys.stderr)
    return 0 if rows else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (OSError, RuntimeError) as error:
        sys.exit(f"error: {error}")
