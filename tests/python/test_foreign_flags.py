"""Habits of llama.cpp: a bare model, -h, completion, and an answer to each flag that dyno does not have."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main
from dyno import _core
from dyno._cli import foreign_flags
from dyno._cli import run as run_module
from dyno._cli.flag_page import UNCHANGED, flags_page
from dyno._cli.foreign_flags import FLAGS, Foreign, Takes, Verdict
from dyno.cli import app
from dyno.server.bodies import ChatBody
from typer.testing import CliRunner

MISSING = "missing.gguf"
TINY = Path(__file__).parents[1] / "data/tiny/llama-tiny.gguf"


def dyno(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(words))
    error = "" if isinstance(done.exception, SystemExit | None) else str(done.exception)
    return done.exit_code, " ".join(f"{done.output}{error}".replace("│", " ").split())


def words_of(flag: Foreign, name: str) -> list[str]:
    return [name] if flag.takes is Takes.NOTHING else [name, "1"]


@pytest.mark.parametrize("flag", FLAGS, ids=[f.names[0] for f in FLAGS])
def test_every_flag_of_the_table_is_answered_by_name(flag: Foreign, caplog: pytest.LogCaptureFixture) -> None:
    for name in flag.names:
        caplog.clear()
        code, said = dyno("run", MISSING, "-p", "x", *words_of(flag, name))
        if flag.verdict is Verdict.UNNECESSARY:
            assert name in caplog.text
            assert flag.answer in caplog.text
            assert code == 1, "the command went on, and found no model"
            assert "[gguf]" in said
        else:
            assert code == 2, said
            assert f"{name}" in said
            assert " ".join(flag.answer.split()) in said
        assert "--max-tokens" not in said or "--max-tokens" in flag.why


def test_the_page_holds_each_flag_and_its_unchanged_flags_are_options() -> None:
    commands: Any = typer.main.get_command(app)
    for names, takers in UNCHANGED.items():
        for taker in takers:
            own = {name for p in commands.commands[taker].params for name in p.opts}
            assert set(names.split()) <= own, (taker, names)
    shown = set(re.findall(r"`(--?[\w-]+)`", flags_page()))
    assert {name for flag in FLAGS for name in flag.names} <= shown
    # A switch with two answers shows both.
    row = next(line for line in flags_page().splitlines() if line.startswith("| `-fa`, `--flash-attn` |"))
    assert "on by default" in row
    assert "Turned off: `--set flash_attention=off`" in row


SWITCHES = [flag for flag in FLAGS if flag.takes is Takes.SWITCH]


@pytest.mark.parametrize("flag", SWITCHES, ids=[f.names[0] for f in SWITCHES])
@pytest.mark.parametrize("word", ["0", "off", "disabled"])
def test_a_switch_that_is_turned_off_is_no_switch_that_is_on(
    flag: Foreign, word: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The other way round would run with the opposite of what was asked for."""
    assert flag.off is not None
    verdict, why = flag.off
    name = flag.names[0]
    words = [[name, word], *([[f"{name}={word}"]] if name.startswith("--") else [])]
    for given in words:
        caplog.clear()
        code, said = dyno("perplexity", MISSING, "-f", "x", *given)
        told = caplog.text if verdict is Verdict.UNNECESSARY else said
        assert " ".join(why.split()) in " ".join(told.split())
        assert code == (1 if verdict is Verdict.UNNECESSARY else 2)


def test_flags_that_ask_for_off_name_their_setting() -> None:
    for words, setting in (
        (("-fa", "off"), "--set flash_attention=off"),
        (("-mmp", "0"), "--set mmap=off"),
        (("-rtr", "0"), "--set cpu_repack=off"),
        (("--fit", "off"), "-ngl all"),
    ):
        code, said = dyno("perplexity", MISSING, "-f", "x", *words)
        assert (code, setting in said) == (2, True), said


def test_a_list_of_on_and_off_is_two_runs(caplog: pytest.LogCaptureFixture) -> None:
    """llama-bench -fa 0,1: the list is not a second model."""
    code, said = dyno("bench", MISSING, "-fa", "0,1")
    assert (code, "two models" in said) == (2, False), said
    assert "one run takes one value" in said
    assert "--set flash_attention=off" in said
    assert dyno("bench", MISSING, "-fa", "1,on")[0] == 1
    assert "flash attention is on by default" in caplog.text


def test_what_does_not_fit_is_placed() -> None:
    (flag,) = [f for f in FLAGS if "--fit" in f.names]
    assert "dyno chooses a placement itself" in flag.why


def test_the_table_holds_no_option_of_run() -> None:
    """Of the names in the table no option of `run` may be one, and each name stands there once."""
    names = [name for flag in FLAGS for name in flag.names]
    assert len(names) == len(set(names))
    commands: Any = typer.main.get_command(app)
    own = {o for p in commands.commands["run"].params for o in (*p.opts, *p.secondary_opts)}
    assert not own & set(names)
    assert all(flag.why for flag in FLAGS)


def test_the_flags_that_people_type_are_in_the_table() -> None:
    names = {name for flag in FLAGS for name in flag.names}
    assert names >= set(["-fa", "-cnv", "-i", "--mlock", "-b", "-np"])


def test_values_that_look_like_flags_are_values() -> None:
    code, said = dyno("run", MISSING, "-p", "-ngl", "--stop", "-cnv")
    assert (code, "[gguf]" in said) == (1, True)


def test_a_number_is_not_read_out_of_an_unknown_flag() -> None:
    code, said = dyno("run", MISSING, "-p", "x", "-nothing")
    assert (code, "-nothing" in said, "--max-tokens" in said) == (2, True, False)
    assert dyno("run", MISSING, "-p", "x", "-n5")[0] == 1  # the option, joined


@pytest.mark.parametrize("command", [["explain", "plan"], ["experts", "--text", "x"], ["bench"]])
def test_other_commands_answer_flags_too(command: list[str], caplog: pytest.LogCaptureFixture) -> None:
    code, said = dyno(*command, MISSING, "-fa", "on", "--mlock")
    assert (code, "--mlock" in said, "not locked in memory" in said) == (2, True, True), said
    assert "-fa on is not needed in dyno" in caplog.text
    code, said = dyno(*command, MISSING, "-sys", "x")
    assert (code, "-sys" in said, "-s " in said) == (2, True, False), said


@pytest.mark.parametrize(
    "command", [["run", "-p", "x"], ["bench"], ["perplexity", "-f", __file__]], ids=lambda command: command[0]
)
def test_a_bare_model(command: list[str]) -> None:
    code, said = dyno(*command, MISSING)
    assert (code, MISSING in said) == (1, True), said
    code, said = dyno(*command, MISSING, "--model", "other.gguf")
    assert (code, "two models were given" in said) == (2, True)
    code, said = dyno(*command)
    assert (code, "--model FILE, or as FILE alone" in said) == (2, True)


@pytest.mark.parametrize(
    "words", [["m.gguf"], ["m.gguf", "-p", "x"], ["-m", "m.gguf"], ["--model", "m.gguf"]]
)
def test_a_model_without_a_command(words: list[str]) -> None:
    code, said = dyno(*words)
    assert (code, "a command must come first" in said, "dyno chat MODEL" in said) == (2, True, True), said


def test_one_error_answers_all_sampling_flags_of_a_server() -> None:
    """Model cards recommend four of them at once."""
    flags = ["--temp", "0.6", "--top-k", "20", "--top-p", "0.95", "-n", "-1", "--no-mmap"]
    code, said = dyno("serve", MISSING, *flags)
    assert code == 2
    assert "5 flags are not options of dyno:" in said
    for name, field in (("--top-k", "top_k"), ("--top-p", "top_p"), ("-n", "max_tokens")):
        assert f"{name}: in dyno, use the field {field} of a request" in said


def test_fields_for_sampling_flags_exist() -> None:
    assert set(foreign_flags._FIELDS) <= set(ChatBody.model_fields)


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (["run", MISSING, "def main"], "give the prompt after -p, in quotes"),
        (["chat", MISSING, "Hello"], "type messages into the chat"),
        (["serve", MISSING, "8080"], "the port follows --port"),
        (["bench", MISSING, "other.gguf"], "one run measures one model"),
    ],
)
def test_a_word_after_the_model_gets_advice(words: list[str], advice: str) -> None:
    code, said = dyno(*words)
    assert (code, f"({words[2]}); {advice}" in said) == (2, True), said


@pytest.mark.parametrize(
    ("prompt", "told"), [(r"Steps:\nStep 1:", True), ('print("a\\n")\n', False), ("plain", False)]
)
def test_a_backslash_n_is_no_line_break(prompt: str, told: bool, caplog: pytest.LogCaptureFixture) -> None:
    """llama.cpp turns it into one by default. In a prompt with line breaks it is meant as it is."""
    assert run_module._prompt(prompt, None) == prompt
    assert ("let the shell write it: -p $'a\\nb'" in caplog.text) == told


@pytest.mark.parametrize("flag", ["-cnv", "--conversation", "-i", "-mli"])
def test_a_chat_needs_no_flag_for_a_chat(flag: str, caplog: pytest.LogCaptureFixture) -> None:
    code, said = dyno("chat", MISSING, flag)
    assert "[gguf]" in said
    assert code == 1
    assert f"{flag} is not needed in dyno: dyno chat is a conversation" in caplog.text


@pytest.mark.parametrize("command", ["run", "bench", "serve"])
def test_several_models_are_no_last_one(command: str) -> None:
    """llama-bench measures each of them. The last one alone would be a result of the wrong model."""
    code, said = dyno(command, "-m", "a.gguf", "--model=b.gguf")
    assert (code, "--model: 2 models were given, a.gguf, b.gguf; one run takes one" in said) == (2, True), (
        said
    )


def test_a_list_of_layers_needs_several_runs() -> None:
    code, said = dyno("bench", MISSING, "-ngl", "0,99")
    assert code == 2
    assert "-ngl: '0,99' is neither a number of layers nor all; one run takes one value" in said
    assert dyno("bench", MISSING, "-ngl", "x")[1].endswith("neither a number of layers nor all")


def test_a_model_for_info_names_the_command_that_describes_it() -> None:
    code, said = dyno("info", MISSING)
    assert (code, f"({MISSING}); `dyno explain model FILE` describes a model" in said) == (2, True), said


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (["doctor", "--", "llama-server"], "use `dyno tune doctor`"),
        (["verify", "x.yaml"], "use `dyno tune verify`"),
        (["check", "x.yaml"], "use `dyno profiles check`"),
        (["list"], "use `dyno profiles list`"),
        (["help"], "use `dyno -h`"),
        (["help", "run"], "`dyno run -h`"),
        (["version"], "use `dyno --version`"),
        (["pull", "me/model"], "dyno downloads no models"),
        (["quantize", "x.gguf"], "llama-quantize"),
    ],
)
def test_a_command_of_another_program_names_the_way(words: list[str], advice: str) -> None:
    code, said = dyno(*words)
    assert code == 2
    assert f"dyno has no command '{words[0]}'; " in said
    assert advice in said


def test_a_misspelt_command_names_the_nearest() -> None:
    assert dyno("profile", "list")[1].endswith("No such command 'profile'. Did you mean 'profiles'?")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["bench", MISSING, "--json"], "--json: in dyno, use -o json"),
        (["chat", MISSING, "-p", "Hello"], "-p: in dyno, use dyno run --chat -p TEXT for one answer"),
        (["chat", MISSING, "--file=x"], "--file: in dyno, use dyno run --chat -f FILE for one answer"),
        (["experts", MISSING, "-f", "x"], "-f: in dyno, use --text FILE"),
        (["serve", MISSING, "-p", "8080"], "-p: in dyno, use --port N"),
        (["serve", MISSING, "-to", "600"], "-to: in dyno, use --timeout SECONDS"),
        (["serve", MISSING, "--temp=0.6"], "--temp: in dyno, use the field temperature of a request"),
        (["serve", MISSING, "--ignore-eos"], "--ignore-eos: in dyno, use the field ignore_eos of a request"),
        (["chat", MISSING, "-st"], "-st: in dyno, use dyno run --chat -p TEXT"),
        (["chat", MISSING, "--ignore-eos"], "--ignore-eos: in dyno, use dyno run --ignore-eos"),
        (
            ["run", MISSING, "--chat", "-p", "x", "--ignore-eos"],
            "an answer ends at this token; leave out --chat",
        ),
    ],
)
def test_an_option_of_another_command_names_its_own(words: list[str], said: str) -> None:
    code, output = dyno(*words)
    assert (code, said in output) == (2, True), output


@pytest.mark.parametrize("flag", ["--color", "--log-colors"])
@pytest.mark.parametrize("word", [None, "on", "off", "auto"])
def test_the_word_of_a_colour_is_no_model(flag: str, word: str | None) -> None:
    code, said = dyno("run", "-m", MISSING, "-p", "x", flag, *([] if word is None else [word]))
    assert (code, "[gguf]" in said) == (1, True), said


def test_a_prompt_without_its_option() -> None:
    code, said = dyno("run", MISSING, "def main")
    assert (code, "after -p" in said) == (2, True), said
    code, said = dyno("run", MISSING)
    assert (code, "-p TEXT" in said, "dyno chat" in said) == (2, True, True), said
    code, said = dyno("run", MISSING, "-p", "x", "-f", "y")
    assert (code, "both give a prompt" in said) == (2, True), said
    assert "-p" not in dyno("bench", MISSING, "more")[1].partition("unexpected")[2]


def test_an_empty_prompt_is_named() -> None:
    model = Path(__file__).parents[2] / "models/pycode-moe-20m-Q4_K_M.gguf"
    code, said = dyno("run", str(model), "--device", "cpu", "-p", "")
    assert (code, "the prompt is empty" in said) == (2, True), said


def test_the_long_names_of_llama_cpp_are_options() -> None:
    names = (
        "--ctx-size",
        "--ubatch-size",
        "--threads-batch",
        "--n-gpu-layers",
        "--cache-type-k",
        "--n-predict",
    )
    for name in names:
        code, said = dyno("run", MISSING, "-p", "x", name, "f16" if "type" in name else "8")
        assert (code, "[gguf]" in said) == (1, True), (name, said)


def test_tokens_below_minus_one_are_an_error() -> None:
    code, said = dyno("run", MISSING, "-p", "x", "-n", "-5")
    assert (code, "-5 is not a valid number of tokens" in said) == (2, True)
    assert dyno("run", MISSING, "-p", "x", "-n", "-1")[0] == 1


@pytest.mark.parametrize(
    "words", [[], ["run"], ["bench"], ["explain"], ["profiles"], ["profiles", "check"], ["tune"]]
)
def test_h_is_help_everywhere(words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dyno", *words, "-h"],
        capture_output=True,
        text=True,
        env=_environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Usage: dyno" in done.stdout


def test_completion() -> None:
    asked = {"_DYNO_COMPLETE": "complete_bash", "COMP_WORDS": "dyno perp", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "dyno"],
        capture_output=True,
        text=True,
        env=_environment() | asked,
        check=False,
    )
    assert done.stdout.split() == ["perplexity"]


def test_more_threads_than_cores(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("dyno._effective.usable_cores", lambda: 1)
    model = str(tiny_dir / "llama-tiny.gguf")
    arguments = ["run", model, "-p", "x", "-n", "1", "--device", "cpu", "--no-profile", "-tb", "1"]
    assert dyno(*arguments, "-t", "2")[0] == 0
    assert "threads=2 is more than the 1 cores" in caplog.text
    caplog.clear()
    assert dyno(*arguments, "-t", "1")[0] == 0
    assert "is more than" not in caplog.text


def test_a_chat_template_is_named(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = str(tiny_dir / "llama-tiny.gguf")
    arguments = ["run", model, "-p", "x", "-n", "1", "--no-profile"]
    assert "chat template: not applied" not in dyno(*arguments)[1]

    class Templated:
        def __init__(self, path: str) -> None:
            assert path == model

        def get(self, key: str) -> str | None:
            return "{{ messages }}" if key == "tokenizer.chat_template" else None

    assert not run_module.has_chat_template(Path(model))
    monkeypatch.setattr("dyno._core.Gguf", Templated)
    assert run_module.has_chat_template(Path(model))
    monkeypatch.undo()
    monkeypatch.setattr(run_module, "has_chat_template", lambda path: True)
    assert dyno(*arguments)[1].count("chat template: not applied") == 1


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


def test_one_error_answers_all_flags_of_a_line() -> None:
    """Otherwise a command line of llama.cpp takes one attempt for each of its flags."""
    code, said = dyno("run", MISSING, "-p", "x", "--no-mmap", "--mlock", "-fa", "on", "--mirostat", "2")
    assert code == 2
    assert "Error: 3 flags are not options of dyno: --no-mmap:" in said
    for told in (
        "--no-mmap: in dyno, use --set mmap=off",
        "--mlock: not supported by dyno",
        "--mirostat 2: not supported by dyno",
    ):
        assert told in said


@pytest.mark.parametrize(
    "words",
    [("-t", "-1"), ("-tb", "-1"), ("--threads=-1",), ("-s", "-1"), ("-ngl", "auto"), ("-ngl", "-1")],
    ids=" ".join,
)
def test_values_that_ask_llama_cpp_for_its_default_ask_for_the_default(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []

    class Opened(Exception):
        pass

    def engine(*_: Any, **arguments: Any) -> None:
        seen.append(arguments)
        raise Opened

    monkeypatch.setattr("dyno.engine.Engine", engine)
    for given in ((), words):
        assert isinstance(CliRunner().invoke(app, ["run", MISSING, "-p", "x", *given]).exception, Opened)
    assert seen[0] == seen[1]


def test_a_default_of_one_option_is_an_ordinary_value_of_another() -> None:
    code, said = dyno("run", MISSING, "-n", "-1", "-p", "-1")
    assert (code, "[gguf]" in said) == (1, True)
    assert dyno("run", MISSING, "-p", "x", "-t", "auto")[0] == 2


def test_a_random_seed_may_be_asked_for_by_its_number() -> None:
    code, said = dyno("run", str(TINY), "-p", "hello", "-n", "1", "--temp", "1", "-s", "-1", "--no-profile")
    assert code == 0, said


def test_a_context_of_0_is_that_of_the_model() -> None:
    trained = _core.describe_model(str(TINY))["n_ctx_train"]
    for words in (("-c", "0"), ("--ctx-size=0",)):
        code, said = dyno("explain", "plan", str(TINY), *words, "--no-profile")
        assert (code, f"context {trained} positions" in said) == (0, True), said


@pytest.mark.parametrize(
    "words", [("run", "-f"), ("perplexity", "-f"), ("run", "-p", "x", "--grammar-file")], ids=" ".join
)
def test_a_file_that_is_no_text_is_named(words: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "no_text"
    file.write_bytes(b"ab\xbd")
    code, said = dyno(words[0], str(TINY), "--no-profile", *words[1:], str(file))
    assert (code, f"{file} is not UTF-8 text: byte 2 is 0xbd" in said) == (1, True), said
