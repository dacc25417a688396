"""Requests that the HTTP server lets in: their sizes, keys, paths and methods, and pages of other origins."""

from __future__ import annotations

import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import httpx
import pytest
from chat_model import chat_model
from dyno import PlanError
from dyno.server import Options
from dyno.server.fields import IGNORED_FIELDS
from served import KEY, Served, chat, serving
from starlette.datastructures import URL

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("model") / "m.gguf")


@pytest.fixture(scope="module")
def served(model: Path, device: str) -> Iterator[Served]:
    options = Options(model="tiny", api_key=KEY, max_body_bytes=4000)
    with serving(model, options, device=device) as server:
        yield server


@pytest.fixture(scope="module")
def open_to_all(model: Path, device: str) -> Iterator[Served]:
    with serving(model, Options(cors_origins=("https://chat.example",)), device=device) as server:
        yield server


@pytest.fixture
def client(served: Served) -> httpx.Client:
    return served.client


def test_limits_keys_and_paths(client: httpx.Client) -> None:
    long = chat(client, messages=[{"role": "user", "content": "x" * 600}])
    assert long.status_code == 400
    assert long.json()["error"]["code"] == "context_length_exceeded"
    assert chat(client, messages=[{"role": "user", "content": "x" * 5000}]).status_code == 413
    assert client.post("/v1/completions", content=b"{").status_code == 400
    for headers in ({"Authorization": "Bearer wrong"}, {"Authorization": KEY}):
        refused = client.get("/v1/models", headers=headers)
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "invalid_api_key"
        assert client.get("/health", headers=headers).status_code == 200
    missing = client.get("/nothing")
    assert missing.status_code == 404
    assert missing.json()["error"]["message"] == "/nothing is not a path of this server"


def test_a_large_body_is_refused_before_it_is_sent(served: Served) -> None:
    host, port = served.address.removeprefix("http://").split(":")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\n"
    with socket.create_connection((host, int(port)), timeout=120) as sender:
        sender.sendall(f"{head}Content-Length: 99999999999\r\nExpect: 100-continue\r\n\r\n".encode())
        assert sender.recv(1 << 16).startswith(b"HTTP/1.1 413 ")


def test_a_method_that_a_path_lacks_gets_those_that_it_has(client: httpx.Client) -> None:
    for method, path, allowed in (("GET", "/v1/completions", "POST"), ("POST", "/health", "GET, HEAD")):
        refused = client.request(method, path)
        assert refused.status_code == 405
        assert refused.headers["allow"] == allowed
        error = refused.json()["error"]
        assert error["message"] == f"{method} is not allowed on {path} (allowed: {allowed})"
        assert error["code"] == "method_not_allowed"


@pytest.mark.parametrize("key", ["", " ", "\t\n"])
def test_an_empty_key_is_refused(key: str) -> None:
    with pytest.raises(PlanError, match=r"\[server\] api_key is '.*'; give a key"):
        Options(api_key=key)
    command = [sys.executable, "-m", "dyno", "serve", "none.gguf", "--api-key", key]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 2
    assert "--api-key is empty" in " ".join(done.stderr.split())


def test_a_path_in_the_header_host_opens_no_door(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As releases of Starlette up to 1.0 read `Host: x/health?`, which makes `/v1/models` part of a query."""
    monkeypatch.setattr(
        "starlette.requests.HTTPConnection.url", property(lambda _: URL("http://x/health?/a"))
    )
    with serving(model, Options(api_key=KEY)) as server:
        for path, status in (("/v1/models", 401), ("/v1/nothing", 404), ("/health", 200)):
            answer = httpx.get(server.address + path, headers={"Host": "x/health?"}, timeout=120)
            assert answer.status_code == status, path
        refused = httpx.post(server.address + "/v1/messages", json={}, timeout=120)
        assert (refused.status_code, refused.json()["type"]) == (401, "error"), "the form of the messages API"


@pytest.mark.parametrize("key", [" blanks around \n", "schlüssel à"])
def test_keys_of_any_letters(model: Path, key: str) -> None:
    with serving(model, Options(api_key=key)) as server:
        bare = key.strip().encode()
        for headers in ({"Authorization": b"Bearer " + bare}, {"x-api-key": bare, "Authorization": b""}):
            assert server.client.get("/v1/models", headers=headers).status_code == 200
        for wrong in (b"x", bare + b"x", bare[:-1]):
            headers = {"Authorization": b"Bearer " + wrong}
            assert server.client.get("/v1/models", headers=headers).status_code == 401


def test_pages_of_other_origins(model: Path) -> None:
    asked = {
        **{"Origin": "https://chat.example", "Access-Control-Request-Method": "POST"},
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    path, body = "/v1/completions", {"prompt": "a", "max_tokens": 1, "max_tokns": 1}
    with serving(model, Options(api_key=KEY, cors_origins=("https://chat.example",))) as server:
        # A browser asks first, without the key.
        before = httpx.options(server.address + path, headers=asked)
        assert before.status_code == 200
        assert before.headers["access-control-allow-origin"] == "https://chat.example"
        assert "authorization" in before.headers["access-control-allow-headers"].lower()
        answer = server.client.post(path, json=body, headers={"Origin": "https://chat.example"})
        assert answer.headers["access-control-allow-origin"] == "https://chat.example"
        assert answer.headers["access-control-expose-headers"] == f"{IGNORED_FIELDS}, Retry-After"
        with server.client.stream("POST", path, json={**body, "stream": True}, headers=asked) as stream:
            assert stream.headers["access-control-allow-origin"] == "https://chat.example"
            assert "[DONE]" in stream.read().decode()
        foreign = {**asked, "Origin": "https://other.example"}
        assert httpx.options(server.address + path, headers=foreign).status_code == 400
        answer = server.client.post(path, json=body, headers={"Origin": "https://other.example"})
        assert "access-control-allow-origin" not in answer.headers
    with serving(model, Options(api_key=KEY)) as server:
        assert httpx.options(server.address + path, headers=asked).status_code == 405


_OTHER = "https://other.example"
_PLAIN = {"Content-Type": "text/plain"}
"""A browser sends such a request of any page without a question before it."""


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Sec-Fetch-Site": "same-origin", "Origin": "https://proxy.example"}, 200),
        ({"Sec-Fetch-Site": "none"}, 200),
        ({"Sec-Fetch-Site": "cross-site", "Origin": _OTHER}, 403),
        ({"Sec-Fetch-Site": "same-site", "Origin": "http://127.0.0.1:1"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Origin": _OTHER}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "OWN"}, 200),
        ({"Sec-Fetch-Site": "cross-site", "Origin": "https://chat.example"}, 200),
    ],
)
def test_a_page_of_another_origin_does_not_use_a_server_without_a_key(
    open_to_all: Served, headers: dict[str, str], status: int
) -> None:
    given = {name: open_to_all.address if value == "OWN" else value for name, value in headers.items()}
    body = '{"prompt": "a", "max_tokens": 1}'
    address = f"{open_to_all.address}/v1/completions"
    answer = httpx.post(address, content=body, headers={**_PLAIN, **given}, timeout=120)
    assert answer.status_code == status
    if status == 403:
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("permission_error", "origin_not_allowed")
        assert "--cors-origin ORIGIN" in error["message"]


def test_a_key_lets_any_page_use_the_server(served: Served) -> None:
    headers = {**_PLAIN, "Origin": _OTHER, "Sec-Fetch-Site": "cross-site"}
    body = '{"prompt": "a", "max_tokens": 1}'
    assert served.client.post("/v1/completions", content=body, headers=headers).status_code == 200


def test_origins_are_the_ones_that_browsers_send() -> None:
    given = ("https://Chat.example/", "http://localhost:3000", "chrome-extension://abc", "*", "null")
    sent = ("https://chat.example", "http://localhost:3000", "chrome-extension://abc", "*", "null")
    assert Options(cors_origins=given).cors_origins == sent
    given = ("https://a.b:443", "https://a.b:443/", "http://[::1]:80", "http://a.b:443", "https://a.b:80")
    sent = ("https://a.b", "https://a.b", "http://[::1]", "http://a.b:443", "https://a.b:80")
    assert Options(cors_origins=given).cors_origins == sent, "a browser leaves out the usual port"
    assert Options(cors_origins=("http://a.b:8080", "https://a.b:4443")).cors_origins[0].endswith(":8080")
    # A browser sends the form of ASCII, so another one would never match.
    assert (
        Options(cors_origins=("https://xn--schlssel-95a.example",)).cors_origins[0].startswith("https://xn")
    )
    schemes = ("chat.example", "https://chat.example/page", "https://", "https://a b", "")
    names = (
        "https://*.chat.example",
        "https://schlüssel.example",
        "https://me@chat.example",
        r"https://a.b\c",
    )
    ports = (
        "https://a.b:",
        "https://a.b:0443",
        "https://a.b:https",
        "https://:443",
        "http://::80",
        "http://[]",
    )
    for wrong in (*schemes, *names, *ports):
        with pytest.raises(PlanError, match="is not an origin; give SCHEME://HOST"):
            Options(cors_origins=("*", wrong))
