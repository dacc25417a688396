"""The perplexity protocol and references, with an engine whose logits are known."""

from __future__ import annotations

import errno
import math
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from dyno import perplexity as measure
from dyno.errors import ModelError, PlanError
from dyno.reference import ReferenceReader, ReferenceWriter, check_destination

if TYPE_CHECKING:
    from pathlib import Path

N_VOCAB = 11


class KnownEngine:
    """Logits that are a fixed table of position and token, through the interface of `Engine.logits`."""

    def __init__(self, seed: int = 0, scale: float = 1.0) -> None:
        rng = np.random.default_rng(seed)
        self.table = (scale * rng.normal(size=(64, N_VOCAB, N_VOCAB))).astype(np.float32)
        self.model = {"n_vocab": N_VOCAB}
        self.position = 0
        self.rows_asked: list[int] = []

    def logits(self, tokens: Any, *, reset: bool = True, rows: str = "all") -> Any:
        start = 0 if reset else self.position
        self.position = start + len(tokens)
        if rows == "none":
            return np.empty((0, N_VOCAB), np.float32)
        self.rows_asked += range(start, self.position)
        return self.table[np.arange(start, self.position), tokens]


def by_hand(engine: KnownEngine, chunks: Any) -> tuple[float, float]:
    nll = []
    ctx = chunks.shape[1]
    for chunk in chunks:
        for position in range(ctx // 2, ctx - 1):
            row = engine.table[position, chunk[position]].astype(np.float64)
            nll.append(math.log(np.exp(row).sum()) - row[chunk[position + 1]])
    mean = sum(nll) / len(nll)
    variance = sum((x - mean) ** 2 for x in nll) / len(nll)
    return math.exp(mean), math.exp(mean) * math.sqrt(variance / (len(nll) - 1))


@pytest.fixture
def chunks() -> Any:
    tokens = np.random.default_rng(5).integers(0, N_VOCAB, size=100).tolist()
    return measure.chunk_tokens(tokens, 16)


def test_chunks() -> None:
    tokens = list(range(40))
    assert measure.chunk_tokens(tokens, 16).tolist() == [list(range(16)), list(range(16, 32))]
    assert measure.chunk_tokens(tokens, 16, 1).tolist() == [list(range(16))]
    assert measure.chunk_tokens(tokens, 16, bos=99)[:, 0].tolist() == [99, 99]
    assert measure.chunk_tokens(tokens, 16, bos=99)[:, 1].tolist() == [1, 17]
    assert tokens[16] == 16  # the caller's list stays


@pytest.mark.parametrize(
    ("ctx", "chunks", "message"), [(3, None, "3"), (2, None, "2"), (16, 0, "0"), (64, None, "40")]
)
def test_impossible_chunks(ctx: int, chunks: int | None, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        measure.chunk_tokens(list(range(40)), ctx, chunks)


def test_protocol(chunks: Any) -> None:
    """Positions ctx/2 to ctx-2 are scored, and only their logits are asked for."""
    engine = KnownEngine()
    result = measure.perplexity(engine, chunks)  # type: ignore[arg-type]
    ppl, stderr = by_hand(engine, chunks)
    assert result.ppl == pytest.approx(ppl, rel=1e-9)
    assert result.stderr == pytest.approx(stderr, rel=1e-6)
    assert (result.tokens, result.chunks, result.ctx) == (7 * 6, 6, 16)
    assert engine.rows_asked == [*range(8, 15)] * 6
    assert result.to_dict().keys() == {"ppl", "stderr", "tokens", "chunks", "ctx"}


def test_blocks_of_rows_change_nothing(chunks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = measure.perplexity(KnownEngine(), chunks)  # type: ignore[arg-type]
    monkeypatch.setattr(measure, "_MAX_LOGITS_BYTES", 3 * 4 * N_VOCAB)
    assert measure.perplexity(KnownEngine(), chunks).ppl == pytest.approx(whole.ppl, rel=1e-12)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("rows", [1, 64])
def test_logits_that_are_not_finite(
    chunks: Any, monkeypatch: pytest.MonkeyPatch, bad: float, rows: int
) -> None:
    monkeypatch.setattr(measure, "_MAX_LOGITS_BYTES", rows * 4 * N_VOCAB)
    engine = KnownEngine()
    engine.table[10, chunks[1][10]][3] = bad
    first = next(n for n, chunk in enumerate(chunks, 1) if chunk[10] == chunks[1][10])
    with pytest.raises(ModelError, match=f"after position 10 of chunk {first} are not finite"):
        measure.perplexity(engine, chunks)  # type: ignore[arg-type]


def test_reference(chunks: Any, tmp_path: Path) -> None:
    path = tmp_path / "reference.npz"
    with ReferenceWriter(path, chunks, N_VOCAB, "model") as writer:
        saved = measure.perplexity(KnownEngine(), chunks, save=writer)  # type: ignore[arg-type]
    with ReferenceReader(path) as reader:
        assert (reader.ctx, reader.n_vocab, reader.model) == (16, N_VOCAB, "model")
        same = measure.perplexity(KnownEngine(), chunks, reference=reader)  # type: ignore[arg-type]
        other = measure.perplexity(KnownEngine(1), chunks[:2], reference=reader)  # type: ignore[arg-type]
    assert same.comparison is not None
    assert same.comparison.mean_kld < 1e-6
    assert same.comparison.top1_agreement == 1.0
    assert same.ppl_ratio == pytest.approx(1.0, abs=1e-12)
    assert same.reference_ppl == pytest.approx(saved.ppl, rel=1e-12)
    assert other.comparison is not None
    assert other.comparison.mean_kld > 0.1
    assert other.comparison.top1_agreement < 0.8
    assert {"mean_kld", "top1_agreement", "ppl_ratio"} <= other.to_dict().keys()


def test_reference_of_other_tokens(chunks: Any, tmp_path: Path) -> None:
    path = tmp_path / "reference.npz"
    with ReferenceWriter(path, chunks, N_VOCAB, "model") as writer:
        measure.perplexity(KnownEngine(), chunks, save=writer)  # type: ignore[arg-type]
    changed = chunks.copy()
    changed[3, 5] += 1
    with ReferenceReader(path) as reader:
        with pytest.raises(PlanError, match="chunk 3"):
            reader.check(changed)
        with pytest.raises(PlanError, match="ctx 16, not 8"):
            reader.check(chunks[:, :8])
        with pytest.raises(PlanError, match="6 chunks, not 12"):
            reader.check(np.concatenate([chunks, chunks]))
        with pytest.raises(PlanError, match="logprobs_00006"):
            reader.chunk(6)


def test_an_unfinished_reference_leaves_no_file(chunks: Any, tmp_path: Path) -> None:
    writer = ReferenceWriter(tmp_path / "reference.npz", chunks, N_VOCAB, "model")
    with pytest.raises(RuntimeError), writer:
        raise RuntimeError
    with ReferenceWriter(tmp_path / "short.npz", chunks, N_VOCAB, "model") as writer:
        writer.add(np.zeros((7, N_VOCAB)), np.zeros(7))
        writer.end_chunk()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"not a zip", b"\x93NUMPY"])
def test_files_that_are_no_reference(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    path.write_bytes(content)
    with pytest.raises(PlanError, match="is not a reference that dyno wrote"):
        ReferenceReader(path)


def test_other_npz_files_are_no_reference(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", header=np.zeros(3), tokens=np.zeros((2, 8), np.int32))
    with pytest.raises(PlanError, match="is not a reference that dyno wrote"):
        ReferenceReader(tmp_path / "x.npz")
    np.savez(tmp_path / "y.npz", a=np.zeros(3))
    with pytest.raises(PlanError, match="is not a reference that dyno wrote"):
        ReferenceReader(tmp_path / "y.npz")


def test_a_reference_that_does_not_fit_leaves_no_file_and_the_old_one(
    chunks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "reference.npz"
    path.write_bytes(b"the old one")
    writer = ReferenceWriter(path, chunks[:1], N_VOCAB, "model")

    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    writer.add(np.zeros((7, N_VOCAB)), np.zeros(7))
    writer.end_chunk()
    monkeypatch.setattr(writer._zip, "close", full)
    with pytest.raises(OSError, match="No space left"), writer:
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["reference.npz"]
    assert path.read_bytes() == b"the old one"
    monkeypatch.undo()
    writer._zip.close()


def test_where_a_reference_cannot_be_written_is_said_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    check_destination(tmp_path / "new.npz")
    check_destination(tmp_path / "file")
    check_destination("new.npz")
    with pytest.raises(IsADirectoryError):
        check_destination(tmp_path)
    with pytest.raises(FileNotFoundError) as caught:
        check_destination(tmp_path / "absent" / "new.npz")
    assert caught.value.filename == str(tmp_path / "absent")
    with pytest.raises(NotADirectoryError):
        check_destination(tmp_path / "file" / "new.npz")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
