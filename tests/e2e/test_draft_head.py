"""Heads that predict one token further, against the logits of the public reference implementations."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

import dyno
import numpy as np
import pytest
from dyno import _core
from dyno.errors import ClosedError, DeviceLostError, GgufError, OutOfMemoryError, PlanError, UnsupportedError
from test_shared_experts import with_head

if TYPE_CHECKING:
    from pathlib import Path

F32 = {"kv_type_k": "f32", "kv_type_v": "f32", "ctx": 256}
# Of logits: a GPU adds in another order, with other kernels for other numbers of rows.
TOLERANCE = {"cpu": 1e-8, "cuda:0": 1e-7}
HOPPER = {"kind": "cuda", "compute_capability": 90, "sm_count": 132, "shared_per_block_bytes": 232_448}


def nmse(observed: np.ndarray, reference: np.ndarray) -> float:
    o, r = observed.astype(np.float64), reference.astype(np.float64)
    return float(((o - r) ** 2).sum() / ((r - r.mean()) ** 2).sum())


def load_for(device: str) -> dict[str, str]:
    return {"device": device} if device == "cpu" else {"device": device, "numerics": "exact"}


def open_head(path: Path, sequences: int = 1, ubatch: int = 512, device: str = "cpu") -> _core.Session:
    context = {**F32, "sequences": sequences}
    s = _core.Session(path, load=load_for(device), context=context, session={"threads": 2, "ubatch": ubatch})
    s.load_draft_head()
    return s


def drafted(s: _core.Session, token: int, slot: int = 0) -> np.ndarray:
    return s.draft([(slot, int(token))])[0]


def check_head(path: Path, tokens: np.ndarray, want: np.ndarray, device: str) -> None:
    """Prompts of several lengths and u-batches, then token by token; row t predicts token t + 2."""
    tokens = tokens.astype(np.int32)
    s = open_head(path, device=device)
    most = TOLERANCE[device]
    for ubatch in (512, 1, 7, 33):
        s.set({"ubatch": ubatch})
        for n in (1, 2, 40, len(tokens) - 1):
            s.reset()
            s.decode([(0, tokens[:n].copy())], "last")
            assert nmse(drafted(s, tokens[n]), want[n - 1]) < most, f"u-batch {ubatch}, {n} tokens"
    s.reset()
    rows = []
    for t in range(60):
        s.decode([(0, tokens[t : t + 1].copy())], "none" if t % 3 else "last")
        rows.append(drafted(s, tokens[t + 1]))
    assert nmse(np.stack(rows), want[:60]) < most


@pytest.mark.parametrize("name", ["qwen35"])
def test_drafts_are_the_references(name: str, tiny_dir: Path, device: str) -> None:
    path = tiny_dir / f"{name}-tiny.gguf"
    with np.load(path.with_suffix(".golden.npz")) as golden:
        check_head(path, golden["tokens_long"], golden["mtp_logits_long"], device)


def test_heads_of_a_folder(models_dir: Path, device: str) -> None:
    checked = []
    for path in sorted((models_dir / "tiny").glob("*-tiny.gguf")):
        with np.load(path.with_suffix(".golden.npz")) as golden:
            if "mtp_logits_long" not in golden:
                continue
            check_head(path, golden["tokens_long"], golden["mtp_logits_long"], device)
        checked.append(path.name)
    assert checked


@pytest.fixture(scope="module")
def golden(tiny_dir: Path) -> dict[str, np.ndarray]:
    with np.load(tiny_dir / "qwen35-tiny.golden.npz") as data:
        return {key: data[key] for key in data.files}


def test_another_token_and_a_rewind(tiny_dir: Path, golden: dict[str, np.ndarray], device: str) -> None:
    """A draft that came to nothing leaves no trace."""
    tokens, want = golden["tokens_long"].astype(np.int32), golden["mtp_logits_long"]
    s = open_head(tiny_dir / "qwen35-tiny.gguf", device=device)
    s.decode([(0, tokens[:20].copy())], "none")
    kept = s.checkpoint()
    drafted(s, (tokens[20] + 1) % 320)
    drafted(s, tokens[20])
    s.decode([(0, np.array([7, 9, 11], np.int32))], "last")
    drafted(s, 13)
    s.restore(kept)
    assert nmse(drafted(s, tokens[20]), want[19]) < TOLERANCE[device]
    s.decode([(0, tokens[20:50].copy())], "all")
    assert nmse(drafted(s, tokens[50]), want[49]) < TOLERANCE[device]


def test_logits_do_not_change(tiny_dir: Path, golden: dict[str, np.ndarray], device: str) -> None:
    path = tiny_dir / "qwen35-tiny.gguf"
    tokens = golden["tokens_long"].astype(np.int32)
    for rows in ("last", "all"):
        plain = _core.Session(path, load=load_for(device), context=F32, session={"threads": 2, "ubatch": 16})
        with_head = open_head(path, ubatch=16, device=device)
        got = [s.decode([(0, tokens.copy())], rows)[0] for s in (plain, with_head)]
        assert nmse(got[1], got[0]) < (1e-12 if device == "cpu" else 1e-9)


def test_sequences_beside_each_other(tiny_dir: Path, golden: dict[str, np.ndarray], device: str) -> None:
    tokens, want = golden["tokens_long"].astype(np.int32), golden["mtp_logits_long"]
    s = open_head(tiny_dir / "qwen35-tiny.gguf", sequences=3, ubatch=11, device=device)
    s.decode([(2, tokens[:31].copy()), (0, tokens[:5].copy())], "last")
    assert nmse(drafted(s, tokens[5], 0), want[4]) < TOLERANCE[device]
    assert nmse(drafted(s, tokens[31], 2), want[30]) < TOLERANCE[device]
    s.copy(2, 1)
    s.decode([(1, tokens[31:33].copy()), (0, tokens[5:6].copy())], "last")
    assert nmse(drafted(s, tokens[33], 1), want[32]) < TOLERANCE[device]
    assert nmse(drafted(s, tokens[6], 0), want[5]) < TOLERANCE[device]


def test_several_texts_in_one_decode(tiny_dir: Path, golden: dict[str, np.ndarray], device: str) -> None:
    tokens, want = golden["tokens_long"].astype(np.int32), golden["mtp_logits_long"]
    s = open_head(tiny_dir / "qwen35-tiny.gguf", sequences=3, ubatch=7, device=device)
    s.decode([(2, tokens[:31].copy()), (0, tokens[:5].copy())], "last")
    assert [s.can_draft(slot) for slot in range(3)] == [True, False, True]
    both = s.draft([(0, int(tokens[5])), (2, int(tokens[31]))])
    assert nmse(both, want[[4, 30]]) < TOLERANCE[device]
    assert s.draft([]).shape == (0, 320)
    s.drop_draft_head()
    assert not s.has_draft_head
    assert not s.can_draft(0)


def test_a_draft_goes_further_with_the_head_s_own_rows(
    tiny_dir: Path, golden: dict[str, np.ndarray], device: str
) -> None:
    """The second token depends on the first draft, and leaves no trace in the next draft."""
    tokens, want = golden["tokens_long"].astype(np.int32), golden["mtp_logits_long"]
    s = open_head(tiny_dir / "qwen35-tiny.gguf", sequences=2, device=device)
    s.decode([(0, tokens[:20].copy()), (1, tokens[:9].copy())], "none")
    with pytest.raises(PlanError, match="no token was drafted at the current position of sequence 1"):
        s.draft([(1, 5)], further=True)
    follow = [(0, int(tokens[20])), (1, int(tokens[9]))]
    s.draft(follow)
    once = s.draft([(0, 11), (1, 12)], further=True)
    twice = s.draft([(0, 13), (1, 14)], further=True)
    alone = open_head(tiny_dir / "qwen35-tiny.gguf", device=device)
    alone.decode([(0, tokens[:9].copy())], "none")
    drafted(alone, tokens[9])
    assert nmse(alone.draft([(0, 12)], further=True)[0], once[1]) < TOLERANCE[device]
    assert nmse(alone.draft([(0, 14)], further=True)[0], twice[1]) < TOLERANCE[device]
    drafted(alone, tokens[9])
    assert nmse(alone.draft([(0, 15)], further=True)[0], once[1]) > 1e-4  # another token
    assert nmse(s.draft(follow), want[[19, 8]]) < TOLERANCE[device]
    s.decode([(0, tokens[20:24].copy())], "none")
    with pytest.raises(PlanError, match="no token was drafted at the current position of sequence 0"):
        s.draft([(0, 5)], further=True)
    assert nmse(drafted(s, tokens[24]), want[23]) < TOLERANCE[device]


def test_the_most_probable_token_is_found_where_the_logits_are(
    tiny_dir: Path, golden: dict[str, np.ndarray], device: str
) -> None:
    tokens = golden["tokens_long"].astype(np.int32)
    s = open_head(tiny_dir / "qwen35-tiny.gguf", sequences=3, device=device)
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


def test_a_head_reads_a_prompt_in_parts(tiny_dir: Path, golden: dict[str, np.ndarray], device: str) -> None:
    tokens, want = golden["tokens_long"].astype(np.int32), golden["mtp_logits_long"]
    s = open_head(tiny_dir / "qwen35-tiny.gguf", sequences=2, ubatch=7, device=device)
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
    assert nmse(drafted(s, tokens[60], 1), want[59]) < TOLERANCE[device]
    s.reset(1)
    assert (s.draft_lacks(0), s.draft_lacks(1)) == (0, 0)
    s.decode([(1, tokens[:30].copy())], "none")
    s.read_for_draft(1, 11)
    assert nmse(drafted(s, tokens[30], 1), want[29]) < TOLERANCE[device]  # it reads the rest itself
    assert s.draft_lacks(1) == 0


@pytest.mark.parametrize("seed", range(3))
def test_a_head_follows_any_course_of_a_text(seed: int, tiny_dir: Path, device: str) -> None:
    """Drafts that come true or not, parts read ahead, copies and ways back: as a new head answers."""
    rng = np.random.default_rng(seed)
    path = tiny_dir / "qwen35-tiny.gguf"
    s = open_head(path, sequences=2, device=device)
    alone = open_head(path, device=device)
    text = rng.integers(1, 300, 4).astype(np.int32)
    s.decode([(0, text)], "none")
    kept, length = s.checkpoint(0), len(text)
    for step in range(40):
        token = int(rng.integers(1, 300))
        alone.reset()
        alone.decode([(0, text)], "none")
        assert nmse(drafted(s, token), drafted(alone, token)) < 10 * TOLERANCE[device], step
        assert s.draft_lacks(0) == 0
        if rng.integers(2):
            s.draft([(0, 7)], further=True)
        follows = rng.integers(1, 300, rng.integers(1, 4)).astype(np.int32)
        true = bool(rng.integers(2))
        if true:
            follows[0] = token
        s.decode([(0, follows)], "none")
        text = np.concatenate([text, follows])
        assert s.draft_lacks(0) == len(follows) - true
        match rng.integers(5):
            case 0:
                s.restore(kept)
                text = text[:length]
                assert s.draft_lacks(0) == 0
            case 1:
                kept, length = s.checkpoint(0), len(text)
            case 2:
                s.read_for_draft(0, 2)
            case 3:
                s.copy(0, 1)
                assert s.draft_lacks(1) == len(text) - 1
                s.reset(0)
                s.copy(1, 0)
                assert s.draft_lacks(0) == len(text) - 1
                kept, length = s.checkpoint(0), len(text)


def test_a_limit_of_the_cache_is_one_of_the_model_s_texts(
    tiny_dir: Path, golden: dict[str, np.ndarray], device: str
) -> None:
    """The head forgets what the model forgets, and its drafts have room beside a full cache."""
    tokens, want = golden["tokens_long"].astype(np.int32), golden["mtp_logits_long"]
    context = {**F32, "ctx": 64, "sequences": 2, "cache_tokens": 64}
    path = tiny_dir / "qwen35-tiny.gguf"
    s = _core.Session(path, load=load_for(device), context=context, session={"threads": 2})
    s.load_draft_head()
    for slot in (0, 1, 0):
        s.reset()
        s.decode([(slot, tokens[:50].copy())], "none")
        assert nmse(drafted(s, tokens[50], slot), want[49]) < TOLERANCE[device]
    s.reset()
    s.decode([(0, tokens[:32].copy()), (1, tokens[:32].copy())], "none")
    both = [(0, int(tokens[32])), (1, int(tokens[32]))]
    assert nmse(s.draft(both), want[[31, 31]]) < TOLERANCE[device]
    for _ in range(8):
        s.draft(both, further=True)


def test_a_change_that_the_head_refuses_changes_nothing(
    tiny_dir: Path, tmp_path: Path, golden: dict[str, np.ndarray], device: str
) -> None:
    tokens, want = golden["tokens_long"].astype(np.int32), golden["mtp_logits_long"]
    path = shutil.copyfile(tiny_dir / "qwen35-tiny.gguf", tmp_path / "m.gguf")
    settings = {"ctx": 64, "kv_type_k": "f32", "kv_type_v": "f32"}
    with dyno.Engine(path, device=device, profile=None, ubatch=32, **settings) as engine:
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


def test_a_context_that_does_not_fit_beside_the_old_head(tiny_dir: Path) -> None:
    path = tiny_dir / "qwen35-tiny.gguf"
    with dyno.Engine(path, device="cpu", profile=None, ctx=64, ram="64MiB") as engine:
        with pytest.raises(OutOfMemoryError) as plain:
            engine.set_context(ctx=4096, sequences=1024)
        assert "drop_draft_head" not in str(plain.value)
        engine.load_draft_head()
        with pytest.raises(OutOfMemoryError, match=r"drop it before \(drop_draft_head\) and load it again"):
            engine.set_context(ctx=4096, sequences=1024)
        engine.logits([5, 6, 7], rows="last")
        assert engine._open().can_draft(0)


def test_of_an_engine(tiny_dir: Path, golden: dict[str, np.ndarray], device: str) -> None:
    tokens = golden["tokens_long"]
    with dyno.Engine(tiny_dir / "qwen35-tiny.gguf", device=device, profile=None, ctx=256) as engine:
        with pytest.raises(PlanError, match=r"no head is loaded; call load_draft_head"):
            engine.draft(3)
        engine.logits(tokens[:9], rows="last")
        engine.load_draft_head()
        with pytest.raises(
            PlanError, match=r"has read 0 of the 9 tokens .* load the head before the sequence begins"
        ):
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
    with pytest.raises(
        UnsupportedError, match=r"a head that drafts tokens is not supported for architecture llama"
    ):
        s.load_draft_head()


def test_rows_of_texts_that_go_on_from_one_another(tiny_dir: Path, device: str) -> None:
    """Copies share the rows of what they have in common, and each goes on with rows of its own."""
    common, first, second = np.split(
        np.random.default_rng(8).integers(1, 300, 400).astype(np.int32), [300, 350]
    )
    path = tiny_dir / "qwen35-tiny.gguf"
    context = {**F32, "ctx": 512, "sequences": 3}

    def opened() -> _core.Session:
        s = _core.Session(path, load=load_for(device), context=context, session={"threads": 2, "ubatch": 64})
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
        assert nmse(drafted(s, 5, slot), want[slot]) < TOLERANCE[device]
    s.reset(0)
    s.copy(2, 0)
    s.decode([(2, first.copy()), (0, second.copy())], "none")
    assert nmse(s.draft([(2, 5), (0, 5), (1, 5)]), np.stack([want[0], want[1], want[1]])) < TOLERANCE[device]


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


@pytest.mark.parametrize("placed", [{}, {"n_gpu_layers": 2}, {"rules": ["^(token_embd|output)=cpu"]}])
def test_a_virtual_main_device_has_its_head_on_the_cpu(
    placed: dict[str, Any], tiny_dir: Path, golden: dict[str, np.ndarray]
) -> None:
    tokens, want = golden["tokens_long"].astype(np.int32), golden["mtp_logits_long"]
    s = _core.Session(
        tiny_dir / "qwen35-tiny.gguf",
        load={"device": "cpu:1", "numerics": "exact"},
        context=F32,
        session={"offload_min_tokens": 4},
        placement={"virtual_devices": [{"streams": True}], **placed},
    )
    s.load_draft_head()
    for token in np.split(tokens, [31, 32, 33, 60]):  # streamed prompts, and single tokens
        s.decode([(0, token.copy())], "none")
        at = s.position(0)
        if at < len(tokens):
            assert nmse(s.draft([(0, int(tokens[at]))]), want[[at - 1]]) < 1e-8


def test_rows_of_a_decode_that_failed_take_no_memory(tmp_path: Path) -> None:
    """The first u-batch fills sequence 1, and the device is lost in the second one."""
    s = _core.Session(
        with_head(tmp_path / "m.gguf"),
        load={"device": "cpu"},
        context={**F32, "sequences": 3},
        session={"threads": 2, "ubatch": 64},
        placement={"virtual_devices": [{}], "rules": [r"^blk\.0\.ffn=cpu:1"]},
    )
    s.load_draft_head()
    text = np.random.default_rng(2).integers(1, 300, 64).astype(np.int32)
    assert s.draft_row_bytes == 0
    s.decode([(0, text[:5])], "none")
    held = s.draft_row_bytes
    assert held > 0
    s.decode([(0, text[:40])], "none")
    assert s.draft_row_bytes == held
    s.lose_device("cpu:1", 1)
    with pytest.raises(DeviceLostError):
        s.decode([(1, text), (2, text[:40])], "none")
    assert s.draft_row_bytes == held
    s.drop_draft_head()
    assert s.draft_row_bytes == 0


def planned(path: Path, **placement: Any) -> _core.Session:
    return _core.Session(path, context={"ctx": 64}, plan_only=True, device=HOPPER, placement=placement)


def test_a_head_on_a_gpu_reads_the_model_s_matrices(tiny_dir: Path) -> None:
    """The embedding and the output are there once; only what the head alone has is counted."""
    path = tiny_dir / "qwen35-tiny.gguf"
    s = planned(path)
    assert s.plan["draft_head"] is None
    s.load_draft_head()
    head = s.plan["draft_head"]
    table = next(t for t in s.plan["tensors"] if t["name"] == "token_embd.weight")
    assert head["lent_bytes"] >= table["bytes"]
    assert 0 < head["weights_bytes"] < s.plan["weights_bytes"]
    parts = ("weights_bytes", "kv_bytes", "arena_bytes", "scratch_bytes")
    assert head["total_bytes"] == sum(head[part] for part in parts)
    assert "of the model's, kv cache" in s.describe_plan()
    with pytest.raises(PlanError, match="plan but no weights"):
        s.draft([(0, 5)])
    on_cpu = open_head(path)
    assert on_cpu.plan["draft_head"]["lent_bytes"] == 0


def test_rows_that_are_read_have_a_norm_of_their_own_on_a_gpu(tiny_dir: Path) -> None:
    """No product norms the rows that the head reads, nor those that it gets beside embeddings."""
    s = planned(tiny_dir / "qwen35-tiny.gguf")
    s.load_draft_head()
    for nodes, norms in (
        (s.nodes(), {"output_norm"}),
        (s.draft_head_nodes(), {"output_norm", "hidden_norm", "embd_norm"}),
    ):
        lists = {node["list"] for node in nodes} - {"draw"}
        assert {"general", "fused", "batched"} <= lists
        for each in lists:
            assert norms <= {node["name"] for node in nodes if node["list"] == each}, each


@pytest.mark.parametrize("placement", [{"n_gpu_layers": 2}, {"rules": ["ffn=cpu"]}])
def test_a_model_on_a_gpu_and_the_cpu_has_no_head(tiny_dir: Path, placement: dict[str, Any]) -> None:
    s = planned(tiny_dir / "qwen35-tiny.gguf", **placement)
    with pytest.raises(UnsupportedError, match=r"is on cuda:0, cpu; .* entirely on one GPU"):
        s.load_draft_head()
    assert not s.has_draft_head


@pytest.mark.gpu
@pytest.mark.skipif(not any(d["kind"] == "cuda" for d in _core.devices()), reason="no GPU")
class TestOnAGpu:
    """Default numerics: the lists for few and for dozens of tokens, launched and replayed."""

    @pytest.mark.parametrize("graphs", [True, False])
    @pytest.mark.parametrize("sequences", [1, 5, 12])
    def test_single_tokens(
        self, graphs: bool, sequences: int, tiny_dir: Path, golden: dict[str, np.ndarray]
    ) -> None:
        tokens, want = golden["tokens_long"].astype(np.int32), golden["mtp_logits_long"]
        graphs = graphs and _core.build_info()["switches"]["GGML_CUDA_USE_GRAPHS"] == "ON"
        s = _core.Session(
            tiny_dir / "qwen35-tiny.gguf",
            load={"device": "cuda:0"},
            context={"ctx": 256, "sequences": sequences},
            session={"cuda_graphs": graphs},
        )
        s.load_draft_head()
        slots = range(sequences)
        s.decode([(slot, tokens[: 20 + slot].copy()) for slot in slots], "none")
        for i in range(12):
            at = [20 + slot + i for slot in slots]
            drafts = s.draft([(slot, int(tokens[at[slot]])) for slot in slots])
            assert nmse(drafts, want[[t - 1 for t in at]]) < 1e-4, i
            s.draft([(slot, int(drafts[slot].argmax())) for slot in slots], further=True)
            s.decode([(slot, tokens[at[slot] : at[slot] + 1].copy()) for slot in slots], "last")
        assert s.capture_failures == 0
        assert any(report["captured"] for report in s.captures()) == graphs

    def test_checked_drafts_leave_their_rows(self, tiny_dir: Path, golden: dict[str, np.ndarray]) -> None:
        """Steps that check a draft: a few tokens of each sequence, of which some have no logits."""
        tokens, want = golden["tokens_long"].astype(np.int32), golden["mtp_logits_long"]
        s = _core.Session(
            tiny_dir / "qwen35-tiny.gguf", load={"device": "cuda:0"}, context={"ctx": 256, "sequences": 3}
        )
        s.load_draft_head()
        greedy = (0.0, 0, 1.0, 0.0, 0.0)
        for first in ([0, 0, 0], [1, 2, 0], [3, 3, 3]):
            s.reset()
            for begin in range(0, 40, 4):
                batch = [(slot, tokens[begin : begin + 4].copy()) for slot in range(3)]
                s.decode_and_draw(batch, [greedy] * sum(4 - skipped for skipped in first), [], first)
                drafts = s.draft([(slot, int(tokens[begin + 4])) for slot in range(3)])
                assert nmse(drafts, want[[begin + 3] * 3]) < 1e-4, (first, begin)

    def test_the_head_takes_no_second_copy_of_matrices(self, tiny_dir: Path) -> None:
        with dyno.Engine(tiny_dir / "qwen35-tiny.gguf", device="cuda:0", profile=None, ctx=64) as engine:
            engine.load_draft_head()
            head = engine.plan["draft_head"]
            assert head["lent_bytes"] > 0
            text = [token for token, _ in zip(engine.generate([5, 6, 7]), range(8), strict=False)]
            assert len(text) == 8
            assert engine._open().can_draft(0)  # the rows of each step came to the head
            engine.draft(5)
        with pytest.raises(ClosedError):
            engine.draft(5)
