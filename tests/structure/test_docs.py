"""What the pages say exists: files behind links, commands, options, make targets, presets and build switches;
and the README's Python runs."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import typer.main
from dyno import Engine
from dyno._cli.foreign_flags import FLAGS
from dyno.cli import app as dyno_app
from dyno_tuner.cli.commands import app as tune_app

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "docs/*/*.md", "*/README.md")
    for path in ROOT.glob(pattern)
    if not path.relative_to(ROOT).parts[0].startswith((".", "build"))
)
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
TOOLS = {"dyno": dyno_app, "tune": tune_app}
PROJECT_FILE = r"(?<![\w./…-])((?:docs|benchmarks|tests|csrc|python|tuner)/[\w./-]+\.\w+)"
STAGES = ("gguf", "model", "plan", "ops")
# Options of other programs that the pages speak of.
FOREIGN = {
    "--jinja",
    "--cont-batching",
    "--repack",
    "--models",
    "--poll",
    "--no-op-offload",
    "--lora",
    "--swa-full",
    "--kernel-name-exclude",
    "--spec-type",
    "--cache-ram",
    "--cache-reuse",
    "--kl-divergence-base",
}


@dataclass(frozen=True)
class Command:
    """A command line on a page."""

    where: str
    words: tuple[str, ...]


def snippets(page: Path) -> Iterator[tuple[int, str]]:
    """Line number and text of every line of code: indented or fenced blocks, and code in a sentence."""
    fenced = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            yield number, line.strip()
        else:
            yield from ((number, code) for code in re.findall(r"`([^`]+)`", line))


def commands(program: str) -> list[Command]:
    found = []
    for page in PAGES:
        for number, text in snippets(page):
            for part in re.split(r"&&|;", text):
                part = part.strip()
                if not re.match(rf"{program}( |$)", part):
                    continue
                plain = re.sub(r"[\[\]…]|\.\.\.", "", part)
                words = tuple(shlex.split(plain, comments=True))
                found.append(Command(f"{page.relative_to(ROOT)}:{number}", words))
    return found


def subcommands(command: Any) -> Mapping[str, Any]:
    """Of a group; typer brings a click of its own or uses the installed one, so its classes are not named."""
    return getattr(command, "commands", {})


def options(command: Any) -> set[str]:
    return {name for p in command.params for name in (*p.opts, *p.secondary_opts)} | {"--help"}


def wrong(program: str, line: Command) -> str:
    """What of a command line the program does not have."""
    command = typer.main.get_command(TOOLS[program])
    words = list(line.words[1:])
    # A subcommand, or several as a|b|c; `tune` by itself takes a model and options.
    while subcommands(command) and words and not words[0].startswith("-"):
        if command.name == "tune" and words[0].endswith(".gguf"):
            break
        names = words.pop(0).split("|")
        unknown = [name for name in names if name not in subcommands(command)]
        if unknown:
            return f"no command {unknown[0]!r}"
        if names == ["tune"] and program == "dyno":
            return wrong("tune", Command(line.where, ("tune", *words)))
        command = subcommands(command)[names[0]]
    for word in words:
        if word == "--":  # what follows is another program's
            break
        if word.startswith("-") and len(word) > 1 and not re.match(r"-\d", word):
            option = word.split("=")[0]
            if option not in options(command):
                return f"no option {option!r}"
    if command.name == "explain" and words:
        unknown = [stage for stage in words[0].split("|") if stage not in STAGES]
        if unknown:
            return f"no stage {unknown[0]!r}"
    return ""


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    text = page.read_text(encoding="utf-8")
    broken = []
    for target in LINK.findall(text):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", path):
            continue
        there = (page.parent / path).resolve() if path else page
        if not there.exists():
            broken.append(target)
        elif anchor and there.suffix == ".md":
            headings = re.findall(r"^#+ (.+)$", there.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}
            if anchor not in slugs:
                broken.append(target)
    assert broken == []


@pytest.mark.parametrize("name", NAMES)
def test_pages_and_scripts_named_in_code_exist(name: str) -> None:
    page = ROOT / name
    missing = []
    for number, text in snippets(page):
        for path in re.findall(
            r"(?<![\w./…-])((?:docs|benchmarks|tests|csrc|python|tuner)/[\w./-]+\.\w+)", text
        ):
            # The op that the page adds: tests/build/test_contribute_op.py follows it.
            added = name == "docs/contribute/op.md" and path.startswith("csrc/ops/clamp/")
            if (ROOT / path).exists() == added:
                missing.append(f"{number}: {path}")
    assert missing == []


@pytest.mark.parametrize("program", sorted(TOOLS))
def test_commands_and_options_exist(program: str) -> None:
    lines = commands(program)
    assert len(lines) >= 5
    assert [f"{c.where}: {' '.join(c.words)}: {why}" for c in lines if (why := wrong(program, c))] == []


def test_the_check_sees_what_is_wrong() -> None:
    for program, text in (
        ("dyno", "dyno walk --model x"),
        ("dyno", "dyno run --modle x"),
        ("dyno", "dyno explain plans x.gguf"),
        ("dyno", "dyno tune --budgett 3m"),
        ("dyno", "dyno profiles chekc x"),
        ("tune", "tune --fast"),
        ("tune", "tune difff a b"),
    ):
        assert wrong(program, Command("", tuple(text.split()))), text


def test_options_named_in_sentences_exist() -> None:
    known = {*FOREIGN, *(name for flag in FLAGS for name in flag.names)}
    for app in TOOLS.values():
        pending: list[Any] = [typer.main.get_command(app)]
        while pending:
            command = pending.pop()
            known |= options(command)
            pending += subcommands(command).values()
    for name in ("README.md", *(n for n in NAMES if n.startswith("docs/user/"))):
        for number, text in snippets(ROOT / name):
            if found := re.match(r"--[a-z][a-z-]*", text):
                assert found[0] in known, f"{name}:{number}"


def test_make_targets_presets_and_build_switches_exist() -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    presets = {p["name"] for p in json.loads((ROOT / "CMakePresets.json").read_text())["configurePresets"]}
    switches = " ".join(p.read_text() for p in (ROOT / "csrc" / "cmake").glob("*.cmake"))
    seen = 0
    for page in PAGES:
        for number, text in snippets(page):
            where = f"{page.relative_to(ROOT)}:{number}"
            if made := re.match(r"make ([a-z-]+)", text):
                assert made[1] in targets, where
                seen += 1
            for preset in re.findall(r"--preset (\w+)", text):
                assert preset in presets, where
            for switch in re.findall(r"cmake\.define\.(\w+)|-D((?:GGML|DYNO)_\w+)", text):
                assert re.search(rf"\b{switch[0] or switch[1]}\b", switches), where
                seen += 1
    assert seen >= 6


def test_the_python_of_the_readme_runs(trained_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(code.replace("x.gguf", str(trained_model)), "README.md", "exec"), names)
    assert capsys.readouterr().out.strip()
    assert getattr(names["logits"], "ndim", 0) == 2


def test_the_first_example_shows_no_line_over_and_over() -> None:
    """The prompt of `make demo` and that of the README, with the model that both name."""
    makefile, readme = ((ROOT / name).read_text(encoding="utf-8") for name in ("Makefile", "README.md"))
    demo = re.search(r"printf '([^']+)' \|", makefile)
    page = re.search(r"dyno run (models/\S+) -n (\d+) --prompt \$'([^']+)'", readme)
    assert demo
    assert page
    with Engine(ROOT / page[1], device="cpu", profile=None) as engine:
        for escaped in (demo[1], page[3]):
            prompt = escaped.replace("\\n", "\n")
            text = prompt + "".join(engine.generate(engine.tokenize(prompt), int(page[2]), temperature=0))
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            assert len(lines) >= 5, text
            assert max(map(lines.count, lines)) <= 2, text
            assert max(map(text.split().count, text.split())) <= 6, text
