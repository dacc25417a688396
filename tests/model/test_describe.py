"""Model descriptions: facts read from files, and refusals that name the offending key, tensor and value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
from dyno import _core
from dyno.errors import ModelError, UnsupportedError
from dyno.profiles import model_from_description
from dyno.testing import TensorSpec, Typed, tiny_gguf, tiny_model

if TYPE_CHECKING:
    from pathlib import Path

EXPECTED: dict[str, dict[str, Any]] = {
    "llama": {"kind": "gqa", "rope": "norm", "ffn": "dense", "activation": "silu"},
    "qwen2": {"kind": "gqa", "rope": "neox", "ffn": "dense", "activation": "silu"},
    "qwen3": {"kind": "gqa", "rope": "neox", "ffn": "dense", "activation": "silu"},
    "qwen3moe": {"kind": "gqa", "rope": "neox", "ffn": "moe", "activation": "silu"},
    "deepseek2-lite": {"kind": "mla", "rope": "norm", "ffn": "moe", "activation": "silu"},
    "deepseek2-v3": {"kind": "mla", "rope": "norm", "ffn": "moe", "activation": "silu"},
    "gemma3": {"kind": "gqa", "rope": "neox", "ffn": "dense", "activation": "gelu_tanh"},
    "gpt-oss": {"kind": "gqa", "rope": "neox", "ffn": "moe", "activation": "swiglu_oai"},
    "glm4moe": {"kind": "gqa", "rope": "neox", "ffn": "moe", "activation": "silu"},
    "granitemoe": {"kind": "gqa", "rope": "norm", "ffn": "moe", "activation": "silu"},
    "bailingmoe2": {"kind": "gqa", "rope": "neox", "ffn": "moe", "activation": "silu"},
    "ernie45moe": {"kind": "gqa", "rope": "norm", "ffn": "moe", "activation": "silu"},
    "mistral3": {"kind": "gqa", "rope": "norm", "ffn": "dense", "activation": "silu"},
    "minimax_m2": {"kind": "gqa", "rope": "neox", "ffn": "moe", "activation": "silu"},
    "olmo3": {"kind": "gqa", "rope": "neox", "ffn": "dense", "activation": "silu"},
    "seedoss": {"kind": "gqa", "rope": "neox", "ffn": "dense", "activation": "silu"},
    "smollm3": {"kind": "gqa", "rope": "none", "ffn": "dense", "activation": "silu"},
    "qwen35": {"kind": "gqa", "rope": "neox", "ffn": "dense", "activation": "silu"},
}


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_facts(name: str, tiny_dir: Path) -> None:
    model = _core.describe_model(tiny_dir / f"{name}-tiny.gguf")
    last = model["layers"][-1]
    want = EXPECTED[name]
    assert last["attention"]["kind"] == want["kind"]
    assert last["attention"]["rope"]["kind"] == want["rope"]
    assert last["ffn"]["kind"] == want["ffn"]
    assert last["ffn"]["activation"] == want["activation"]
    assert model["n_vocab"] == 320
    assert sum(model["types"].values()) == pytest.approx(1)
    text = _core.describe_model_text(tiny_dir / f"{name}-tiny.gguf")
    assert model["architecture"] in text


def test_details_that_only_some_have(tiny_dir: Path) -> None:
    def describe(name: str) -> dict[str, Any]:
        return _core.describe_model(tiny_dir / f"{name}-tiny.gguf")

    gemma = describe("gemma3")
    windows = [layer["attention"]["window"] for layer in gemma["layers"]]
    assert windows == [32, 32, 32, 32, 32, 0, 32]
    assert gemma["layers"][5]["attention"]["rope"]["factor"] == 8.0
    assert gemma["layers"][0]["attention"]["rope"]["base"] == 10000.0
    oss = describe("gpt-oss")
    assert [layer["attention"]["window"] for layer in oss["layers"]] == [32, 0, 32, 0]
    assert all(layer["attention"]["sinks"] for layer in oss["layers"])
    glm = describe("glm4moe")
    assert glm["n_layers"] == 3  # the fourth block predicts the token after the next
    assert glm["layers"][0]["ffn"]["kind"] == "dense"
    bailing = describe("bailingmoe2")
    assert bailing["layers"][1]["ffn"]["groups"] == 4
    assert bailing["layers"][1]["attention"]["fused_qkv"]
    lite = describe("deepseek2-lite")
    # YaRN's magnitude squared: (1 + 0.0707 ln 40)^2 / sqrt(48)
    assert lite["layers"][0]["attention"]["scale"] == pytest.approx(
        (1 + 0.0707 * np.log(40)) ** 2 / np.sqrt(48), rel=1e-6
    )
    olmo = [layer["attention"] for layer in describe("olmo3")["layers"]]
    assert [a["window"] for a in olmo] == [32, 32, 32, 0, 0]
    assert [a["rope"]["scaling"] for a in olmo] == ["none"] * 3 + ["yarn"] * 2
    smol = [layer["attention"]["rope"]["kind"] for layer in describe("smollm3")["layers"]]
    assert smol == ["norm", "norm", "norm", "none"]
    qwen = describe("qwen35")
    assert qwen["n_layers"] == 6  # the seventh block predicts the token after the next
    assert qwen["recurrent_layers"] == 4
    kinds = [layer["recurrent"] and layer["recurrent"]["kind"] for layer in qwen["layers"]]
    assert kinds == ["delta_rule", "delta_rule", None] * 2
    assert [layer["attention"]["kind"] for layer in qwen["layers"]] == ["none", "none", "gqa"] * 2
    delta = qwen["layers"][0]["recurrent"]
    assert (delta["k_heads"], delta["v_heads"], delta["dk"], delta["dv"], delta["taps"]) == (2, 6, 16, 16, 4)
    assert qwen["layers"][2]["attention"]["gated"]
    ernie = [layer["ffn"] for layer in describe("ernie45moe")["layers"]]
    assert [f["kind"] for f in ernie] == ["dense", "moe", "moe"]
    assert ernie[1]["gating"] == "softmax"
    assert ernie[1]["selection_bias"]
    assert describe("granitemoe")["logit_scale"] == pytest.approx(1 / 6)
    assert describe("llama")["layers"][0]["attention"]["rope"]["frequency_factors"]


def llama(path: Path, changes: dict[str, Any], extra: dict[str, np.ndarray] | None = None) -> Path:
    """A one-layer llama whose metadata and tensor shapes can be bent. A change to None drops the entry."""
    rng = np.random.default_rng(0)
    meta: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.context_length": 64,
        "llama.embedding_length": 32,
        "llama.feed_forward_length": 48,
        "llama.attention.head_count": 2,
        "llama.attention.head_count_kv": 1,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
    }
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (40, 32),
        "output_norm.weight": (32,),
        "blk.0.attn_norm.weight": (32,),
        "blk.0.attn_q.weight": (32, 32),
        "blk.0.attn_k.weight": (16, 32),
        "blk.0.attn_v.weight": (16, 32),
        "blk.0.attn_output.weight": (32, 32),
        "blk.0.ffn_norm.weight": (32,),
        "blk.0.ffn_gate.weight": (48, 32),
        "blk.0.ffn_up.weight": (48, 32),
        "blk.0.ffn_down.weight": (32, 48),
    }
    for name, value in changes.items():
        table: dict[str, Any] = shapes if name in shapes else meta
        if value is None:
            del table[name]
        else:
            table[name] = value
    tensors = {name: rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}
    tensors.update(extra or {})
    return tiny_gguf(path, meta, [TensorSpec.of(name, array) for name, array in tensors.items()])


def test_the_unbent_model_is_fine(tmp_path: Path) -> None:
    path = llama(tmp_path / "m.gguf", {})
    session = _core.Session(path)
    logits, _ = session.decode([(0, np.array([1, 2, 3], np.int32))], "all")
    assert logits.shape == (3, 40)
    assert np.isfinite(logits).all()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"general.architecture": "bert"}, UnsupportedError, "'bert' is not supported; known: .*qwen3moe"),
        ({"llama.block_count": None}, ModelError, "llama.block_count is missing"),
        ({"llama.block_count": 0}, ModelError, "llama.block_count is 0"),
        ({"llama.block_count": 2}, ModelError, "blk.1.attn_norm.weight is missing"),
        ({"llama.embedding_length": 33}, ModelError, r"token_embd.weight has shape .*; expected \[33, 40\]"),
        ({"llama.attention.head_count": 3}, ModelError, "rotary dims|attn_q.weight|head"),
        ({"llama.attention.head_count_kv": 0}, ModelError, "head_count_kv is 0"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, ModelError, "finite"),
        ({"llama.rope.dimension_count": 7}, ModelError, "dimension_count is 7; expected an even"),
        ({"llama.rope.dimension_count": 64}, ModelError, "64 dims rotate, but a head has 16"),
        ({"llama.rope.scaling.type": "longrope"}, UnsupportedError, "'longrope'; supported: none"),
        ({"llama.feed_forward_length": -4}, ModelError, "feed_forward_length is -4"),
        (
            {"blk.0.ffn_down.weight": (32, 40)},
            ModelError,
            r"ffn_down.weight has shape .*; expected \[48, 32\]",
        ),
        ({"blk.0.attn_v.weight": None}, ModelError, "blk.0.attn_v.weight is missing"),
        ({"output_norm.weight": (31,)}, ModelError, "output_norm.weight has shape"),
    ],
)
def test_refusals_name_the_offender(
    changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    path = llama(tmp_path / "m.gguf", changes)
    with pytest.raises(error, match=message):
        _core.describe_model(path)


def test_tensors_nobody_needs_are_listed(tmp_path: Path) -> None:
    path = llama(tmp_path / "m.gguf", {}, {"blk.0.mystery.weight": np.zeros((4, 4), np.float32)})
    assert _core.describe_model(path)["unused_tensors"] == ["blk.0.mystery.weight"]


def with_other_head(path: Path, source: Path, drop: str = "") -> Path:
    """A tiny model whose head has matrices of BF16 (of any values), without the tensor `drop`."""
    reader = gguf.GGUFReader(source)
    metadata = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    first = int(metadata["qwen35.block_count"]) - int(metadata["qwen35.nextn_predict_layers"])
    tensors = []
    for t in reader.tensors:
        kind = t.tensor_type.name.lower()
        if t.name.startswith(f"blk.{first}.") and kind == "f16":
            kind = "bf16"
        if t.name != drop:
            tensors.append(TensorSpec(t.name, tuple(map(int, reversed(t.shape))), kind, t.data.tobytes()))
    return tiny_gguf(path, metadata, tensors)


def test_weight_types_of_a_head_are_listed(tmp_path: Path, tiny_dir: Path) -> None:
    path = with_other_head(tmp_path / "m.gguf", tiny_dir / "qwen35-tiny.gguf")
    model = _core.describe_model(path)
    assert (set(model["types"]), model["draft_types"]) == ({"f16"}, ["bf16", "f16"])  # f16: the output
    assert model_from_description(model).types == {"F16": 1.0, "BF16": 0.0001}
    assert _core.describe_model(tiny_dir / "llama-tiny.gguf")["draft_types"] == []


def test_a_head_that_cannot_be_loaded_has_no_types(tmp_path: Path, tiny_dir: Path) -> None:
    lacks = "blk.6.nextn.eh_proj.weight"
    path = with_other_head(tmp_path / "m.gguf", tiny_dir / "qwen35-tiny.gguf", lacks)
    assert _core.describe_model(path)["draft_types"] == []
    with pytest.raises(ModelError, match=lacks):
        _core.Session(path).load_draft_head()


def test_biases_of_a_file_are_used(tmp_path: Path) -> None:
    tokens = [(0, np.array([1, 2, 3], np.int32))]
    plain = _core.Session(llama(tmp_path / "a.gguf", {})).decode(tokens, "all")[0]
    path = llama(tmp_path / "b.gguf", {}, {"blk.0.ffn_down.bias": np.ones(32, np.float32)})
    assert np.abs(plain - _core.Session(path).decode(tokens, "all")[0]).max() > 1e-3


def test_a_bias_that_nobody_would_add_is_refused(tmp_path: Path, tiny_dir: Path) -> None:
    """Queries, keys and values of Qwen3.5 have none; a file that has them would give wrong answers."""
    reader = gguf.GGUFReader(tiny_dir / "qwen35-tiny.gguf")
    metadata = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    tensors = [
        TensorSpec(t.name, tuple(map(int, reversed(t.shape))), t.tensor_type.name.lower(), t.data.tobytes())
        for t in reader.tensors
    ]
    rows = next(t.shape[0] for t in tensors if t.name == "blk.2.attn_v.weight")
    bias = TensorSpec.of("blk.2.attn_v.bias", np.ones(rows, np.float32))
    path = tiny_gguf(tmp_path / "m.gguf", metadata, [*tensors, bias])
    with pytest.raises(UnsupportedError, match=r"blk.2.attn_v.bias is a bias, but models .* 'qwen35'"):
        _core.describe_model(path)


def test_bytes_that_are_no_text_are_escaped(tmp_path: Path) -> None:
    """A message with raw bytes is no string in Python, and a terminal obeys the rest."""
    bad = Typed("string", b"q\xffen\x1b[31m")
    path = tiny_gguf(tmp_path / "a.gguf", {"general.architecture": bad}, [])
    with pytest.raises(UnsupportedError, match=r"architecture 'q\\xffen\\x1b\[31m' is not supported"):
        _core.describe_model(path)
    path = tiny_model(tmp_path / "s.gguf", metadata={"llama.rope.scaling.type": bad})
    with pytest.raises(UnsupportedError, match=r"llama.rope.scaling.type is 'q\\xffen\\x1b\[31m'; supported"):
        _core.describe_model(path)
    path = tiny_model(tmp_path / "n.gguf", metadata={"general.name": bad})
    assert _core.describe_model(path)["name"] == "'q\\xffen\\x1b[31m'"
    assert "\x1b" not in _core.describe_model_text(path)
