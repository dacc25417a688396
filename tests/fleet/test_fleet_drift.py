"""`dyno profiles drift`: pages of metrics, served by a real HTTP server."""

from __future__ import annotations

import http.server
import json
import socketserver
import threading
from typing import TYPE_CHECKING

import pytest
from dyno.cli import app
from dyno.errors import ProfileError
from dyno.fleet.drift import fetch, report
from dyno.profiles import Profile, list_profiles, load_profile, save_profile
from dyno.profiles.io import to_dict
from prometheus_client import CollectorRegistry, Gauge, Info, generate_latest
from typer.testing import CliRunner

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LLAMA = """\
# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed.
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 40000
# TYPE llamacpp:prompt_seconds_total counter
llamacpp:prompt_seconds_total 2
# TYPE llamacpp:tokens_predicted_total counter
llamacpp:tokens_predicted_total 5000
# TYPE llamacpp:tokens_predicted_seconds_total counter
llamacpp:tokens_predicted_seconds_total 10
"""


def of_dyno(pp: float | None, tg: float | None, match: str = "exact", state: str = "applied") -> str:
    registry = CollectorRegistry()
    Info("dyno_profile", "The profile in force.", registry=registry).info({"state": state, "match": match})
    promised = Gauge("dyno_profile_promised_tokens_per_second", "Speed.", ["metric"], registry=registry)
    ratio = Gauge("dyno_profile_speed_ratio", "Ratio.", ["metric"], registry=registry)
    promised.labels("pp").set(20000)
    promised.labels("tg").set(600)
    for name, value in (("pp", pp), ("tg", tg)):
        if value is not None:
            ratio.labels(name).set(value)
    return generate_latest(registry).decode()


@pytest.fixture
def page() -> Iterator[dict[str, str]]:
    """`text` is what the server answers on /metrics; `url` is its address."""
    told = {"text": ""}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(told["text"].encode())

        def log_message(self, *_: object) -> None:
            """Nothing on stderr."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        told["url"] = f"http://127.0.0.1:{server.server_address[1]}"
        yield told
        server.shutdown()
        thread.join()


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["profiles", "drift", *words])
    said = "" if isinstance(done.exception, SystemExit | None) else str(done.exception)
    return done.exit_code, done.output + said


@pytest.mark.parametrize(
    ("pp", "tg", "code"),
    [(1.0, 0.95, 0), (1.0, 0.85, 3), (0.5, None, 3), (None, 1.2, 0), (None, None, 4)],
)
def test_the_server_tells_its_own_promise(
    page: dict[str, str], pp: float | None, tg: float | None, code: int
) -> None:
    page["text"] = of_dyno(pp, tg)
    found, output = run("--metrics", page["url"], "--json")
    told = json.loads(output)
    assert (found, told["exit_code"]) == (code, code)
    assert told["profile"] == {"state": "applied", "match": "exact"}
    rows = {row["metric"]: row for row in told["metrics"]}
    assert rows["tg"]["promised"] == 600
    assert rows["tg"]["ratio"] == (None if tg is None else pytest.approx(tg))


@pytest.mark.parametrize(
    ("match", "words"),
    [
        ("exact", None),
        ("same_device", "on a similar device"),
        ("nearest", "on a similar device"),
        ("other_model", "with another model"),
    ],
)
def test_less_than_the_promise_for_another_device_is_no_drift(
    page: dict[str, str], match: str, words: str | None
) -> None:
    page["text"] = of_dyno(0.4, 0.5, match)
    code, output = run("--metrics", page["url"])
    assert code == (3 if words is None else 4)
    assert "0.400 of the promise" in output
    assert ("note: the profile was measured" in output) == (words is not None)
    assert words is None or words in output
    told = json.loads(run("--metrics", page["url"], "--json")[1])
    assert (told["exit_code"], "note" in told) == (code, words is not None)
    page["text"] = of_dyno(1.4, 1.5, match)
    assert run("--metrics", page["url"])[0] == 0


@pytest.mark.parametrize("state", ["none", "off"])
def test_a_server_without_a_profile_measures_nothing(page: dict[str, str], state: str) -> None:
    page["text"] = of_dyno(None, None, "default", state)
    shipped = next(str(item.path) for item in list_profiles() if "qwen3moe-30b" in item.path)
    for words in ((), ("--profile", shipped)):
        code, output = run("--metrics", page["url"], *words)
        assert (code, "note: the server runs without a profile" in output) == (4, True)


def test_a_profile_that_the_caller_names_is_a_promise(page: dict[str, str]) -> None:
    page["text"] = of_dyno(0.4, 0.5, "nearest")
    shipped = next(str(item.path) for item in list_profiles() if "qwen3moe-30b" in item.path)
    code, output = run("--metrics", page["url"], "--profile", shipped)
    assert (code, "note:" in output) == (3, False)


@pytest.mark.parametrize("missing", [float("nan"), float("inf"), -1.0])
def test_a_value_that_is_missing_is_not_compared(page: dict[str, str], missing: float) -> None:
    for pp, tg, code in ((missing, 1.0, 0), (1.0, missing, 0), (missing, 0.5, 3), (missing, missing, 4)):
        page["text"] = of_dyno(pp, tg)
        assert run("--metrics", page["url"])[0] == code, (pp, tg)
    text = LLAMA.replace("prompt_tokens_total 40000", f"prompt_tokens_total {missing}")
    assert [row.measured for row in report(text).rows] == [None, 500.0]


def of_llama(folder: Path) -> str:
    """A profile of llama.cpp in the form of a shipped one."""
    shipped = next(item.path for item in list_profiles() if "qwen3moe-30b" in item.path)
    content = to_dict(load_profile(shipped))
    content["match"]["engine"] = {"name": "llama.cpp", "version": "1"}
    for name in ("settings", "kernels", "groups"):
        content.pop(name, None)
    speeds = {"pp4096": 44_000.0, "tg64": 800.0}
    content["evidence"] |= {"baseline": speeds, "tuned": speeds}
    path = folder / "llama.yaml"
    save_profile(Profile.model_validate(content), path)
    return str(path)


def test_a_profile_of_another_engine_promises_nothing(page: dict[str, str], tmp_path: Path) -> None:
    page["text"] = LLAMA
    shipped = next(str(item.path) for item in list_profiles() if "qwen3moe-30b" in item.path)
    code, output = run("--metrics", page["url"], "--profile", shipped)
    assert (code, "the server is llama-server, and the profile is for dyno" in output) == (1, True), output
    page["text"] = of_dyno(1.0, 1.0)
    code, output = run("--metrics", page["url"], "--profile", of_llama(tmp_path))
    assert (code, "`dyno serve`, and the profile is for llama.cpp" in output) == (1, True), output
    assert run("--metrics", page["url"], "--profile", shipped)[0] == 3


def test_llama_server_is_held_against_a_profile(page: dict[str, str], tmp_path: Path) -> None:
    page["text"] = LLAMA
    shipped = of_llama(tmp_path)
    code, output = run("--metrics", page["url"] + "/metrics", "--profile", shipped)
    assert code == 3
    assert "pp: promised 44,000.0 t/s, 20,000.0 t/s, 0.455 of the promise" in output
    assert "tg: promised 800.0 t/s, 500.0 t/s, 0.625 of the promise" in output
    assert run("--metrics", page["url"], "--profile", shipped, "--within", "0.6")[0] == 0
    code, output = run("--metrics", page["url"])
    assert code == 4
    assert "pp: promised unknown, 20,000.0 t/s" in output


@pytest.mark.parametrize("text", ["", "<html>no</html>", "up 1\n", "a{b 3\n"])
def test_pages_of_others_are_errors(text: str) -> None:
    with pytest.raises(ProfileError, match=r"not a page of|neither of"):
        report(text)


def test_a_server_that_is_not_there_is_an_error(page: dict[str, str]) -> None:
    with pytest.raises(ProfileError, match="Connection refused"):
        fetch("http://127.0.0.1:9")
    with pytest.raises(ProfileError, match="not the address of a server"):
        fetch("file:///etc/passwd")
    with pytest.raises(ProfileError, match="404"):
        fetch(page["url"] + "/other")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", "does not answer as a web server: BadStatusLine: SSH-2.0"),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
            "does not answer as a web server: IncompleteRead",
        ),
    ],
)
def test_a_server_of_another_protocol_is_an_error(answer: bytes, said: str) -> None:
    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while self.rfile.readline().strip():
                pass
            self.wfile.write(answer)

    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        with pytest.raises(ProfileError, match=said):
            fetch(f"http://127.0.0.1:{server.server_address[1]}")
        thread.join()


@pytest.mark.parametrize("url", ["http://host:80a", "http://a host", "http://host\x00"])
def test_a_wrong_address_is_an_error(url: str) -> None:
    with pytest.raises(ProfileError, match=r"--metrics .*: not the address of a server: "):
        fetch(url)
