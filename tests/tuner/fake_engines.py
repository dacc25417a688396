"""Stand-ins for an engine's binaries, in a folder of the test's."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "data" / "engines"
OPS = ["NONE", "DUP", "ADD", "ADD_ID", "MUL_MAT", "MUL_MAT_ID", "MOE_FUSED_UP_GATE"]
TOOLS = ("llama-bench", "llama-server", "llama-perplexity")


def fake(folder: Path, version: str, tools: tuple[str, ...] = TOOLS, **spec: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "spec.json").write_text(json.dumps({"data": str(DATA), "engine": version, "ops": OPS, **spec}))
    for tool in tools:
        path = folder / tool
        path.write_text(f"#!{sys.executable} -S\n" + (DATA / "fake.py").read_text())
        path.chmod(0o755)
    return folder
