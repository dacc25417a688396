from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dyno_tuner.measure import environment as environment_module
from dyno_tuner.measure.environment import busy_processes, company, environment, is_ours, page_cache

if TYPE_CHECKING:
    import pytest


def test_what_the_kernel_tells_is_plain_text() -> None:
    found = environment(str(Path(__file__)))
    assert len(found["load"]) == 3
    assert 0 <= found["page_cache"] <= 1
    assert all(isinstance(v, str) for k, v in found.items() if k not in ("load", "page_cache", "busy"))
    assert {"cpus_allowed", "memory_nodes_allowed"} <= set(found)
    json.dumps(found)


def test_the_page_cache_is_looked_at_without_filling_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(64 * mmap.PAGESIZE))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        before = page_cache(str(path))
        assert page_cache(str(path)) == before
        file.read()
    assert page_cache(str(path)) == 1.0
    assert page_cache(str(tmp_path / "absent")) is None
    (tmp_path / "empty").write_bytes(b"")
    assert page_cache(str(tmp_path / "empty")) is None


def test_whose_a_process_is() -> None:
    inner = "import os; print(os.getpid()); input()"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        grandchild = int(child.stdout.readline())
        assert is_ours(os.getpid())
        assert is_ours(child.pid)
        assert is_ours(grandchild)
        child.stdin.write("\n")
    assert not is_ours(os.getppid())
    assert str(os.getppid()) in company([os.getppid()])
    assert company([]) == ""


def test_processes_that_compute_are_told_unless_they_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    tick = os.sysconf("SC_CLK_TCK")
    shown = [{(1, "a"): 0, (2, "b"): 0, (3, "c"): 0}, {(1, "a"): 30 * tick, (2, "b"): 90 * tick, (4, "d"): 9}]
    monkeypatch.setattr(environment_module, "_cpu_times", lambda: shown.pop(0))
    monkeypatch.setattr(environment_module, "is_ours", lambda pid: pid == 2)
    found = busy_processes(seconds=0.05)
    assert [(b.pid, b.name) for b in found] == [(1, "a")]
    assert found[0].cores > 1
