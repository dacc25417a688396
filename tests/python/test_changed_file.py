"""A model file that changes while it is open: an error, never a dead process or a wrong answer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import dyno
import numpy as np
import pytest
from dyno import _core
from dyno.errors import GgufError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TOKENS = list(range(3, 40))
OPEN = {"device": "cpu", "profile": None, "cpu_repack": False, "ctx": 64}
WRITTEN = r"model\.gguf: the file changed while it was open: it was written to.*Open the model again"
SHORTER = r"model\.gguf: the file changed while it was open: it had \d+ bytes and has \d+"


@pytest.fixture
def model(trained_model: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil, so old that a write moves its time by any clock."""
    path = tmp_path / "model.gguf"
    shutil.copyfile(trained_model, path)
    os.utime(path, (1e9, 1e9))
    return path


def overwrite(path: Path) -> None:
    """The second half of the file becomes NaN, its size stays."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size // 2)
        file.write(b"\xff" * (size - size // 2))


def shorten(path: Path) -> None:
    os.truncate(path, 4096)


def script(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs `code` in a process of its own, which a signal may end."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


# ---- Truncated ---------------------------------------------------------------------------------------------
def test_a_lost_page_is_an_error_and_no_signal(model: Path) -> None:
    done = script(
        """
import os, sys
from dyno import _core
from dyno.errors import GgufError
path = sys.argv[1]
file = _core.Gguf(path)
name = max(file.tensors(), key=lambda t: t["offset"])["name"]
file.raw(name)
os.truncate(path, os.path.getsize(path) // 2)
for read in (file.raw, file.dequantize):
    try:
        read(name)
    except GgufError as error:
        print(error)
""",
        model,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the file changed while it was open") == 2, done.stdout


def test_pages_lost_while_threads_read_them_end_the_call_with_an_error(model: Path) -> None:
    done = script(
        """
import os, signal, sys
import dyno
from dyno.errors import GgufError
path = sys.argv[1]
engine = dyno.Engine(path, device="cpu", profile=None, cpu_repack=False, threads=3, threads_batch=3, ubatch=1)
engine.logits([1, 2, 3])
# Handlers of signals run between two passes.
signal.signal(signal.SIGALRM, lambda *_: os.truncate(path, 4096))
signal.setitimer(signal.ITIMER_REAL, 0.001)
try:
    engine.logits([5] * (engine.settings["ctx"] - 3), reset=False, rows="last")
except GgufError as error:
    print(error)
assert os.path.getsize(path) == 4096, "the decode was over before the file changed"
print("position", engine.position())
try:
    list(engine.generate("def", max_tokens=2))
except GgufError as error:
    print(error)
engine.reset()  # the slot is free again
""",
        model,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("bytes and has 4096") == 2, done.stdout
    assert "position 3\n" in done.stdout


def test_a_truncated_file_is_named_with_both_sizes_and_the_way_out(model: Path) -> None:
    with dyno.Engine(model, **OPEN) as engine:
        engine.logits(TOKENS)
        os.truncate(model, model.stat().st_size - 1)
        with pytest.raises(GgufError, match=SHORTER) as caught:
            engine.logits(TOKENS)
        assert "rename a new file to its name" in str(caught.value)
        assert "mmap=false" in str(caught.value)
        with pytest.raises(GgufError, match=SHORTER):
            engine.diagnostics.greedy_after(TOKENS)
        with pytest.raises(GgufError, match=SHORTER):
            engine.diagnostics.time_ops(TOKENS)


def test_opening_beside_a_writer_is_an_error_or_a_model(model: Path) -> None:
    done = script(
        """
import os, sys
import dyno
from dyno.errors import DynoError, GgufError
path = sys.argv[1]
whole = open(path, "rb").read()
tokens = [1, 2, 3]
expected = dyno.Engine(path, device="cpu", profile=None).logits(tokens)
ready, go = os.pipe()
writer = os.fork()
if writer == 0:
    os.write(go, b"x")
    while os.getppid() != 1:
        with open(path, "r+b") as file:
            file.truncate(len(whole) // 3)
            file.seek(len(whole) // 3)
            file.write(whole[len(whole) // 3 :])
    os._exit(0)
os.read(ready, 1)
outcomes = []
try:
    for _ in range(25):
        try:
            engine = dyno.Engine(path, device="cpu", profile=None, mmap=len(outcomes) % 2 == 0)
            outcomes.append("same" if (engine.logits(tokens) == expected).all() else "WRONG")
        except DynoError as error:
            outcomes.append(type(error).__name__)
finally:
    os.kill(writer, 9)
    os.waitpid(writer, 0)
print(sorted(set(outcomes)))
assert set(outcomes) <= {"same", "GgufError"} and len(outcomes) == 25
""",
        model,
    )
    assert done.returncode == 0, done.stdout + done.stderr


# ---- Overwritten, replaced ---------------------------------------------------------------------------------
def test_an_overwritten_file_is_no_answer(model: Path) -> None:
    with dyno.Engine(model, **OPEN) as engine:
        engine.logits(TOKENS)
        overwrite(model)
        with pytest.raises(GgufError, match=WRITTEN):
            engine.logits(TOKENS)
        assert engine.position() == 0
        with pytest.raises(GgufError, match=WRITTEN):
            list(engine.generate("def main", max_tokens=3))
        assert engine.tokenize("def main") != []  # its vocabulary is the one that was opened


def test_a_replaced_file_is_not_read_by_an_open_engine(model: Path, tmp_path: Path) -> None:
    with dyno.Engine(model, **OPEN) as engine:
        with dyno.Engine(model, **OPEN) as same:
            expected, ids = same.logits(TOKENS), same.tokenize("def main():")
        new = tmp_path / "new.gguf"
        new.write_bytes(b"another model")
        new.replace(model)
        assert engine.tokenize("def main():") == ids
        np.testing.assert_array_equal(engine.logits(TOKENS), expected)


def test_a_vocabulary_that_is_written_over_after_opening_stays_what_it_was(model: Path) -> None:
    file = _core.Gguf(model)
    before = file.get("tokenizer.ggml.tokens")
    header = min(t["offset"] for t in file.tensors())
    with model.open("r+b") as out:
        out.write(b"\xff" * header)
    assert file.get("tokenizer.ggml.tokens") == before
    with pytest.raises(GgufError, match="written to"):
        file.check_unchanged()


# ---- Read into memory --------------------------------------------------------------------------------------
@pytest.mark.parametrize("change", [shorten, overwrite])
def test_without_mmap_a_change_of_the_file_changes_nothing(
    model: Path, change: Callable[[Path], None]
) -> None:
    with dyno.Engine(model, **OPEN, mmap=False) as engine:
        expected = engine.logits(TOKENS)
        text = "".join(engine.generate("def main", max_tokens=8))
        change(model)
        np.testing.assert_array_equal(engine.logits(TOKENS), expected)
        assert "".join(engine.generate("def main", max_tokens=8)) == text


def test_without_mmap_no_weight_is_a_page_of_the_file(model: Path) -> None:
    with (
        dyno.Engine(model, **OPEN, plan_only=True) as mapped,
        dyno.Engine(model, **OPEN, plan_only=True, mmap=False) as read,
    ):
        assert "mapped from the file" in mapped.describe_plan()
        assert "mapped from the file" not in read.describe_plan()
        with pytest.raises(dyno.errors.OutOfMemoryError, match=r"mmap=true \(frees"):
            read._open().check_memory(1 << 20)
    with dyno.Engine(model, **OPEN) as mapped, dyno.Engine(model, **OPEN, mmap=False) as read:
        np.testing.assert_array_equal(mapped.logits(TOKENS), read.logits(TOKENS))


def test_a_file_that_was_read_whole_does_not_change(model: Path) -> None:
    file = _core.Gguf(model, mmap=False)
    name = file.tensors()[-1]["name"]
    before = file.raw(name)
    os.truncate(model, 4096)
    np.testing.assert_array_equal(file.raw(name), before)
    np.testing.assert_array_equal(file.raw(name), before)
    file.check_unchanged()


# ---- Whose signal it is ------------------------------------------------------------------------------------
@pytest.mark.parametrize("known", [True, False], ids=["handler", "default"])
def test_signals_of_others_go_where_they_went_before(model: Path, tmp_path: Path, known: bool) -> None:
    other = tmp_path / "other"
    other.write_bytes(bytes(1 << 16))
    done = script(
        """
import mmap, os, signal, sys
from dyno import _core
if sys.argv[3] == "True":
    signal.signal(signal.SIGBUS, lambda *_: print("handled", flush=True))
file = _core.Gguf(sys.argv[1])
if sys.argv[3] == "True":
    os.kill(os.getpid(), signal.SIGBUS)
    sys.exit(0)
with open(sys.argv[2], "r+b") as other:
    view = mmap.mmap(other.fileno(), 0)
    other.truncate(0)
    print("before", flush=True)
    view[8192]
    print("after", flush=True)
""",
        model,
        other,
        known,
    )
    if known:
        assert (done.returncode, done.stdout) == (0, "handled\n"), done.stderr
    else:
        assert (done.returncode, done.stdout) == (-7, "before\n"), done.stderr
