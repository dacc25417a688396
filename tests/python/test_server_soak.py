"""Many streams at a time, broken off and read slowly: right answers, and nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import TYPE_CHECKING

import pytest
from chat_model import chat_model
from dyno.server import Options
from served import KEY, serving, until
from soak import soak

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.alone
def test_many_streams(tmp_path: Path, device: str) -> None:
    model = chat_model(tmp_path / "m.gguf", n_layers=2)
    # Exact, so that a text in a batch is the text alone to the last bit.
    with serving(
        model, Options(max_waiting=40, api_key=KEY), sequences=4, ctx=512, device=device, numerics="exact"
    ) as server:
        headers = {"Authorization": f"Bearer {KEY}"}
        for _ in range(2):
            found = asyncio.run(soak(server.address, clients=24, seconds=3, tokens=24, headers=headers))
            assert not found.wrong, found.wrong[0]
            assert found.counts["whole"] > 10
            assert found.counts["cancelled"] > 3
            assert found.counts["refused"] == 0
            until(lambda: server.scheduler.load()["running"] == server.scheduler.load()["waiting"] == 0)
            gc.collect()
            assert server.scheduler.load()["held_tokens"] == 0
            assert len(server.engine._slots._owners) == 0
        readers = [t for t in threading.enumerate() if t.name.startswith("dyno-request")]
        assert len(readers) <= 2 * (4 + 40) + 8
