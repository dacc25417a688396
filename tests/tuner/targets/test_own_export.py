"""`dyno profiles export` for a profile of dyno: each form starts `dyno serve` with the same words."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from dyno import _core, profiles
from dyno.cli import app
from dyno.testing import tiny_model
from dyno.testing.models import byte_vocabulary
from dyno_tuner.cli.own_export import FORMS, export
from dyno_tuner.core.errors import TuneError
from typer.testing import CliRunner

MODEL = "/models/a $b \"c\" 'd'/x%y.gguf"
OWN = ["dyno", "serve", "--host", "0.0.0.0", "--alias", 'a "b" $HOME $(NAME) 50% \\ ünï']
TUNED = "tune --model x.gguf --gpu 2 --vram 16GiB --set numerics=exact"


def profile_of(device: dict[str, Any], command: str) -> profiles.Profile:
    return profiles.Profile.model_validate({
        "schema": 1, "label": "a 100 % test",
        "match": {
            "device": device,
            "model": {"architecture": "llama", "layers": 1, "embedding": 8, "types": {"F32": 1.0}},
            "engine": {"name": "dyno", "version": "1", "ops_revision": 1},
        },
        "settings": {"ubatch": {"value": 1024}},
        "provenance": {"tuner": "1", "date": "2026-11-20", "command": command},
    })  # fmt: skip


H200 = profile_of({"kind": "cuda", "compute_capability": "9.0", "sm_count": 132, "memory_mib": 143771}, TUNED)
CPU = profile_of(
    {"kind": "cpu", "isa": "avx2", "cores": 2, "memory_mib": 1000}, "tune -m x.gguf --device cpu"
)
FILE = Path("/etc/dyno/p 1.yaml")


def text_of(form: str, profile: profiles.Profile = H200, own: list[str] = OWN) -> tuple[str, list[str]]:
    said: list[str] = []
    return export(profile, FILE, form, model=MODEL, command=own, tell=said.append), said


def wanted(*device: str) -> list[str]:
    same = ["--vram", "16GiB", "--set", "numerics=exact"]
    return ["serve", MODEL, "--profile", str(FILE), *same, *device, *OWN[2:]]


def test_a_shell_gets_every_word() -> None:
    words = shlex.split(text_of("dyno-serve")[0])
    assert words[words.index("serve") :] == wanted("--device", "cuda:2")
    words = shlex.split(text_of("dyno-serve", own=[*OWN, "--device", "cuda:5"])[0])
    assert words.count("--device") == 1
    words = shlex.split(text_of("dyno-serve", CPU)[0])
    assert words[words.index("serve") :] == [
        "serve",
        MODEL,
        "--profile",
        str(FILE),
        "--device",
        "cpu",
        *OWN[2:],
    ]


def test_a_unit_starts_the_same_words() -> None:
    text, _ = text_of("systemd")
    (line,) = [row for row in text.splitlines() if row.startswith("ExecStart=")]
    words = [w.replace("%%", "%").replace("$$", "$") for w in shlex.split(line.removeprefix("ExecStart="))]
    assert words[0].startswith("/")
    assert words[words.index("serve") :] == wanted("--device", "cuda:2")
    assert "KillMode=mixed" in text.splitlines()  # the server itself ends its processes


def test_containers_get_the_same_words_and_files() -> None:
    service = yaml.safe_load(text_of("compose")[0])["services"]["dyno"]
    assert [word.replace("$$", "$") for word in service["command"]] == wanted()
    assert [mount["source"].replace("$$", "$") for mount in service["volumes"]] == [
        MODEL.rpartition("/")[0], "/etc/dyno",
    ]  # fmt: skip
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device["device_ids"] == ["2"]
    values = yaml.safe_load(text_of("helm-values")[0])
    assert [word.replace("$$(", "$(") for word in values["args"]] == wanted()
    assert (values["model"], values["profile"]) == ({"path": MODEL}, {"path": str(FILE)})
    assert "resources" not in yaml.safe_load(text_of("helm-values", CPU)[0])
    assert [text_of(form, own=[])[1] != [] for form in FORMS] == [False, False, True, True]


def test_secrets_are_hidden() -> None:
    text, said = text_of("compose", own=["--api-key", "sesame"])
    assert "sesame" not in text
    assert any("secrets" in line for line in said)


@pytest.mark.parametrize(
    ("form", "own", "words"),
    [
        ("llama-server", [], "llama-server does not read it; give dyno-serve, systemd"),
        ("models.ini", [], "llama-server does not read it"),
        ("env", [], "reads no settings from the environment"),
        ("nomad", [], "'nomad': this is a profile of dyno itself; give dyno-serve"),
        ("systemd", ["-m", "y.gguf"], "-m after -- contradicts the profile"),
        ("systemd", ["--profile=q.yaml"], "--profile=q.yaml after -- contradicts"),
        ("systemd", ["y.gguf", "--port", "80"], "'y.gguf' after -- would be a second model"),
        ("dyno-serve", ["dyno", "serve", "y.gguf"], "'y.gguf' after -- would be a second model"),
    ],
)
def test_what_cannot_be_exported(form: str, own: list[str], words: str) -> None:
    with pytest.raises(TuneError, match=words):
        text_of(form, own=own)


def test_the_command_line_serves_with_the_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(tmp_path / "a 'b'.gguf", n_vocab=288, n_layers=1, metadata=byte_vocabulary(288))
    made = CPU.model_copy(
        update={
            "match": profiles.Match(
                device=profiles.device_from_info(_core.cpu_info()),
                model=profiles.model_from_description(_core.describe_model(str(model))),
                engine=profiles.engine_from_build(_core.build_info()),
            )
        }
    )
    file = tmp_path / "p.yaml"
    file.write_text(profiles.dumps_profile(made), encoding="utf-8")
    assert (
        CliRunner().invoke(app, ["profiles", "export", str(file), "--bin", "x", "-m", str(model)]).exit_code
        == 1
    )
    absent = CliRunner().invoke(app, ["profiles", "export", str(file), "-m", str(tmp_path / "absent.gguf")])
    assert absent.exit_code == 0
    assert f"{tmp_path}/absent.gguf does not exist here; give the model of the server with" in absent.stderr
    done = CliRunner().invoke(app, ["profiles", "export", str(file), "-m", str(model), "--", "--port", "0"])
    assert done.exit_code == 0, done.output
    assert "does not exist" not in done.stderr
    words = shlex.split(done.stdout)
    command = [sys.executable, "-m", "dyno", *words[words.index("serve") :]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().removeprefix("listening on ").strip()
            props = httpx.get(f"{address}/props", timeout=120).json()
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(120)
    assert props["settings"]["ubatch"] == 1024
