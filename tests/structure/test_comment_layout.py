"""The formatter wraps comments over 120 characters, which breaks banners and table rows."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DASHES = re.compile(r"^\s*// ?-{8,}$")


def test_no_banner_has_lost_its_dashes_to_the_next_line() -> None:
    broken = [
        f"{path.relative_to(ROOT)}:{number}"
        for folder in ("csrc", "tests")
        for suffix in ("h", "cpp", "cu", "cuh")
        for path in sorted((ROOT / folder).rglob(f"*.{suffix}"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if DASHES.match(line)
    ]
    assert not broken


def test_each_row_of_the_layout_tables_is_a_line() -> None:
    text = (ROOT / "csrc" / "ops" / "matmul" / "gpu_layout.h").read_text(encoding="utf-8")
    for row in ("8 bits:", "4 bits:", "2 bits:", "1 bit:", "scale of 16 ", "scale of 32 (iq4_xs)"):
        assert len(re.findall(rf"^//   {re.escape(row)}", text, re.MULTILINE)) == 1, row
