"""Tunes an engine over settings whose values all run the same code: nothing may be written.

    python benchmarks/null_tune.py x.gguf --device cuda:0 --budget 90s --seeds 2 --json null.json

Space and measurements are real, but the truth is known: anything that the tune writes is false. On a GPU the
bounds of the matrix-vector path take values between the sizes that occur; on every device the u-batch takes
values beyond the length of the prompt, which only make room. The JSON has for every seed the margin, how many
configurations were tried, what the best of them seemed to gain, and what was written. Exit code 1 where that
is anything.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dyno.bench import machine_facts
from dyno.devices import resolve_device
from dyno_tuner.cli.arguments import parse_duration
from dyno_tuner.core.options import Options
from dyno_tuner.core.workload import Workload
from dyno_tuner.execution.worker import WorkerExecutor
from dyno_tuner.record import journal
from dyno_tuner.run.session import Request, run, target_of
from dyno_tuner.space.knobs import Fidelity, Knob
from dyno_tuner.space.search_space import Space
from dyno_tuner.targets.dyno.declaration import declaration

if TYPE_CHECKING:
    from dyno_tuner.core.protocol import Description

ROOM = (1, 2, 4, 8)  # multiples of the length of the prompt
BOUNDS = ("matvec_max_tokens", "matvec_id_max_tokens")


def null_space(description: Description, workload: Workload) -> Space:
    """Knobs whose values do not change the code of the workload, nor a bit of an answer.

    Raises:
        ValueError: The prompt is no longer than a bound, or longer than the default's u-batch.
    """
    defaults = description.engine["defaults"]
    ubatch = int(defaults["ubatch"])
    if not workload.pp or workload.pp > ubatch:
        raise ValueError(f"prompts of {workload.pp} tokens; give 1 to {ubatch}, a u-batch of the default")
    knobs = [Knob("ubatch", tuple(ubatch * n for n in ROOM), ubatch, fidelity=Fidelity.ROUNDING)]
    for name in BOUNDS:
        if name not in defaults or (name == BOUNDS[1] and not description.model.get("experts")):
            continue
        bound = int(defaults[name])
        if bound + 4 >= workload.pp:
            raise ValueError(f"prompts of {workload.pp} tokens; {name} is {bound}, so give more")
        knobs.append(Knob(name, tuple(bound + n for n in range(4)), bound, fidelity=Fidelity.ROUNDING))
    return Space(tuple(knobs))


def null_tune(model: str, device: str, workload: Workload, budget: float, seed: int) -> dict[str, Any]:
    """Run one tune in a temporary folder."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dyno-null-") as folder:
        out = Path(folder) / "null.yaml"
        request = Request(
            model, Options(workload, budget=budget, seed=seed), device, out=out, quiet=True,
            ctx=max(4096, workload.longest), deadline_floor=declaration("dyno").least_deadline(device, model),
        )  # fmt: skip
        executor = WorkerExecutor(*target_of(request, device, folder))
        try:
            space = null_space(executor.describe(), workload)
            outcome = run(request, executor, space).outcome
        finally:
            executor.close()
        tried = [r for r in journal.load(journal.of_profile(out)).records if r.get("note") == "trial"]
    ratios = [r["ratio"] for r in tried if r.get("ratio") is not None]
    return {
        "seed": seed,
        "status": outcome.status,
        "settings": {k.name: list(k.values) for k in space.knobs},
        "trials": outcome.trials,
        "best_trial": max(ratios, default=None),
        "margin": outcome.margin,
        "baseline": outcome.baseline,
        "written": {e.name: {"value": e.value, **e.estimate.to_dict()} for e in outcome.entries},
        "seconds": round(time.monotonic() - begun, 1),
    }


def main() -> int:
    """Run the command. Exit code 1 if a tune wrote anything."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="GGUF file")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda:N")
    parser.add_argument("--budget", default="90s", help="of each tune")
    parser.add_argument("--workload", default="pp=512,tg=64", help="prompts of one u-batch at most")
    parser.add_argument("--seeds", type=int, default=1, help="how many tunes")
    parser.add_argument("--json", type=Path, required=True, help="write everything there, after every tune")
    args = parser.parse_args()
    device = resolve_device(args.device).name
    report: dict[str, Any] = {
        "command": "python benchmarks/null_tune.py " + " ".join(os.path.basename(a) for a in sys.argv[1:]),
        "machine": machine_facts(device),
        "model": args.model.stem,
        "tunes": [],
    }
    for seed in range(args.seeds):
        workload, budget = Workload.parse(args.workload), parse_duration(args.budget)
        row = null_tune(str(args.model.absolute()), device, workload, budget, seed)
        report["tunes"].append(row)
        args.json.write_text(json.dumps(report, indent=1) + "\n")
        wrong = ", ".join(row["written"]) or "nothing"
        print(f"seed {seed}: {row['trials']} configurations, {wrong} written, {row['seconds']:.0f} s")
    return 1 if any(row["written"] for row in report["tunes"]) else 0


if __name__ == "__main__":
    sys.exit(main())
