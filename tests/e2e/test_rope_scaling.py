"""Keys of a file that change rotary embeddings: which files scale positions, and by how much."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from dyno import ModelError, UnsupportedError, _core
from dyno.testing import TensorSpec, tiny_gguf
from random_models import Shape, random_model, random_parts

if TYPE_CHECKING:
    from pathlib import Path

LLAMA = Shape("llama", ("f32",), 50, 3, 1, 22, 70, 91)
TOKENS = np.arange(40, dtype=np.int32)


def with_keys(shape: Shape, **keys: Any) -> Shape:
    return replace(shape, metadata={name.replace("__", "."): value for name, value in keys.items()})


def logits(path: Path) -> np.ndarray:
    session = _core.Session(
        path, load={"numerics": "exact"}, context={"ctx": 64, "kv_type_k": "f32", "kv_type_v": "f32"}
    )
    return session.decode([(0, TOKENS)], "all")[0]


@pytest.mark.parametrize(
    ("keys", "scaling", "factor"),
    [
        ({}, "none", 1.0),
        ({"rope.scaling.factor": 4.0}, "linear", 4.0),
        ({"rope.scale_linear": 4.0}, "linear", 4.0),
        ({"rope.scaling.factor": 2.0, "rope.scale_linear": 4.0}, "linear", 2.0),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, "linear", 4.0),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, "none", 1.0),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, "yarn", 4.0),
        ({"rope.scaling.factor": 0.0}, "none", 1.0),
    ],
)
def test_a_factor_without_a_type_is_linear(
    keys: dict[str, Any], scaling: str, factor: float, tmp_path: Path
) -> None:
    path = random_model(tmp_path / "m.gguf", replace(LLAMA, metadata=keys))
    rope = _core.describe_model(path)["layers"][0]["attention"]["rope"]
    assert (rope["scaling"], rope["factor"]) == (scaling, factor)


@pytest.mark.parametrize("name", ["rope.scaling.factor", "rope.scale_linear"])
def test_a_negative_factor_is_refused_by_its_name(name: str, tmp_path: Path) -> None:
    path = random_model(tmp_path / "m.gguf", replace(LLAMA, metadata={name: -2.0}))
    with pytest.raises(ModelError, match=rf"llama.{name} is -2; expected 0 or more"):
        _core.describe_model(path)


@pytest.mark.parametrize("scaling", [{}, {"rope__scaling__factor": 4.0}])
def test_an_attention_factor_multiplies_queries_and_keys(scaling: dict[str, Any], tmp_path: Path) -> None:
    """Both rotate whole, so their products grow by its square, as if the matrix of queries had grown so."""
    factor = 1.3
    found = logits(
        random_model(tmp_path / "a.gguf", with_keys(LLAMA, rope__scaling__attn_factor=factor, **scaling))
    )
    metadata, tensors = random_parts(with_keys(LLAMA, **scaling))
    grown = [
        TensorSpec(t.name, t.shape, t.dtype, (np.frombuffer(t.data, np.float32) * factor**2).tobytes())
        if t.name.endswith("attn_q.weight")
        else t
        for t in tensors
    ]
    expected = logits(tiny_gguf(tmp_path / "b.gguf", metadata, grown))
    assert np.abs(found - expected).max() < 1e-4
    plain = logits(random_model(tmp_path / "c.gguf", with_keys(LLAMA, **scaling)))
    assert np.abs(plain - expected).max() > 1e-2


def test_layers_without_rotation_have_no_attention_factor(tmp_path: Path) -> None:
    shape = Shape(
        "nemotron_h", ("f32",), 96, 4, 2, 32, 128, 67, n_layers=6,
        linear_keys=2, linear_values=6, linear_dim=32, linear_state=24,
    )  # fmt: skip
    plain = logits(random_model(tmp_path / "a.gguf", shape))
    keyed = logits(random_model(tmp_path / "b.gguf", with_keys(shape, rope__scaling__attn_factor=1.3)))
    assert (plain == keyed).all()


MISTRAL = Shape("mistral3", ("f32",), 64, 4, 2, 32, 96, 83)


@pytest.mark.parametrize("second", [0.0, 0.1, 1.0])
def test_mistral3_divides_its_magnitude_by_that_of_the_file(second: float, tmp_path: Path) -> None:
    keys = {
        "rope__scaling__type": "yarn",
        "rope__scaling__factor": 8.0,
        "rope__scaling__original_context_length": 16,
    }
    found = logits(
        random_model(
            tmp_path / "a.gguf", with_keys(MISTRAL, rope__scaling__yarn_log_multiplier=second, **keys)
        )
    )
    factor = 1 / (1 + 0.1 * second * math.log(8.0))
    same = with_keys(MISTRAL, rope__scaling__attn_factor=factor, **keys)
    assert np.abs(found - logits(random_model(tmp_path / "b.gguf", same))).max() < 1e-5


def test_mistral3_grows_queries_from_the_trained_context_on(tmp_path: Path) -> None:
    """A file need not name the original context."""
    shape = with_keys(MISTRAL, attention__temperature_scale=0.3, context_length=64)
    path = random_model(tmp_path / "m.gguf", shape)
    named = with_keys(
        MISTRAL,
        attention__temperature_scale=0.3,
        context_length=64,
        rope__scaling__original_context_length=64,
    )
    assert (logits(path) == logits(random_model(tmp_path / "n.gguf", named))).all()


def test_a_window_of_lfm2_is_read(tmp_path: Path) -> None:
    shape = Shape("lfm2", ("f32",), 64, 4, 2, 16, 96, 71, n_layers=5, taps=3)
    path = random_model(tmp_path / "m.gguf", with_keys(shape, attention__sliding_window=8))
    layers = _core.describe_model(path)["layers"]
    windows = [None if layer["recurrent"] else layer["attention"]["window"] for layer in layers]
    assert windows == [None, 8, None, None, 8]


def test_scaling_belongs_to_layers_without_a_window(tmp_path: Path) -> None:
    """Gemma 4 and OLMo 3 rotate sliding layers as they were trained first, whatever scales the others."""
    gemma = Shape("gemma4", ("f32",), 64, 4, 2, 16, 96, 71, n_layers=4, window=9, tied=True, full_head_dim=32)
    path = random_model(tmp_path / "g.gguf", with_keys(gemma, rope__scaling__factor=4.0))
    ropes = [layer["attention"]["rope"] for layer in _core.describe_model(path)["layers"]]
    assert [(r["scaling"], r["factor"]) for r in ropes] == [("none", 1.0), ("linear", 4.0)] * 2
    olmo = Shape("olmo2", ("f32",), 64, 4, 4, 16, 96, 71, n_layers=3, window=11)  # the fourth has no window
    plain = logits(random_model(tmp_path / "a.gguf", olmo))
    keyed = logits(random_model(tmp_path / "b.gguf", with_keys(olmo, rope__scaling__attn_factor=1.3)))
    assert (plain == keyed).all()


def test_attention_to_later_tokens_is_refused(tmp_path: Path) -> None:
    path = random_model(tmp_path / "m.gguf", with_keys(LLAMA, attention__causal=False))
    with pytest.raises(UnsupportedError, match=r"llama.attention.causal is false: .*supported: causal"):
        _core.describe_model(path)
    random_model(path, with_keys(LLAMA, attention__causal=True))
    assert _core.describe_model(path)["n_layers"] == 2
