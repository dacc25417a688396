"""Writes `benchmarks/REPORT.md` and its plots from the files in `benchmarks/results`.

    python benchmarks/report.py            # write the page and the plots
    python benchmarks/report.py --check    # exit code 1 if they are not what the files give

The page holds no number that is not in one of the files. Of several files of one kind the newest counts. The
sections are in `report_gpu.py`, `report_cpu.py` and `report_tuner.py`, the plots in `report_plots.py`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from typing import TYPE_CHECKING

from report_cpu import cpu_avx2, cpu_depth, cpu_models, cpu_servers, cpu_types
from report_gpu import gpu_models, other_engines, sequences, vram_limits, whole_models
from report_plots import prompts_plot, tunes_plot
from report_text import RESULTS, ROOT, filled, table
from report_tuner import method, tunes

if TYPE_CHECKING:
    from pathlib import Path


def sources() -> str:
    rows = []
    for path in sorted(RESULTS.iterdir()):
        if path.suffix == ".json":
            data = json.loads(path.read_text(encoding="utf-8"))
            runs = data.get("runs")
            first = runs[0] if isinstance(runs, list) else data.get("quiet") or data
            about = data.get("command") or data.get("what") or data.get("about") or first.get("command")
            about = about or first.get("note") or "–"
            machine = data.get("machine")
            machine = machine if isinstance(machine, dict) else {}
            device = data.get("device") or machine.get("gpu_info") or machine.get("cpu")
            date = str(data.get("date") or "")[:10]
        elif path.name.endswith(".jsonl.gz") and "journal" not in path.name:
            with gzip.open(path, "rt", encoding="utf-8") as lines:
                first = json.loads(next(lines))
            about = "records of llama-bench's form, for `tune replay`"
            device = first.get("gpu_info") or first.get("cpu_info")
            date = str(first.get("test_time") or "")[:10]
        else:
            continue
        about = " ".join(str(about).split()).replace("|", "\\|")
        short = about if len(about) <= 110 else about[:107].rsplit(" ", 1)[0] + " …"
        rows.append([f"[{path.name}](results/{path.name})", date or "–", str(device or "–"), short])
    return f"""## The files

[README.md](README.md) describes the scripts that made them.

{table(["file", "date", "device", "command or content"], rows, numbers=False)}"""


def pages() -> dict[Path, str]:
    """Every file that this script writes, with its text."""
    chosen = whole_models()
    about = """# Benchmark report

<!-- Written by benchmarks/report.py from the files in benchmarks/results. Do not edit. -->

This page shows the newest measurements of each kind, with device, date and commit.
`python benchmarks/report.py` writes it from the files in `benchmarks/results`. Prompts are `ppN` (N tokens
are read), and generation is `tgN` (N tokens are generated, one at a time).
"""
    sections = [
        gpu_models(chosen),
        other_engines(),
        vram_limits(),
        sequences(),
        cpu_models(),
        cpu_types(),
        cpu_avx2(),
        cpu_depth(),
        cpu_servers(),
        tunes(),
        method(),
        sources(),
    ]
    folder = ROOT / "benchmarks"
    return {
        folder / "REPORT.md": filled("\n\n".join(part.strip() for part in [about, *sections])),
        folder / "plots" / "gpu_prompts.svg": prompts_plot(chosen),
        folder / "plots" / "gpu_tunes.svg": tunes_plot(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit code 1 if a file is out of date"
    )
    check = parser.parse_args().check
    stale = []
    for path, content in pages().items():
        if path.exists() and path.read_text(encoding="utf-8") == content:
            continue
        stale.append(str(path.relative_to(ROOT)))
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(content, encoding="utf-8")
    if stale:
        print(("out of date: " if check else "written: ") + ", ".join(stale))
    if check and stale:
        print("run: python benchmarks/report.py")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
