"""A load of requests on a server: many parallel clients, prompts that share a beginning, and the measured
figures.

Each of `concurrency` clients sends a request, reads its stream to the end, and sends the next one. Prompts
are token ids, so that all engines process the same numbers of tokens. The last requests end one by one, so
figures of two runs are comparable only if their loads are equal.
"""

from __future__ import annotations

import dataclasses
import http.client
import json
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..core.serve_load import ServedLoad

__all__ = ["Figures", "HttpClient", "LoadError", "Timing", "drive", "figures", "other_clock"]


class LoadError(Exception):
    """The error that a server refused a request, or ended one without an answer."""


@dataclass(frozen=True, slots=True)
class Timing:
    """The times of one request in seconds of one clock, with begin and end also by another clock."""

    begun: float
    first: float
    """Time of the first token."""
    ended: float
    """Time of the last token."""
    tokens: int
    cached: int = 0
    """Number of prompt tokens that the server took from its cache."""
    other_clock: tuple[float, float] = (0.0, 0.0)

    @property
    def first_s(self) -> float:
        """Time to the first token."""
        return self.first - self.begun

    @property
    def between_s(self) -> float:
        """Mean time between two tokens; 0 for a single token."""
        return (self.ended - self.first) / (self.tokens - 1) if self.tokens > 1 else 0.0


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of a load."""

    output_tokens: int
    seconds: float
    ttft_p50: float
    ttft_p95: float
    itl_p50: float
    """Percentiles over the requests' mean times between tokens."""
    itl_p95: float
    cached: int
    clock_seconds: float
    """The same time as `seconds` by another clock."""

    @property
    def output_rate(self) -> float:
        """Output tokens per second of all clients together."""
        return self.output_tokens / self.seconds


class Client(Protocol):
    """The protocol of a client, which sends one request and reads its answer in the calling thread."""

    def __call__(self, prompt: Sequence[int], tokens: int) -> Timing:
        """Send a request. Raises LoadError."""
        ...


def drive(load: ServedLoad, prompts: Sequence[Sequence[int]], client: Client) -> list[Timing]:
    """Send each prompt once, with `concurrency` requests in parallel.

    Raises:
        LoadError: The first request that failed. No further one is sent then.
    """
    waiting = iter(prompts)
    lock, found, failed = threading.Lock(), [], []  # type: ignore[var-annotated]

    def work() -> None:
        while True:
            with lock:
                prompt = None if failed else next(waiting, None)
            if prompt is None:
                return
            try:
                timing = client(prompt, load.tg)
            except Exception as error:
                with lock:
                    failed.append(error)
                return
            with lock:
                found.append(timing)

    threads = [threading.Thread(target=work, name=f"client-{i}") for i in range(load.concurrency)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return found


def figures(timings: Sequence[Timing]) -> Figures:
    """The figures over all requests of a load."""
    firsts = [each.first_s for each in timings]
    between = [each.between_s for each in timings if each.tokens > 1] or [0.0]
    return Figures(
        output_tokens=sum(each.tokens for each in timings),
        seconds=max(each.ended for each in timings) - min(each.begun for each in timings),
        ttft_p50=float(np.quantile(firsts, 0.5)),
        ttft_p95=float(np.quantile(firsts, 0.95)),
        itl_p50=float(np.quantile(between, 0.5)),
        itl_p95=float(np.quantile(between, 0.95)),
        cached=sum(each.cached for each in timings),
        clock_seconds=max(each.other_clock[1] for each in timings)
        - min(each.other_clock[0] for each in timings),
    )


def other_clock() -> float:
    """Seconds of the clock of `Timing.other_clock`."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


SILENCE = 600.0
"""Seconds without a byte after which a request has failed."""


class HttpClient:
    """A client of the completions endpoint of the public API, as in dyno, llama-server and vLLM.

    Args:
        address: `http://host:port`, with `/v1` or without.
        model: Name of the model in requests.
        key: API key of the server; None: no key.
        draws: Sampling fields of each request; None: always the most probable token.
    """

    def __init__(
        self,
        address: str,
        model: str = "any",
        key: str | None = None,
        draws: Mapping[str, float] | None = None,
    ) -> None:
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise LoadError(f"{address!r} is not an address of a server; write http://host:port")
        self._https, self._host, self._port = parts.scheme == "https", parts.hostname, parts.port
        self._path = parts.path.rstrip("/").removesuffix("/v1") + "/v1/completions"
        self._model = model
        self._draws = {"temperature": 0} if draws is None else dict(draws)
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    def __call__(self, prompt: Sequence[int], tokens: int) -> Timing:
        body = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": tokens,
            **self._draws,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        kind = http.client.HTTPSConnection if self._https else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=SILENCE)
        try:
            begun, clock_begun = time.perf_counter(), other_clock()
            connection.request("POST", self._path, json.dumps(body), self._headers)
            response = connection.getresponse()
            if response.status != 200:
                text = response.read(2000).decode(errors="replace")
                raise LoadError(f"the server answers with status {response.status}: {text}")
            timing = self._read(begun, response, len(prompt))
            return dataclasses.replace(timing, other_clock=(clock_begun, timing.other_clock[1]))
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise LoadError(f"the server's answer ends early: {error!r}") from error
        finally:
            connection.close()

    def _read(self, begun: float, response: http.client.HTTPResponse, prompt: int) -> Timing:
        first = last = clock_last = 0.0
        events = 0
        usage: dict[str, Any] = {}
        for line in response:
            if line.startswith(b"error: "):  # as llama-server wrote until 2025
                said = line[7:].decode(errors="replace").strip()
                raise LoadError(f"the server ends a stream with an error: {said:.2000}")
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            now = time.perf_counter()
            data = json.loads(line[6:])
            if "error" in data:
                raise LoadError(f"the server ends a stream with an error: {data['error']}")
            usage = data.get("usage") or usage
            choice = (data.get("choices") or [{}])[0]
            if not choice:
                continue
            last, clock_last = now, other_clock()  # the last token may have no text, and comes with the end
            # Tokens without text (part of a character) are events with an empty text, or no events.
            if choice.get("text") or choice.get("finish_reason") is None:
                first, events = first or now, events + 1
        tokens = int(usage.get("completion_tokens") or events)
        if not events:
            silent = f"no event for {tokens} tokens, so nothing tells when the first one came"
            held = silent if tokens else "no token"
            raise LoadError(f"the server's stream holds {held}")
        # Some servers cut a prompt that does not fit, and would seem faster by that.
        read = int(usage.get("prompt_tokens") or prompt)
        if read < prompt:
            raise LoadError(
                f"the server read {read} of {prompt} tokens of a prompt; its context may be too short"
            )
        details = usage.get("prompt_tokens_details") or {}
        return Timing(
            begun, first, last, tokens,
            int(details.get("cached_tokens") or 0), (0.0, clock_last),
        )  # fmt: skip
