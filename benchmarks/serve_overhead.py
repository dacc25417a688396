"""Output tokens per second of the same texts from the engine's batch, its scheduler, and its server.

    python benchmarks/serve_overhead.py model.gguf --sequences 32 --pp 64 --tg 256 --rounds 3 --json out.json

Each way reads as many prompts as there are sequences and draws --tg tokens behind each. `batch` calls
the engine for each step, in one thread. `scheduler` has a thread for each text. `server` is `dyno serve` in a
process of its own, with a client for each text that reads a stream. The ways take turns, round by round. A
share is the rate of a way over the rate of `batch` in the same round; the report gives medians.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from dyno import Engine, Sampling, Scheduler
from dyno._requests import Handling
from dyno_tuner.core.serve_load import ServedLoad
from dyno_tuner.measure.served_load import HttpClient, drive, figures

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

GREEDY = (0.0, 0, 1.0, 0.0, 0.0)


def batch_seconds(engine: Engine, prompts: list[list[int]], tokens: int) -> float:
    """Prompts one step each, then a step for each token of all texts."""
    session = engine._open()
    engine.reset()
    begun = time.perf_counter()
    fed = [
        int(session.decode_and_draw([(slot, np.array(prompt, np.int32))], [GREEDY])[0][0])
        for slot, prompt in enumerate(prompts)
    ]
    for _ in range(tokens - 1):
        step = [(slot, np.array([token], np.int32)) for slot, token in enumerate(fed)]
        fed = session.decode_and_draw(step, [GREEDY] * len(step))[0].tolist()
    return time.perf_counter() - begun


def scheduler_seconds(engine: Engine, prompts: list[list[int]], tokens: int) -> float:
    """The texts in threads, as callers of the engine write them."""
    handling = Handling(reuse=False, ignore_end=True)
    drawn = [0] * len(prompts)

    def text(index: int) -> None:
        drawn[index] = sum(1 for _ in scheduler.drawn(prompts[index], Sampling(), tokens, handling=handling))

    with Scheduler(engine) as scheduler:
        threads = [threading.Thread(target=text, args=(index,)) for index in range(len(prompts))]
        begun = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - begun
    if drawn != [tokens] * len(prompts):
        raise SystemExit(f"error: the scheduler drew {drawn} tokens instead of {tokens} each")
    return seconds


def setting(text: str) -> tuple[str, str]:
    """Name and value, as JSON, of NAME=VALUE."""
    name, _, value = text.partition("=")
    return name, value


@contextlib.contextmanager
def served(model: Path, options: list[str]) -> Iterator[str]:
    """A server in a process of its own; gives its address."""
    with tempfile.TemporaryDirectory() as folder:
        port = Path(folder) / "port"
        command = [sys.executable, "-P", "-m", "dyno", "serve", str(model), "--port", "0"]
        server = subprocess.Popen([*command, "--port-file", str(port), *options], stdout=subprocess.DEVNULL)
        try:
            while not port.is_file() or not port.read_text().strip():
                if server.poll() is not None:
                    raise SystemExit(f"error: the server ended with {server.returncode}")
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port.read_text().strip()}"
        finally:
            server.terminate()
            server.wait()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--pp", type=int, default=64, help="tokens of a prompt (default %(default)s)")
    parser.add_argument("--tg", type=int, default=256, help="tokens of an answer (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of both; the value is JSON",
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    size = {"ctx": given.pp + given.tg, "sequences": given.sequences}
    settings = {**{name: json.loads(value) for name, value in map(setting, given.set)}, **size}
    options = ["--device", given.device, "--no-profile", "--queue", str(given.sequences)]
    options += [word for name, value in settings.items() for word in ("--set", f"{name}={json.dumps(value)}")]
    load = ServedLoad(given.sequences, given.pp, given.tg, shared=0.0, rounds=1)
    rates: dict[str, list[float]] = {"batch": [], "scheduler": [], "server": []}
    with (
        served(given.model, options) as address,
        Engine(given.model, device=given.device, profile=None, **settings) as engine,
    ):
        client, vocabulary = HttpClient(address), int(engine.model["n_vocab"])

        def server_seconds(prompts: list[list[int]], tokens: int) -> float:
            timings = drive(load, prompts, client)
            if any(each.tokens != tokens for each in timings):
                raise SystemExit("error: an answer of the server has another number of tokens")
            return figures(timings).seconds

        ways: dict[str, Callable[[list[list[int]], int], float]] = {
            "batch": lambda prompts, tokens: batch_seconds(engine, prompts, tokens),
            "scheduler": lambda prompts, tokens: scheduler_seconds(engine, prompts, tokens),
            "server": server_seconds,
        }
        for number in range(given.rounds + 1):
            prompts = [list(map(int, prompt)) for prompt in load.prompts(vocabulary, number)]
            for name, way in ways.items():
                seconds = way(prompts, given.tg)
                if number:  # the first round warms up
                    rates[name].append(given.sequences * given.tg / seconds)
        facts = {
            "device": engine.device,
            "hardware": engine.device_headline,
            "settings": dict(engine.settings),
        }
    shares = {
        name: statistics.median(way / batch for way, batch in zip(rates[name], rates["batch"], strict=True))
        for name in rates
    }
    for name, values in rates.items():
        print(f"{name:<10} {statistics.median(values):>10.1f} tokens/s  {shares[name]:.1%}")
    if given.json:
        whole: dict[str, Any] = {
            "command": ["python", "benchmarks/serve_overhead.py", *sys.argv[1:]],
            "date": time.strftime("%Y-%m-%d"),
            "model": given.model.name,
            **facts,
            "load": {"sequences": given.sequences, "pp": given.pp, "tg": given.tg, "rounds": given.rounds},
            "rates": {name: [round(each, 1) for each in values] for name, values in rates.items()},
            "shares": {name: round(share, 4) for name, share in shares.items()},
        }
        given.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
