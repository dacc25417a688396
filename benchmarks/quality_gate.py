"""How often the tuner's check of answers rejects a wrong kernel, and how often a correct one.

Needs a build with -DDYNO_TEST_FAULTS=ON, whose products have configurations that are wrong by a known factor.
For one shape at a time the factor is found that costs the perplexity given (0.4 % unless said otherwise),
where every batch runs through the wrong kernel. Each run then takes other passages of text and judges that
kernel, and configurations that are sound: other u-batches, weights as they are in the file, and other
correct kernels for the same shape.

    pip install . -C cmake.define.DYNO_TEST_FAULTS=ON
    python benchmarks/quality_gate.py --model models/pycode-moe-20m-Q4_K_M.gguf --text tests/data/eval.txt
"""

from __future__ import annotations

import argparse
import json
import math
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from dyno import _core
from dyno.quality import log_softmax
from dyno.tokenizer import Tokenizer
from dyno_tuner.core.intervals import keyed_rng
from dyno_tuner.core.protocol import Configuration, KernelChoice, OpContext
from dyno_tuner.decide.answer_check import judge
from dyno_tuner.space.knobs import Fidelity
from dyno_tuner.targets.dyno.target import DynoTarget

CTX = 512
# fault_factor() in csrc/ops/matmul/product.h, which tells its configurations by these.
ERROR_UNIT = 1 / 2000
SOUND_PREFETCH, SOUND_BLOCK = 1024, 400
MATVEC_TOKENS = 8  # dense products of more tokens are gemm's
# The broken ops, by family, type and rows of the weights, at batches of so many tokens: attention's products,
# the head, and all three of the experts.
PLACES = (
    ("matmul q5_k n=512", 1),
    ("matmul q8_0 n=128", 7),
    ("matmul q6_k n=8192", 500),
    ("moe_up_gate q4_k n=256", 1),
    ("matmul_id q4_k n=512", 125),
    ("matmul_id q6_k n=512", 500),
)


@dataclass
class Shape:
    """A shape at one batch size, and the cost of its wrong kernel."""

    key: str
    tokens: str
    batch: int
    errors: tuple[int, ...]
    """Available errors in ERROR_UNIT, ascending."""
    error: int = 0
    ppl_ratio: float = 1.0
    """Extrapolated with the square law of larger errors."""
    ppl_ratio_measured: float = 1.0
    ppl_ratio_stderr: float = 0.0
    caught: int = 0
    runs: int = 0

    def to_dict(self) -> dict[str, Any]:
        found = asdict(self)
        del found["errors"], found["error"]
        ratios = {name: round(value, 4) for name, value in found.items() if name.startswith("ppl_ratio")}
        return {**found, **ratios, "factor": round(1 + self.error * ERROR_UNIT, 4)}

    def take(self, known: dict[str, Any]) -> None:
        """Take the result of an earlier calibration, from to_dict()."""
        self.error = round((known["factor"] - 1) / ERROR_UNIT)
        self.ppl_ratio = known["ppl_ratio"]
        self.ppl_ratio_measured = known["ppl_ratio_measured"]
        self.ppl_ratio_stderr = known["ppl_ratio_stderr"]


def error_of(config: dict[str, Any]) -> int:
    """The error of a configuration in ERROR_UNIT; 0 for a correct one."""
    prefetch, block = int(config.get("prefetch", SOUND_PREFETCH)), int(config.get("block", 0))
    return prefetch if prefetch < SOUND_PREFETCH else max(0, block - SOUND_BLOCK)


def candidates(key: str, batch: int) -> list[dict[str, Any]]:
    family, desc = _core.ops.parse_key(key, batch)
    return [dict(c) for c in _core.ops.candidates(family, desc)]


def find_shapes(model: str) -> list[Shape]:
    """The shapes of PLACES in a model, with the errors that this build offers."""
    session = _core.Session(model)
    found = []
    for start, batch in PLACES:
        ops = [op for op in session.ops(batch) if str(op["key"]).startswith(start + " ")]
        if not ops:
            raise SystemExit(f"{model} has no {start}")
        key = str(ops[0]["key"])
        errors = sorted({error_of(c) for c in candidates(key, batch)} - {0})
        if not errors:
            raise SystemExit(f"{key} has no configuration that is wrong: build with -DDYNO_TEST_FAULTS=ON")
        found.append(Shape(key, str(ops[0]["tokens"]), batch, tuple(errors)))
    session.close()
    return found


def faulty(shape: Shape, error: int) -> KernelChoice:
    streams = {"rows": 64, "prefetch": error, "split": 1}
    tiles = {"rows": 64, "tokens": 3, "kc": 512, "block": SOUND_BLOCK + error}
    config: dict[str, Any]
    if shape.key.startswith("matmul "):
        few = shape.batch <= MATVEC_TOKENS
        config = {"variant": "matvec", **streams} if few else {"variant": "gemm", **tiles, "split": 1}
    else:
        one = shape.batch == 1
        config = {"variant": "by_row", **streams} if one else {"variant": "by_expert", **tiles, "few": 8}
    return KernelChoice(shape.key, shape.tokens, config)


def nll_by_context(session: Any, tokens: np.ndarray, batch: int) -> np.ndarray:
    """Nats per token of each context of the text, decoded in batches of `batch` tokens."""
    found = []
    for start in range(0, len(tokens) - CTX + 1, CTX):
        part = tokens[start : start + CTX]
        session.reset()
        rows = [session.decode([(0, part[at : at + batch])], rows="all")[0] for at in range(0, CTX, batch)]
        logs = log_softmax(np.concatenate(rows)[:-1])
        found.append(-float(logs[np.arange(CTX - 1), part[1:]].mean()))
    return np.asarray(found)


def stderr(values: np.ndarray) -> float:
    return float(values.std(ddof=1)) / math.sqrt(len(values))


def calibrate(model: str, shape: Shape, text: np.ndarray, cost: float, threads: int) -> Shape:
    """Choose the error whose cost is nearest to `cost`, and measure its cost.

    Rounding changes the routing, and this noise hides small costs. So the error is extrapolated from larger
    costs, which grow with its square. If its cost is clearly higher than expected, a smaller error is chosen.
    """
    session = _core.Session(model, context={"ctx": CTX}, session={"threads": threads})
    base = nll_by_context(session, text, shape.batch)

    def log_ratios(error: int) -> np.ndarray:
        kernel = faulty(shape, error)
        session.set_kernels([(kernel.key, kernel.tokens, dict(kernel.config), "fault")])
        if any(row["status"] != "applied" for row in session.kernel_report()):
            raise SystemExit(str(session.kernel_report()))
        return nll_by_context(session, text, shape.batch) - base

    def nearest(error: float) -> int:
        return min(shape.errors, key=lambda known: abs(math.log(known / error)))

    error = nearest(200)
    while (excess := float(log_ratios(error).mean())) < 2 * cost:
        if error == shape.errors[-1]:
            raise SystemExit(f"{shape.key}: no fault costs {cost:.1%}")
        error = nearest(2 * error)
    first = excess / error**2
    larger = [nearest(math.sqrt(times * cost / first)) for times in (3, 5, 8)]
    slope = float(np.median([float(log_ratios(error).mean()) / error**2 for error in larger]))
    shape.error = nearest(math.sqrt(math.log1p(cost) / slope))
    measured = log_ratios(shape.error)
    while measured.mean() > math.log1p(cost) + 2 * stderr(measured):
        # Here the cost does not follow the square law, so a fault of the requested size is harder to find.
        smaller = shape.errors[: shape.errors.index(shape.error)]
        if not smaller:
            raise SystemExit(f"{shape.key}: the smallest fault costs more than {cost:.1%}")
        shape.error = min(smaller[-1], nearest(shape.error * cost / float(measured.mean())))
        measured = log_ratios(shape.error)
    shape.ppl_ratio = math.exp(slope * shape.error**2)
    shape.ppl_ratio_measured = math.exp(float(measured.mean()))
    shape.ppl_ratio_stderr = stderr(measured)
    session.close()
    return shape


def sound(shape: Shape, run: int) -> list[Configuration]:
    """Correct configurations, which may only change rounding."""
    right = [c for c in candidates(shape.key, shape.batch) if error_of(c) == 0]
    drawn = right[int(keyed_rng("sound", run).integers(len(right)))]
    return [
        Configuration({"ubatch": (33, 64)[run % 2]}),
        Configuration({"cpu_repack": False}),
        *(Configuration({}, (KernelChoice(shape.key, shape.tokens, c),)) for c in (right[-1], drawn)),
    ]


@dataclass
class Run:
    """The checks of one run: all wrong kernels and some correct configurations."""

    tokens: int
    caught: list[bool]
    alarms: list[bool]
    seconds: list[float]


def run_once(model: str, shapes: list[Shape], run: int, seed: int, threads: int) -> Run:
    context = OpContext("quality gate")
    target = DynoTarget(model, {"threads": threads}, check_seed=seed + run)
    begun = time.perf_counter()
    default = target.quality(Configuration({}), context)
    seconds = [time.perf_counter() - begun]

    def wrong(configuration: Configuration) -> bool:
        found = target.quality(configuration, context)
        if found.message:
            raise SystemExit(found.message)
        seconds.append(found.seconds)
        return not judge(found, default, Fidelity.ROUNDING, None).ok

    caught = [wrong(Configuration({}, (faulty(shape, shape.error),))) for shape in shapes]
    alarms = [wrong(configuration) for configuration in sound(shapes[run % len(shapes)], run)]
    target.close()
    return Run(default.tokens, caught, alarms, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", type=Path, required=True, help="what the cost in perplexity is measured on")
    parser.add_argument("--contexts", type=int, default=32, help=f"of {CTX} tokens, of that text")
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first run's passages")
    parser.add_argument("--cost", type=float, default=0.004, help="share of the perplexity")
    parser.add_argument("--calibration", type=Path, help="file to read the factors from, or to write them to")
    parser.add_argument("--threads", type=int, default=1, help="of a process")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    tokenizer = Tokenizer.from_gguf(args.model)
    text = np.asarray(tokenizer.encode(args.text.read_text(encoding="utf-8")), dtype=np.int32)
    text = text[: args.contexts * CTX]
    shapes = find_shapes(args.model)
    if args.calibration and args.calibration.exists():
        known = {(k["key"], k["tokens"]): k for k in json.loads(args.calibration.read_text())}
        for shape in shapes:
            if (shape.key, shape.tokens) in known:
                shape.take(known[shape.key, shape.tokens])
    runs: list[Run] = []
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        calibrated = [
            pool.submit(calibrate, args.model, s, text, args.cost, args.threads)
            for s in shapes
            if not s.error
        ]
        fresh = {(s.key, s.tokens): s for s in (future.result() for future in calibrated)}
        shapes = [fresh.get((s.key, s.tokens), s) for s in shapes]
        if args.calibration:
            args.calibration.write_text(json.dumps([s.to_dict() for s in shapes], indent=2) + "\n")
        for shape in shapes:
            print(
                f"{shape.key} {shape.tokens}: x {1 + shape.error * ERROR_UNIT:.4f} costs "
                f"{100 * (shape.ppl_ratio - 1):.2f} %, measured {100 * (shape.ppl_ratio_measured - 1):.2f} "
                f"± {100 * shape.ppl_ratio_stderr:.2f} %",
                flush=True,
            )
        pending = [
            pool.submit(run_once, args.model, shapes, run, args.seed, args.threads)
            for run in range(args.runs)
        ]
        for future in as_completed(pending):
            runs.append(future.result())
            for shape, caught in zip(shapes, runs[-1].caught, strict=True):
                shape.caught += caught
                shape.runs += 1
            found = ", ".join(f"{s.caught} of {s.runs}" for s in shapes)
            alarms = [alarm for run in runs for alarm in run.alarms]
            print(f"caught {found}; {sum(alarms)} false alarms in {len(alarms)}", flush=True)

    seconds = [value for run in runs for value in run.seconds]
    result = {
        "command": "python benchmarks/quality_gate.py",
        "model": Path(args.model).name,
        "device": _core.cpu_info()["name"],
        "threads": args.threads,
        "scored_tokens": min(run.tokens for run in runs),
        "calibration_tokens": len(text),
        "runs": args.runs,
        "first_seed": args.seed,
        "shapes": [s.to_dict() for s in shapes],
        "sound_checks": len(alarms),
        "false_alarms": sum(alarms),
        "seconds_of_a_check": {"median": float(np.median(seconds)), "max": max(seconds)},
    }
    print(json.dumps(result, indent=2))
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
