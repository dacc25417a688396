from __future__ import annotations

import gzip
import json
import os
import resource
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest
from dyno_tuner.core.errors import JournalError
from dyno_tuner.output.progress import Progress
from dyno_tuner.record.journal import Journal, decode, encode, load, of_device, sha256
from dyno_tuner.run.continuation import FORMAT, open_journal

if TYPE_CHECKING:
    from pathlib import Path

RECORDS = [{"op": "visit", "key": f"k{i}", "text": 'é\n"{}' * i, "x": i / 3} for i in range(4)]


def _written(path: Path) -> bytes:
    with Journal(path) as journal:
        for record in RECORDS:
            journal.append(record)
    return path.read_bytes()


def test_every_line_is_json_and_reads_back(tmp_path: Path) -> None:
    data = _written(tmp_path / "j")
    assert load(tmp_path / "j").records == RECORDS
    assert [json.loads(line)["record"] for line in data.splitlines()] == RECORDS


def test_a_cut_at_any_byte_loses_only_the_record_that_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "j"
    data = _written(path)
    ends = [i + 1 for i, byte in enumerate(data) if byte == 0x0A]
    for cut in range(len(data) + 1):
        path.write_bytes(data[:cut])
        whole = sum(end <= cut for end in ends)
        # A line that lacks nothing but its newline is whole, too.
        whole += cut + 1 in ends
        assert load(path).records == RECORDS[:whole], cut


def test_a_run_goes_on_after_a_cut(tmp_path: Path) -> None:
    path = tmp_path / "j"
    data = _written(path)
    for cut in (1, len(data) // 2, len(data) - 2):
        path.write_bytes(data[:cut])
        kept = load(path).records
        with Journal(path) as journal:
            journal.append({"op": "after"})
        assert load(path).records == [*kept, {"op": "after"}]


def test_a_flipped_bit_costs_one_record(tmp_path: Path) -> None:
    path = tmp_path / "j"
    data = bytearray(_written(path))
    third = data.split(b"\n")
    position = len(third[0]) + len(third[1]) + 2 + 40
    data[position] ^= 0x10
    path.write_bytes(bytes(data))
    loaded = load(path)
    assert loaded.damaged == 1
    assert loaded.records == RECORDS[:2] + RECORDS[3:]


@pytest.mark.parametrize(
    "line", [b"", b"{}", b"null", b'{"crc32":"00000000","record":{}}', encode({"a": 1})[:-2], b"\xff" * 40]
)
def test_what_is_no_record_is_none(line: bytes) -> None:
    assert decode(line) is None


def test_numbers_that_json_does_not_have() -> None:
    line = encode({"x": float("nan"), "y": [float("inf")]}).rstrip(b"\n")
    record = decode(line)
    assert record is not None
    assert str(float(record["x"])) == "nan"
    assert float(record["y"][0]) == float("inf")


@pytest.mark.parametrize("resume", [True, False])
def test_a_journal_has_one_writer(tmp_path: Path, resume: bool) -> None:
    path = tmp_path / "p.yaml.journal.jsonl"
    with Journal(path) as first:
        first.append({"n": 1})
        with pytest.raises(JournalError, match=r"p\.yaml\.journal\.jsonl: another tune is writing to it"):
            open_journal(path, {"run": FORMAT}, resume, Progress("x", None, quiet=True))
        with pytest.raises(JournalError, match="another tune"):
            Journal(path)
        first.append({"n": 2})
    assert [r["n"] for r in load(path).records] == [1, 2]
    assert list(tmp_path.iterdir()) == [path]  # not moved aside
    with Journal(path) as second:
        second.append({"n": 3})


def test_no_place_to_write(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match="cannot be opened"):
        Journal(tmp_path / "file" / "j")
    with pytest.raises(JournalError, match="cannot be read"):
        load(tmp_path / "absent")


def test_a_full_disk_keeps_every_earlier_record(tmp_path: Path) -> None:
    """A file-size limit stands in for the full disk: a write stops in the middle of a record."""
    path = tmp_path / "j"
    program = textwrap.dedent(
        f"""
        import resource, signal
        from pathlib import Path
        from dyno_tuner.core.errors import JournalError
        from dyno_tuner.record.journal import Journal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with Journal(Path({str(path)!r})) as journal:
            journal.append({{"n": 0}})
            resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
            journal.append({{"n": 1}})
            try:
                journal.append({{"n": 2, "long": "x" * 300}})
            except JournalError as error:
                print(error)
            journal.append({{"n": 3}})
        """
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--resume" in done.stdout
    assert [r["n"] for r in load(path).records] == [0, 1, 3]
    assert load(path).damaged == 0
    assert resource.RLIMIT_FSIZE is not None
    assert os.path.getsize(path) < 200


def test_a_packed_journal_is_the_one_that_was_packed(tmp_path: Path) -> None:
    plain, packed = tmp_path / "p.yaml.journal.jsonl", tmp_path / "p.yaml.journal.jsonl.gz"
    data = _written(plain)
    packed.write_bytes(gzip.compress(data))
    assert load(packed) == load(plain)
    assert sha256(packed) == sha256(plain)
    assert of_device(packed, 2) == of_device(plain, 2)
    for broken in (gzip.compress(data)[:-20], b"\x1f\x8b" + data):
        packed.write_bytes(broken)
        for read in (load, sha256):
            with pytest.raises(JournalError, match="cannot be unpacked"):
                read(packed)
