"""The load on a server: its prompts, its figures, and the HTTP client against a server of known answers."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from dyno.testing import Array, tiny_model
from dyno_tuner.core.serve_load import ServedLoad
from dyno_tuner.measure.served_load import (
    HttpClient,
    LoadError,
    Timing,
    drive,
    figures,
)
from waiting import LONG

if TYPE_CHECKING:
    from collections.abc import Iterator


def test_prompts_share_their_beginning() -> None:
    load = ServedLoad(concurrency=3, pp=100, shared=0.5, rounds=2)
    prompts = load.prompts(1000, seed=1)
    assert [len(p) for p in prompts] == [100] * 6
    assert len({tuple(p[:50]) for p in prompts}) == 1
    assert len({tuple(p[50:60]) for p in prompts}) == 6
    assert all(0 <= token < 1000 for p in prompts for token in p)
    assert prompts == load.prompts(1000, seed=1)
    assert prompts != load.prompts(1000, seed=2)
    assert len({tuple(p[:10]) for p in ServedLoad(pp=100, shared=0).prompts(1000, seed=1)}) == 8


def test_as_many_requests_run_as_there_are_clients() -> None:
    running, most, lock = 0, 0, threading.Lock()
    together = threading.Barrier(3)  # no request ends before three are under way

    def client(prompt: Any, tokens: int) -> Timing:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        together.wait(LONG)
        with lock:
            running -= 1
        return Timing(0.0, 1.0, 2.0, tokens)

    load = ServedLoad(concurrency=3, pp=4, tg=5, rounds=2)
    timings = drive(load, load.prompts(9, 0), client)
    assert len(timings) == 6
    assert most == 3


def test_the_first_failure_ends_the_load() -> None:
    sent = []

    def client(prompt: Any, tokens: int) -> Timing:
        sent.append(prompt)
        raise LoadError("refused")

    load = ServedLoad(concurrency=1, rounds=9)
    with pytest.raises(LoadError, match="refused"):
        drive(load, load.prompts(9, 0), client)
    assert len(sent) == 1


def test_figures() -> None:
    timings = [Timing(0.0, 1.0, 3.0, 5, 7), Timing(1.0, 1.5, 5.0, 8), Timing(2.0, 2.25, 2.25, 1)]
    found = figures(timings)
    assert found.output_tokens == 14
    assert found.seconds == 5.0
    assert found.output_rate == pytest.approx(2.8)
    assert found.ttft_p50 == 0.5
    assert found.itl_p50 == 0.5  # (3 - 1) / 4 and (5 - 1.5) / 7; a single token has no time between tokens
    assert found.cached == 7


class _Handler(BaseHTTPRequestHandler):
    bodies: list[dict[str, Any]] = []  # noqa: RUF012 - set anew for each server
    status = 200
    silent = False
    end: tuple[str, ...] = ()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append({**body, "path": self.path, "key": self.headers["Authorization"]})
        self.send_response(self.status)
        self.end_headers()
        for i in range(body["max_tokens"]):
            time.sleep(0.01)
            self._event({"choices": [{"text": "" if self.silent else f"t{i}", "finish_reason": None}]})
        for text in self.end:
            self._event(json.loads(text))
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, data: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(data).encode() + b"\n\n")

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[str, type[_Handler]]]:
    handler = type("Handler", (_Handler,), {"bodies": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{made.server_address[1]}", handler
        made.shutdown()
        thread.join()


def test_requests_over_http(server: tuple[str, type[_Handler]]) -> None:
    address, handler = server
    usage = {"completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 2}}
    handler.end = (
        '{"choices": [{"text": "", "finish_reason": "length"}]}',
        json.dumps({"choices": [], "usage": usage}),
    )
    for url in (address, address + "/v1/"):
        timing = HttpClient(url, "m", "k")([1, 2, 3], 4)
        assert (timing.tokens, timing.cached) == (4, 2)
        assert timing.begun < timing.first < timing.ended
        assert timing.between_s == pytest.approx((timing.ended - timing.first) / 3)
    sent = handler.bodies[0]
    assert (sent["prompt"], sent["stream"], sent["ignore_eos"]) == ([1, 2, 3], True, True)
    assert (sent["path"], sent["key"], sent["model"]) == ("/v1/completions", "Bearer k", "m")


def test_errors_over_http(server: tuple[str, type[_Handler]]) -> None:
    address, handler = server
    handler.status = 429
    with pytest.raises(LoadError, match="status 429"):
        HttpClient(address)([1], 1)
    handler.status, handler.end = 200, ('{"error": {"message": "out of memory"}}',)
    with pytest.raises(LoadError, match="out of memory"):
        HttpClient(address)([1], 1)
    handler.end = ('{"choices": [], "usage": {"completion_tokens": 1, "prompt_tokens": 2}}',)
    with pytest.raises(LoadError, match="the server read 2 of 3 tokens of a prompt"):
        HttpClient(address)([1, 2, 3], 1)
    assert HttpClient(address)([1, 2], 1).tokens == 1
    handler.end = ()
    with pytest.raises(LoadError, match="no token"):
        HttpClient(address)([1], 0)
    handler.end = (
        '{"choices": [{"text": "", "finish_reason": "length"}]}',
        '{"choices": [], "usage": {"completion_tokens": 7}}',
    )
    with pytest.raises(LoadError, match="no event for 7 tokens"):
        HttpClient(address)([1], 0)
    with pytest.raises(LoadError, match="is not an address"):
        HttpClient("127.0.0.1:8080")


def test_tokens_without_text_are_counted_and_timed(server: tuple[str, type[_Handler]]) -> None:
    address, handler = server
    handler.silent = True
    handler.end = (
        '{"choices": [{"text": "", "finish_reason": "length"}]}',
        '{"choices": [], "usage": {"completion_tokens": 30}}',
    )
    timing = HttpClient(address)([1], 1)
    assert timing.tokens == 30
    assert timing.begun < timing.first < timing.ended  # the end of a stream is that of its last token


def test_the_overhead_of_a_server_whose_tokens_have_no_text(tmp_path: Path) -> None:
    kinds = {"tokenizer.ggml.token_type": Array("int32", [3] * 288)}  # control tokens, which are no text
    model = tiny_model(tmp_path / "m.gguf", metadata=kinds)
    script = Path(__file__).resolve().parents[3] / "benchmarks" / "serve_overhead.py"
    out = tmp_path / "out.json"
    size = ("--sequences", "1,2", "--pp", "4", "--tg", "80", "--rounds", "1", "--sampled")
    command = [sys.executable, str(script), str(model), "--device", "cpu", *size, "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    runs = json.loads(out.read_text())["runs"]
    assert [run["load"]["sequences"] for run in runs] == [1, 2]
    for run in runs:
        assert set(run["rates"]) == {"batch", "scheduler", "server"}
        assert all(len(each) == 1 and each[0] > 0 for each in run["rates"].values())
        met = [way for way, step in run["steps"].items() if step is not None]
        # A busy machine may begin the second thread behind the first one's text: no step draws for both.
        assert "batch" in met
        assert run["load"]["sequences"] == 2 or "scheduler" in met
        assert all(0 < run["steps"][way]["outside_us"] < run["steps"][way]["step_us"] for way in met)
