"""The file that a script writes about one model."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


def write_result(path: Path, model: Path, found: Mapping[str, Any]) -> None:
    """Write the findings of the script that runs, behind its command, the day and the name of the model."""
    whole = {
        "command": ["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]],
        "date": time.strftime("%Y-%m-%d"),
        "model": model.name,
        **found,
    }
    path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
