"""The rules of CONTRIBUTING.md, "How we write", as far as a test can count: sentences that begin with "What",
dropped nouns, and long sentences on public pages; docstrings that begin with "Args:"; comments that begin
with "What"; messages with dropped nouns; entries of the changelog."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    str(path.relative_to(ROOT))
    for pattern in ("README.md", "CONTRIBUTING.md", "docs/*.md", "docs/*/*.md", "*/README.md")
    for path in ROOT.glob(pattern)
    if not path.relative_to(ROOT).parts[0].startswith((".", "build"))
)
PHRASES = (r"^(?:What|Whatever)\b[^?]*$", r"\bthose of\b", r"\bis none\b", r"\bis (?:said|told)\b")
MOST_WORDS = 30

# Exceptions by page: how often a phrase occurs, and how many sentences are longer. The numbers only fall.
PHRASES_LEFT: dict[str, int] = {}
LONG_LEFT: dict[str, int] = {}


def prose(page: str) -> list[str]:
    """The sentences of a page, without code, tables, quotes of code and headings."""
    text = (ROOT / page).read_text(encoding="utf-8")
    text = re.sub(r"```.*?```", "\n\n", text, flags=re.DOTALL)
    text = re.sub(r"^(?: {4,}|\||#|<).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"“[^”]*”|\"[^\"\n]*\"|`[^`]*`", "x", text)
    paragraphs = re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.)\s", text)
    return [
        sentence
        for paragraph in paragraphs
        for sentence in re.split(r"(?<=[.!?:;])\s+(?=[A-Z*`x])", " ".join(paragraph.split()))
        if sentence
    ]


@pytest.mark.parametrize("page", PAGES)
def test_no_noun_is_dropped(page: str) -> None:
    found = [s for s in prose(page) for phrase in PHRASES if re.search(phrase, s)]
    limit = PHRASES_LEFT.get(page, 0)
    assert len(found) <= limit, "\n".join(found)
    assert len(found) == limit, f"{page} has {len(found)} such sentences: lower its number in PHRASES_LEFT"


@pytest.mark.parametrize("page", PAGES)
def test_sentences_are_short(page: str) -> None:
    found = [s for s in prose(page) if len(s.split()) > MOST_WORDS]
    limit = LONG_LEFT.get(page, 0)
    assert len(found) <= limit, "\n".join(found)
    assert len(found) == limit, f"{page} has {len(found)} long sentences: lower its number in LONG_LEFT"


def test_the_count_sees_what_it_counts() -> None:
    assert any(re.search(PHRASES[0], s) for s in ["What it takes is time."])
    assert not re.search(PHRASES[0], "What is new?")
    assert re.search(PHRASES[1], "the ops and those of the list")


def test_docstrings_begin_with_what_the_thing_is() -> None:
    found = []
    for folder in ("python/dyno", "tuner/dyno_tuner"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.Module):
                    doc = ast.get_docstring(node) or ""
                    if doc.startswith(("Args:", "What ", "Whatever ")):
                        found.append(f"{path.relative_to(ROOT)}: {doc.splitlines()[0]}")
    assert not found, "\n".join(found)


SOURCES = (
    *ROOT.glob("csrc/**/*"),
    *(p for d in ("python", "tuner", "tests", "benchmarks") for p in ROOT.glob(f"{d}/**/*")),
)
CODE = sorted(
    p for p in SOURCES if p.suffix in (".h", ".cpp", ".cu", ".cuh", ".py", ".def") and "data" not in p.parts
)
COMMENT = re.compile(r"^\s*(?://+|#|/?\*+)\s*(?:What|Whatever) (?!.*\?)")
# Texts of messages: a dropped noun, or "is no multiple" and "no JSON" instead of "is not".
MESSAGE = re.compile(
    r"\"[^\"]*\b(?:is none of|(?:is|are) no (?:multiple|list|dict|type|number|row|profile)"
    r"|(?<!printed )no (?:valid|JSON|XML|UTF-8))\b[^\"]*\""
)


def test_no_comment_begins_with_what() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in CODE
        for line in lines(path)
        if COMMENT.match(line)
    ]
    assert not found, "begin with a noun: " + "\n".join(found)


def test_messages_have_their_nouns() -> None:
    folders = ("csrc", "python", "tuner")
    code = [p for p in CODE if p.relative_to(ROOT).parts[0] in folders]
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in code
        for line in lines(path)
        if MESSAGE.search(line) and '"""' not in line
    ]
    assert not found, 'write "is not a multiple of": ' + "\n".join(found)


def test_each_entry_of_a_release_is_one_short_line() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").partition("\n## 0.")[2]
    wrapped = [line for line in text.splitlines() if re.match(r"  \S", line)]
    assert not wrapped, "an entry has one line: " + "\n".join(wrapped)
    long = [line for line in text.splitlines() if len(line) > 145]
    assert not long, "shorten: " + "\n".join(long)
    found = [
        line for line in text.splitlines() if any(re.search(p, line.removeprefix("- ")) for p in PHRASES)
    ]
    assert not found, "\n".join(found)


def lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


# First words of the docstring of a class that does not begin with what the class is.
NOT_A_THING = re.compile(
    r"(?:What|How|Where|Whether|Which|Of|As|Appends|Builds|Carries|Collects|Compares|Compiles|Draws|Encodes|Hands|Holds"
    r"|Keeps|Lives|Makes|Measures|Passes|Runs|Sends|Solves|Sweeps|Takes|Turns|Watches|Writes)\b"
)


def test_the_docstring_of_a_class_begins_with_what_it_is() -> None:
    found = []
    for path in (
        p for p in CODE if p.suffix == ".py" and p.relative_to(ROOT).parts[0] in ("python", "tuner")
    ):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and NOT_A_THING.match(doc := ast.get_docstring(node) or ""):
                found.append(f"{path.relative_to(ROOT)}: {node.name}: {doc.splitlines()[0]}")
    assert not found, "\n".join(found)
