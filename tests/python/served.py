"""A server in a thread over a tiny chat model, for tests."""

from __future__ import annotations

import contextlib
import json
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
import uvicorn
from chat_model import numerics
from dyno import Engine
from dyno.server import Options, create_app
from dyno.server.connections import Connection
from dyno.server.ending import EndingServer
from dyno.server.options import KEEP_ALIVE_S

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dyno import Scheduler

KEY = "a-key"
HELLO = [{"role": "user", "content": "Hello"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}


@dataclass(frozen=True)
class Served:
    client: httpx.Client
    engine: Engine
    scheduler: Scheduler
    address: str

    def metrics(self) -> dict[str, float]:
        lines = self.client.get("/metrics").text.splitlines()
        return {name: float(value) for name, value in (x.rsplit(" ", 1) for x in lines if x[0] != "#")}


@contextlib.contextmanager
def serving(
    model: Path, options: Options, sequences: int = 2, ctx: int = 256, device: str = "cpu", **settings: Any
) -> Iterator[Served]:
    with Engine(
        model,
        device=device,
        **{"profile": None, "threads": 2, "numerics": numerics(device), **settings},
        sequences=sequences,
        ctx=ctx,
    ) as engine:
        app = create_app(engine, options)
        config = uvicorn.Config(
            app,
            port=0,
            http=Connection,
            log_level="warning",
            lifespan="off",
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        with app.state.scheduler, config.bind_socket() as socket:
            socket.listen()  # a client may connect before the server's thread runs
            server = EndingServer(config, app.state.scheduler, drain_s=60)
            thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]})
            thread.start()
            address = f"http://127.0.0.1:{socket.getsockname()[1]}"
            try:
                with httpx.Client(
                    base_url=address, timeout=120, headers={"Authorization": f"Bearer {KEY}"}
                ) as client:
                    yield Served(client, engine, app.state.scheduler, address)
            finally:  # the thread of a failed test would keep the process
                server.should_exit = True
                thread.join()


def chat(client: httpx.Client, **fields: Any) -> httpx.Response:
    """The response to HELLO, greedily, unless `fields` say otherwise."""
    return client.post("/v1/chat/completions", json={"messages": HELLO, **GREEDY, **fields})


def stream(client: httpx.Client, path: str, body: dict[str, Any]) -> list[Any]:
    """The events of a stream, read from JSON; the word `[DONE]` stays as it is."""
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]
