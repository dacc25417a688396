"""The command `tune doctor`: exit codes, JSON, and options at a wrong place."""

from __future__ import annotations

import json

from dyno_tuner.cli.commands import app
from dyno_tuner.doctor.line import IK
from typer.testing import CliRunner


def test_an_unknown_flag_is_no_success() -> None:
    done = CliRunner().invoke(app, ["doctor", "--", "llama-server", "--no-such-flag", "-ub", "512"])
    assert done.exit_code == 1
    assert "dyno's tables do not list --no-such-flag" in " ".join(done.output.split())
    told = CliRunner().invoke(app, ["doctor", "--json", "--", "llama-server", "--no-such-flag"])
    assert told.exit_code == 1
    assert json.loads(told.output)["unknown_flags"] == ["--no-such-flag"]
    assert not json.loads(told.output)["wrong"]
    # not in the tables, and no flag of the program: cmake takes any name, a shell any variable
    assert CliRunner().invoke(app, ["doctor", "--", "cmake", "-DMY_OWN=1"]).exit_code == 0
    assert CliRunner().invoke(app, ["doctor", "--", "MY_OWN=1", "llama-cli", "-m", "x"]).exit_code == 0


def test_exit_codes_and_json() -> None:
    def run(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["doctor", *arguments])
        return done.exit_code, done.output

    assert run("--gpu-arch", "7.5", "--", "cmake", "-DGGML_CUDA_FORCE_MMQ=ON")[0] == 0
    code, text = run("--json", "--", "llama-server", "-op", "26,0,27,0,29,0", "-cuda", "graphs=0")
    told = json.loads(text)
    assert code == 1
    assert told["wrong"]
    assert told["engine"] == IK
    assert [t["status"] for t in told["tokens"]] == ["does", "renumbered", "does", "does"]
    assert told["tokens"][1]["rewritten"] == "27,0,28,0,31,0"
    assert all(n["source"] for t in told["tokens"] if t["kind"] != "program" for n in t["notes"])
    assert run("--gpu-arch", "turing", "--", "llama-cli")[0] == 2
    assert run("--engine", "vllm", "--", "llama-cli")[0] == 2
    assert run()[0] == 2
    assert "[/bold]" in run("--", "llama-cli", "-m", "[/bold]")[1]


def test_options_behind_a_quoted_line_are_refused() -> None:
    """The quoted line would be the name of a program, and the option a flag of it."""
    line = "llama-server -m x.gguf -ub 512"
    done = CliRunner().invoke(app, ["doctor", line, "--engine", "ik_llama.cpp"])
    assert done.exit_code == 2
    assert "before the command line" in " ".join(done.output.replace("│", " ").split())
    before = CliRunner().invoke(app, ["doctor", "--engine", "ik_llama.cpp", line])
    assert before.exit_code == 0, before.output
    assert "ik_llama.cpp" in before.output
    folder = CliRunner().invoke(app, ["doctor", "--", "/my builds/llama-server", "-ub", "512"])
    assert folder.exit_code == 0, folder.output
