"""The texts of --help: sections, short names of values, whole sentences, and lines that fit a terminal."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
import typer.main
from dyno._cli.help import LAST, WIDTH
from dyno.cli import app as dyno_app
from dyno_tuner.cli.commands import app as tune_app
from typer.testing import CliRunner

APPS = {"dyno": dyno_app, "tune": tune_app}


def commands(program: str) -> list[tuple[str, ...]]:
    """Every command by its words, groups too."""

    def below(command: Any, words: tuple[str, ...]) -> list[tuple[str, ...]]:
        inner = getattr(command, "commands", {})
        return [words, *(found for name, c in inner.items() for found in below(c, (*words, name)))]

    found = below(typer.main.get_command(APPS[program]), (program,))
    return [words for words in found if words != ("dyno", "tune")]  # hands everything on to `tune`


ALL = [words for program in APPS for words in commands(program)]


def shown(words: tuple[str, ...], columns: int = WIDTH) -> str:
    done = CliRunner().invoke(APPS[words[0]], [*words[1:], "-h"], terminal_width=columns)
    assert done.exit_code == 0, done.output
    return str(done.output)


@pytest.mark.parametrize("words", ALL, ids=" ".join)
def test_a_help_is_for_people(words: tuple[str, ...]) -> None:
    text = shown(words)
    for jargon in (
        "<int",
        "<str",
        "<list",
        "<path",
        "<float",
        " range>",
        "INTEGER",
        "[x>",
        "x<=",
        "[default: 0]\n\n",
    ):
        assert jargon not in text, text
    assert not re.search(r" (FILE|TEXT) +(Folder|Source tree) ", text), text
    assert f"\n{LAST}:\n" in text
    assert "-h, --help" in text.partition(f"\n{LAST}:\n")[2]


@pytest.mark.parametrize("words", ALL, ids=" ".join)
def test_a_narrow_terminal_gets_narrow_lines(words: tuple[str, ...]) -> None:
    text = re.sub(r"\S{45,}", "", shown(words, columns=80))
    assert max(map(len, text.splitlines())) <= 80


def test_a_wide_terminal_does_not_get_wide_lines() -> None:
    for app in APPS.values():
        assert app.info.context_settings["max_content_width"] == WIDTH


@pytest.mark.parametrize("words", [("dyno",), ("dyno", "profiles"), ("tune",)], ids=" ".join)
def test_the_sentences_about_commands_are_whole(words: tuple[str, ...]) -> None:
    text = shown(words)
    listed = text.partition("Commands:\n")[2].partition("\n\n")[0]
    assert listed
    assert "..." not in listed
    names = re.findall(r"^  (\w+) ", listed, re.MULTILINE)
    command: Any = typer.main.get_command(APPS[words[0]])
    for name in words[1:]:
        command = command.commands[name]
    assert set(names) == set(command.commands)
    assert set(command.first) <= set(names)


@pytest.mark.parametrize("words", ALL, ids=" ".join)
def test_arguments_are_named_in_capitals_without_braces(words: tuple[str, ...]) -> None:
    (usage,) = re.findall(r"^Usage: (.*)$", shown(words), re.MULTILINE)
    rest = usage.removeprefix(" ".join(words))
    assert rest.startswith(" [OPTIONS]")
    assert rest == rest.upper()
    assert not set("{}") & set(rest)


@pytest.mark.parametrize("words", [w for w in ALL if w != ("dyno", "profiles")], ids=" ".join)
def test_each_help_ends_with_examples_of_its_command(words: tuple[str, ...]) -> None:
    examples = shown(words).partition("\n  Examples:\n")[2]
    lines = [line.strip().rpartition(" | ")[2] for line in examples.splitlines() if line.strip()]
    assert lines
    for line in lines:
        given = shlex.split(line)
        assert given[: len(words)] == list(words)
        command: Any = typer.main.get_command(APPS[words[0]])
        for word in given[1:]:
            inner = getattr(command, "commands", {})
            command = inner.get(word, command)
        names = {name for p in command.params for name in (*p.opts, *p.secondary_opts)}
        asked = given[: given.index("--")] if "--" in given else given
        options = [word for word in asked if re.match(r"-+[a-zA-Z]", word)]
        assert set(options) <= names, line


def test_the_usage_of_tune_has_the_model() -> None:
    assert "Usage: tune [OPTIONS] [MODEL | COMMAND [ARGS]...]\n" in shown(("tune",))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("dyno", "profiles", "show"), "FILE is missing: Profile file."),
        (("tune", "verify", "x.gguf"), "PROFILE is missing: Profile to verify."),
        (("tune", "diff", "a.yaml"), "SECOND is missing: Second profile."),
    ],
)
def test_an_error_says_what_is_missing(words: tuple[str, ...], said: str) -> None:
    done = CliRunner().invoke(APPS[words[0]], list(words[1:]))
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("dyno", "run"), "Error: --model: no model was given"),
        (("dyno", "serve", "x.gguf", "--port", "99999"), "Error: --port: '99999' is too large"),
        (("dyno", "run", "x.gguf", "-p", "x", "--no-mmap"), "Error: --no-mmap: in dyno, use --set mmap=off"),
        (("dyno", "profiles", "match", "--labels", "a", "--all", "b"), "Error: --labels describes one node"),
        (("dyno", "explain", "x.gguf"), "Error: STAGE: 'x.gguf' is not a stage"),
        (("tune", "-c", "5", "x.gguf"), "Error: -c: write --ctx N for a tune"),
        (("tune", "doctor"), "Error: no command line was given"),
    ],
)
def test_an_error_begins_with_the_option(words: tuple[str, ...], said: str) -> None:
    """Typer begins with "Invalid value for", which is wrong if nothing was given."""
    done = CliRunner().invoke(APPS[words[0]], list(words[1:]))
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())


def test_the_options_of_run_stand_in_sections() -> None:
    text = shown(("dyno", "run"))
    titles = re.findall(r"^(\S.*):$", text, re.MULTILINE)
    assert titles[:2] == ["Arguments", "Options"]
    assert titles[-1] == LAST
    section = dict(zip(titles, re.split(r"(?m)^\S.*:$", text)[1:], strict=True))
    assert "--prompt" in section["Options"]
    assert "--top-k" in section["Sampling"]
    assert "--n-cpu-moe" in section["Devices and memory"]
    assert "--require-profile" in section["Profile and settings"]
    assert "--ctx" in section["Context and speed"]
    assert len(section["Options"].splitlines()) < 15


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("run", "x.gguf", "-p", "x", "-n", "abc"), "'abc' is not a whole number"),
        (("run", "x.gguf", "-p", "x", "--temp", "warm"), "'warm' is not a number"),
        (("serve", "x.gguf", "--port", "99999"), "'99999' is too large; give 65535 or less"),
        (("run", "x.gguf", "-p", "x", "-ncmoe", "-2"), "'-2' is too small; give 0 or more"),
        (("serve", "x.gguf", "--drain-timeout", "-1"), "'-1' is too small; give 0.001 or more"),
        (("serve", "x.gguf", "--drain-timeout", "nan"), "'nan' is not a finite number"),
        (("serve", "x.gguf", "--drain-timeout", "inf"), "'inf' is not a finite number"),
        (("serve", "x.gguf", "--max-body", "1e999"), "'inf' is not a finite number"),
        (("serve", "x.gguf", "--spec-min-p", "nan"), "'nan' is not a finite number"),
    ],
)
def test_an_error_about_a_number_names_it(words: tuple[str, ...], told: str) -> None:
    done = CliRunner().invoke(dyno_app, list(words))
    assert (done.exit_code, told in " ".join(done.output.split())) == (2, True), done.output


def test_an_error_about_a_number_of_tune_names_it() -> None:
    done = CliRunner().invoke(tune_app, ["x.gguf", "--seed", "abc"])
    assert (done.exit_code, "'abc' is not a whole number" in done.output) == (2, True), done.output
