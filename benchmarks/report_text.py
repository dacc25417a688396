"""Files of results, tables and numbers of the report: the parts that all its sections share."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
UBATCHES = (128, 256, 512, 1024, 2048, 4096)
COLOURS = {"dyno": "#1668b8", "llama.cpp": "#d9822b", "ik_llama.cpp": "#7b53a6"}

Json = dict[str, Any]


def load(name: str) -> Json:
    loaded: Json = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return loaded


def table(head: list[str], rows: list[list[str]], numbers: bool = True) -> str:
    """A markdown table; all columns but the first are aligned to the right if they hold numbers."""
    rule = ["---"] + ["---:" if numbers else "---"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *rows)) + "\n"


def filled(page: str) -> str:
    """The page with its sentences in lines of 120 characters; tables, headings and pictures stay."""
    blocks = []
    for block in page.strip().split("\n\n"):
        if block.startswith(("|", "#", "!", "<!--")):
            blocks.append(block)
            continue
        items = re.split(r"\n(?=- )", block)
        blocks.append("\n".join(
            textwrap.fill(
                " ".join(item.split()), 120, subsequent_indent="  " if item.startswith("- ") else "",
                break_long_words=False, break_on_hyphens=False,
            )
            for item in items
        ))  # fmt: skip
    return "\n\n".join(blocks) + "\n"


def rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def percent(value: float, digits: int = 1) -> str:
    return f"{100 * value:.{digits}f} %"
