"""Answers of the exact path that a tune finds from the one before."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from dyno import _core
from dyno_tuner.target import Configuration, OpContext, TrialStatus
from dyno_tuner.targets import answers, kept_answers
from dyno_tuner.targets.dyno import DynoTarget

if TYPE_CHECKING:
    from collections.abc import Callable

MODEL = Path(__file__).parents[1] / "data" / "tiny" / "qwen3moe-tiny.gguf"
CONTEXT = OpContext("k")


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One item for every time that the exact path computes; whatever it takes is worth keeping."""
    times: list[int] = []
    real = answers.exact_answers

    def counted(*args: Any, **kwargs: Any) -> Any:
        times.append(1)
        return real(*args, **kwargs)

    monkeypatch.setattr(answers, "exact_answers", counted)
    monkeypatch.setattr(kept_answers, "WORTH_SECONDS", 0.0)
    return times


@pytest.fixture
def quality(tmp_path: Path) -> Callable[..., Any]:
    """Of the defaults, in a target of its own as in a fresh tune."""

    def ask(model: Path = MODEL, cache: Path = tmp_path / "kept", **options: Any) -> Any:
        target = DynoTarget(str(model), cache=str(cache), **options)
        try:
            found = target.quality(Configuration({}), CONTEXT)
        finally:
            target.close()
        assert found.status is TrialStatus.OK
        return found

    return ask


def test_the_second_tune_finds_what_the_first_has_computed(
    computed: list[int], quality: Callable[..., Any]
) -> None:
    first, second = quality(), quality()
    assert computed == [1]
    assert (first.digest, first.mean_kld, first.groups) == (second.digest, second.mean_kld, second.groups)


def test_another_file_or_other_passages_are_computed(
    computed: list[int], quality: Callable[..., Any], tmp_path: Path
) -> None:
    model = tmp_path / "m.gguf"
    shutil.copy(MODEL, model)
    quality(model)
    quality(model, check_seed=1)
    assert len(computed) == 2
    os.utime(model, ns=(1, 1))  # written anew, as far as can be seen
    quality(model)
    assert len(computed) == 3
    quality(model, settings={"threads": 1})
    assert len(computed) == 4


def test_one_changed_byte_of_the_file_makes_another_key(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    shutil.copy(MODEL, model)
    os.utime(model, ns=(1, 1))
    before = kept_answers.key_of(str(model), [], _core.__file__, {})
    assert kept_answers.key_of(str(model), [], _core.__file__, {"driver": "1"}) != before
    data = bytearray(model.read_bytes())
    data[-1] ^= 1
    model.write_bytes(data)
    os.utime(model, ns=(1, 1))
    assert kept_answers.key_of(str(model), [], _core.__file__, {}) != before


def test_all_files_of_a_split_model_count(tmp_path: Path) -> None:
    parts = [tmp_path / f"m-0000{n}-of-00002.gguf" for n in (1, 2)]
    for part in parts:
        part.write_bytes(b"x")
        os.utime(part, ns=(1, 1))
    before = kept_answers.key_of(str(parts[0]), [], _core.__file__, {})
    parts[1].write_bytes(b"y")
    os.utime(parts[1], ns=(1, 1))
    assert kept_answers.key_of(str(parts[0]), [], _core.__file__, {}) != before


def test_what_is_damaged_counts_as_none(
    computed: list[int], quality: Callable[..., Any], tmp_path: Path
) -> None:
    whole = quality()
    (kept,) = (tmp_path / "kept").glob("*.npz")
    data = bytearray(kept.read_bytes())
    data[len(data) // 2] ^= 1
    kept.write_bytes(data)
    assert quality().digest == whole.digest
    assert len(computed) == 2
    kept.write_bytes(data[:100])
    assert kept_answers.load(kept) is None
    assert kept_answers.load(tmp_path / "none.npz") is None


def test_a_folder_that_cannot_be_written_costs_nothing_else(
    computed: list[int], quality: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    assert quality(cache=tmp_path / "file" / "kept").digest == quality().digest
    assert len(computed) == 2


def test_what_was_used_longest_ago_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = ([np.zeros(1000, np.float32)], [None])
    monkeypatch.setattr(kept_answers, "MOST_BYTES", 10_000)
    for number, key in enumerate(("a", "b")):
        kept_answers.keep(tmp_path, key, exact)
        os.utime(tmp_path / f"{key}.npz", ns=(number, number))
    assert kept_answers.load(tmp_path / "a.npz") is not None  # used: it is the newer one now
    kept_answers.keep(tmp_path, "c", exact)
    assert sorted(p.stem for p in tmp_path.glob("*.npz")) == ["a", "c"]
    kept_answers.keep(tmp_path, "d", ([np.zeros(10_000, np.float32)], [None]))
    assert not (tmp_path / "d.npz").exists()


def test_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kept_answers.folder() == tmp_path / "dyno" / "answers"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert kept_answers.folder() == tmp_path / "home" / ".cache" / "dyno" / "answers"
