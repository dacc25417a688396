"""The Python and shell blocks of the user pages run, with the model that the project ships."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(python|bash)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Blocks with this need a running server; the tests of the server ask the same paths with the same packages.
SERVER = "base_url="
BLOCKS = [
    pytest.param(language, code, id=f"{page.name}-{number}")
    for page in [ROOT / "README.md", *sorted((ROOT / "docs" / "user").glob("*.md"))]
    for number, (language, code) in enumerate(BLOCK.findall(page.read_text(encoding="utf-8")))
    if SERVER not in code
]


def test_there_are_blocks_of_both_languages() -> None:
    assert {block.values[0] for block in BLOCKS} == {"python", "bash"}
    assert len(BLOCKS) >= 6


@pytest.mark.parametrize(("language", "code"), BLOCKS)
def test_a_block_runs(language: str, code: str, trained_model: Path, tmp_path: Path) -> None:
    code = re.sub(r"\b(?:x|model)\.gguf", str(trained_model), code)
    # The shipped model has no chat template; its answers may be cut anywhere.
    code = code.replace("engine.chat(", "engine.chat(template='chatml', messages=")
    code = code.replace("max_tokens=300", "max_tokens=8")
    command = (
        [sys.executable, "-c", f"import dyno\n{code}"] if language == "python" else ["bash", "-euc", code]
    )
    scripts = str(Path(sys.executable).parent)
    found = {
        **os.environ,
        "PATH": scripts + os.pathsep + os.environ["PATH"],
        "XDG_CONFIG_HOME": str(tmp_path),
    }
    done = subprocess.run(
        command, cwd=ROOT, env=found, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
