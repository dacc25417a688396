"""Heads that predict one token further, against the logits of the public reference implementations."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import dyno
import numpy as np
import pytest
from dyno import _core
from dyno.errors import GgufError, OutOfMemoryError, PlanError, UnsupportedError

if TYPE_CHECKING:
    from pathlib import Path

F32 = {"kv_type_k": "f32", "kv_type_v": "f32", "ctx": 256}


def nmse(observed: np.ndarray, reference: np.ndarray) -> float:
    o, r = observed.astype(np.float64), reference.astype(np.float64)
    return float(((o - r) ** 2).sum() / ((r - r.mean()) ** 2).sum())


def open_head(path: Path, sequences: int = 1, ubatch: int = 512) -> _core.Session:
    s = _core.Session(path, context={**F32, "sequences": sequences}, session={"threads": 2, "ubatch": ubatch})
    s.load_draft_head()
    return s


def drafted(s: _core.Session, token: int, slot: int = 0) -> np.ndarray:
    return s.draft([(slot, int(token))])[0]


def check_head(path: Path, tokens: np.ndarray, want: np.ndarray) -> None:
    """Prompts of several lengths and u-batches, then token by token; row t predicts token t + 2."""
    tokens = tokens.astype(np.int32)
    s = open_head(path)
    for ubatch in (512, 1, 7, 33):
        s.set({"ubatch": ubatch})
        for n in (1, 2, 40, len(tokens) - 1):
            s.reset()
            s.decode([(0, tokens[:n].copy())], "last")
            assert nmse(drafted(s, tokens[n]), want[n - 1]) < 1e-8, f"u-batch {ubatch}, {n} tokens"
    s.reset()
    rows = []
    for t in range(60):
        s.decode([(0, tokens[t : t + 1].copy())], "none" if t % 3 else "last")
        rows.append(drafted(s, tokens[t + 1]))
    assert nmse(np.stack(rows), want[:60]) < 1e-8


@pytest.mark.parametrize("name", ["qwen35"])
def test_drafts_are_the_references(name: str, tiny_dir: Path) -> None:
    path = tiny_dir / f"{name}-tiny.gguf"
    with np.load(path.with_suffix(".golden.npz")) as golden:
        check_head(path, golden["tokens_long"], golden["mtp_logits_long"])


def test_heads_of_a_folder(models_dir: Path) -> None:
    checked = []
    for path in sorted((models_dir / "tiny").glob("*-tiny.gguf")):
        with np.load(path.with_suffix(".golden.npz")) as golden:
            if "mtp_logits_long" not in golden:
                continue
            check_head(path, golden["tokens_long"], golden["mtp_logits_long"])
        checked.append(path.name)
    assert checked


@pytest.fixture(scope="module")
def golden(tiny_dir: Path) -> dict[str, np.ndarray]:
    with np.load(tiny_dir / "qwen35-tiny.golden.npz") as data:
        return {key: data[key] for key in data.files}


def test_another_token_and_a_rewind(tiny_dir: Path, golden: dict[str, np.ndarray]) -> None:
    """A draft that came to nothing leaves no trace."""
    tokens, want = golden["tokens_long"].astype(np.int32), golden["mtp_logits_long"]
    s = open_head(tiny_dir / "qwen35-tiny.gguf")
    s.decode([(0, tokens[:20].copy())], "none")
    kept = s.checkpoint()
    drafted(s, (tokens[20] + 1) % 320)
    drafted(s, tokens[20])
    s.decode([(0, np.array([7, 9, 11], np.int32))], "last")
    drafted(s, 13)
    s.restore(kept)
    assert nmse(drafted(s, tokens[20]), want[19]) < 1e-8
    s.decode([(0, tokens[20:50].copy())], "all")
    assert nmse(drafted(s, tokens[50]), want[49]) < 1e-8


def test_logits_do_not_change(tiny_dir: Path, golden: dict[str, np.ndarray]) -> None:
    path = tiny_dir / "qwen35-tiny.gguf"
    tokens = golden["tokens_long"].astype(np.int32)
    for rows in ("last", "all"):
        plain = _core.Session(path, context=F32, session={"threads": 2, "ubatch": 16})
        with_head = open_head(path, ubatch=16)
        got = [s.decode([(0, tokens.copy())], rows)[0] for s in (plain, with_head)]
        assert nmse(got[1], got[0]) < 1e-12


def test_sequences_beside_each_other(tiny_dir: Path, golden: dict[str, np.ndarray]) -> None:
    tokens, want = golden["tokens_long"].astype(np.int32), golden["mtp_logits_long"]
    s = open_head(tiny_dir / "qwen35-tiny.gguf", sequences=3, ubatch=11)
    s.decode([(2, tokens[:31].copy()), (0, tokens[:5].copy())], "last")
    assert nmse(drafted(s, tokens[5], 0), want[4]) < 1e-8
    assert nmse(drafted(s, tokens[31], 2), want[30]) < 1e-8
    s.copy(2, 1)
    s.decode([(1, tokens[31:33].copy()), (0, tokens[5:6].copy())], "last")
    assert nmse(drafted(s, tokens[33], 1), want[32]) < 1e-8
    assert nmse(drafted(s, tokens[6], 0), want[5]) < 1e-8


def test_several_texts_in_one_decode(tiny_dir: Path, golden: dict[str, np.ndarray]) -> None:
    tokens, want = golden["tokens_long"].astype(np.int32), golden["mtp_logits_long"]
    s = open_head(tiny_dir / "qwen35-tiny.gguf", sequences=3, ubatch=7)
    s.decode([(2, tokens[:31].copy()), (0, tokens[:5].copy())], "last")
    assert [s.can_draft(slot) for slot in range(3)] == [True, False, True]
    both = s.draft([(0, int(tokens[5])), (2, int(tokens[31]))])
    assert nmse(both, want[[4, 30]]) < 1e-8
    assert s.draft([]).shape == (0, 320)
    s.drop_draft_head()
    assert not s.has_draft_head
    assert not s.can_draft(0)


def test_a_draft_goes_further_with_the_head_s_own_rows(tiny_dir: Path, golden: dict[str, np.ndarray]) -> None:
    """The second token depends on the first draft, and leaves no trace in the next draft."""
    tokens, want = golden["tokens_long"].astype(np.int32), golden["mtp_logits_long"]
    s = open_head(tiny_dir / "qwen35-tiny.gguf", sequences=2)
    s.decode([(0, tokens[:20].copy()), (1, tokens[:9].copy())], "none")
    with pytest.raises(PlanError, match="nothing was drafted yet for what sequence 1 holds"):
        s.draft([(1, 5)], further=True)
    follow = [(0, int(tokens[20])), (1, int(tokens[9]))]
    s.draft(follow)
    once = s.draft([(0, 11), (1, 12)], further=True)
    twice = s.draft([(0, 13), (1, 14)], further=True)
    alone = open_head(tiny_dir / "qwen35-tiny.gguf")
    alone.decode([(0, tokens[:9].copy())], "none")
    drafted(alone, tokens[9])
    assert nmse(alone.draft([(0, 12)], further=True)[0], once[1]) < 1e-10
    assert nmse(alone.draft([(0, 14)], further=True)[0], twice[1]) < 1e-10
    drafted(alone, tokens[9])
    assert nmse(alone.draft([(0, 15)], further=True)[0], once[1]) > 1e-4  # another token
    assert nmse(s.draft(follow), want[[19, 8]]) < 1e-8
    s.decode([(0, tokens[20:24].copy())], "none")
    with pytest.raises(PlanError, match="nothing was drafted yet for what sequence 0 holds"):
        s.draft([(0, 5)], further=True)
    assert nmse(drafted(s, tokens[24]), want[23]) < 1e-8


def test_a_head_reads_a_prompt_in_parts(tiny_dir: Path, golden: dict[str, np.ndarray]) -> None:
    tokens, want = golden["tokens_long"].astype(np.int32), golden["mtp_logits_long"]
    s = open_head(tiny_dir / "qwen35-tiny.gguf", sequences=2, ubatch=7)
    s.decode([(1, tokens[:60].copy())], "none")
    lacking = []
    while s.draft_lacks(1):
        lacking.append(s.draft_lacks(1))
        s.read_for_draft(1, 20)
    assert lacking == [59, 39, 19]
    s.read_for_draft(1, 20)  # there is nothing to read
    s.decode([(0, tokens[:9].copy())], "none")
    s.read_for_draft(0, -1)
    assert s.draft_lacks(0) == 8
    s.reset(0)
    assert nmse(drafted(s, tokens[60], 1), want[59]) < 1e-8
    s.reset(1)
    assert (s.draft_lacks(0), s.draft_lacks(1)) == (0, 0)
    s.decode([(1, tokens[:30].copy())], "none")
    s.read_for_draft(1, 11)
    assert nmse(drafted(s, tokens[30], 1), want[29]) < 1e-8  # it reads the rest itself
    assert s.draft_lacks(1) == 0


def test_a_limit_of_the_cache_is_one_of_the_model_s_texts(
    tiny_dir: Path, golden: dict[str, np.ndarray]
) -> None:
    """The head forgets what the model forgets, and its drafts have room beside a full cache."""
    tokens, want = golden["tokens_long"].astype(np.int32), golden["mtp_logits_long"]
    context = {**F32, "ctx": 64, "sequences": 2, "cache_tokens": 64}
    s = _core.Session(tiny_dir / "qwen35-tiny.gguf", context=context, session={"threads": 2})
    s.load_draft_head()
    for slot in (0, 1, 0):
        s.reset()
        s.decode([(slot, tokens[:50].copy())], "none")
        assert nmse(drafted(s, tokens[50], slot), want[49]) < 1e-8
    s.reset()
    s.decode([(0, tokens[:32].copy()), (1, tokens[:32].copy())], "none")
    both = [(0, int(tokens[32])), (1, int(tokens[32]))]
    assert nmse(s.draft(both), want[[31, 31]]) < 1e-8
    for _ in range(8):
        s.draft(both, further=True)


def test_a_change_that_the_head_refuses_changes_nothing(
    tiny_dir: Path, tmp_path: Path, golden: dict[str, np.ndarray]
) -> None:
    tokens, want = golden["tokens_long"].astype(np.int32), golden["mtp_logits_long"]
    path = shutil.copyfile(tiny_dir / "qwen35-tiny.gguf", tmp_path / "m.gguf")
    settings = {"ctx": 64, "kv_type_k": "f32", "kv_type_v": "f32"}
    with dyno.Engine(path, device="cpu", profile=None, ubatch=32, **settings) as engine:
        engine.load_draft_head()
        engine.logits(tokens[:20], rows="last")
        # A new head reads the file again, and the file is not the same.
        times = path.stat()
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns + 10**9))
        with pytest.raises(GgufError, match="changed"):
            engine.set_context(ctx=128, sequences=2)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert engine.plan["settings"]["ctx"] == engine.settings["ctx"] == 64
        assert nmse(engine.draft(int(tokens[20])), want[19]) < 1e-4
        with pytest.raises((OutOfMemoryError, PlanError)):
            engine.set(ubatch=1 << 40)
        assert nmse(engine.draft(int(tokens[20])), want[19]) < 1e-4
        engine.set_context(ctx=128, sequences=2)
        engine.logits(tokens[:100], rows="last", slot=1)
        assert engine._open().can_draft(1)


def test_of_an_engine(tiny_dir: Path, golden: dict[str, np.ndarray]) -> None:
    tokens = golden["tokens_long"]
    with dyno.Engine(tiny_dir / "qwen35-tiny.gguf", device="cpu", profile=None, ctx=256) as engine:
        with pytest.raises(PlanError, match=r"no head is loaded; call load_draft_head"):
            engine.draft(3)
        engine.logits(tokens[:9], rows="last")
        engine.load_draft_head()
        with pytest.raises(PlanError, match=r"knows 0 of the 9 tokens .* load it before the sequence begins"):
            engine.draft(3)
        engine.reset()
        with pytest.raises(PlanError, match=r"is empty; decode at least one token"):
            engine.draft(3)
        engine.logits(tokens[:9], rows="last")
        assert nmse(engine.draft(int(tokens[9])), golden["mtp_logits_long"][8]) < 1e-4
        with pytest.raises(PlanError, match=r"token 4000 .* the vocabulary has 320"):
            engine.draft(4000)


def test_files_without_a_head(tiny_dir: Path) -> None:
    s = _core.Session(tiny_dir / "deepseek2-v3-tiny.gguf")
    assert s.draft_blocks == 0
    with pytest.raises(UnsupportedError, match=r"no block that predicts a further token"):
        s.load_draft_head()
    s = _core.Session(tiny_dir / "llama-tiny.gguf")
    with pytest.raises(UnsupportedError, match=r"no head that drafts tokens for architecture llama"):
        s.load_draft_head()


def test_the_most_probable_token_is_found_where_the_logits_are(
    tiny_dir: Path, golden: dict[str, np.ndarray]
) -> None:
    tokens = golden["tokens_long"].astype(np.int32)
    s = open_head(tiny_dir / "qwen35-tiny.gguf", sequences=3)
    s.decode([(slot, tokens[: 9 + 7 * slot].copy()) for slot in range(3)], "none")
    texts = [(slot, int(tokens[9 + 7 * slot])) for slot in range(3)]
    for further in (False, True):
        s.draft(texts)
        logits = s.draft(texts, further).astype(np.float64)
        best = logits.argmax(axis=1)
        certain = 1 / np.exp(logits - logits.max(axis=1, keepdims=True)).sum(axis=1)
        s.draft(texts)
        assert s.draft_tokens(texts, further).tolist() == best.tolist()
        for slot in range(3):
            for margin, found in ((0.999, best[slot]), (1.001, -1)):
                s.draft(texts)
                got = s.draft_tokens(texts, further, min_p=float(certain[slot]) * margin)
                assert got[slot] == found, (further, slot, margin)
    assert s.draft_tokens([]).shape == (0,)


def test_rows_of_texts_that_go_on_from_one_another(tiny_dir: Path) -> None:
    """Copies share the rows of what they have in common, and each goes on with rows of its own."""
    common, first, second = np.split(
        np.random.default_rng(8).integers(1, 300, 400).astype(np.int32), [300, 350]
    )
    path = tiny_dir / "qwen35-tiny.gguf"
    context = {**F32, "ctx": 512, "sequences": 3}

    def opened() -> _core.Session:
        s = _core.Session(path, context=context, session={"threads": 2, "ubatch": 64})
        s.load_draft_head()
        return s

    alone = opened()
    want = []
    for slot, own in enumerate((first, second)):
        alone.decode([(slot, np.concatenate([common, own]))], "none")
        want.append(drafted(alone, 5, slot))
    s = opened()
    s.decode([(2, common.copy())], "none")
    s.copy(2, 0)
    s.copy(2, 1)
    s.decode([(0, first.copy()), (1, second.copy())], "none")
    for slot in (0, 1):
        assert nmse(drafted(s, 5, slot), want[slot]) < 1e-8
    s.reset(0)
    s.copy(2, 0)
    s.decode([(2, first.copy()), (0, second.copy())], "none")
    assert nmse(s.draft([(2, 5), (0, 5), (1, 5)]), np.stack([want[0], want[1], want[1]])) < 1e-8


@pytest.mark.parametrize("away", [r"blk\.[2-9]", "output_norm", r"^output\.weight"])
def test_rows_come_from_the_device_that_has_them(
    away: str, tiny_dir: Path, golden: dict[str, np.ndarray]
) -> None:
    """A virtual device holds the last layers, the last norm or the output."""
    tokens, want = golden["tokens_long"].astype(np.int32), golden["mtp_logits_long"]
    placement = {"virtual_devices": [{}], "rules": [f"{away}=cpu:1"]}
    context = {**F32, "sequences": 2}
    s = _core.Session(tiny_dir / "qwen35-tiny.gguf", context=context, placement=placement)
    s.load_draft_head()
    assert s.plan["devices"][1]["weights_bytes"] > 0
    for rows in ("none", "last", "all"):
        s.reset()
        s.decode([(1, tokens[:31].copy()), (0, tokens[:5].copy())], rows)
        assert nmse(s.draft([(0, int(tokens[5])), (1, int(tokens[31]))]), want[[4, 30]]) < 1e-8


@pytest.mark.gpu
@pytest.mark.skipif(not any(d["kind"] == "cuda" for d in _core.devices()), reason="no GPU")
def test_a_model_on_a_gpu_has_no_head(tiny_dir: Path) -> None:
    s = _core.Session(tiny_dir / "qwen35-tiny.gguf", load={"device": "cuda:0"})
    with pytest.raises(
        UnsupportedError, match=r"only with the whole model on the CPU; open it with device=cpu"
    ):
        s.load_draft_head()
