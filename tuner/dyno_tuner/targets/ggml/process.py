"""Running a foreign binary: a process with a deadline, and a status for each way it can fail."""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ...core.errors import TargetFailure, TargetUnusable
from ...core.protocol import TrialStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_OOM = re.compile(
    r"out of memory|cudaMalloc failed|failed to allocate|unable to allocate|cannot allocate memory"
    r"|std::bad_alloc|ErrorOutOfDeviceMemory|failed to (?:create|initialize) (?:the )?(?:KV|context).*memory",
    re.IGNORECASE,
)
_REFUSED = re.compile(
    r"unknown argument|invalid (?:argument|parameter|value)|unrecognized|error while handling argument"
    r"|invalid.*type|requires flash|not supported",
    re.IGNORECASE,
)
_ASSERT = re.compile(r"GGML_ASSERT|GGML_ABORT|CUDA error|Aborted|fatal error", re.IGNORECASE)
_IGNORED = re.compile(r"invalid parameter (\S+) .*ignored", re.IGNORECASE)
_PEAK = re.compile(r"^VmHWM:\s*([0-9]+) kB", re.MULTILINE)
_PR_SET_PDEATHSIG = 1
_FIRST_LOOK, _LOOK = 0.001, 0.05  # seconds between two looks at a process, first and later
_CLOSE_LOOK = 0.025  # if each look reads counters


@dataclass(frozen=True, slots=True)
class Finished:
    stdout: str
    stderr: str
    seconds: float
    code: int  # exit status; negative: minus the number of the signal
    peak_mib: float | None = None  # peak resident memory

    def last_line(self) -> str:
        lines = [line.strip() for line in (self.stderr or self.stdout).splitlines() if line.strip()]
        return lines[-1][:300] if lines else "it printed nothing"


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def execute(
    command: Sequence[str],
    environment: Mapping[str, str | None] | None = None,
    deadline: float = 600.0,
    folder: str | None = None,
    look: Callable[[int], None] | None = None,
) -> Finished:
    """Run `command` to its end.

    Args:
        environment: variables to set; None unsets one (engines only test whether some of them exist).
        deadline: seconds, after which the process is killed.
        folder: working folder. Tools of ik_llama.cpp leave a log file there.
        look: called every few milliseconds and once at the end, with the number of bytes printed so far.

    Raises:
        TargetFailure: the process exceeded its deadline (`timeout`).
        TargetUnusable: the process cannot be started.
    """
    merged = dict(os.environ)
    for name, value in (environment or {}).items():
        merged.pop(name, None)
        if value is not None:
            merged[name] = value
    # Output goes to files: they need no reader while the process runs.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        begun = time.monotonic()
        try:
            child = subprocess.Popen(
                list(command), env=merged, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                preexec_fn=_die_with_parent, cwd=folder,
            )  # fmt: skip
        except OSError as error:
            raise TargetUnusable(f"{command[0]} cannot be started: {error.strerror or error}") from error
        ended = _wait(child, deadline, None if look is None else lambda: look(os.fstat(out.fileno()).st_size))
        seconds = time.monotonic() - begun
        if ended is None:
            name = os.path.basename(command[0])
            raise TargetFailure(
                TrialStatus.TIMEOUT, f"{name} did not end within {deadline:.0f} s and was killed"
            )
        code, peak_mib = ended
        return Finished(_text(out), _text(err), seconds, code, peak_mib)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _wait(
    child: subprocess.Popen[bytes], deadline: float, look: Callable[[], None] | None = None
) -> tuple[int, float | None] | None:
    """Exit code and peak resident memory in MiB; None if the process was killed at its deadline."""
    found: list[tuple[int, float | None]] = []
    # Do not join the thread: after an interrupted join, Python 3.11 takes the thread for ended.
    ended = threading.Event()

    def reap() -> None:
        _, status, used = os.wait4(child.pid, 0)
        kib = used.ru_maxrss if sys.platform == "linux" else used.ru_maxrss / 1024
        found.append((os.waitstatus_to_exitcode(status), kib / 1024 if kib else None))
        ended.set()

    threading.Thread(target=reap, daemon=True).start()
    try:
        seen = _watch(child.pid, ended, deadline, look)
        late = not ended.is_set()
    except BaseException:  # Ctrl-C while it runs: leave no process behind
        late = True
        raise
    finally:
        if not ended.is_set():
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(child.pid, signal.SIGKILL)
            ended.wait()
        child.returncode = found[0][0]
    code, peak_mib = found[0]
    return None if late else (code, _own_peak(peak_mib, seen))


def _watch(
    pid: int, ended: threading.Event, deadline: float, look: Callable[[], None] | None = None
) -> float | None:
    """Wait for the end or the deadline. Returns the peak resident memory in MiB, or None if the kernel does
    not report it."""
    until = time.monotonic() + deadline
    pause, seen = _FIRST_LOOK, resident_peak(pid)
    most = _LOOK if look is None else _CLOSE_LOOK
    while not ended.wait(min(pause, max(0.0, until - time.monotonic()))) and time.monotonic() < until:
        pause = min(2 * pause, most)
        if look is not None:
            look()
        seen = resident_peak(pid) or seen  # an ended process reports no memory
    if look is not None:
        look()
    return seen


def resident_peak(pid: int | str = "self") -> float | None:
    """Peak resident memory of a process so far, in MiB; None without /proc or without such a process."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = _PEAK.search(text)
    return int(found[1]) / 1024 if found else None


def _own_peak(reported: float | None, seen: float | None) -> float | None:
    """The peak memory of the process itself, in MiB.

    After fork and exec, the peak that Linux reports for a child includes the parent's memory at that time. If
    the report exceeds the parent's own peak, it belongs to the child and is exact. Otherwise the peak seen
    while the child ran is taken."""
    inherited = resident_peak()
    if inherited is None or (reported is not None and reported > inherited):
        return reported
    return seen


def judge(done: Finished) -> None:
    """Raise TargetFailure with a status if a process failed.

    A parameter that the engine ignored is a failure, too, because another configuration was measured."""
    ignored = _IGNORED.search(done.stderr + done.stdout)
    if done.code == 0 and ignored is None:
        return
    if done.code == 0 and ignored is not None:
        raise TargetFailure(TrialStatus.INVALID, f"this binary does not know {ignored[0][:200]}")
    text = done.stderr + "\n" + done.stdout
    found = _OOM.search(text)
    if found or done.code == -signal.SIGKILL:
        said = _line_of(text, found) if found else "it was killed from outside (SIGKILL)"
        raise TargetFailure(TrialStatus.OOM, f"out of memory: {said}")
    found = _ASSERT.search(text)
    if found or done.code < 0:
        name = _signal_name(-done.code) if done.code < 0 else f"exit code {done.code}"
        said = _line_of(text, found) if found else done.last_line()
        if done.code == -signal.SIGILL:
            said = f"the binary has instructions that this CPU does not have; its last line: {said}"
        raise TargetFailure(TrialStatus.CRASH, f"{name}: {said}")
    found = _REFUSED.search(text)
    status = TrialStatus.INVALID if found else TrialStatus.CRASH
    said = _line_of(text, found) if found else done.last_line()
    raise TargetFailure(status, f"exit code {done.code}: {said}")


def _signal_name(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:  # a real-time signal has no name
        return f"signal {number}"


def _line_of(text: str, found: re.Match[str]) -> str:
    begin = text.rfind("\n", 0, found.start()) + 1
    end = text.find("\n", found.end())
    return text[begin : end if end >= 0 else len(text)].strip()[:300]


def bench_rows(stdout: str) -> list[dict[str, Any]]:
    """The tests of a llama-bench run, from `-o json` or `-o jsonl`. Log lines that some builds print before
    the first line with `[` or `{` are skipped.

    Raises:
        TargetFailure: there is no such data, or a test lacks a needed field.
    """
    lines = stdout.splitlines(keepends=True)
    decoder = json.JSONDecoder()
    for number, line in enumerate(lines):
        if not line.lstrip().startswith(("[", "{")):
            continue
        text = "".join(lines[number:]).lstrip()
        rows: list[Any] = []
        try:
            while text.startswith(("[", "{")):
                value, end = decoder.raw_decode(text)
                rows.extend(value if isinstance(value, list) else [value])
                text = text[end:].lstrip()
        except ValueError:
            # A log line may begin with a bracket, too; then the data starts later.
            if not rows:
                continue
        if rows and all(isinstance(r, dict) and "samples_ns" in r for r in rows):
            return [_checked(r) for r in rows]
    raise TargetFailure(TrialStatus.CRASH, "llama-bench printed no JSON with the key samples_ns")


def _checked(row: dict[str, Any]) -> dict[str, Any]:
    samples = row["samples_ns"]
    good = isinstance(samples, list) and samples and all(_is_positive(x) for x in samples)
    if not good or not all(isinstance(row.get(k), int) for k in ("n_prompt", "n_gen")):
        raise TargetFailure(
            TrialStatus.CRASH, "llama-bench: a test without n_prompt, n_gen and positive samples_ns"
        )
    return row


def _is_positive(value: Any) -> bool:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
    )
