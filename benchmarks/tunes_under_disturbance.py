"""Tunes a real engine while other programs disturb it: no false entry may be written.

    python benchmarks/tunes_under_disturbance.py x.gguf --tunes 100 --lanes auto --json tunes.json

Each lane is a set of CPUs on which one tune runs at a time, and what disturbs it uses the same CPUs. A null
tune searches settings of which every value runs the same code, so that every entry is false. An ordinary tune
searches real settings and kernels; half of them begin from defaults that are slow on purpose. When the
disturbance has ended, each of its entries is measured again (`tune verify` on the quiet lane): an entry is
false if the profile is faster without it. The JSON has one row for every tune. Exit code 1 if an entry is
false.

Disturbances: `bursts` (all CPUs of the lane are busy for 0.2 to 1.5 s, again and again), `competitor` (a
process pinned to one CPU), `quota` (a CPU quota of the control group; needs root), `hog` (copies between
large arrays), `stops` (SIGSTOP and SIGCONT for the tune's processes). `none`, on request, shows how much the
same tunes find on a quiet lane.

If the JSON exists, the tunes in it are not run again, and the file of several runs holds the tunes of all.
With `--force` no tune stops, however busy the machine is: their false entries tell what the margins and the
proof in rounds are worth without the watch over the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dyno import profiles
from dyno.bench import machine_facts
from dyno_tuner.core.errors import DisturbedError
from dyno_tuner.core.options import Options
from dyno_tuner.core.protocol import Configuration
from dyno_tuner.core.workload import Workload
from dyno_tuner.execution.worker import WorkerExecutor
from dyno_tuner.record import journal
from dyno_tuner.run import verify
from dyno_tuner.run.session import Request, run, space_for, target_of
from dyno_tuner.space.knobs import Fidelity, Kind, Knob
from dyno_tuner.space.search_space import Space
from dyno_tuner.targets.dyno.declaration import declaration
from lanes import BURN, automatic, busy
from null_tune import null_space
from slow_engine import SLOW, SlowEngine

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dyno_tuner.core.protocol import Description

KINDS = ("null", "ordinary")
DISTURBANCES = ("bursts", "competitor", "quota", "hog", "stops")
NONE = "none"
WORKLOAD = "pp=256,tg=32"
PROMPTS, GENERATION = frozenset({"pp"}), frozenset({"tg"})  # the metrics that a knob changes


# ---- one tune, in a process of its own


def slow_space(cores: int) -> Space:
    """Real settings from a slow default: the truth is that all three gain, if there are two cores."""
    counts = tuple(range(1, cores + 1))
    return Space(
        (
            Knob("ubatch", (32, 64, 128, 256), SLOW["ubatch"], moves=PROMPTS, fidelity=Fidelity.ROUNDING),
            Knob("threads", counts, SLOW["threads"], Kind.LOAD, GENERATION),
            Knob("threads_batch", counts, SLOW["threads_batch"], Kind.LOAD, PROMPTS),
        )
    )


def one(model: str, kind: str, seed: int, budget: float, out: Path, force: bool = False) -> dict[str, Any]:
    """Run one tune in this process. If it stops because the machine is busy, the result has the reason. With
    `force` it does not stop.

    Answers are not compared: no load changes them, and the whole budget goes to measurements.
    """
    workload = Workload.parse(WORKLOAD)
    slow = kind == "ordinary" and seed % 4 in (1, 2)  # half of each of five, and of six, disturbances
    kernels = kind == "ordinary" and not slow
    options = Options(workload, budget=budget, seed=seed, kernels=kernels, check=False)
    request = Request(
        model, options, "cpu", out=out, quiet=True, force=force,
        deadline_floor=declaration("dyno").least_deadline("cpu", model),
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="dyno-disturbed-") as scratch:
        executor = WorkerExecutor(*target_of(request, "cpu", scratch))
        try:
            description = executor.describe()
            space = _space(kind, slow, description, request)
            outcome = run(request, executor, space).outcome
        except DisturbedError as error:
            return {"stopped": str(error), "slow_default": slow}
        finally:
            executor.close()
    return {
        "status": outcome.status, "slow_default": slow, "trials": outcome.trials, "margin": outcome.margin,
        "conditions": outcome.conditions, "settings": outcome.settings,
    }  # fmt: skip


def _space(kind: str, slow: bool, description: Description, request: Request) -> Space:
    if kind == "null":
        return null_space(description, request.options.workload)
    if slow:
        return slow_space(len(os.sched_getaffinity(0)))
    return space_for(description, request)


def entries_of(out: Path) -> dict[str, Any]:
    """All gains that a profile holds."""
    if not out.exists():
        return {}
    profile = profiles.load_profile(out)
    return {
        entry: {"ratio": unit.recorded}
        for unit in verify.units_of(profile, verify.workload_of(profile).metrics)
        for entry in unit.entries()
    }


def judge(model: str, out: Path, slow: bool, budget: float) -> dict[str, Any]:
    """Verdicts by entry of a profile, measured on the quiet machine."""
    if slow:
        knobs = {k.name: k for k in slow_space(len(os.sched_getaffinity(0))).knobs}
        request = Request(model, Options(Workload.parse(WORKLOAD)))
        with tempfile.TemporaryDirectory(prefix="dyno-disturbed-") as scratch:
            executor = SlowEngine(*target_of(request, "cpu", scratch), Configuration(SLOW))
            try:
                verdicts, gain = verify.verify(
                    out, model, budget=budget, quiet=True, executor=executor,
                    knob=lambda name, value, default: knobs[name],
                )  # fmt: skip
            finally:
                executor.close()
    else:
        verdicts, gain = verify.verify(out, model, budget=budget, quiet=True)
    return {
        "entries": {v.entry: {k: x for k, x in v.to_dict().items() if k != "entry"} for v in verdicts},
        "gain": {m: g.to_dict() for m, g in gain.items()},
    }


# ---- what disturbs; each runs on the lane's CPUs beside the tune


class Disturber:
    """A disturber of the process `victim` on `cpus`, until `stop` is called."""

    def __init__(self, how: str, victim: int, cpus: Sequence[int], seed: int, budget: float) -> None:
        self._how, self._victim, self._cpus, self._budget = how, victim, list(cpus), budget
        self._random = random.Random(f"{how} {seed}")
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the disturbance, and return when it has ended."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        getattr(self, f"_{self._how}")()

    def _none(self) -> None:
        self._over.wait()

    def _wait(self, low: float, high: float) -> bool:
        """Whether the disturbance goes on after a random time, in seconds."""
        return not self._over.wait(self._random.uniform(low, high))

    def _bursts(self) -> None:
        while self._wait(0.3, 3.0):
            with contextlib.ExitStack() as stack:
                for cpu in self._cpus:
                    stack.enter_context(busy(BURN, [cpu]))
                self._wait(0.2, 1.5)

    def _competitor(self) -> None:
        if not self._wait(0.0, 0.6 * self._budget):
            return
        with busy(BURN, self._cpus[:1]):
            self._wait(0.1 * self._budget, 0.6 * self._budget)

    def _hog(self) -> None:
        while self._wait(0.0, 0.4 * self._budget):
            with busy(_HOG, self._cpus):
                self._wait(0.05 * self._budget, 0.3 * self._budget)

    def _stops(self) -> None:
        while self._wait(0.1, 2.0):
            stopped = [p for p in tree(self._victim) if p != self._victim or self._random.random() < 0.3]
            for pid in stopped:
                _signal(pid, signal.SIGSTOP)
            self._wait(0.02, 0.8)
            for pid in stopped:
                _signal(pid, signal.SIGCONT)

    def _quota(self) -> None:
        """Set a CPU quota, at the start in half of the tunes and later in the others."""
        cpus = self._random.choice([0.5, 1.0, 1.5])
        if self._random.random() < 0.5 and not self._wait(0.1 * self._budget, 0.7 * self._budget):
            return
        with group(self._victim, cpus):
            self._over.wait()


_HOG = "import numpy as np\na = np.ones(1 << 25)\nb = np.empty_like(a)\nwhile True: np.copyto(b, a)"


def tree(root: int) -> list[int]:
    """A process and all its descendants."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(entry.name))
    found, left = [], [root]
    while left:
        pid = left.pop()
        found.append(pid)
        left += parents.get(pid, [])
    return found


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended
        os.kill(pid, number)


def quota_folder() -> Path | None:
    """A folder in which a control group with a CPU quota can be created; None if that is not allowed."""
    for base in (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup/cpu,cpuacct"), Path("/sys/fs/cgroup")):
        probe = base / f"dyno-disturbed-{os.getpid()}"
        try:
            probe.mkdir()
        except OSError:
            continue
        usable = (probe / "cpu.cfs_quota_us").exists() or (probe / "cpu.max").exists()
        probe.rmdir()
        if usable:
            return base
    return None


@contextlib.contextmanager
def group(pid: int, cpus: float) -> Iterator[None]:
    """A process tree inside a control group with a quota."""
    base = quota_folder()
    if base is None:
        raise RuntimeError(
            "no control group with a CPU quota can be made here; leave out the disturbance quota"
        )
    folder = base / f"dyno-disturbed-{pid}"
    folder.mkdir()
    if (folder / "cpu.max").exists():
        (folder / "cpu.max").write_text(f"{round(cpus * 100000)} 100000")
    else:
        (folder / "cpu.cfs_period_us").write_text("100000")
        (folder / "cpu.cfs_quota_us").write_text(str(round(cpus * 100000)))
    for each in tree(pid):
        with contextlib.suppress(OSError):  # it has ended
            (folder / "cgroup.procs").write_text(str(each))
    try:
        yield
    finally:
        for each in tree(pid):
            with contextlib.suppress(OSError):
                (base / "cgroup.procs").write_text(str(each))
        for _ in range(100):
            try:
                folder.rmdir()
                break
            except OSError:  # a process in it has not ended yet
                time.sleep(0.05)


# ---- lanes


def tune_and_judge(
    args: argparse.Namespace, kind: str, how: str, seed: int, cpus: Sequence[int]
) -> dict[str, Any]:
    """One disturbed tune. If it wrote entries, they are measured again on the quiet lane."""
    with tempfile.TemporaryDirectory(prefix="dyno-disturbed-") as folder:
        out = Path(folder) / "profile.yaml"
        begun = time.monotonic()
        row: dict[str, Any] = {"kind": kind, "disturbance": how, "seed": seed}
        words = ["--one", kind, "--seed", str(seed), "--out", str(out), *(["--force"] if args.force else [])]
        with _process(args, words, cpus) as process:
            disturber = Disturber(how, process.pid, cpus, seed, args.budget)
            try:
                said, errors = process.communicate(timeout=20 * args.budget + 60)
            finally:
                disturber.stop()
        if process.returncode:
            return {**row, "error": (errors.strip().splitlines() or ["no message"])[-1]}
        row |= json.loads(said.splitlines()[-1])
        row |= {"seconds": round(time.monotonic() - begun, 1), "entries": entries_of(out)}
        path = journal.of_profile(out)
        if path.exists():
            records = journal.load(path).records
            row["noise"] = next((noise_of(r) for r in records if r.get("note") == "noise"), None)
            row["repeated"] = sum(
                int(r["result"].get("cpu", {}).get("dropped") or 0) for r in records if "op" in r
            )
        if kind == "null":
            row["false"] = sorted(row["entries"])
        elif row["entries"]:
            words = ["--judge", "--out", str(out), *(["--slow"] if row["slow_default"] else [])]
            with _process(args, words, cpus) as process:
                said, errors = process.communicate(timeout=600)
            if process.returncode:
                return {**row, "error": (errors.strip().splitlines() or ["no message"])[-1]}
            row["judged"] = json.loads(said.splitlines()[-1])
            row["false"] = [e for e, v in row["judged"]["entries"].items() if v["verdict"] == verify.HARMFUL]
        else:
            row["false"] = []
        return row


def noise_of(record: dict[str, Any]) -> dict[str, Any]:
    """The result of the A/A measurement before the first round."""
    return {k: record[k] for k in ("margin", "within", "between")}


def _process(args: argparse.Namespace, words: Sequence[str], cpus: Sequence[int]) -> subprocess.Popen[str]:
    script = Path(__file__).resolve()
    command = [sys.executable, "-P", str(script), str(args.model), "--budget", str(args.budget)]
    found = os.pathsep.join([str(script.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": found, "DYNO_LANE": ",".join(map(str, cpus))}
    return subprocess.Popen(
        [*command, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Counts by kind and disturbance. The power: `found` of `slow` tunes that ended wrote something, from a
    default that is slow on purpose."""
    table: dict[str, Any] = {}
    for row in rows:
        cell = table.setdefault(row["kind"], {}).setdefault(
            row["disturbance"],
            {
                "tunes": 0,
                "ended": 0,
                "stopped": 0,
                "errors": 0,
                "repeated": 0,
                "entries": 0,
                "kept": 0,
                "false": 0,
                "slow": 0,
                "found": 0,
            },
        )
        cell["tunes"] += 1
        kind = "errors" if "error" in row else "stopped" if "stopped" in row else "ended"
        cell[kind] += 1
        cell["repeated"] += row.get("repeated", 0)
        cell["entries"] += len(row.get("entries", ()))
        cell["kept"] += sum(
            v["verdict"] == verify.KEEP for v in row.get("judged", {}).get("entries", {}).values()
        )
        cell["false"] += len(row.get("false", ()))
        slow = kind == "ended" and row["slow_default"]
        cell["slow"] += slow
        cell["found"] += slow and bool(row.get("entries"))
    return table


def main() -> int:
    """Exit code 1 where an entry is false or a tune fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="GGUF file")
    parser.add_argument("--budget", type=float, default=30.0, help="seconds of each tune")
    parser.add_argument("--tunes", type=int, default=100, help="of each kind")
    parser.add_argument("--first", type=int, default=0, help="seed of the first one")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--how", nargs="+", choices=(*DISTURBANCES, NONE), default=DISTURBANCES)
    parser.add_argument(
        "--lanes",
        nargs="+",
        help="CPUs of each: 0,1 2,3; `auto`: two cores each, as many as there are; default: one lane of all",
    )
    parser.add_argument(
        "--force", action="store_true", help="tunes with --force: none stops, and rounds alone tell noise"
    )
    parser.add_argument("--until", type=float, help="seconds after which no further tune begins")
    parser.add_argument("--json", type=Path, help="write everything there, after every tune; goes on with it")
    parser.add_argument("--one", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--judge", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--slow", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one or args.judge:
        os.sched_setaffinity(0, [int(n) for n in os.environ["DYNO_LANE"].split(",")])
        model = str(args.model.absolute())
        found = (
            one(model, args.one, args.seed, args.budget, args.out, args.force)
            if args.one
            else judge(model, args.out, args.slow, args.budget + 10)
        )
        print(json.dumps(found))
        return 0
    return sweep(args)


def lanes_of(words: Sequence[str] | None) -> list[list[int]]:
    """The lanes of the arguments."""
    if words == ["auto"]:
        return automatic()
    return [[int(n) for n in lane.split(",")] for lane in words or ()] or [sorted(os.sched_getaffinity(0))]


def so_far(args: argparse.Namespace) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The tunes in the JSON and the runs that made them. Exits if the JSON has other options."""
    if args.json is None or not args.json.exists():
        return [], []
    report = json.loads(args.json.read_text())
    asked = {"model": args.model.stem, "workload": WORKLOAD, "budget": args.budget, "force": args.force}
    for name, value in asked.items():
        if (there := report.get(name, False)) != value:  # older files know no `force`
            raise SystemExit(f"{args.json} has {name} {there}, not {value}; name another file")
    return report["tunes"], report["runs"]


def sweep(args: argparse.Namespace) -> int:
    """All tunes of the arguments, one after the other on each lane."""
    lanes = lanes_of(args.lanes)
    print("lanes:", *(",".join(map(str, lane)) for lane in lanes), file=sys.stderr)
    how = list(args.how)
    if "quota" in how and quota_folder() is None:
        how.remove("quota")
        print("quota: left out, because no control group can be made here", file=sys.stderr)
    jobs: queue.Queue[tuple[str, str, int]] = queue.Queue()
    rows, earlier = so_far(args)
    done = {(row["kind"], row["disturbance"], row["seed"]) for row in rows}
    for seed in range(args.first, args.first + args.tunes):
        for kind in args.kinds:
            if (job := (kind, how[seed % len(how)], seed)) not in done:
                jobs.put(job)
    command = " ".join(os.path.basename(a) for a in sys.argv[1:])
    this = {
        "command": f"python benchmarks/tunes_under_disturbance.py {command}",
        "machine": machine_facts("cpu"), "lanes": lanes,
    }  # fmt: skip
    report: dict[str, Any] = {
        "model": args.model.stem, "workload": WORKLOAD, "budget": args.budget, "force": args.force,
        "runs": [*earlier, this],
    }  # fmt: skip
    lock = threading.Lock()
    begun = time.monotonic()

    def work(cpus: list[int]) -> None:
        while args.until is None or time.monotonic() - begun < args.until:
            try:
                kind, disturbance, seed = jobs.get_nowait()
            except queue.Empty:
                return
            row = tune_and_judge(args, kind, disturbance, seed, cpus)
            row["run"] = len(earlier)
            with lock:
                rows.append(row)
                ordered = sorted(rows, key=lambda r: (r["kind"], r["seed"], r["disturbance"]))
                report.update(summary=summary(rows), tunes=ordered)
                if args.json is not None:
                    args.json.write_text(json.dumps(report, indent=1) + "\n")
                what = row.get("error") or row.get("stopped") or f"{len(row['entries'])} entries"
                print(f"{kind} {seed} {disturbance}: {what}; false: {row.get('false', [])}", flush=True)

    threads = [threading.Thread(target=work, args=(lane,)) for lane in lanes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps(summary(rows), indent=1))
    return 1 if any(row.get("false") or "error" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
