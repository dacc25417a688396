"""Runs a link and reports its cost: seconds, peak memory of its largest process, bytes of what it made.

Usage: link_report.py --step device_link|module_link --output FILE --report FILE [--before REPORT] -- COMMAND…

The report of a later step includes that of the step `--before` it. Of the module it also says how much
is device code. The numbers are printed, lie in the wheel and are shown by `dyno info`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import resource
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

INTERNAL_KERNEL = re.compile(rb"__nv_static_\d+__\w+__Z\w+\0")  # how such a kernel is registered
DEVICE_SECTIONS = (b".nv_fatbin", b"__nv_relfatbin")


def device_code_bytes(module: Path) -> int:
    """Size of the sections of a 64-bit little-endian ELF file that hold code for GPUs."""
    data = module.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        raise SystemExit(f"{module}: not a 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", data, 40)
    entry, count, names_at = struct.unpack_from("<HHH", data, 58)
    headers = [struct.unpack_from("<IIQQQQ", data, table + i * entry) for i in range(count)]
    names = headers[names_at][4]
    total = 0
    for name, _, _, _, _, size in headers:
        begin = names + name
        if data[begin : data.index(b"\0", begin)] in DEVICE_SECTIONS:
            total += size
    return total


def internal_kernels(command: list[str]) -> list[str]:
    """Objects of a device link with kernels of internal linkage, which a split link drops without a word."""
    objects = [Path(word) for word in command if word.endswith(".o")]
    return [path.name for path in objects if path.is_file() and INTERNAL_KERNEL.search(path.read_bytes())]


def cost_text(step: str, cost: dict[str, Any]) -> str:
    return (
        f"{step.replace('_', ' ')}: {cost['seconds']} s, largest process {cost['peak_process_mib']} MiB, "
        f"{cost['bytes'] / 2**20:.1f} MiB"
    )


def output_of(command: list[str]) -> Path | None:
    """The file that a compiler's command line writes."""
    return next((Path(name) for flag, name in itertools.pairwise(command) if flag == "-o"), None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step", choices=("device_link", "module_link"), required=True)
    parser.add_argument("--output", type=Path, help="default: what follows -o in the command")
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--before", type=Path)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    output = args.output or output_of(command)
    if output is None:
        parser.error("no --output, and no -o in the command")
    if args.step == "device_link" and (dropped := internal_kernels(command)):
        print(f"kernels of internal linkage are lost in a split link: {', '.join(dropped)}", file=sys.stderr)
        return 1
    started = time.monotonic()
    status = subprocess.run(command, check=False).returncode
    if status != 0:
        return status
    report: dict[str, Any] = json.loads(args.before.read_text(encoding="utf-8")) if args.before else {}
    report[args.step] = {
        "seconds": round(time.monotonic() - started, 1),
        "peak_process_mib": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024,
        "bytes": output.stat().st_size,
    }
    if args.step == "module_link":
        report["device_code_bytes"] = device_code_bytes(output)
    args.report.write_text(json.dumps(report) + "\n", encoding="utf-8")
    print(cost_text(args.step, report[args.step]))
    if args.step == "module_link":
        print(f"device code: {report['device_code_bytes'] / 2**20:.1f} MiB")
        if args.before:
            print(cost_text("device_link", report["device_link"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
