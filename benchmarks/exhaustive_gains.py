"""Whether `tune --budget 2m` writes every gain above 5 % that an exhaustive run finds.

    python benchmarks/exhaustive_gains.py --lanes auto --seeds 2 --json gains.json
    python benchmarks/exhaustive_gains.py --lanes auto --slow settings kernels --json gains_slow.json

Models: the shipped one, and three of random weights that are made here. Each job runs on two cores. The
exhaustive run measures every value of every setting, and every kernel of every op inside whole prompts and
tokens, one change at a time; the best kernels of a metric together are one change more. The promising changes
are measured again in paired rounds, and a change with a ratio above 1.05 and an interval above 1 is a gain.
Then the tune runs. A gain counts as written if the profile holds the change, or if the whole interval of
further rounds lies at or below 1.05: the profile with the change is at most 5 % faster than the profile. If
the ratio is above 1.05 and the interval above 1, the gain is missed. Otherwise the rounds cannot decide, and
more --rounds are needed.

Good defaults may leave no gain that a tune could miss. With `--slow` the defaults of the engine are slow on
purpose: settings (u-batches of 32, one thread) and kernels (of the two heaviest ops of generation, about half
as fast alone). The exhaustive run and the tune both begin from these.

A job can be measured in pieces: until it ends, its results are in a file beside the JSON
(x.MODEL.SEED.part.json), and the same command continues it. All pieces of a job belong to one machine and
build. The journal of the tune is beside it (x.MODEL.SEED.journal.jsonl), to find out why a gain was not
written. `--until` limits the seconds of a piece. The jobs in the JSON are not run again.

Exit code 1 if a gain was not written or a job failed, 3 if jobs are left.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import queue
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dyno.bench import machine_facts
from dyno.testing.models import tiny_model
from dyno_tuner.core.errors import DisturbedError
from dyno_tuner.core.options import MeasurementPolicy, Options
from dyno_tuner.core.protocol import Configuration, KernelChoice, TrialStatus
from dyno_tuner.core.workload import Workload
from dyno_tuner.measure.machine_monitor import Machine
from dyno_tuner.measure.paired_rounds import Rounds
from dyno_tuner.record.recorder import Recorder
from dyno_tuner.run.context import RunContext
from dyno_tuner.run.session import Request, run, space_for, target_of
from dyno_tuner.targets.dyno.declaration import declaration
from job_notebook import Notebook, Stopped
from lanes import automatic
from slow_engine import SLOW, SlowEngine, slow_kernels

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping, Sequence

    from dyno_tuner.space.search_space import Space

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = "pycode-moe-20m-Q4_K_M"
SYNTHETIC: dict[str, dict[str, Any]] = {
    "llama-q4_0": {
        "architecture": "llama", "n_layers": 8, "n_embd": 512, "n_heads": 8, "n_kv_heads": 4, "n_ff": 1536,
        "n_vocab": 8192, "dtype": "q4_0",
    },
    "qwen3-q6_k": {
        "architecture": "qwen3", "n_layers": 6, "n_embd": 1024, "n_heads": 16, "n_kv_heads": 8, "n_ff": 2048,
        "n_vocab": 8192, "dtype": "q6_k",
    },
    "qwen3moe-q8_0": {
        "architecture": "qwen3moe", "n_layers": 4, "n_embd": 512, "n_heads": 8, "n_kv_heads": 2,
        "n_experts": 16, "n_experts_used": 4, "n_ff_expert": 512, "n_vocab": 8192, "dtype": "q8_0",
    },
}  # fmt: skip
MODELS = (SHIPPED, *SYNTHETIC)
WORKLOAD = "pp=256,tg=32"
GAIN = 1.05
PROMISING = 1.02  # ratio of one look from which a change gets rounds
AGAIN = 2  # further looks at the best changes
GROUP = 12  # changes between two measurements of the default
MOST = 5  # maximum number of changes of a metric in rounds
STARTS = ("settings", "kernels")  # kinds of defaults that can be slow on purpose

LEFT = 3  # exit code if jobs are left

Change = tuple[str, Configuration, tuple[str, ...]]  # name, configuration, metrics that it can change


def make_model(name: str, folder: Path) -> Path:
    """The path of the shipped model, or of one with random weights in `folder`."""
    if name == SHIPPED:
        return ROOT / "models" / f"{SHIPPED}.gguf"
    path = folder / f"{name}.gguf"
    if not path.exists():
        tiny_model(path, n_ctx=2048, **SYNTHETIC[name])
    return path


class _Time:
    """An unlimited time budget, for rounds."""

    @property
    def now(self) -> float:
        return time.monotonic()

    def of_rounds(self, measurements: float) -> float:
        return 0.0

    def took_round(self, measurements: float, seconds: float) -> None:
        """Do nothing: there is no plan to correct."""

    def more_seconds(self, seconds: float) -> bool:
        return True

    def in_time(self, seconds: float | None = None) -> bool:
        return True


class Bench:
    """A bench that measures configurations of one model in worker processes."""

    def __init__(self, model: Path, scratch: str, args: argparse.Namespace, notebook: Notebook) -> None:
        self.notebook, self.rounds = notebook, args.rounds
        workload = Workload.parse(WORKLOAD)
        self.options = Options(workload, kernels=True, policy=MeasurementPolicy(prompts=1))
        self.request = Request(str(model), self.options, "cpu", quiet=True)
        target = target_of(self.request, "cpu", scratch)
        self.start = Configuration.from_dict(
            notebook.once("start", lambda: self._make_start(target, args.slow))
        )
        self.executor = SlowEngine(*target, self.start)
        description = self.executor.describe()
        self.space = space_for(description, self.request)
        self._watch = Machine(None, host_weights=False)
        self._watch.__enter__()
        recorder = Recorder(
            self.executor, workload, identity=self.space.identity, watch=self._watch,
            patience=None if args.force else 30.0,
            deadline_floor=declaration("dyno").least_deadline("cpu", str(model)),
        )  # fmt: skip
        self.context = RunContext(recorder, self.space, self.options)
        self.context.policy = self.options.policy
        self.default = self.space.configuration(self.space.default)
        self._looks = 0

    def _make_start(self, target: tuple[str, dict[str, Any]], slow: Sequence[str]) -> dict[str, Any]:
        """The defaults that are slow on purpose, as a configuration; an empty one leaves the engine's own."""
        kernels: tuple[KernelChoice, ...] = ()
        if "kernels" in slow:
            plain = SlowEngine(*target, Configuration({}))
            try:
                space = space_for(plain.describe(), self.request)
                usual = space.configuration(space.default)
                kernels = tuple(slow_kernels(plain, usual, self.options.workload))
            finally:
                plain.close()
        return Configuration(SLOW if "settings" in slow else {}, kernels).to_dict()

    def close(self) -> None:
        self._watch.__exit__(None, None, None)
        self.executor.close()

    def settings(self) -> Iterator[Change]:
        """All values of all settings except the defaults."""
        for n, knob in enumerate(self.space.knobs):
            for i in range(len(knob.values)):
                point = (*self.space.default[:n], i, *self.space.default[n + 1 :])
                if i != self.space.default[n] and self.space.legal(point):
                    moves = tuple(m for m in self.context.weights if m in knob.moves)
                    yield f"{knob.name}={knob.values[i]}", self.space.configuration(point), moves

    def kernels(self) -> Iterator[tuple[tuple[str, str], Change]]:
        """All kernels of all ops except the defaults, each with its op."""
        for op in self.executor.kernel_ops(self.default, self.options.workload):
            for candidate in op.candidates:
                if candidate != op.default:
                    choice = KernelChoice(op.key, op.tokens, candidate)
                    name = f"{op.key} {op.tokens} {json.dumps(dict(candidate), sort_keys=True)}"
                    what = Configuration(self.default.settings, (choice,))
                    yield (op.key, op.tokens), (name, what, (op.metric,))

    def looks(self, changes: Sequence[Change], metric: str) -> list[float]:
        """Ratios to the default in the order of `changes`; 0 if a change does not run. One look errs by tens
        of percent on a busy machine, so the better quarter gets AGAIN more, and their median counts."""
        found = self._looks_of(changes, metric, "looks")
        order = sorted(range(len(changes)), key=lambda i: -found[i])
        better = sorted(order[: max(MOST, len(order) // 4)])
        further = [
            self._looks_of([changes[i] for i in better], metric, f"looks{n}") for n in range(1, 1 + AGAIN)
        ]
        for place, i in enumerate(better):
            found[i] = statistics.median([found[i], *(f[place] for f in further)])
        return found

    def _looks_of(self, changes: Sequence[Change], metric: str, phase: str) -> list[float]:
        """One look at each change."""
        found: list[float] = []
        for begin in range(0, len(changes), GROUP):
            group = changes[begin : begin + GROUP]
            key = f"{phase}/{metric}/{group[0][0]}/{group[-1][0]}"
            found += self.notebook.once(key, functools.partial(self._group, group, metric))
        return found

    def _group(self, group: Sequence[Change], metric: str) -> list[float]:
        self.context.processes.next()
        rates = [self._look(c, metric) for c in (self.default, *(g[1] for g in group), self.default)]
        ends = [r for r in (rates[0], rates[-1]) if r]
        base = sum(ends) / len(ends) if ends else math.inf
        return [rate / base for rate in rates[1:-1]]

    def _look(self, configuration: Configuration, metric: str) -> float:
        self._looks += 1
        measurement = self.context.measure(f"look/{self._looks}", configuration, [metric])
        if measurement.status is not TrialStatus.OK:
            return 0.0
        rates = sorted(measurement.rates(metric).values())
        return rates[len(rates) // 2]

    def race(
        self, key: str, base: Configuration, named: Mapping[str, Configuration], metric: str
    ) -> dict[str, list[float]]:
        """The ratio of each change to `base`, with its interval, from paired rounds."""
        found: dict[str, list[float]] = self.notebook.once(key, lambda: self._race(key, base, named, metric))
        return found

    def _race(
        self, key: str, base: Configuration, named: Mapping[str, Configuration], metric: str
    ) -> dict[str, list[float]]:
        rounds = Rounds(self.context.measure_in, self.context.processes.next, _Time(), (metric,), 0.1)
        result = rounds.compare(key, {"base": base, **named}, self.rounds)
        ratios = {n: result.ratio(n, [metric], {metric: 1.0}) for n in named if n in result.logs}
        return {n: [r.ratio, r.low, r.high] for n, r in ratios.items()}


def exhaustive(bench: Bench, metric: str) -> tuple[dict[str, Any], dict[str, Configuration]]:
    """Every change that can move a metric: how many, and the promising ones with their ratios in rounds."""
    changes = [c for c in bench.settings() if metric in c[2]]
    settings = dict(zip((c[0] for c in changes), bench.looks(changes, metric), strict=True))
    ops = [(op, c) for op, c in bench.kernels() if metric in c[2]]
    kernels = bench.looks([c for _, c in ops], metric)
    best: dict[tuple[str, str], tuple[float, Change]] = {}
    for (op, change), ratio in zip(ops, kernels, strict=True):
        if ratio > best.get(op, (1.01, None))[0]:
            best[op] = (ratio, change)
    knobs: dict[str, tuple[float, Change]] = {}
    for change in changes:  # only the best value of a setting, because a profile holds one
        knob, ratio = change[0].partition("=")[0], settings[change[0]]
        if ratio > knobs.get(knob, (0.0, None))[0]:
            knobs[knob] = (ratio, change)
    seen = {c[0]: (r, c[1]) for r, c in (*knobs.values(), *best.values())}
    chosen = sorted((n for n in seen if seen[n][0] > PROMISING), key=lambda n: -seen[n][0])[:MOST]
    named = {n: seen[n][1] for n in chosen}
    if len(best) > 1:
        together = tuple(c[1].kernels[0] for _, c in best.values())
        named["the best kernels together"] = Configuration(bench.default.settings, together)
    rounds = bench.race(f"truth/{metric}", bench.default, named, metric) if named else {}
    looks = {"settings": settings, "kernels": len(ops), "promising": {n: seen[n][0] for n in chosen}}
    return {**looks, "rounds": rounds}, named


def with_change(profile: Configuration, change: Configuration, default: Configuration) -> Configuration:
    """The profile with a change of the default added."""
    moved = {n: v for n, v in change.settings.items() if v != default.settings.get(n)}
    places = {(k.key, k.tokens) for k in change.kernels}
    kept = tuple(k for k in profile.kernels if (k.key, k.tokens) not in places)
    return Configuration({**profile.settings, **moved}, (*kept, *change.kernels))


def judge(
    bench: Bench, profile: Configuration, metric: str, found: Mapping[str, Any],
    named: Mapping[str, Configuration],
) -> list[dict[str, Any]]:  # fmt: skip
    """A verdict on each gain of a metric: whether the profile holds it, or would gain no more from it."""
    gains = {n: r for n, r in found["rounds"].items() if r[0] > GAIN and r[1] > 1}
    added = {n: with_change(profile, named[n], bench.default) for n in gains}
    others = {n: c for n, c in added.items() if runs(bench.space, c) != runs(bench.space, profile)}
    raced = bench.race(f"judge/{metric}", profile, others, metric) if others else {}
    return [
        {"metric": metric, "change": n, "alone": alone, "on_top": raced.get(n),
         **verdict(n not in others, raced.get(n))}
        for n, alone in gains.items()
    ]  # fmt: skip


def runs(space: Space, configuration: Configuration) -> Hashable:
    """A key that is equal for configurations with the same code; the order of kernels does not matter."""
    settings = space.configuration(space.point(configuration.settings))
    return space.identity(settings), frozenset(configuration.kernels_key())


def verdict(held: bool, on_top: Sequence[float] | None) -> dict[str, Any]:
    """Whether a gain is written, and the reason. None: the interval contains 5 %, so the rounds cannot tell.

    Args:
        held: whether the profile holds exactly this change.
        on_top: the ratio and interval of the profile with the change to the profile; None: it has not run.
    """
    if held:
        return {"written": True, "why": "the profile holds it"}
    if on_top is None:
        return {"written": False, "why": "the profile does not run with it"}
    if on_top[2] <= GAIN:
        return {"written": True, "why": "the profile gains no more than 5 % by it"}
    if on_top[0] > GAIN and on_top[1] > 1:
        return {"written": False, "why": "the profile gains by it"}
    return {"written": None, "why": "the rounds cannot tell"}


def one(args: argparse.Namespace, notebook: Notebook) -> dict[str, Any]:
    """The exhaustive run, the tune and the race of one model, on the CPUs of this process."""
    model = make_model(args.one, args.folder)
    row: dict[str, Any] = {"model": args.one, "seed": args.seed, "bytes": model.stat().st_size}
    with tempfile.TemporaryDirectory(prefix="dyno-gains-") as scratch:
        bench = Bench(model, scratch, args, notebook)
        try:
            row["start"] = bench.start.to_dict()
            truth = {m: exhaustive(bench, m) for m in bench.context.weights}
            row["exhaustive"] = {m: found for m, (found, _) in truth.items()}
            bench.executor.close()
            tuned = notebook.once("tune", lambda: tune(bench, model, args, scratch), args.budget)
            profile = Configuration.from_dict(tuned["profile"])
            row["tune"] = {k: v for k, v in tuned.items() if k != "profile"}
            row["gains"] = [
                gain
                for metric, (found, named) in truth.items()
                for gain in judge(bench, profile, metric, found, named)
            ]
            row["missed"] = [gain["change"] for gain in row["gains"] if gain["written"] is False]
            row["open"] = [gain["change"] for gain in row["gains"] if gain["written"] is None]
            row["seconds"] = notebook.seconds
        finally:
            bench.close()
    notebook.close()
    return row


def tune(bench: Bench, model: Path, args: argparse.Namespace, scratch: str) -> dict[str, Any]:
    """One tune, and its profile as a configuration."""
    options = Options(Workload.parse(WORKLOAD), budget=args.budget, seed=args.seed, kernels=True)
    request = Request(
        str(model), options, "cpu", out=Path(scratch) / "profile.yaml", quiet=True,
        deadline_floor=declaration("dyno").least_deadline("cpu", str(model)), force=args.force,
    )  # fmt: skip
    engine = SlowEngine(*target_of(request, "cpu", scratch), bench.start)
    try:
        result = run(request, engine)
    finally:
        engine.close()
    outcome = result.outcome
    if args.part is not None:  # to learn why a gain was not written
        shutil.copy(result.journal, args.part.with_suffix("").with_suffix(".journal.jsonl"))
    profile = Configuration(
        {**bench.default.settings, **outcome.settings}, tuple(k.choice for k in outcome.kernels)
    )
    return {
        "status": outcome.status, "trials": outcome.trials, "margin": outcome.margin,
        "settings": {e.name: e.value for e in outcome.entries},
        "kernels": [k.choice.to_dict() for k in outcome.kernels],
        "gain": {m: g.to_dict() for m, g in outcome.gain.items()},
        "promises": outcome.promises, "missed": outcome.missed,
        "profile": profile.to_dict(),
    }  # fmt: skip


def job(args: argparse.Namespace, name: str, seed: int, cpus: Sequence[int]) -> dict[str, Any] | None:
    """Run a whole job or its next piece in a new process; None if a piece is left."""
    words = [sys.executable, "-P", str(Path(__file__).resolve()), "--one", name, "--seed", str(seed)]
    words += ["--budget", str(args.budget), "--rounds", str(args.rounds), "--folder", str(args.folder)]
    words += ["--force"] if args.force else []
    words += ["--slow", *args.slow] if args.slow else []
    words += ["--part", str(args.json.with_suffix(f".{name}.{seed}.part.json"))] if args.json else []
    words += ["--until", str(args.end - time.monotonic())] if args.until is not None else []
    found = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": found, "DYNO_LANE": ",".join(map(str, cpus))}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    if done.returncode == LEFT:
        return None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"model": name, "seed": seed, "error": last}
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--seeds", type=int, default=1, help="tunes of each model")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds of a tune")
    parser.add_argument("--rounds", type=int, default=6, help="of each comparison")
    parser.add_argument("--lanes", nargs="+", default=["auto"], help="CPUs of each: 0,1 2,3; default: auto")
    parser.add_argument("--beside", default="", help="what other CPUs did meanwhile, for the JSON")
    parser.add_argument("--force", action="store_true", help="beside other programs: a try, no result")
    parser.add_argument(
        "--slow", nargs="+", choices=STARTS, default=[],
        help="defaults that are slow on purpose, so that there are gains",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, help="write everything there, after every job; goes on with it")
    parser.add_argument("--until", type=float, help="seconds after which nothing more is measured")
    parser.add_argument("--part", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--one", choices=MODELS, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.end = math.inf if args.until is None else time.monotonic() + args.until
    if args.one:
        os.sched_setaffinity(0, [int(n) for n in os.environ["DYNO_LANE"].split(",")])
        try:
            notebook = Notebook(args.part, args.end, options_of(args))
            print(json.dumps(one(args, notebook)))
        except Stopped as stopped:
            print(f"stopped before {stopped}", file=sys.stderr)
            return LEFT
        except DisturbedError as error:
            print(error, file=sys.stderr)
            return 1
        return 0
    with tempfile.TemporaryDirectory(prefix="dyno-gains-") as folder:
        args.folder = Path(folder)
        for name in args.models:
            make_model(name, args.folder)
        return sweep(args)


def beside(lanes: Sequence[Sequence[int]], args: argparse.Namespace) -> str:
    """A sentence: how many jobs ran at the same time, on how many CPUs, and beside which work."""
    widths = "/".join(map(str, sorted({len(lane) for lane in lanes})))
    jobs = f"{len(lanes)} jobs at a time, each" if len(lanes) > 1 else "one job at a time,"
    meanwhile = f"; beside them: {args.beside}" if args.beside else ""
    return f"{jobs} on {widths} CPUs of a machine with {os.cpu_count()} CPUs{meanwhile}"


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """The options on which results depend."""
    return {"force": args.force, "budget": args.budget, "rounds": args.rounds, "slow": sorted(args.slow)}


def sweep(args: argparse.Namespace) -> int:
    """All jobs, one after the other on each lane."""
    lanes = automatic() if args.lanes == ["auto"] else [[int(n) for n in w.split(",")] for w in args.lanes]
    rows: list[dict[str, Any]] = []
    if args.json is not None and args.json.exists():
        kept = json.loads(args.json.read_text())
        its = {name: kept.get(name) for name in options_of(args)}
        if its != options_of(args):
            said = ", ".join(f"{name} {value}" for name, value in its.items())
            raise SystemExit(f"{args.json} is of {said}; give the same options, or another --json")
        rows = [r for r in kept["jobs"] if "error" not in r]
    done = {(r["model"], r["seed"]) for r in rows}
    jobs: queue.Queue[tuple[str, int]] = queue.Queue()
    for seed in range(args.seeds):
        for name in args.models:
            if (name, seed) not in done:
                jobs.put((name, seed))
    lock = threading.Lock()
    left: list[tuple[str, int]] = []

    def work(cpus: list[int]) -> None:
        while True:
            try:
                name, seed = jobs.get_nowait()
            except queue.Empty:
                return
            row = job(args, name, seed, cpus) if time.monotonic() < args.end else None
            if row is None:
                left.append((name, seed))
                continue
            with lock:
                rows.append(row)
                rows.sort(key=lambda r: (r["model"], r["seed"]))
                report = {
                    "command": "python benchmarks/exhaustive_gains.py "
                    + " ".join(os.path.basename(a) for a in sys.argv[1:]),
                    "machine": machine_facts("cpu"), "lanes": lanes, "side_by_side": beside(lanes, args),
                    "workload": WORKLOAD,
                    **options_of(args), "jobs": rows,
                }  # fmt: skip
                if args.json is not None:
                    args.json.write_text(json.dumps(report, indent=1) + "\n")
                told = f"{len(row.get('gains', ()))} gains, missed: {row.get('missed')}"
                told += f", the rounds cannot tell: {row['open']}" if row.get("open") else ""
                print(name, seed, row.get("error") or told, flush=True)

    threads = [threading.Thread(target=work, args=(lane,)) for lane in lanes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if left:
        print("left:", *(f"{name} {seed}" for name, seed in left), flush=True)
        return LEFT
    return 1 if any("error" in r or r["missed"] for r in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
