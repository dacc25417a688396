"""Answers of the exact path that a tune finds from the one before."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from dyno import _core
from dyno_tuner.core.protocol import Configuration, OpContext, TrialStatus
from dyno_tuner.execution.worker import WorkerExecutor
from dyno_tuner.targets.dyno import answers, kept_answers
from dyno_tuner.targets.dyno.target import DynoTarget

if TYPE_CHECKING:
    from collections.abc import Callable

MODEL = Path(__file__).parents[2] / "data" / "tiny" / "qwen3moe-tiny.gguf"
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


@pytest.fixture
def exact(tmp_path: Path) -> Callable[..., None]:
    """Asks for the exact path's answers alone."""

    def ask(model: Path = MODEL, cache: Path = tmp_path / "kept", **options: Any) -> None:
        target = DynoTarget(str(model), cache=str(cache), **options)
        try:
            target._exact()
        finally:
            target.close()

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


def key_of(model: Path, **facts: Any) -> kept_answers.Key:
    return kept_answers.key_of(str(model), [], _core.__file__, facts, vocabulary=1, experts=(0, 0, 0))


def test_one_changed_byte_of_the_file_makes_another_key(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    shutil.copy(MODEL, model)
    os.utime(model, ns=(1, 1))
    before = key_of(model)
    assert key_of(model, driver="1") != before
    data = bytearray(model.read_bytes())
    data[-1] ^= 1
    model.write_bytes(data)
    os.utime(model, ns=(1, 1))
    assert key_of(model) != before


def test_all_files_of_a_split_model_count(tmp_path: Path) -> None:
    parts = [tmp_path / f"m-0000{n}-of-00002.gguf" for n in (1, 2)]
    for part in parts:
        part.write_bytes(b"x")
        os.utime(part, ns=(1, 1))
    before = key_of(parts[0])
    parts[1].write_bytes(b"y")
    os.utime(parts[1], ns=(1, 1))
    assert key_of(parts[0]) != before


def rewritten(file: Path, change: Callable[[dict[str, Any], bytearray], None]) -> None:
    """Changes header and body, and makes the checksum hold again."""
    first, _, rest = file.read_bytes().partition(b"\n")
    header, body = json.loads(first), bytearray(rest)
    change(header, body)
    header["sha256"] = hashlib.sha256(body).hexdigest()
    file.write_bytes(json.dumps(header).encode() + b"\n" + body)


def not_finite(value: float) -> Callable[[Path], None]:
    def change(header: dict[str, Any], body: bytearray) -> None:
        body[400:404] = struct.pack("<f", value)

    return lambda file: rewritten(file, change)


def header_of(**fields: Any) -> Callable[[Path], None]:
    return lambda file: rewritten(file, lambda header, body: header.update(fields))


def expert(number: int) -> Callable[[Path], None]:
    """The last value of the body is an expert of the last group."""

    def change(header: dict[str, Any], body: bytearray) -> None:
        body[-4:] = struct.pack("<i", number)

    return lambda file: rewritten(file, change)


def first_group(at: int, value: Any) -> Callable[[Path], None]:
    def change(header: dict[str, Any], body: bytearray) -> None:
        header["groups"][0][at] = value

    return lambda file: rewritten(file, change)


def flipped(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1000])


def extended(file: Path) -> None:
    with file.open("ab") as stream:
        stream.write(bytes(4096))


def a_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def a_link(file: Path) -> None:
    file.rename(file.with_name("elsewhere"))
    file.symlink_to(file.with_name("elsewhere"))


def a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def an_old_format(file: Path) -> None:
    with file.open("wb") as stream:
        np.savez(stream, count=np.int64(1 << 62), logits0=np.zeros((4, 4), np.float32))


FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "NaN logits": (not_finite(float("nan")), "a logit in it is not finite"),
    "infinite logits": (not_finite(float("inf")), "a logit in it is not finite"),
    "another model": (header_of(model="0" * 64), "it is of another model file"),
    "another engine": (header_of(engine="0" * 64), "it is of another engine"),
    "another vocabulary": (header_of(vocabulary=4), "it is of another vocabulary"),
    "a count of 2^62": (first_group(3, 1 << 62), "it is of other prompts"),
    "a wrong shape": (first_group(3, 1), "it is of other prompts"),
    "a vocabulary of 2^62": (header_of(vocabulary=1 << 62), "it is of another vocabulary"),
    "a number of 5000 digits": (
        lambda file: file.write_bytes(b'{"format": ' + b"9" * 5000 + b"}\n"),
        "its first line is not a header",
    ),
    "a deep header": (lambda file: file.write_bytes(b"[" * 60_000 + b"\n"), "its first line is not a header"),
    "an endless header": (lambda file: file.write_bytes(b"9" * 100_000), "its first line is not a header"),
    "an expert too many": (expert(16), "an expert in it is not one of 16"),
    "an expert before the first": (expert(-1), "an expert in it is not one of 16"),
    "a changed bit": (flipped, "its checksum is wrong"),
    "a cut": (cut, "bytes of answers, not "),
    "more than it should hold": (extended, "bytes of answers, not "),
    "an empty file": (lambda file: file.write_bytes(b""), "its first line is not a header"),
    "the earlier format": (an_old_format, "its first line is not a header"),
    "a pipe": (a_pipe, "it is not a regular file"),
    "a link": (a_link, "it is a symbolic link"),
    "a folder": (a_folder, "it is not a regular file"),
    "a file that others may write": (lambda file: file.chmod(0o666), "others may write to it (mode 0666)"),
    "a file that cannot be read": (lambda file: file.chmod(0), "Permission denied"),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, kept_answers.Key]:
    """A file that is as it should be, and its key."""
    where = tmp_path_factory.mktemp("sound")
    target = DynoTarget(str(MODEL), scratch=str(where))
    try:
        target._exact()
        key = target._exact_key()
    finally:
        target.close()
    assert key is not None
    return where / "exact.answers", key


@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_hold_is_named_and_not_taken(
    fault: str, sound: tuple[Path, kept_answers.Key], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept, key = Path(shutil.copy2(sound[0], tmp_path)), sound[1]
    assert kept_answers.load(kept, key) is not None
    spoil, reason = FAULTS[fault]
    spoil(kept)
    if fault == "a file that cannot be read" and os.access(kept, os.R_OK):
        pytest.skip("this user may read everything")
    assert kept_answers.load(kept, key) is None
    (line,) = [r.getMessage() for r in caplog.records if r.name == "dyno.tuner"]
    assert line.startswith(f"{kept}: ")
    assert reason in line
    assert line.endswith("; computing the exact answers again")
    assert "\n" not in line


def test_a_file_that_shrinks_while_it_is_read(sound: tuple[Path, kept_answers.Key], tmp_path: Path) -> None:
    kept, key = Path(shutil.copy2(sound[0], tmp_path)), sound[1]
    cut(kept)
    with kept.open("rb") as stream, pytest.raises(kept_answers.Unsound, match="became shorter"):
        kept_answers._read(stream, sound[0].stat().st_size, key)


def test_nothing_is_said_where_there_is_no_file(
    sound: tuple[Path, kept_answers.Key], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert kept_answers.load(tmp_path / "none.answers", sound[1]) is None
    assert caplog.records == []


def test_what_is_damaged_is_computed_again(
    computed: list[int], quality: Callable[..., Any], tmp_path: Path
) -> None:
    whole = quality()
    (kept,) = (tmp_path / "kept").iterdir()
    flipped(kept)
    again = quality()
    assert (again.digest, again.groups) == (whole.digest, whole.groups)
    assert len(computed) == 2
    assert quality().digest == whole.digest
    assert len(computed) == 2  # the file was written anew


def test_the_answers_of_another_model_under_the_right_name(
    computed: list[int], exact: Callable[..., None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = tmp_path / "other.gguf"
    shutil.copy(MODEL, other)
    data = bytearray(other.read_bytes())
    data[-1] ^= 1
    other.write_bytes(data)
    exact()
    (mine,) = (tmp_path / "kept").iterdir()
    exact(other)
    (foreign,) = (f for f in (tmp_path / "kept").iterdir() if f != mine)
    shutil.copy(foreign, mine)
    exact()
    assert len(computed) == 3
    assert "it is of another model file" in caplog.text


def test_the_file_of_another_user_is_not_taken(
    computed: list[int],
    exact: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    exact()
    monkeypatch.setattr(os, "geteuid", lambda: 4242)  # to whom the file that was just written is another's
    exact()
    assert len(computed) == 2
    assert f"it is owned by user {os.getuid()}, not by user 4242" in caplog.text


def test_only_the_user_can_read_what_is_kept(
    computed: list[int], exact: Callable[..., None], tmp_path: Path
) -> None:
    where = tmp_path / "deep" / "kept"
    before = os.umask(0)
    try:
        exact(cache=where)
        where.chmod(0o755)  # as an earlier version made it
        exact(cache=where, check_seed=1)
    finally:
        os.umask(before)
    assert stat.S_IMODE(where.stat().st_mode) == 0o700
    assert [stat.S_IMODE(f.stat().st_mode) for f in where.iterdir()] == [0o600, 0o600]


def test_what_is_not_finite_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, computed: list[int], tmp_path: Path
) -> None:
    real = answers.exact_answers

    def spoilt(*args: Any, **kwargs: Any) -> Any:
        logits, routing = real(*args, **kwargs)
        logits[0][0, 0] = np.nan
        return logits, routing

    monkeypatch.setattr(answers, "exact_answers", spoilt)
    (tmp_path / "scratch").mkdir()
    target = DynoTarget(str(MODEL), cache=str(tmp_path / "kept"), scratch=str(tmp_path / "scratch"))
    target._exact()
    target.close()
    assert not (tmp_path / "kept").exists()
    assert list((tmp_path / "scratch").iterdir()) == []


def test_the_line_reaches_the_tuner(
    computed: list[int], exact: Callable[..., None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The answers are read in a worker process, whose own output nobody sees."""
    exact()
    (kept,) = (tmp_path / "kept").iterdir()
    cut(kept)
    executor = WorkerExecutor("dyno", {"model": str(MODEL), "cache": str(tmp_path / "kept")})
    try:
        for _ in range(2):
            assert executor.quality(Configuration({}), CONTEXT, 60.0).status is TrialStatus.OK
    finally:
        executor.close()
    (line,) = [r.getMessage() for r in caplog.records]
    assert line.startswith(f"{kept}: it holds ")
    assert line.endswith("; computing the exact answers again")


def test_a_folder_that_cannot_be_written_costs_nothing_else(
    computed: list[int], quality: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    assert quality(cache=tmp_path / "file" / "kept").digest == quality().digest
    assert len(computed) == 2


def test_what_was_used_longest_ago_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def key(name: str, rows: int = 1000) -> kept_answers.Key:
        return kept_answers.Key(2, name, "", 1, (0, 0, 0), ((1, 1, rows, rows, ""),))

    def exact(rows: int = 1000) -> Any:
        return [np.zeros((rows, 1), np.float32)], [None]

    def names() -> list[str]:
        return [n for n in "abcdefgh" if (tmp_path / key(n).name).exists()]

    monkeypatch.setattr(kept_answers, "MOST_BYTES", 10_000)
    for number, name in enumerate("ab"):
        kept_answers.keep(tmp_path, key(name), exact())
        os.utime(tmp_path / key(name).name, ns=(number, number))
    assert kept_answers.load(tmp_path / key("a").name, key("a")) is not None  # used: it is the newer one now
    kept_answers.keep(tmp_path, key("c"), exact())
    assert names() == ["a", "c"]
    kept_answers.keep(tmp_path, key("d", 10_000), exact(10_000))
    assert names() == ["a", "c"]
    (tmp_path / "old.npz").write_bytes(bytes(3000))  # of an earlier version
    (tmp_path / "half.answers.new").write_bytes(bytes(3000))  # of a tune that was killed
    for old in ("old.npz", "half.answers.new"):
        os.utime(tmp_path / old, ns=(1, 1))
    kept_answers.keep(tmp_path, key("e"), exact())
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".answers", ".answers"]
    monkeypatch.setattr(kept_answers, "MOST_BYTES", 1 << 30)
    monkeypatch.setattr(kept_answers, "MOST_FILES", 3)
    for name in "fgh":
        kept_answers.keep(tmp_path, key(name), exact())
    assert names() == ["f", "g", "h"]


def test_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kept_answers.folder() == tmp_path / "dyno" / "answers"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert kept_answers.folder() == tmp_path / "home" / ".cache" / "dyno" / "answers"
