"""Servers of several engines side by side: lanes of cores, and on each lane all servers, driven in turn.

    python benchmarks/serve_peers.py model.gguf --threads 4 --json out.json \\
        --server 'dyno=dyno serve {model} --device cpu --sequences 16 --ctx 600 -t {threads} --port {port}' \\
        --server 'llama.cpp=llama-server -m {model} -t {threads} -np 16 -c 9600 --port {port}'

A lane has `--threads` cores for the servers and one for their clients; with `--clients-share` the clients
run on the servers' cores. Only one of its servers has work at a time, by `serve.py`; lanes begin with
different servers. Each level of clients is measured again and again until `--seconds` are over, and a cell
holds all its runs. `--merge FOLDER` only puts the files of serve.py in that folder together.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lanes import cores
from serve import cpu_name, named

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

FIGURES = ("output_rate", "ttft_p50", "ttft_p95", "itl_p50")
LEVELS = (4, 1, 16)
"""Clients at a time, the quickest first: what is cut off at the end is measured more often before."""
READY_S = 120.0


def merged(files: Iterable[Path]) -> dict[str, dict[str, dict[str, Any]]]:
    """The cells of results of serve.py.

    Args:
        files: of one load each, with several servers.

    Returns:
        By clients and server: `runs`, each with tokens a second and seconds, and the median of each figure.
    """
    found: defaultdict[int, defaultdict[str, list[dict[str, float]]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted(files):
        for row in json.loads(path.read_text(encoding="utf-8"))["results"]:
            for run in row["runs"]:
                kept = {name: round(run[name], 4) for name in FIGURES[1:]}
                rate = round(run["output_tokens"] / run["seconds"], 2)
                found[row["concurrency"]][row["server"]].append({"output_rate": rate, **kept})
    return {
        str(level): {
            server: {**{f: statistics.median(run[f] for run in runs) for f in FIGURES}, "runs": runs}
            for server, runs in servers.items()
        }
        for level, servers in sorted(found.items())
    }


def split(threads: int, most: int, own: int) -> list[tuple[list[int], list[int]]]:
    """Lanes of so many cores, each with the CPUs of its servers and of its clients.

    Args:
        threads: cores for the servers of a lane.
        most: lanes at most.
        own: cores for the clients of a lane; 0 shares those of the servers.
    """
    firsts = [group[0] for group in cores(sorted(os.sched_getaffinity(0)))]
    each = threads + own
    lanes = [firsts[each * n : each * (n + 1)] for n in range(min(most, len(firsts) // each))]
    return [(lane[:threads], lane[threads:] or lane) for lane in lanes]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=3) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@contextlib.contextmanager
def started(
    commands: dict[str, str], values: dict[str, Any], cpus: Sequence[int]
) -> Iterator[dict[str, int]]:
    """The ports of ready servers, in the order of `commands`. Raises RuntimeError for one that ends."""
    children, ports = [], {}
    try:
        for name, command in commands.items():
            port = free_port()
            words = shlex.split(command.format(**values, port=port))
            child = subprocess.Popen(
                ["taskset", "-c", ",".join(map(str, cpus)), *words],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            children.append(child)
            end = time.monotonic() + READY_S
            while not is_ready(port):
                if child.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"{name} is not ready: {shlex.join(words)}")
                time.sleep(0.1)
            ports[name] = port
        yield ports
    finally:
        for child in children:
            child.kill()
            child.wait()


def drive(
    number: int, ports: dict[str, int], cpus: Sequence[int], given: argparse.Namespace, folder: Path
) -> None:
    """Measure one lane until the time is over. Raises RuntimeError if serve.py fails."""
    took: dict[int, float] = {}
    turn = 0
    while True:
        for level in LEVELS:
            begun = time.monotonic()
            if begun + took.get(level, 0.0) > given.end:
                return
            out = folder / f"{number}_{turn}_{level}.json"
            words = [
                *(
                    "taskset",
                    "-c",
                    ",".join(map(str, cpus)),
                    sys.executable,
                    str(Path(__file__).with_name("serve.py")),
                ),
                *(f"{name}=http://127.0.0.1:{port}" for name, port in ports.items()),
                *("--concurrency", str(level), "--pp", str(given.pp), "--tg", str(given.tg)),
                *("--seed", str(1000 * number + turn), "--json", str(out)),
            ]
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"lane {number}: {done.stderr.strip()[-500:]}")
            took[level] = time.monotonic() - begun
        turn += 1


def measure(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All lanes at the same time; what they were. Raises RuntimeError."""
    commands = named(given.server)
    own = 0 if given.clients_share else 1
    lanes = split(given.threads, given.lanes, own)
    if not lanes:
        raise RuntimeError(f"a lane takes {given.threads + own} cores; this process may use fewer")
    given.end = time.monotonic() + given.seconds
    errors: list[Exception] = []

    def lane(number: int, cpus: list[int], clients: list[int]) -> None:
        names = list(commands)
        order = {name: commands[name] for name in names[number % len(names) :] + names[: number % len(names)]}
        values = {"model": shlex.quote(str(given.model)), "threads": given.threads}
        try:
            with started(order, values, cpus) as ports:
                drive(number, ports, clients, given, folder)
        except (OSError, RuntimeError) as error:
            errors.append(error)

    threads = [threading.Thread(target=lane, args=(n, *each)) for n, each in enumerate(lanes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise RuntimeError(str(errors[0]))
    return {
        "threads": given.threads,
        "lanes": len(lanes),
        "clients_share": given.clients_share,
        "servers": commands,
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="GGUF file with a vocabulary")
    parser.add_argument(
        "--server", action="append", default=[], metavar="NAME=WORDS", help="with {model}, {threads}, {port}"
    )
    parser.add_argument("--threads", type=int, default=4, help="cores of a server (default %(default)s)")
    parser.add_argument("--lanes", type=int, default=8, help="at most (default %(default)s)")
    parser.add_argument("--clients-share", action="store_true", help="the clients have no core of their own")
    parser.add_argument("--seconds", type=float, default=300.0, help="(default %(default)s)")
    parser.add_argument("--pp", type=int, default=512, help="tokens of a prompt (default %(default)s)")
    parser.add_argument("--tg", type=int, default=64, help="tokens of an answer (default %(default)s)")
    parser.add_argument(
        "--commit", action="append", default=[], metavar="NAME=HASH", help="of an engine, for the record"
    )
    parser.add_argument("--merge", type=Path, metavar="FOLDER", help="only put these files together")
    parser.add_argument("--json", type=Path, metavar="FILE", required=True)
    given = parser.parse_args(arguments)
    about: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/serve_peers.py", *(arguments or sys.argv[1:])]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": {"cpu": cpu_name(), "cores": os.cpu_count()},
        "model": given.model.name,
        "commits": named(given.commit),
        "load": {"pp": given.pp, "tg": given.tg, "shared": 0.5, "requests": 2},
    }
    if given.merge is not None:
        files = sorted(given.merge.glob("*_*_*.json"))
        if not files:
            raise RuntimeError(f"{given.merge} has no files of a lane: NUMBER_TURN_CLIENTS.json")
        # The machine that measured, which may not be this one.
        first = json.loads(files[0].read_text(encoding="utf-8"))
        about |= {key: first[key] for key in ("date", "machine") if key in first}
        about |= {"threads": given.threads, "lanes": len({file.name.partition("_")[0] for file in files})}
        about["servers"] = named(given.server)
        cells = merged(files)
    else:
        with tempfile.TemporaryDirectory() as folder:
            about |= measure(given, Path(folder))
            cells = merged(Path(folder).glob("*.json"))
    for level, servers in cells.items():
        for name, cell in servers.items():
            print(
                f"{level:>3} clients  {name:<20} {cell['output_rate']:>8.1f} tokens/s  first token "
                f"{1000 * cell['ttft_p50']:>6.0f} ms  {len(cell['runs'])} runs"
            )
    given.json.write_text(json.dumps({**about, "clients": cells}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RuntimeError as error:
        sys.exit(f"error: {error}")
