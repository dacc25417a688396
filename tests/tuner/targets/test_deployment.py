"""Each form of `dyno profiles export`, read back by what consumes it: the server gets the same words."""

from __future__ import annotations

import configparser
import json
import shlex
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from dyno import profiles
from dyno_tuner.core.errors import TuneError
from dyno_tuner.targets.ggml.export import FORMS, export
from dyno_tuner.targets.ggml.installation import Installation
from fake_engines import calls, fake

if TYPE_CHECKING:
    from pathlib import Path

MODEL = "/models/a $b \"c\" 'd'/x%y.gguf"
OWN = ["llama-server", "--port", "80", "--alias", 'a "b" $HOME $(NAME) 50% \\ ünï', "--no-slots"]


def profile_of(gpu: bool) -> profiles.Profile:
    cuda = {"kind": "cuda", "compute_capability": "9.0", "sm_count": 132, "memory_mib": 143771}
    cpu = {"kind": "cpu", "isa": "avx2", "cores": 2, "memory_mib": 1000}
    settings = {
        "ubatch": {"value": 4096},
        "graph_concurrency": {"value": True},
        "cpu_repack": {"value": False},
    }
    return profiles.Profile.model_validate({
        "schema": 1, "label": "a 100 % test",
        "match": {
            "device": cuda if gpu else cpu,
            "model": {"architecture": "llama", "layers": 1, "embedding": 8, "types": {"F32": 1.0}},
            "engine": {"name": "llama.cpp", "version": "1"},
        },
        "settings": settings,
        "provenance": {"tuner": "1", "date": "2026-11-20", "command": f"tune {'--gpu 1,3' if gpu else ''}"},
    })  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return fake(tmp_path / "b", "llama.cpp-0c1e570", serves=False)


def text_of(form: str, folder: Path, gpu: bool = True, own: list[str] = OWN) -> tuple[str, list[str]]:
    said: list[str] = []
    text = export(profile_of(gpu), form, binaries=str(folder), model=MODEL, command=own, tell=said.append)
    return text, said


def started(folder: Path, words: list[str]) -> list[str]:
    """What the server sees when it is started with these arguments."""
    subprocess.run([str(folder / "llama-server"), *words], capture_output=True, check=False)
    return list(calls(folder, "llama-server")[-1]["args"])


def wanted(folder: Path, gpu: bool = True) -> list[str]:
    """The arguments by a shell, which is the form that everything else is held against."""
    text, _ = text_of("llama-server", folder, gpu)
    subprocess.run(["bash", "-c", text], capture_output=True, check=False)
    return list(calls(folder, "llama-server")[-1]["args"])


def test_a_shell_gets_every_word_as_it_was(folder: Path) -> None:
    found = wanted(folder)
    assert found[:2] == ["-m", MODEL]
    assert found[found.index("--alias") + 1] == OWN[4]
    assert found[found.index("-ub") + 1] == "4096"


@pytest.mark.parametrize("gpu", [True, False])
def test_compose(folder: Path, gpu: bool) -> None:
    text, _ = text_of("compose", folder, gpu)
    service: Any = yaml.safe_load(text)["services"]["llama-server"]
    filled = [word.replace("$$", "\0") for word in service["command"]]
    assert not any("$" in word for word in filled), "Compose would fill in a variable here"
    assert started(folder, [word.replace("\0", "$") for word in filled]) == wanted(folder, gpu)
    (mount,) = service["volumes"]
    assert mount["source"].replace("$$", "$") == MODEL.rpartition("/")[0]
    assert mount["read_only"] is True
    assert service["environment"] == {"GGML_CUDA_GRAPH_OPT": "1"}
    if gpu:
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert device == {"driver": "nvidia", "device_ids": ["1", "3"], "capabilities": ["gpu"]}
    else:
        assert "deploy" not in service


def test_helm_values(folder: Path) -> None:
    text, _ = text_of("helm-values", folder)
    values: Any = yaml.safe_load(text)
    # Kubernetes takes $$( for $( and leaves every other dollar alone.
    assert started(folder, [word.replace("$$(", "$(") for word in values["args"]]) == wanted(folder)
    assert values["env"] == [{"name": "GGML_CUDA_GRAPH_OPT", "value": "1"}]
    assert values["resources"] == {"limits": {"nvidia.com/gpu": 2}}
    assert values["nodeSelector"] == {
        "nvidia.com/gpu.compute.major": "9",
        "nvidia.com/gpu.compute.minor": "0",
    }


def test_models_ini(folder: Path) -> None:
    text, said = text_of("models.ini", folder)
    parser = configparser.RawConfigParser(delimiters=("=",), comment_prefixes=(";", "#"), strict=True)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string("[first]\n" + text)
    assert parser.sections() == ["first", "x%y"]
    rows = dict(parser["x%y"])
    assert rows["model"] == MODEL
    assert rows["alias"] == OWN[4]
    assert rows["ubatch-size"] == "4096"
    assert rows["no-repack"] == "true"
    assert rows["no-slots"] == "true"
    help_ = Installation(str(folder), "llama.cpp").help_of("llama-server")
    assert help_ is not None
    assert all(help_.has(f"--{key}") for key in rows), rows
    assert any("GGML_CUDA_GRAPH_OPT=1: a preset holds no environment" in line for line in said)
    back = [w for k, v in rows.items() for w in ([f"--{k}"] if v == "true" else [f"--{k}", v])]
    # The same flags with the same values, by whichever of their names.
    names = {n: flag.names for n, flag in help_.flags.items()}
    assert [names.get(w, w) for w in back if w not in ("--no-repack", "--no-slots")] == [
        names.get(w, w) for w in wanted(folder) if w not in ("-nr", "--no-repack", "--no-slots")
    ]


@pytest.mark.parametrize("alias", ["two\nlines", " edge", "; comment"])
def test_values_that_no_preset_can_hold_are_errors(folder: Path, alias: str) -> None:
    with pytest.raises(TuneError, match="cannot stand in a preset"):
        text_of("models.ini", folder, own=["llama-server", "--alias", alias])


def test_a_server_without_presets_says_so(tmp_path: Path) -> None:
    folder = fake(tmp_path / "old", "llama.cpp-4227c9b")
    plain = profile_of(True).model_copy(update={"settings": {}})
    with pytest.raises(TuneError, match="no --models-preset"):
        export(plain, "models.ini", binaries=str(folder), model="/m.gguf")


def test_an_environment_file_is_read_by_a_shell(folder: Path) -> None:
    plain = profile_of(False)
    text = export(plain, "env", binaries=str(folder), model="/m.gguf")
    script = f"set -a\n{text}\nexec env"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, env={})
    read = dict(line.split("=", 1) for line in done.stdout.splitlines())
    assert read["LLAMA_ARG_UBATCH"] == "4096"
    assert read["LLAMA_ARG_REPACK"] == "0"
    assert read["GGML_CUDA_GRAPH_OPT"] == "1"


def test_a_unit_starts_the_same_words(folder: Path) -> None:
    text, _ = text_of("systemd", folder)
    (line,) = [row for row in text.splitlines() if row.startswith("ExecStart=")]
    words = shlex.split(line.removeprefix("ExecStart="))  # its quotes are a shell's; % and $ are doubled
    assert [w.replace("%%", "%").replace("$$", "$") for w in words[1:]] == wanted(folder)


def test_every_form_is_offered(folder: Path) -> None:
    assert set(FORMS) == {"llama-server", "env", "systemd", "compose", "helm-values", "models.ini"}
    with pytest.raises(TuneError, match="compose"):
        export(profile_of(True), "nomad", binaries=str(folder), model="/m.gguf")
    assert json.dumps(text_of("compose", folder))
