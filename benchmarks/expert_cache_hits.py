"""The hit rate of an expert cache: static or adaptive, with or without recorded use.

    python benchmarks/expert_cache_hits.py models/pycode-moe-20m-Q4_K_M.gguf --json out.json

The passages follow each other, token by token, as in generation: Python, English, C++ and Python again, from
files of this repository. The use is recorded from another part of the Python file. A static cache of `all
passages` knows their use beforehand. The experts lie on the CPU and the cache on a virtual device without a
link, so hits are counts that depend on no time.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from dyno import Engine, _core, _expert_use

ROOT = Path(__file__).resolve().parents[1]
PYTHON = "tests/data/eval.txt"
PASSAGES = {
    "Python": (PYTHON, 0.0),
    "English": ("docs/user/several-devices.md", 0.0),
    "C++": ("csrc/runtime/session.cpp", 0.0),
    "Python again": (PYTHON, 0.5),
}
RECORDED = (PYTHON, 0.75)
"""Position after all passages of the file."""
STEP = 256
"""Tokens in one call of the engine, which decodes them one by one."""


def cut(engine: Engine, place: tuple[str, float], count: int) -> list[int]:
    """`count` tokens of a file, from a given place on."""
    text = (ROOT / place[0]).read_text(encoding="utf-8")
    begin = int(len(text) * place[1])
    return list(engine.tokenizer.encode(text[begin : begin + 12 * count]))[:count]


def opened(model: Path, mib: int, kind: str, uses: Any) -> _core.Session:
    placement: dict[str, Any] = {"virtual_devices": [{}], "cpu_moe": True}
    if uses is not None:
        placement["expert_uses"] = uses.tolist()
    return _core.Session(
        model,
        load={"device": "cpu:1", "expert_cache_mib": mib, "expert_cache": kind},
        context={"ctx": STEP, "sequences": 1},
        session={"ubatch": 1, "threads": 1},
        placement=placement,
    )


def hits(session: _core.Session, passages: dict[str, list[int]]) -> dict[str, Any]:
    """By passage: the share of expert choices that were hits, and the number of swapped experts.

    A layer without cached experts has no hits, and its choices count.
    """
    found: dict[str, Any] = {}
    each = int(session.model["moe_layers"]) * int(session.model["experts_used"])
    for name, tokens in passages.items():
        before = session.experts
        for begin in range(0, len(tokens), STEP):
            session.reset()
            session.decode([(0, np.array(tokens[begin : begin + STEP], np.int32))], "none")
        counts = {key: count - before[key] for key, count in session.experts.items()}
        found[name] = {
            "hits": round(counts["cached"] / (each * len(tokens)), 4),
            "swapped": counts["swapped"],
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=2048, help="of each passage")
    parser.add_argument("--mib", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    with Engine(args.model, "cpu", profile=None, ctx=512) as engine:
        passages = {name: cut(engine, place, args.tokens) for name, place in PASSAGES.items()}
        recorded = _expert_use.count(engine, cut(engine, RECORDED, args.tokens), 512)
        known = sum(_expert_use.count(engine, tokens, 512) for tokens in passages.values())
        experts, layers = int(engine.model["experts"]), int(engine.model["moe_layers"])
    uses = {"nothing": None, "Python": recorded, "all passages": known}
    rows = []
    for mib in args.mib:
        for kind, use in (
            ("static", "nothing"), ("static", "Python"), ("static", "all passages"),
            ("adaptive", "nothing"), ("adaptive", "Python"),
        ):  # fmt: skip
            session = opened(args.model, mib, kind, uses[use])
            text = session.describe_plan()
            line = next(line for line in text.splitlines() if line.startswith("expert cache"))
            rows.append(
                {"expert_cache_mib": mib, "expert_cache": kind, "recorded use": use, "plan": line}
                | {"passages": hits(session, passages)}
            )
            shares = [f"{name} {of['hits']:.1%}" for name, of in rows[-1]["passages"].items()]
            print(f"{mib} MiB, {kind}, use of {use}: {', '.join(shares)}")
    result = {
        "what": "Share of the chosen experts that an expert cache on a virtual device held, by passage of "
        f"{args.tokens} tokens, in the order in which they ran; swapped: experts that came to a place.",
        "command": " ".join(["python", *(Path(word).name if "/" in word else word for word in sys.argv)]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "model": args.model.name,
        "layers": layers,
        "experts": experts,
        "rows": rows,
    }
    args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
