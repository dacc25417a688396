"""Stands for the binaries of an engine: prints help, version and results in the documented forms of real
ones, and measures nothing: its rates are a function of the flags. Started under the binaries' names;
`spec.json` is beside it."""

import json
import os
import sys
import time
from pathlib import Path

spec = json.loads((Path(sys.argv[0]).parent / "spec.json").read_text())
name, args = Path(sys.argv[0]).name, sys.argv[1:]
data, engine = Path(spec["data"]), spec["engine"]


def value(flag: str, otherwise: str) -> str:
    return args[len(args) - 1 - args[::-1].index(flag) + 1] if flag in args else otherwise


with (Path(sys.argv[0]).parent / "calls.jsonl").open("a") as log:
    seen = {k: v for k, v in os.environ.items() if k.startswith(("GGML_", "CUDA_"))}
    log.write(json.dumps({"name": name, "args": args, "env": seen}) + "\n")
if "--help" in args:
    print((data / f"{engine}-{'bench' if name == 'llama-bench' else 'common'}.help").read_text())
    sys.exit(0)
if "--version" in args:
    print((data / f"{engine}.version").read_text(), file=sys.stderr)
    sys.exit(0)
for fault, text in spec.get("faults", {}).items():
    if fault in " ".join(args):
        if text == "hang":
            time.sleep(600)
        print(text, file=sys.stderr)
        if text.startswith("GGML_ASSERT"):
            os.abort()
        sys.exit(1)
if "-op" in args and "-dr" in args:
    for number, _ in enumerate(value("-op", "").split(",")[::2]):
        op = spec["ops"][number] if number < len(spec["ops"]) else None
        print(
            f"Setting offload policy for op {op} to ON" if op else "Setting offload policy for all ops to ON"
        )
    sys.exit(0)
if name == "llama-perplexity":
    if "--kl-divergence" in args:
        kld = "0.000500" if spec.get("wrong", "-") in " ".join(args) else "0.000071"
        print((data / "kld.txt").read_text().replace("@KLD@", kld))
    else:
        Path(value("--kl-divergence-base", "")).write_bytes(b"_logits_")
    sys.exit(0)
ubatch, threads = int(value("-ub", "512")), int(value("-t", "4"))
rows = []
for key, tokens, rate in (
    ("n_prompt", int(value("-p", "0")), 400000.0 * (1.5 if ubatch == 64 else 1.0)),
    ("n_gen", int(value("-n", "0")), 80000.0),
):
    if tokens:
        nanoseconds = [round(1e9 * tokens / rate * (1 + 0.001 * i)) for i in (3, 0, 1, 2)]
        rows.append({
            "build_commit": "65c797c4", "build_number": 6100, "n_ubatch": spec.get("ran", ubatch),
            "n_threads": threads, "type_k": "f16", "n_prompt": 0, "n_gen": 0, key: tokens,
            "samples_ns": nanoseconds, "samples_ts": [tokens / n * 1e9 for n in nanoseconds],
        })  # fmt: skip
print("ggml_cuda_init: a log line on standard output")
print("[NCCL] a log line that begins with a bracket")
print(json.dumps(rows, indent=2))
