"""Hidden rows against float64 NumPy: the rows that an output matrix made the logits of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from dyno import PlanError, _core
from dyno.testing import tiny_model
from random_models import SHAPES, random_model

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

EXACT = {"load": {"numerics": "exact"}, "context": {"ctx": 128, "kv_type_k": "f32", "kv_type_v": "f32"}}
TOKENS = np.random.default_rng(3).integers(0, 80, 50).astype(np.int32)
# One of each architecture; rows follow from logits if the output has at least as many rows as columns.
WIDE = list({s.architecture: s for s in SHAPES if s.n_vocab >= 1.2 * s.n_embd}.values())


def nmse(out: NDArray[Any], reference: NDArray[Any]) -> float:
    error = out.astype(np.float64) - reference
    return float((error**2).sum() / ((reference - reference.mean()) ** 2).sum())


def head_of(path: Path) -> NDArray[np.float64]:
    """The output matrix, scaled as the model scales its logits."""
    file, model = _core.Gguf(path), _core.describe_model(path)
    names = {tensor["name"] for tensor in file.tensors()}
    head = file.dequantize("output.weight" if "output.weight" in names else "token_embd.weight")
    return head.astype(np.float64) * model["logit_scale"]


@pytest.mark.parametrize("shape", WIDE, ids=lambda s: s.architecture)
def test_hidden_rows_are_those_that_give_the_logits(tmp_path: Path, shape: Any, device: str) -> None:
    path = random_model(tmp_path / "m.gguf", shape)
    load = {**EXACT["load"], "device": device}
    session = _core.Session(path, load=load, context=EXACT["context"], session={"threads": 2, "ubatch": 16})
    logits = session.decode([(0, TOKENS)], "all")[0]
    session.reset()
    hidden = session.decode_hidden([(0, TOKENS)])
    assert hidden.shape == (len(TOKENS), session.model["n_embd"])
    assert hidden.dtype == np.float32
    head, cap = head_of(path), session.model["logit_softcap"]
    scores = hidden.astype(np.float64) @ head.T
    assert nmse(logits, cap * np.tanh(scores / cap) if cap else scores) < 1e-9
    if not cap:  # the other way round: the head has more rows than columns
        assert nmse(hidden, np.linalg.lstsq(head, logits.T.astype(np.float64), rcond=None)[0].T) < 1e-8
    session.reset()
    # A GPU multiplies the last row alone by other kernels than many rows together.
    bits = 0.0 if device == "cpu" else 1e-9
    last = session.decode_hidden([(0, TOKENS)], "last")
    assert last.shape == (1, session.model["n_embd"])
    assert nmse(last, hidden[-1:].astype(np.float64)) <= bits
    # The sequence goes on behind them as behind logits.
    after = session.decode([(0, TOKENS[:5])], "last")[0]
    assert after.shape == (1, session.model["n_vocab"])
    session.reset()
    session.decode([(0, TOKENS)], "none")
    again = session.decode([(0, TOKENS[:5])], "last")[0]
    assert again.shape == after.shape
    assert nmse(again, after.astype(np.float64)) <= bits


def test_several_sequences_and_virtual_devices_give_the_same_rows(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "m.gguf", n_layers=3)
    context = {**EXACT["context"], "sequences": 3}
    plain = _core.Session(path, load=EXACT["load"], context=context, session={"threads": 2, "ubatch": 7})
    parts = [TOKENS[:1], TOKENS[5:30], TOKENS[30:]]
    together = plain.decode_hidden(list(enumerate(parts)))
    begin = 0
    for part in parts:
        plain.reset()
        alone = plain.decode_hidden([(1, part)])
        assert alone.shape == (len(part), plain.model["n_embd"])
        assert nmse(alone, together[begin : begin + len(part)].astype(np.float64)) < 1e-10
        begin += len(part)
    placed = _core.Session(
        path,
        load=EXACT["load"],
        context=context,
        session={"threads": 2, "ubatch": 7},
        placement={"virtual_devices": [{}], "rules": ["blk\\.1\\.=cpu:1", "output=cpu:1"]},
    )
    assert np.array_equal(placed.decode_hidden(list(enumerate(parts))), together)


def test_impossible_rows(tmp_path: Path) -> None:
    session = _core.Session(tiny_model(tmp_path / "m.gguf"), context={"ctx": 16})
    with pytest.raises(PlanError, match="rows is 'none'; expected all or last"):
        session.decode_hidden([(0, TOKENS[:3])], "none")
    with pytest.raises(PlanError, match="would reach 50 positions"):
        session.decode_hidden([(0, TOKENS)])
    assert session.position(0) == 0
