"""Names for a terminal: hostile characters neither reach it raw nor change a command that it suggests."""

from __future__ import annotations

import subprocess

import pytest
from dyno._shell import escaped, shell_word


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("x.gguf", "x.gguf"),
        ("my models/x.gguf", "'my models/x.gguf'"),
        ("a\n'b\x1b[2J.gguf", r"$'a\n\'b\x1b[2J.gguf'"),
    ],
)
def test_a_path_is_one_word_of_a_shell(path: str, word: str) -> None:
    assert shell_word(path) == word
    printed = subprocess.run(["bash", "-c", f"printf %s {word}"], capture_output=True, text=True, check=True)
    assert printed.stdout == path


def test_control_characters_are_visible() -> None:
    assert escaped("a\x1b[31mb\u202ec\n") == r"a\x1b[31mb\u202ec\n"
    assert escaped("größer · 大") == "größer · 大"
