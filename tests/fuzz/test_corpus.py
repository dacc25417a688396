"""The seeds of the fuzz target are what their names say."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from dyno import _core
from dyno.errors import GgufError

_spec = importlib.util.spec_from_file_location("make_corpus", Path(__file__).with_name("make_corpus.py"))
assert _spec is not None
assert _spec.loader is not None
make_corpus = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make_corpus)


@pytest.mark.parametrize("name", sorted(make_corpus.well_formed()))
def test_well_formed_seeds_open(tmp_path: Path, name: str) -> None:
    path = tmp_path / "seed.gguf"
    path.write_bytes(make_corpus.well_formed()[name])
    assert _core.Gguf(path).describe()


@pytest.mark.parametrize("name", sorted(make_corpus.hostile()))
def test_hostile_seeds_do_not(tmp_path: Path, name: str) -> None:
    path = tmp_path / "seed.gguf"
    path.write_bytes(make_corpus.hostile()[name])
    with pytest.raises(GgufError):
        _core.Gguf(path)
