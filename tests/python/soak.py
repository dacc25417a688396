"""Many streams at a time on a server, some of which are broken off or read slowly; answers are compared.

    dyno serve model.gguf --sequences 16 --queue 256 --port 8080 & python tests/python/soak.py \\
        http://127.0.0.1:8080 --clients 100 --seconds 60 --pid $!
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    from collections.abc import Mapping

PROMPTS = ["def main", "class Shape:\n    def", "import os\n" * 8, "x = [", "# " + "a long line " * 30]


@dataclass
class Soaked:
    """The outcome."""

    counts: Counter[str] = field(default_factory=Counter)
    """Streams that were read to the end (`whole`), broken off (`cancelled`) or refused (`refused`)."""
    wrong: list[str] = field(default_factory=list)
    memory_mib: list[float] = field(default_factory=list)
    """Of the server's process, once a second, if its number is known."""


def _body(prompt: str, tokens: int) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}


async def _texts(
    client: httpx.AsyncClient, body: dict[str, Any], pause: float, stop_after: int | None
) -> str:
    """The text of a stream, or its beginning; raises for an error of the server."""
    text, pieces = "", 0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code == 429:
            await asyncio.sleep(float(response.headers["retry-after"]) * random.random())
            return ""
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            data = json.loads(line[6:])
            if "error" in data:
                raise RuntimeError(data["error"]["message"])
            text += data["choices"][0]["text"]
            pieces += 1
            if stop_after is not None and pieces >= stop_after:
                return text
            if pause:
                await asyncio.sleep(pause)
    return text


async def soak(
    address: str,
    *,
    clients: int,
    seconds: float,
    tokens: int = 48,
    headers: dict[str, str] | None = None,
    pid: int | None = None,
    least: Mapping[str, int] | None = None,
) -> Soaked:
    """Runs streams for so many seconds, after each prompt's answer was asked for alone.

    Args:
        address: Of the server.
        clients: Streams at a time.
        seconds: How long new streams begin.
        tokens: Of an answer.
        headers: Of every request.
        pid: Process of the server, whose memory is watched.
        least: Streams of a kind without which it goes on for longer; see `Soaked.counts`.
    """
    result, until, wanted = Soaked(), 0.0, least or {}
    # A server closes a connection that was idle for a while, maybe just when a slow client takes it again.
    limits = httpx.Limits(max_connections=clients + 1, keepalive_expiry=2)
    async with httpx.AsyncClient(base_url=address, headers=headers, timeout=300, limits=limits) as client:
        alone = {prompt: await _texts(client, _body(prompt, tokens), 0, None) for prompt in PROMPTS}

        def lacks_streams() -> bool:
            # A wrong or refused stream is the end: a server that gives no others would be asked for ever.
            sound = not result.wrong and not result.counts["refused"]
            return sound and any(result.counts[kind] < n for kind, n in wanted.items())

        async def one() -> None:
            while time.monotonic() < until or lacks_streams():
                prompt, kind = random.choice(PROMPTS), random.random()
                stop = random.randint(1, 8) if kind < 0.3 else None
                pause = 0.02 if kind > 0.8 else 0.0
                text = await _texts(client, _body(prompt, tokens), pause, stop)
                result.counts["refused" if not text else "whole" if stop is None else "cancelled"] += 1
                if text and not (
                    alone[prompt] == text or (stop is not None and alone[prompt].startswith(text))
                ):
                    result.wrong.append(f"{prompt!r}: {text!r} instead of {alone[prompt]!r}")

        async def watch() -> None:
            while True:
                for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                    if line.startswith("VmRSS:"):
                        result.memory_mib.append(int(line.split()[1]) / 1024)
                await asyncio.sleep(1)

        watching = asyncio.create_task(watch()) if pid is not None else None
        until = time.monotonic() + seconds
        await asyncio.gather(*(one() for _ in range(clients)))
        if watching is not None:
            watching.cancel()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("address")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--pid", type=int)
    given = parser.parse_args()
    found = asyncio.run(soak(given.address, clients=given.clients, seconds=given.seconds, pid=given.pid))
    print(dict(found.counts), "wrong:", len(found.wrong))
    print("\n".join(found.wrong[:3]))
    if found.memory_mib:
        half = found.memory_mib[len(found.memory_mib) // 2 :]
        span = f"{min(half):.1f} to {max(half):.1f}"
        print(f"memory in MiB: {found.memory_mib[0]:.1f} at first; second half {span}")
    sys.exit(bool(found.wrong))


if __name__ == "__main__":
    main()
