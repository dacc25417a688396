"""How often the tuner's check of answers catches a kernel that is wrong, and how often it cries wolf.

Needs a build with -DDYNO_TEST_FAULTS=ON, whose matmul has configurations that are wrong by a known factor.
For one shape at a time the factor is found that costs the perplexity given (0.4 % unless said otherwise),
where every batch runs through the wrong kernel. Each run then takes other passages of text and judges that
kernel, and configurations that are sound: other u-batches, and other correct kernels for the same shape.

    pip install . -C cmake.define.DYNO_TEST_FAULTS=ON
    python benchmarks/quality_gate.py --model models/pycode-moe-20m-Q4_K_M.gguf --text tests/data/eval.txt
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from dyno import _core
from dyno.quality import log_softmax
from dyno.tokenizer import Tokenizer
from dyno_tuner.check import judge
from dyno_tuner.knobs import Fidelity
from dyno_tuner.target import Configuration, KernelChoice, OpContext, Quality
from dyno_tuner.targets.dyno import DynoTarget

FACTORS = (101, 102, 103, 104, 106, 108, 111, 116, 123, 132, 145, 164)


@dataclass
class Shape:
    """A shape at one size of batches, and what its wrong kernel costs."""

    key: str
    tokens: str
    batch: int
    factor: float = 1.0
    ppl_ratio: float = 1.0
    caught: int = 0
    runs: int = 0


def faulty(key: str, tokens: str, percent: int) -> KernelChoice:
    few = tokens in ("m1", "m2-4", "m5-8")
    config: dict[str, Any] = (
        {"variant": "matvec", "rows": 64, "prefetch": percent, "split": 1}
        if few
        else {"variant": "gemm", "rows": 64, "tokens": 3, "kc": 512, "block": 3 * percent, "split": 1}
    )
    return KernelChoice(key, tokens, config)


def mean_nll(session: Any, tokens: np.ndarray, batch: int) -> float:
    """Nats per token of the text in contexts of 512 tokens, decoded in batches of that size."""
    total = count = 0.0
    for start in range(0, len(tokens) - 511, 512):
        part = tokens[start : start + 512]
        session.reset()
        rows = [session.decode([(0, part[at : at + batch])], rows="all")[0] for at in range(0, 512, batch)]
        logs = log_softmax(np.concatenate(rows)[:-1])
        total -= float(logs[np.arange(511), part[1:]].sum())
        count += 511
    return total / count


def calibrate(model: str, shape: Shape, text: np.ndarray, cost: float) -> None:
    """Takes the factor whose cost is nearest to `cost`.

    A small cost drowns in what rounding does to the routing, so it is taken from larger ones: it grows with
    the square of the error.
    """
    session = _core.Session(model, context={"ctx": 512})
    base = mean_nll(session, text, shape.batch)
    slopes = []
    for percent in FACTORS:
        kernel = faulty(shape.key, shape.tokens, percent)
        session.set_kernels([(kernel.key, kernel.tokens, dict(kernel.config), "fault")])
        if any(row["status"] != "applied" for row in session.kernel_report()):
            raise SystemExit(f"{session.kernel_report()}: build with -DDYNO_TEST_FAULTS=ON")
        ratio = math.exp(mean_nll(session, text, shape.batch) - base)
        if ratio - 1 > 2 * cost:
            slopes.append((ratio - 1) / (percent / 100 - 1) ** 2)
        if ratio - 1 > 10 * cost:
            break
    session.close()
    if not slopes:
        raise SystemExit(f"{shape.key}: no fault costs {cost:.1%}")
    slope = float(np.median(slopes))
    costs = {percent: slope * (percent / 100 - 1) ** 2 for percent in FACTORS}
    nearest = min(FACTORS, key=lambda percent: abs(math.log(costs[percent] / cost)))
    shape.factor, shape.ppl_ratio = nearest / 100, 1 + costs[nearest]


def sound(key: str, tokens: str, batch: int) -> list[Configuration]:
    """Configurations that may change rounding and nothing else."""
    family, desc = _core.ops.parse_key(key, batch)
    right = [
        c
        for c in _core.ops.candidates(family, desc)
        if not (c["variant"] == "matvec" and c["prefetch"] < 1024)
        and not (c["variant"] == "gemm" and c["rows"] == 64 and c["block"] > 300)
    ]
    return [
        Configuration({"ubatch": 64}),
        Configuration({"ubatch": 33}),
        *(Configuration({}, (KernelChoice(key, tokens, dict(c)),)) for c in (right[0], right[-1])),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", type=Path, required=True, help="what the cost in perplexity is measured on")
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--cost", type=float, default=0.004, help="share of the perplexity")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    tokenizer = Tokenizer.from_gguf(args.model)
    text = np.asarray(tokenizer.encode(args.text.read_text(encoding="utf-8")), dtype=np.int32)[: 32 * 512]
    session = _core.Session(args.model)
    by_key = {
        op["key"]: op for op in session.ops(1) if op["family"] == "matmul" and "q" in op["key"].split()[1]
    }
    session.close()
    keys = list(by_key)
    places = [(keys[2], "m1", 1), (keys[1], "m5-8", 7), (keys[-1], "m257-512", 500)]
    shapes = [Shape(*place) for place in places]
    for shape in shapes:
        calibrate(args.model, shape, text, args.cost)
        print(
            f"{shape.key} {shape.tokens}: x {shape.factor} costs {100 * (shape.ppl_ratio - 1):.2f} %",
            flush=True,
        )

    alarms = checks = 0
    seconds: list[float] = []
    tokens = 0
    context = OpContext("quality gate")
    for run in range(args.runs):
        target = DynoTarget(args.model, check_seed=run)
        begun = time.perf_counter()
        default = target.quality(Configuration({}), context)
        seconds.append(time.perf_counter() - begun)
        tokens = default.tokens

        def verdict(
            configuration: Configuration, target: DynoTarget = target, default: Quality = default
        ) -> bool:
            found = target.quality(configuration, context)
            if found.message:
                raise SystemExit(found.message)
            seconds.append(found.seconds)
            return judge(found, default, Fidelity.ROUNDING, None).ok

        for shape in shapes:
            kernel = faulty(shape.key, shape.tokens, round(100 * shape.factor))
            shape.runs += 1
            shape.caught += not verdict(Configuration({}, (kernel,)))
        place = shapes[run % len(shapes)]
        for configuration in sound(place.key, place.tokens, place.batch):
            checks += 1
            alarms += not verdict(configuration)
        target.close()
        caught = ", ".join(f"{s.caught} of {s.runs}" for s in shapes)
        print(f"run {run}: caught {caught}; {alarms} false alarms in {checks}", flush=True)

    result = {
        "command": "python benchmarks/quality_gate.py",
        "model": Path(args.model).name,
        "device": _core.cpu_info()["name"],
        "scored_tokens": tokens,
        "runs": args.runs,
        "shapes": [asdict(s) for s in shapes],
        "sound_checks": checks,
        "false_alarms": alarms,
        "seconds_of_a_check": {"median": float(np.median(seconds)), "max": max(seconds)},
    }
    print(json.dumps(result, indent=2))
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
