"""`dyno serve` as it starts: its address, a port in use, a file without a vocabulary, and its defaults."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from chat_model import chat_model
from dyno import Engine, ModelError, _core, profiles
from dyno.server import Options, create_app
from dyno.server.hosts import is_loopback
from dyno.server.opening import Recipe, ServedEngine, opened
from dyno.testing import tiny_model
from served import GREEDY
from waiting import until

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("model") / "m.gguf")


def test_the_command(model: Path, device: str, tmp_path: Path) -> None:
    port_file = tmp_path / "port"
    command = [
        sys.executable,
        "-m",
        "dyno",
        "serve",
        str(model),
        "--port",
        "0",
        "--port-file",
        str(port_file),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    more = ["--device", device, "--ctx", "128", "--sequences", "2", "--no-profile"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, *more], env=environment, **streams) as server:  # type: ignore[call-overload]
        try:
            until(lambda: port_file.exists() or server.poll() is not None)
            address = f"http://127.0.0.1:{port_file.read_text().strip()}"
            got = httpx.post(f"{address}/v1/completions", json={"prompt": "a", **GREEDY}, timeout=600)
            assert got.json()["model"] == "m"
            # No other protocol, even if a library for WebSockets is installed.
            words = {"Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==", "Sec-WebSocket-Version": "13"}
            other = {"Connection": "Upgrade", "Upgrade": "websocket", **words}
            assert httpx.get(f"{address}/health", headers=other, timeout=600).status_code == 200
            server.send_signal(signal.SIGTERM)
            told, said = server.communicate(timeout=600)
        finally:
            server.kill()
    assert server.returncode in (0, -signal.SIGTERM)
    assert told.splitlines()[0] == f"listening on {address}"
    assert "Traceback" not in said
    assert "no API key is set" not in said
    assert "profile: " in said
    assert "serving m: 2 requests in parallel, context of 128 tokens each" in said


@pytest.mark.parametrize(("template", "chosen"), [(None, None), (None, "chatml"), ("{{ messages }}", None)])
def test_a_model_without_a_template_is_told_at_the_start(
    template: str | None, chosen: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise the first chat request is the first to know."""
    model = chat_model(tmp_path / "m.gguf", template)
    recipe = Recipe(str(model), Options(), "cpu", {"profile": None}, chat_template=chosen)
    with caplog.at_level(logging.WARNING, "dyno.server"), opened(recipe):
        pass
    told = [r.getMessage() for r in caplog.records if "has no chat template" in r.getMessage()]
    assert len(told) == (1 if template is None and chosen is None else 0)
    assert all("--chat-template chatml" in line for line in told)


def test_a_file_without_a_vocabulary_is_refused_at_the_start(tmp_path: Path) -> None:
    bare = tiny_model(tmp_path / "bare.gguf", vocabulary=False)
    with (
        pytest.raises(ModelError, match=r"\[server\] bare.gguf has no vocabulary"),
        opened(Recipe(str(bare), Options(), "cpu", {"profile": None})),
    ):
        pass
    with (
        Engine(bare, device="cpu", profile=None, ctx=64) as engine,
        pytest.raises(ModelError, match="no vocabulary"),
    ):
        create_app(engine, Options())
    command = [sys.executable, "-m", "dyno", "serve", str(bare), "--port", "0", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 1
    assert "bare.gguf has no vocabulary" in " ".join(done.stderr.split())
    assert "listening" not in done.stdout


def test_a_port_in_use_is_named_before_the_model_is_read(tmp_path: Path) -> None:
    broken = tmp_path / "m.gguf"
    broken.write_bytes(b"no model")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        command = [sys.executable, "-m", "dyno", "serve", str(broken), "--port", port, "--device", "cpu"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 1
    assert f"--port {port} is in use by another program" in done.stderr
    assert "Errno" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("name", "words"),
    [(".", "is a folder; give the path of a file"), ("missing/port", "does not exist; create it first")],
)
def test_a_port_file_that_cannot_be_written_is_named_before_the_model_is_read(
    tmp_path: Path, name: str, words: str
) -> None:
    broken = tmp_path / "m.gguf"
    broken.write_bytes(b"no model")
    file = tmp_path / name
    command = [sys.executable, "-m", "dyno", "serve", str(broken), "--port", "0", "--device", "cpu"]
    done = subprocess.run(
        [*command, "--port-file", str(file)], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 1
    assert f"error: --port-file {file}" in done.stderr
    assert words in done.stderr
    assert done.stdout == ""
    assert [each.name for each in tmp_path.iterdir()] == ["m.gguf"]


def test_a_port_file_is_whole_or_absent(tmp_path: Path) -> None:
    from dyno._cli.serve import _write

    taken = tmp_path / "port"
    taken.mkdir()
    with pytest.raises(OSError, match=r"--port-file .*port: Is a directory"):
        _write(taken, "1\n")
    assert [each.name for each in tmp_path.iterdir()] == ["port"]
    taken.rmdir()
    _write(taken, "1\n")
    assert taken.read_text() == "1\n"


@pytest.mark.parametrize(
    ("host", "alone"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("localhost", True),
        ("::ffff:127.0.0.1", True),
        ("127.4.5.6", True),
        ("a.localhost", True),
        ("LocalHost", True),
        ("localhost.", True),
        ("localhost.a", False),
        ("127.0.0.1.a", False),
        ("0.0.0.0", False),
        ("::", False),
        ("a.b", False),
    ],
)
def test_loopback_addresses(host: str, alone: bool) -> None:
    assert is_loopback(host) == alone


def test_too_few_tokens_of_a_step_are_refused_before_the_model_is_read(tmp_path: Path) -> None:
    from dyno.cli import app
    from typer.testing import CliRunner

    words = ["serve", str(tmp_path / "none.gguf"), "--sequences", "4", "--step-tokens", "3"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    assert "--step-tokens is 3; expected at least one for each of the 4" in " ".join(done.stderr.split())


def test_sequences_of_a_server(model: Path) -> None:
    for given, expected in (({}, 4), ({"sequences": 3}, 3), ({"sequences": 1}, 1)):
        with ServedEngine(model, device="cpu", profile=None, ctx=64, **given) as engine:
            assert engine.settings["sequences"] == engine.plan["settings"]["sequences"] == expected
            assert engine.settings.origins["sequences"] == ("argument" if given else "default")
            engine.set_context(ctx=32)
            assert engine.settings["sequences"] == expected
            made = profile_of(engine, sequences=1)
    with ServedEngine(model, device="cpu", profile=made, ctx=64) as engine:
        assert engine.settings["sequences"] == engine.plan["settings"]["sequences"] == 1
    with Engine(model, device="cpu", profile=None, ctx=64) as engine:
        assert engine.settings["sequences"] == 1


def profile_of(engine: Engine, **values: int) -> profiles.Profile:
    """A profile that matches exactly."""
    return profiles.Profile(
        schema=1,
        label="served",
        match=profiles.Match(
            device=profiles.device_from_info(engine.device_info),
            model=profiles.model_from_description(engine.model),
            engine=profiles.engine_from_build(_core.build_info()),
        ),
        settings={name: profiles.SettingEntry(value=value) for name, value in values.items()},
    )


def test_the_placement_of_a_server_is_for_all_its_sequences(tiny_dir: Path) -> None:
    """The cache of one sequence fits beside all weights, and that of four does not."""
    given: dict[str, Any] = {"profile": None, "ctx": 1024, "threads": 1}
    given["virtual_devices"] = {"cpu:1": {"memory_mib": 7}}
    with Engine(tiny_dir / "qwen3moe-tiny.gguf", "cpu:1", **given) as engine:
        assert not engine.plan["placement"]["note"]
    with ServedEngine(tiny_dir / "qwen3moe-tiny.gguf", "cpu:1", **given) as engine:
        assert engine.settings["sequences"] == 4
        assert engine.plan["placement"]["note"].startswith("auto: ")


def test_a_draft_model_opens_beside_a_virtual_device_and_without_a_profile(model: Path) -> None:
    given: dict[str, Any] = {"ctx": 64, "threads": 1, "virtual_devices": 1, "spec": "draft"}
    for arguments in (given, {**given, "profile": None}):
        recipe = Recipe(str(model), Options(model="tiny"), "cpu:1", arguments, draft=str(model))
        with opened(recipe) as (_, app):
            draft = app.state.scheduler._drafting._speculation.draft
            assert (draft.device, draft.match.switched_off) == ("cpu", "profile" in arguments)
