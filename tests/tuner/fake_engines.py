"""Stand-ins for an engine's binaries, in a folder of the test's."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "data" / "engines"
TOOLS = ("llama-bench", "llama-server", "llama-perplexity")


def fake(folder: Path, version: str, tools: tuple[str, ...] = TOOLS, **spec: Any) -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "spec.json").write_text(json.dumps({"data": str(DATA), "engine": version, **spec}))
    for tool in tools:
        path = folder / tool
        path.write_text(f"#!{sys.executable} -S\n" + (DATA / "fake.py").read_text())
        path.chmod(0o755)
    return folder


def calls(folder: Path, name: str) -> list[dict[str, Any]]:
    """How a tool of these was started, but for its help."""
    lines = [json.loads(line) for line in (folder / "calls.jsonl").read_text().splitlines()]
    return [c for c in lines if c["name"] == name and "--help" not in c["args"]]
