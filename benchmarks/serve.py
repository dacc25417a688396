"""Drives a server with the public completions API: tokens per second, time to first token and between tokens.

    dyno serve model.gguf --sequences 16 --ctx 1024 --port 8080 &
    python benchmarks/serve.py http://127.0.0.1:8080 --concurrency 1,4,16 --pp 512 --tg 64 --json out.json

Several servers are measured in turn, round by round, so that a drift of the machine affects all of them:

    python benchmarks/serve.py dyno=http://127.0.0.1:8080 llama.cpp=http://127.0.0.1:8081 --rounds 3

Prompts are random token ids below the size of the vocabulary, which the server tells (`/props` of dyno,
`/v1/models` of llama-server) or `--vocabulary` gives. They begin with the same tokens, `--shared` of their
length; the rest differs in every round. Each client sends `--requests` requests, one after the other. One
request warms a server up.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
import urllib.request
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dyno_tuner.core.serve_load import ServedLoad
from dyno_tuner.measure.served_load import Figures, HttpClient, LoadError, drive, figures


def vocabulary(address: str, key: str | None) -> int:
    """Size of the server's vocabulary in tokens. Raises LoadError if the server does not report it."""
    base = address.rstrip("/").removesuffix("/v1")
    for path in ("/props", "/v1/models"):
        request = urllib.request.Request(
            base + path, headers={"Authorization": f"Bearer {key}"} if key else {}
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                data = json.load(response)
        except (OSError, ValueError):
            continue
        for found in (data, *(each.get("meta") or {} for each in data.get("data", []))):
            if isinstance(found.get("n_vocab"), int):
                return int(found["n_vocab"])
    raise LoadError(f"{address} does not tell the size of its vocabulary; give --vocabulary N")


def named(texts: list[str]) -> dict[str, str]:
    """Values by name; without a name the value is its own."""
    return {
        name if equals else text: value if equals else text
        for text in texts
        for name, equals, value in [text.partition("=")]
    }


def memory_mib(pid: int) -> float:
    """Resident memory of a process in MiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise LoadError(f"process {pid} tells no VmRSS")


def median(runs: list[Figures], name: str) -> float:
    return statistics.median(getattr(run, name) for run in runs)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("servers", nargs="+", metavar="[NAME=]URL")
    parser.add_argument(
        "--concurrency", default="1,4,16", help="clients at a time, a list (default %(default)s)"
    )
    parser.add_argument("--pp", type=int, default=512, help="tokens of a prompt (default %(default)s)")
    parser.add_argument("--tg", type=int, default=64, help="tokens of an answer (default %(default)s)")
    parser.add_argument(
        "--shared", type=float, default=0.5, help="share that all prompts begin with (default %(default)s)"
    )
    parser.add_argument(
        "--requests", type=int, default=2, help="requests of each client (default %(default)s)"
    )
    parser.add_argument(
        "--rounds", type=int, default=1, help="times that everything is measured (default %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--key", help="API key")
    parser.add_argument("--model", default="any", help="name of the model in requests")
    parser.add_argument("--vocabulary", type=int, help="draw tokens below this number")
    parser.add_argument(
        "--pid",
        action="append",
        default=[],
        metavar="NAME=PID",
        help="report the memory of a server's process",
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args(arguments)
    servers, pids = named(given.servers), named(given.pid)
    levels = [int(level) for level in given.concurrency.split(",")]
    found: dict[tuple[str, int], list[Figures]] = {}
    for address in servers.values():
        known = given.vocabulary or vocabulary(address, given.key)
        client = HttpClient(address, given.model, given.key)
        client([token % known for token in range(7, 7 + given.pp)], 2)  # warm-up
    for number in range(given.rounds):
        for level in levels:
            load = ServedLoad(level, given.pp, given.tg, given.shared, given.requests)
            order = list(servers.items())
            for name, address in order if number % 2 == 0 else reversed(order):
                prompts = load.prompts(known, given.seed + number)
                run = figures(drive(load, prompts, HttpClient(address, given.model, given.key)))
                found.setdefault((name, level), []).append(run)
    rows = []
    print(
        f"{'server':<12} {'clients':>7} {'tokens/s':>9} {'TTFT p50':>9} {'p95':>7} "
        f"{'ITL p50':>8} {'p95':>7}  cached"
    )
    for (name, level), runs in found.items():
        row: dict[str, Any] = {"server": name, "concurrency": level, "runs": [asdict(run) for run in runs]}
        row["output_rate"] = statistics.median(run.output_rate for run in runs)
        rows.append(row)
        times = [1000 * median(runs, each) for each in ("ttft_p50", "ttft_p95", "itl_p50", "itl_p95")]
        share = sum(run.cached for run in runs) / (len(runs) * level * given.requests * given.pp)
        print(
            f"{name:<12} {level:>7} {row['output_rate']:>9.1f} {times[0]:>6.0f} ms {times[1]:>4.0f} ms "
            f"{times[2]:>5.1f} ms {times[3]:>4.1f} ms  {share:.0%}"
        )
    memory = {name: round(memory_mib(int(pid)), 1) for name, pid in pids.items()}
    if memory:
        print("memory in MiB:", memory)
    if given.json:
        whole = {
            "command": [
                "python",
                "benchmarks/serve.py",
                *(arguments if arguments is not None else sys.argv[1:]),
            ],
            "date": time.strftime("%Y-%m-%d"),
            "machine": {"cpu": cpu_name(), "cores": os.cpu_count(), "system": platform.platform()},
            "load": {
                name: getattr(given, name) for name in ("pp", "tg", "shared", "requests", "rounds", "seed")
            },
            "memory_mib": memory,
            "results": rows,
        }
        given.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    return 0


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except LoadError as error:
        sys.exit(f"error: {error}")
