"""Arguments as newcomers write them: they work, or an error names the value and the remedy."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import dyno
import pytest
from dyno import GgufError, PlanError


@pytest.fixture
def tiny(tiny_dir: Path) -> Path:
    return tiny_dir / "qwen3moe-tiny.gguf"


# ---- the path of the model ----


def test_a_path_may_begin_with_the_home_folder(
    tmp_path: Path, tiny: Path, trained_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copy(tiny, tmp_path / "x.gguf")
    for path in ("~/x.gguf", Path("~/x.gguf"), b"~/x.gguf"):
        with dyno.Engine(path, profile=None, plan_only=True) as engine:  # type: ignore[arg-type]
            assert engine.path == str(tmp_path / "x.gguf")
    shutil.copy(trained_model, tmp_path / "y.gguf")
    assert len(dyno.Tokenizer.from_gguf("~/y.gguf")) == len(dyno.Tokenizer.from_gguf(trained_model))


def test_a_path_need_not_be_utf8(tmp_path: Path, tiny: Path) -> None:
    path = os.fsencode(tmp_path) + b"/\xff.gguf"
    shutil.copy(tiny, path)
    for each in (path, os.fsdecode(path)):
        dyno.Engine(each, profile=None, plan_only=True).close()  # type: ignore[arg-type]


@pytest.mark.parametrize("path", [None, 5, ["x.gguf"], "", b"", "a\0b"], ids=repr)
def test_what_is_no_path(path: Any) -> None:
    for opens in (dyno.Engine, dyno.Tokenizer.from_gguf):
        with pytest.raises(PlanError, match=r"path is .*; expected the path of a GGUF file"):
            opens(path)


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("https://example.org/x.gguf", "does not download models. Download the file, and give its path"),
        (Path("hf://me/x.gguf"), "does not download models. Download the file, and give its path"),
        ("me/my-model", "dyno opens local GGUF files, and does not download models"),
        ("~nobody-has-this-name/x.gguf", "your shell has not replaced the ~"),
    ],
    ids=str,
)
def test_a_path_of_no_file_says_what_to_do(
    path: Any, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(GgufError, match=f"cannot open .*: No such file or directory; .*{advice}"):
        dyno.Engine(path)
    with pytest.raises(GgufError, match=r"/absent\.gguf: No such file or directory$"):
        dyno.Engine(tmp_path / "absent.gguf")
