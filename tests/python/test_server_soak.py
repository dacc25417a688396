"""Many streams at a time, broken off and read slowly: right answers, and nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import statistics
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from chat_model import chat_model
from dyno.server import Options
from served import KEY, serving
from soak import soak
from waiting import until

LEAST = {"whole": 11, "cancelled": 4}
"""Streams that a machine of any speed has to end before the soak does."""

PARTS = 4
"""Loads of 20 seconds, one of which has to leave the memory as it was."""


@pytest.mark.alone
def test_many_streams(tmp_path: Path, device: str) -> None:
    model = chat_model(tmp_path / "m.gguf", n_layers=2)
    # Exact, so that a text in a batch is the text alone to the last bit.
    with serving(
        model, Options(max_waiting=40, api_key=KEY), sequences=4, ctx=512, device=device, numerics="exact"
    ) as server:
        headers = {"Authorization": f"Bearer {KEY}"}
        for _ in range(2):
            found = asyncio.run(
                soak(server.address, clients=24, seconds=3, tokens=24, headers=headers, least=LEAST)
            )
            assert not found.wrong, found.wrong[0]
            assert found.counts["refused"] == 0
            until(lambda: server.scheduler.load()["running"] == server.scheduler.load()["waiting"] == 0)
            gc.collect()
            assert server.scheduler.load()["held_tokens"] == 0
            until(lambda: not server.engine._slots._owners)  # the scheduler may just be freeing the last one
        readers = [t for t in threading.enumerate() if t.name.startswith("dyno-request")]
        assert len(readers) <= 16


@pytest.mark.alone
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="this system has no /proc")
def test_memory_is_flat(tmp_path: Path) -> None:
    """100 clients on a server in a process of its own. The first ten thousand streams fill threads, pools and
    caches, and peaks of the load, ever rarer, fill the allocators. A fast machine takes a minute. Then the
    memory is flat; a leak grows by the same amount in each part of the load."""
    model, port = chat_model(tmp_path / "m.gguf", n_layers=2), tmp_path / "port"
    command = [sys.executable, "-m", "dyno", "serve", str(model), "--port", "0", "--port-file", str(port)]
    more = ["--device", "cpu", "--no-profile", "--sequences", "8", "--ctx", "512", "--queue", "200"]
    exact = ["--set", "numerics=exact"]
    seen: list[list[float]] = []
    with subprocess.Popen([*command, *more, *exact], stdout=subprocess.DEVNULL) as server:
        try:
            until(lambda: (port.is_file() and port.read_text().strip()) or server.poll() is not None)
            address = f"http://127.0.0.1:{port.read_text().strip()}"
            asyncio.run(soak(address, clients=100, seconds=20))
            while len(seen) < PARTS and not any(map(_is_flat, seen)):
                found = asyncio.run(
                    soak(address, clients=100, seconds=20, pid=server.pid, least={"whole": 51})
                )
                assert not found.wrong, found.wrong[0]
                assert found.counts["refused"] == 0
                assert len(found.memory_mib) >= 10
                seen.append(found.memory_mib)
        finally:
            server.terminate()
    assert any(map(_is_flat, seen)), seen


def _is_flat(memory_mib: list[float]) -> bool:
    """A leak of a kilobyte a token or of a thread a client would not pass."""
    first, second = (memory_mib[a:b] for a, b in ((0, 5), (-5, None)))
    return statistics.median(second) <= 1.02 * statistics.median(first) + 1
