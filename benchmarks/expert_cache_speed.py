"""Tokens a second with a static and an adaptive expert cache on a GPU, and the share of hits.

    python benchmarks/expert_cache_speed.py model.gguf --mib 2048 4096 --threads 16 --json out.json

All experts lie on the CPU. Tokens are drawn with a seed: `even` from the whole vocabulary, `words` by Zipf's
law, so that some come again and again. A text runs token by token, first without a clock. The use is recorded
from another part of `words`. With it, an adaptive cache has little to swap, so its time beside the one of a
static cache is the price of counting. `--virtual` tries the script on a virtual device.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from dyno import _core

if TYPE_CHECKING:
    from numpy.typing import NDArray

CTX = 512
SAMPLE = 128
"""Tokens of a sample, from an empty context on."""


def drawn(kind: str, vocabulary: int, count: int, seed: int) -> NDArray[np.int32]:
    rng = np.random.default_rng(seed)
    if kind == "even":
        return rng.integers(0, vocabulary, count).astype(np.int32)
    ranks = np.arange(1, min(vocabulary, 4096) + 1)
    words = np.random.default_rng(1).permutation(vocabulary)[: ranks.size]
    return rng.choice(words, count, p=(1 / ranks) / (1 / ranks).sum()).astype(np.int32)


def opened(args: argparse.Namespace, mib: int, cache: str, uses: Any) -> _core.Session:
    placement: dict[str, Any] = {"cpu_moe": True}
    if uses is not None:
        placement["expert_uses"] = uses.tolist()
    if args.virtual:
        placement["virtual_devices"] = [{}]
    return _core.Session(
        args.model,
        load={
            "device": "cpu:1" if args.virtual else "cuda:0",
            "expert_cache_mib": mib,
            "expert_cache": cache,
        },
        context={"ctx": CTX},
        session={"threads": args.threads, "cuda_graphs": not args.virtual},
        placement=placement,
    )


def seconds_of(session: _core.Session, tokens: NDArray[np.int32]) -> float:
    """Seconds to decode tokens one by one, each with its logits."""
    session.reset()
    begin = time.perf_counter()
    for i in range(tokens.size):
        session.decode([(0, tokens[i : i + 1])], "last")
    return time.perf_counter() - begin


def measured(args: argparse.Namespace, session: _core.Session, kind: str) -> dict[str, Any]:
    vocabulary = int(session.model["n_vocab"])
    text = drawn(kind, vocabulary, SAMPLE * (args.warm + args.samples), 7)
    pieces = text.reshape(-1, SAMPLE)
    begin = session.experts
    for piece in pieces[: args.warm]:
        seconds_of(session, piece)
    before = session.experts
    rates = [SAMPLE / seconds_of(session, piece) for piece in pieces[args.warm :]]
    after = session.experts
    counts = {key: after[key] - before[key] for key in after}
    return {
        "tokens_per_second": round(statistics.median(rates), 2),
        "samples": [round(rate, 2) for rate in rates],
        "hits": round(counts["cached"] / max(1, counts["chosen"]), 4),
        "swapped": counts["swapped"],
        "swapped_before": before["swapped"] - begin["swapped"],
    }


def recorded(args: argparse.Namespace, session: _core.Session) -> NDArray[np.int64]:
    """[layers with experts, experts]: choices of a text that is not measured."""
    session.reset()
    tokens = drawn("words", int(session.model["n_vocab"]), CTX, 99)
    routing = session.decode([(0, tokens)], "none", capture_routing=True)[1]
    experts = int(session.model["experts"])
    return np.array([np.bincount(layer.reshape(-1), minlength=experts) for layer in routing])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--mib", type=int, nargs="+", default=[2048, 4096])
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--warm", type=int, default=3, help=f"pieces of {SAMPLE} tokens before the clock")
    parser.add_argument("--samples", type=int, default=5, help=f"of {SAMPLE} tokens")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no further cache after these")
    parser.add_argument("--virtual", action="store_true")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    start = time.monotonic()
    uses: NDArray[np.int64] | None = None
    result: dict[str, Any] = {
        "what": "Generation with all experts on the CPU and an expert cache on the device: median of "
        f"{args.samples} samples of {SAMPLE} tokens, after {args.warm * SAMPLE} tokens without a clock; "
        "hits: share of the choices.",
        "command": " ".join(["python", *(Path(word).name if "/" in word else word for word in sys.argv)]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "model": args.model.name,
        "device": next((d["name"] for d in _core.devices() if d["kind"] == "cuda"), "a virtual device"),
        "threads": args.threads,
        "rows": [],
    }
    for mib in args.mib:
        for use in ("nothing", "words"):
            for cache in ("static", "adaptive"):
                if time.monotonic() - start > args.seconds:
                    continue
                session = opened(args, mib, cache, uses if use == "words" else None)
                row: dict[str, Any] = {"expert_cache_mib": mib, "expert_cache": cache, "recorded use": use}
                row["texts"] = {kind: measured(args, session, kind) for kind in ("even", "words")}
                result["rows"].append(row)
                if uses is None:
                    uses = recorded(args, session)
                session.close()
                args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
                told = [
                    f"{kind} {of['tokens_per_second']} t/s, hits {of['hits']:.1%}, swapped {of['swapped']}"
                    for kind, of in row["texts"].items()
                ]
                print(f"{mib} MiB, {cache}, use of {use}: {'; '.join(told)}", flush=True)


if __name__ == "__main__":
    main()
