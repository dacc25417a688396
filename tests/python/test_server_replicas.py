"""`dyno serve --ray`: two replicas on a cluster of this machine alone, which the test starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import httpx
import pytest
from chat_model import chat_model
from dyno import Engine
from waiting import until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.alone, pytest.mark.cluster]  # Ray starts its own processes on every core


def test_two_replicas_answer_behind_one_address(tmp_path: Path) -> None:
    # Not at the head of the file, which every worker of other tests collects as well.
    pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install 'gguf-dyno[ray]'")
    model, port = chat_model(tmp_path / "m.gguf"), tmp_path / "port"
    settings = ["--device", "cpu", "--no-profile", "-t", "1", "-c", "128", "--set", "numerics=exact"]
    command = [sys.executable, "-m", "dyno", "serve", str(model), "--ray", "2", "--port", "0", *settings]
    # Processes of Ray do not see what a path file adds to the modules of this one.
    paths = os.pathsep.join(path for path in sys.path if path)
    env = {**os.environ, "PYTHONPATH": paths, "RAY_raylet_start_wait_time_s": "240"}
    env.pop("RAY_ADDRESS", None)
    with subprocess.Popen(
        [*command, "--port-file", str(port), "--api-key", "k"], stdout=subprocess.PIPE, text=True, env=env
    ) as server:
        try:
            assert server.stdout is not None
            line = next((line for line in server.stdout if line.startswith("listening on ")), "")
            address = line.removeprefix("listening on ").strip()
            assert address, "the server has ended before it listens"
            until(port.is_file)
            assert address == f"http://127.0.0.1:{int(port.read_text())}"
            with httpx.Client(base_url=address, timeout=120) as client:
                assert client.get("/health").status_code == 200
                assert client.get("/v1/models").status_code == 401
                client.headers["Authorization"] = "Bearer k"
                body = {"prompt": "def main", "max_tokens": 8, "temperature": 0}
                found = [client.post("/v1/completions", json=body).json() for _ in range(12)]
                # Each replica counts its own requests: no one of the two had all.
                counts = set()
                for _ in range(40):
                    lines = client.get("/metrics").text.splitlines()
                    name = 'dyno_requests_total{path="/v1/completions",status="200"}'
                    counts.add(next((x.rsplit(" ", 1)[1] for x in lines if x.startswith(name)), "0.0"))
                with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as events:
                    pieces = [each for each in events.iter_lines() if each]
                refused = client.post("/v1/completions", json={**body, "max_tokens": -2})
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(120)
    with Engine(model, device="cpu", profile=None, threads=1, ctx=128, numerics="exact") as engine:
        wanted = "".join(engine.generate("def main", 8))
    assert {each["choices"][0]["text"] for each in found} == {wanted}
    assert counts != {"12.0"}
    assert pieces[-1] == "data: [DONE]"
    assert refused.status_code == 400
    assert server.returncode == 0
