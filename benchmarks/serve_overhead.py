"""Output tokens per second of the same texts from the engine's batch, its scheduler, and its server.

    python benchmarks/serve_overhead.py model.gguf --sequences 32,64 --pp 64 --tg 256 --rounds 3 --sampled

Each way decodes one prompt per sequence and samples --tg tokens after each. `batch` calls the engine for each
step, in one thread. `scheduler` has a thread for each text. `server` is a new process of `dyno serve`, with a
streaming client for each text. The ways take turns, round by round. A share is the rate of a way over the
rate of `batch` in the same round; the report gives medians. Each token is the most probable one, or with
--sampled a random one.

Of steps that draw a token for every text, the report gives the median time, and the part of it in which the
thread does not wait for the engine's call. On a GPU that part is the host's, and the device has no work then.
If no two such steps follow each other, the texts never ran together: the report says so and gives no time.
Longer answers (--tg) let them meet.
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
from dyno._requests import Handling, SchedulerEvents, Step
from dyno_tuner.core.serve_load import ServedLoad
from dyno_tuner.measure.served_load import HttpClient, drive, figures
from result_file import write_result

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

GREEDY = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
SAMPLED = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}


class Steps(SchedulerEvents):
    """The times of the steps that sample a token for each of `texts` texts.

    Attributes:
        whole: Seconds from the end of one such step to the end of the next.
        outside: The part of these seconds outside of the engine's call.
    """

    def __init__(self, texts: int) -> None:
        self.texts = texts
        self.whole: list[float] = []
        self.outside: list[float] = []
        self._last: float | None = None

    def stepped(self, step: Step) -> None:
        """Keep the time since the previous step, if that step was of the same kind."""
        now = time.perf_counter()
        counts = step.tokens == step.sequences == self.texts and not step.prompt_tokens
        if counts and self._last is not None:
            self.whole.append(now - self._last)
            self.outside.append(self.whole[-1] - step.seconds)
        self._last = now if counts else None

    def figures(self) -> dict[str, float] | None:
        """Medians in microseconds; None if no two such steps followed each other."""
        if not self.whole:
            return None
        return {
            "step_us": round(1e6 * statistics.median(self.whole), 1),
            "outside_us": round(1e6 * statistics.median(self.outside), 1),
        }


def batch_seconds(
    engine: Engine, prompts: list[list[int]], tokens: int, draws: Mapping[str, float], steps: Steps
) -> float:
    """Seconds of the batch: one step for each prompt, then one step for each token of all texts."""
    session, random = engine._open(), np.random.default_rng(1)

    def settings(number: float) -> tuple[float, int, float, float, float]:
        return draws["temperature"], int(draws["top_k"]), draws["top_p"], draws["min_p"], number

    engine.reset()
    begun = time.perf_counter()
    fed = [
        int(session.decode_and_draw([(slot, np.array(prompt, np.int32))], [settings(0.5)])[0][0])
        for slot, prompt in enumerate(prompts)
    ]
    for at in range(tokens - 1):
        step = [(slot, np.array([token], np.int32)) for slot, token in enumerate(fed)]
        numbers = random.random(len(step)).tolist()
        called = time.perf_counter()
        drawn = session.decode_and_draw(step, [settings(number) for number in numbers])[0]
        took = time.perf_counter() - called
        fed = drawn.tolist()
        steps.stepped(Step(len(step), len(step), 0, len(prompts[0]) + at + 1, took))
    return time.perf_counter() - begun


def scheduler_seconds(
    engine: Engine, prompts: list[list[int]], tokens: int, draws: Mapping[str, float], steps: Steps
) -> float:
    """Seconds of the scheduler, with a thread for each text."""
    handling = Handling(reuse=False, ignore_end=True)
    drawn = [0] * len(prompts)

    def text(index: int) -> None:
        sampling = Sampling(**draws, seed=index)  # type: ignore[arg-type]
        drawn[index] = sum(1 for _ in scheduler.drawn(prompts[index], sampling, tokens, handling=handling))

    with Scheduler(engine, events=steps) as scheduler:
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
    """A context manager for a server in a new process; gives its address."""
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
    parser.add_argument("--sequences", default="32", help="texts at a time, a list (default %(default)s)")
    parser.add_argument("--pp", type=int, default=64, help="tokens of a prompt (default %(default)s)")
    parser.add_argument("--tg", type=int, default=256, help="tokens of an answer (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sampled", action="store_true", help=f"draw tokens: {SAMPLED}")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of both; the value is JSON",
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    counts = [int(count) for count in given.sequences.split(",")]
    draws = SAMPLED if given.sampled else GREEDY
    size = {"ctx": given.pp + given.tg, "sequences": max(counts)}
    settings = {**{name: json.loads(value) for name, value in map(setting, given.set)}, **size}
    options = ["--device", given.device, "--no-profile", "--queue", str(max(counts))]
    options += [word for name, value in settings.items() for word in ("--set", f"{name}={json.dumps(value)}")]
    runs: list[dict[str, Any]] = []
    with (
        served(given.model, options) as address,
        Engine(given.model, device=given.device, profile=None, **settings) as engine,
    ):
        client = HttpClient(address, draws=draws)
        for count in counts:
            runs.append(compared(engine, client, count, given, draws))
        facts = {
            "device": engine.device,
            "hardware": engine.device_headline,
            "settings": dict(engine.settings),
        }
    if given.json:
        write_result(given.json, given.model, {**facts, "draws": draws, "runs": runs})
    return 0


def compared(
    engine: Engine, client: HttpClient, count: int, given: argparse.Namespace, draws: Mapping[str, float]
) -> dict[str, Any]:
    """Rates, shares and times of steps of `count` texts at a time, which are printed, too."""
    load = ServedLoad(count, given.pp, given.tg, shared=0.0, rounds=1)
    rates: dict[str, list[float]] = {"batch": [], "scheduler": [], "server": []}
    steps = {"batch": Steps(count), "scheduler": Steps(count)}
    for number in range(given.rounds + 1):
        prompts = [list(map(int, each)) for each in load.prompts(int(engine.model["n_vocab"]), number)]
        if number == 1:  # the first round warms up
            steps = {"batch": Steps(count), "scheduler": Steps(count)}
        for name in rates:
            if name == "batch":
                seconds = batch_seconds(engine, prompts, given.tg, draws, steps[name])
            elif name == "scheduler":
                seconds = scheduler_seconds(engine, prompts, given.tg, draws, steps[name])
            else:
                timings = drive(load, prompts, client)
                if any(each.tokens != given.tg for each in timings):
                    raise SystemExit("error: an answer of the server has another number of tokens")
                seconds = figures(timings).seconds
            if number:
                rates[name].append(count * given.tg / seconds)
    shares = {
        name: statistics.median(way / batch for way, batch in zip(rates[name], rates["batch"], strict=True))
        for name in rates
    }
    times = {name: each.figures() for name, each in steps.items()}
    print(f"{count} texts")
    for name, values in rates.items():
        took = times.get(name)
        told = f"  a step {took['step_us']:,.0f} us, {took['outside_us']:,.0f} outside" if took else ""
        if name in times and took is None:
            told = f"  the {count} texts never ran together"
        print(f"  {name:<10} {statistics.median(values):>10.1f} tokens/s  {shares[name]:.1%}{told}")
    return {
        "load": {"sequences": count, "pp": given.pp, "tg": given.tg, "rounds": given.rounds},
        "rates": {name: [round(each, 1) for each in values] for name, values in rates.items()},
        "shares": {name: round(share, 4) for name, share in shares.items()},
        "steps": times,
    }


if __name__ == "__main__":
    sys.exit(main())
