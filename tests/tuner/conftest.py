from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for conftest_tuner


@pytest.fixture(scope="session")
def sweep_path() -> Path:
    return Path(__file__).parents[1] / "data" / "replay" / "ik-h200-qwen3moe-30b-a3b.jsonl"
