"""The seeds of the fuzz targets are what their names say."""

from __future__ import annotations

import importlib.util
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dyno import _core
from dyno.errors import GgufError

_spec = importlib.util.spec_from_file_location("make_corpus", Path(__file__).with_name("make_corpus.py"))
assert _spec is not None
assert _spec.loader is not None
make_corpus = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make_corpus)


@pytest.fixture(scope="module")
def seeds() -> dict[str, bytes]:
    return make_corpus.sessions()


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


def _write_shards(folder: Path, files: list[bytes]) -> Path:
    paths = [folder / f"model-{number:05}-of-{len(files):05}.gguf" for number in range(1, len(files) + 1)]
    for path, data in zip(paths, files, strict=True):
        path.write_bytes(data)
    return paths[0]


@pytest.mark.parametrize("name", sorted(make_corpus.splits()))
def test_shards_open(tmp_path: Path, name: str) -> None:
    assert len(_core.Gguf(_write_shards(tmp_path, make_corpus.splits()[name])).tensors()) == 5


@pytest.mark.parametrize("name", sorted(make_corpus.hostile_splits()))
def test_hostile_shards_do_not(tmp_path: Path, name: str) -> None:
    with pytest.raises(GgufError):
        _core.Gguf(_write_shards(tmp_path, make_corpus.hostile_splits()[name]))


@pytest.mark.parametrize("shape", make_corpus.SHAPES, ids=lambda shape: shape.name)
def test_models_of_the_session_target_run(tmp_path: Path, shape: Any) -> None:
    """A seed that is turned down tests the reader alone."""
    path = make_corpus.random_model(tmp_path / "seed.gguf", shape)
    session = _core.Session(path, context={"ctx": 8})
    logits, _ = session.decode([(0, np.arange(5, dtype=np.int32))])
    assert np.isfinite(logits).all()


def test_seeds_have_every_architecture_type_and_split_files(seeds: dict[str, bytes]) -> None:
    """Decoded as the target does: settings, number of files less one, their sizes, the files."""
    assert {shape.architecture for shape in make_corpus.SHAPES} == set(_core.architectures())
    split = 0
    for data in seeds.values():
        count = data[64] + 1
        sizes = struct.unpack_from(f"<{count}I", data, 65)
        at = 65 + 4 * count
        assert at + sum(sizes) == len(data)
        for size in sizes:
            assert data[at : at + 4] == b"GGUF"
            at += size
        split += count > 1
    assert split >= 5
    assert sum(map(len, seeds.values())) < 30 << 20


def test_seeds_have_every_weight_type(tmp_path: Path) -> None:
    used = set()
    for shape in make_corpus.SHAPES:
        file = _core.Gguf(make_corpus.random_model(tmp_path / "seed.gguf", shape))
        used |= {tensor["dtype"] for tensor in file.tensors()}
    weights = {"f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "iq4_nl", "iq4_xs", "mxfp4"}
    assert used >= weights | {f"q{bits}_k" for bits in range(2, 7)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["0"], "SECONDS is '0'; expected a positive number"),
        (["1x"], "SECONDS is '1x'; expected a positive number"),
        (["5", "models"], "'models' is nothing to run; expected gguf, session or suite"),
    ],
)
def test_the_script_refuses_what_it_cannot_run(arguments: list[str], message: str) -> None:
    script = Path(__file__).with_name("run.sh")
    done = subprocess.run([str(script), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert message in done.stderr


def test_the_script_names_an_interpreter_that_is_not_there() -> None:
    script = Path(__file__).with_name("run.sh")
    environment = os.environ | {"PYTHON": "no-such-python"}
    done = subprocess.run([str(script)], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 2
    assert "PYTHON is 'no-such-python', which is no program" in done.stderr


@pytest.mark.parametrize(
    ("log", "count"),
    [
        (
            "#2 INITED cov: 1\nstat::number_of_executed_units: 1234567\nstat::average_exec_per_sec: 9\n",
            1234567,
        ),
        ("Done 4200 runs on 17 files, seed 1\n", 4200),
        (
            "#2\tINITED cov: 3\n#65536\tpulse  cov: 9\n==1==ERROR: AddressSanitizer: heap-buffer-overflow\n",
            65536,
        ),
    ],
)
def test_executions_are_counted_and_added_up(tmp_path: Path, log: str, count: int) -> None:
    script, path, report = Path(__file__).with_name("count.py"), tmp_path / "a.log", tmp_path / "fuzz.json"
    path.write_text(log)
    for run, options in enumerate(([], ["--crashed"]), 1):
        words = [sys.executable, str(script), str(path), "gguf", "--json", str(report), *options]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        assert f"{count:,} executions, {run - 1} crashes" in done.stdout
        found = json.loads(report.read_text())
        assert [r["executions"] for r in found["runs"]] == [count] * run
        assert found["totals"] == {"gguf": {"executions": count * run, "crashes": run - 1}}


def test_a_log_without_a_count_is_refused(tmp_path: Path) -> None:
    script, path = Path(__file__).with_name("count.py"), tmp_path / "a.log"
    path.write_text("ninja: error\n")
    words = [sys.executable, str(script), str(path), "gguf"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "the log tells of no execution" in done.stderr
