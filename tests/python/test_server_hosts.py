"""Names by which requests address a server: a page that lets its own name lead here gets nothing."""

from __future__ import annotations

import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from chat_model import chat_model
from dyno import PlanError
from dyno.server import Options
from dyno.server.hosts import host_name
from served import HELLO, KEY, Served, serving

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

LOOPBACK = (
    "127.0.0.1",
    "127.0.0.1:8080",
    "127.9.9.9:1",
    "localhost",
    "LocalHost:80",
    "localhost.",
    "[::1]:80",
)
OTHER = ("[::ffff:127.0.0.1]", "a.localhost:1", "localhost.", "localhost:", "chat.example:443", "")
FOREIGN = (
    "evil.example",
    "evil.example:8080",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "192.0.2.1",
)
BROKEN = ("[::1", "[::1]x", "a b", "127.0.0.1@evil.example", "::1:80")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("model") / "m.gguf")


@pytest.fixture(scope="module")
def local(model: Path) -> Iterator[Served]:
    """As `dyno serve --allow-host Chat.example` starts it."""
    with serving(model, Options(listens="127.0.0.1", allowed_hosts=("Chat.example",))) as server:
        yield server


def asked(server: Served, host: str, path: str = "/health") -> httpx.Response:
    return httpx.get(server.address + path, headers={"Host": host}, timeout=120)


@pytest.mark.parametrize("host", [*LOOPBACK, *OTHER])
def test_a_local_server_answers_to_its_own_names(local: Served, host: str) -> None:
    assert asked(local, host).status_code == 200


@pytest.mark.parametrize("host", [*FOREIGN, *BROKEN, "sub.chat.example"])
def test_a_local_server_refuses_other_names(local: Served, host: str) -> None:
    refused = asked(local, host)
    assert refused.status_code == 403
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("permission_error", "host_not_allowed")
    assert repr(host) in error["message"]
    name = "evil.example" if host.startswith("evil") else ""
    assert f"--allow-host {name}" in error["message"]


@pytest.mark.parametrize(
    "path", ["/", "/page.js", "/props", "/openapi.json", "/metrics", "/nothing", "/v1/models"]
)
def test_every_path_is_closed_to_other_names(local: Served, path: str) -> None:
    assert asked(local, "evil.example", path).status_code == 403


def test_a_rebound_page_generates_nothing(local: Served) -> None:
    """To the browser, the request goes to the page's own origin."""
    page = {"Host": "evil.example", "Origin": "http://evil.example", "Sec-Fetch-Site": "same-origin"}
    before = local.scheduler.totals()["steps"]
    for path in ("/v1/chat/completions", "/v1/messages"):
        body = {"messages": HELLO, "max_tokens": 1}
        refused = httpx.post(local.address + path, json=body, headers=page, timeout=120)
        assert refused.status_code == 403
        assert refused.json()["error"]["type"] == "permission_error"
    assert refused.json()["type"] == "error", "the form of the messages API"
    assert local.scheduler.totals()["steps"] == before


def test_two_names_in_one_request(local: Served) -> None:
    host, port = local.address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=120) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 403 ")


def test_a_key_opens_a_server_to_every_name(model: Path) -> None:
    with serving(model, Options(api_key=KEY, listens="127.0.0.1")) as server:
        assert server.client.get("/v1/models", headers={"Host": "evil.example"}).status_code == 200


def test_a_star_opens_a_server_to_every_name(model: Path) -> None:
    with serving(model, Options(listens="127.0.0.1", allowed_hosts=("*",))) as server:
        assert asked(server, "evil.example").status_code == 200


def test_other_machines_use_addresses(model: Path) -> None:
    """A probe of an orchestrator asks by the address of the pod, and no page of a foreign name can."""
    with serving(model, Options(listens="0.0.0.0", allowed_hosts=("llm.example",))) as server:
        for host in ("10.1.2.3:8080", "[2001:db8::1]:8080", "llm.example", *LOOPBACK):
            assert asked(server, host).status_code == 200, host
        assert asked(server, "evil.example").status_code == 403


@pytest.mark.parametrize("given", ["2001:db8::5", "[2001:0DB8:0::5]", "2001:DB8::5", "2001:db8::5%eth0"])
@pytest.mark.parametrize("host", ["[2001:db8::5]:80", "[2001:DB8:0:0::5]", "[2001:db8::5%25eth0]"])
def test_all_spellings_of_an_address_are_one_name(model: Path, given: str, host: str) -> None:
    with serving(model, Options(listens="127.0.0.1", allowed_hosts=(given,))) as server:
        assert asked(server, host).status_code == 200
        assert asked(server, "[2001:db8::6]").status_code == 403


def test_names_are_the_ones_that_browsers_send() -> None:
    for given, name in (
        ("Chat.Example.", "chat.example"),
        ("[::1]", "::1"),
        ("::1", "::1"),
        ("[0:0::1]", "::1"),
        ("2001:DB8:0::1", "2001:db8::1"),
        ("[fe80::1%eth0]", "fe80::1"),
        ("::ffff:10.0.0.5", "10.0.0.5"),
        (" a ", "a"),
        ("*", "*"),
    ):
        assert host_name(given) == name
    for wrong in (
        "https://chat.example",
        "chat.example:80",
        "a/b",
        "",
        "schlüssel.example",
        "*.a.b",
        "-a",
        "[a]",
    ):
        with pytest.raises(PlanError, match="is not the name of a host; give a name without scheme"):
            host_name(wrong)


@pytest.mark.parametrize(
    ("words", "status"),
    [
        ((), 403),
        (("--allow-host", "other.example"), 403),
        (("--allow-host", "other.example", "--allow-host", "evil.example"), 200),
        (("--api-key", KEY), 200),
        (("--host", "0.0.0.0"), 200),
        (("--host", "0.0.0.0", "--allow-host", "other.example"), 403),
        (("--host", "127.1"), 403),
        (("--host", "2130706433"), 403),
        (("--host", "inside.example"), 403),
        (("--host", "outside.example"), 200),
        (("--host", "outside.example", "--allow-host", "other.example"), 403),
    ],
)
def test_the_command_knows_its_names(
    model: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], status: int
) -> None:
    recipe, _ = _begun(model, monkeypatch, words)
    with serving(model, recipe.options) as server:
        answer = server.client.get("/health", headers={"Host": "evil.example"})
        assert answer.status_code == status


NAMES = {"inside.example": "127.0.0.3", "outside.example": "0.0.0.0"}


def _begun(model: Path, monkeypatch: pytest.MonkeyPatch, words: Sequence[str]) -> tuple[Any, str]:
    """The recipe that the command line gives to the server, and the messages, without a process."""
    from dyno.cli import app
    from typer.testing import CliRunner

    recipes = []

    def opened(recipe: object) -> object:
        recipes.append(recipe)
        raise OSError("far enough")

    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *a, **k: real(NAMES.get(host, host), *a, **k))
    monkeypatch.setattr("dyno.server.opening.opened", opened)
    done = CliRunner().invoke(app, ["serve", str(model), "--port", "0", "--device", "cpu", *words])
    (recipe,) = recipes
    return recipe, done.stderr


@pytest.mark.parametrize(
    ("host", "address", "hosts"),
    [
        ("127.1", "127.0.0.1", ("127.1", "127.0.0.1", "localhost")),
        ("inside.example", "127.0.0.3", ("Inside.Example:80", "127.0.0.3")),
        ("localhost", "127.0.0.1", ("localhost",)),
        ("[0:0::1]", "::1", ("[::1]",)),
    ],
)
def test_the_bound_address_decides_whether_the_server_is_local(
    model: Path, monkeypatch: pytest.MonkeyPatch, host: str, address: str, hosts: tuple[str, ...]
) -> None:
    """A name of a loopback address is one of the server's names, and nothing warns about other machines."""
    if ":" in address and not _has_ipv6():
        pytest.skip("this machine has no IPv6")
    recipe, said = _begun(model, monkeypatch, ("--host", host))
    assert recipe.options.listens == address
    assert "accepts connections from other machines" not in said
    with serving(model, recipe.options) as server:
        for each in hosts:
            assert asked(server, each).status_code == 200, each


def test_ray_binds_no_address_of_one_interface(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray Serve drops the number of the interface, so its proxy would fail after the model is read."""
    from dyno.cli import app
    from typer.testing import CliRunner

    found = [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fe80::1", 0, 0, 2))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    words = ["serve", str(tmp_path / "none.gguf"), "--ray", "2", "--host", "fe80::1%eth0", "--port", "0"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    assert "--host fe80::1%eth0 is an address of one network interface" in " ".join(done.output.split())


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def test_a_name_of_an_open_address_warns_about_other_machines(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, said = _begun(model, monkeypatch, ("--host", "outside.example"))
    assert "--host outside.example accepts connections from other machines" in " ".join(said.split())


@pytest.mark.parametrize("host", ["", "[::1", "a" * 64 + ".b", "0.0.0.0:8080"])
def test_a_host_without_an_address_is_refused_before_the_model_is_read(tmp_path: Path, host: str) -> None:
    port = "; write --port 8080 for the port" if host.endswith(":8080") else ""
    broken = tmp_path / "m.gguf"
    broken.write_bytes(b"no model")
    command = [sys.executable, "-m", "dyno", "serve", str(broken), "--host", host, "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 1
    assert f"--host {host!r} leads to no address{port}; give" in " ".join(done.stderr.split())


def test_a_name_that_no_request_holds_is_refused_at_the_start(model: Path) -> None:
    command = [sys.executable, "-m", "dyno", "serve", str(model), "--allow-host", "http://a.b"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 1
    assert "'http://a.b' is not the name of a host" in " ".join(done.stderr.split())
