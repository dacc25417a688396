"""Sequences of models with recurrent state: how they begin, go on beside each other, and come back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dyno
import numpy as np
import pytest
from dyno import _core
from dyno.errors import PlanError
from random_models import SHAPES, random_model
from random_newer import RECURRENT

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

F32 = {"ctx": 128, "kv_type_k": "f32", "kv_type_v": "f32"}
BY_ARCHITECTURE = {shape.architecture: shape for shape in SHAPES if shape.architecture in RECURRENT}
TOKENS = np.random.default_rng(5).integers(0, 260, 100).astype(np.int32)


@pytest.fixture(params=sorted(BY_ARCHITECTURE))
def opener(request: pytest.FixtureRequest, tmp_path: Path, device: str) -> Opener:
    return Opener(random_model(tmp_path / "m.gguf", BY_ARCHITECTURE[request.param]), device)


class Opener:
    """Sessions of one model on one device, and the error that their exact numerics may have."""

    def __init__(self, path: Path, device: str) -> None:
        self.path, self.device = path, device
        # Products of a prompt and of single tokens add in other orders on a GPU.
        self.limit = 1e-9 if device == "cpu" else 1e-7

    def __call__(self, **context: Any) -> _core.Session:
        load = {"numerics": "exact", "device": self.device}
        return _core.Session(self.path, load=load, context={**F32, **context}, session={"threads": 2})

    def close(self, a: NDArray[np.float32], b: NDArray[np.float32]) -> bool:
        x, y = a.astype(np.float64), b.astype(np.float64)
        return bool(((x - y) ** 2).sum() < self.limit * ((y - y.mean()) ** 2).sum())


def decode(s: _core.Session, tokens: NDArray[np.int32], slot: int = 0) -> NDArray[np.float32]:
    logits = s.decode([(slot, np.ascontiguousarray(tokens, np.int32))], "all")[0]
    assert logits is not None
    return logits


def test_logits_do_not_depend_on_how_a_prompt_is_cut(opener: Opener) -> None:
    s = opener()
    whole = decode(s, TOKENS)
    for ubatch in (1, 2, 3, 5, 16, 17, 64):
        s.set({"ubatch": ubatch})
        s.reset()
        assert opener.close(decode(s, TOKENS), whole), ubatch
    s.reset()
    assert opener.close(
        np.concatenate([decode(s, token) for token in TOKENS[:40].reshape(-1, 1)]), whole[:40]
    )
    s.reset()
    parts = [decode(s, TOKENS[:1]), decode(s, TOKENS[1:3]), decode(s, TOKENS[3:90]), decode(s, TOKENS[90:])]
    assert opener.close(np.concatenate(parts), whole)


def test_state_goes_on_where_no_logits_are_wanted(opener: Opener) -> None:
    s = opener()
    whole = decode(s, TOKENS)
    s.set({"ubatch": 16})
    s.reset()
    s.decode([(0, TOKENS[:70].copy())], "none")
    assert opener.close(decode(s, TOKENS[70:]), whole[70:])
    s.reset()
    last = s.decode([(0, TOKENS[:70].copy())], "last")[0]
    assert last is not None
    assert opener.close(last, whole[69:70])


def test_sequences_keep_apart(opener: Opener) -> None:
    s = opener(sequences=3)
    whole = decode(s, TOKENS)
    s.reset()
    s.decode([(0, TOKENS[50:90].copy())], "none")  # something else lies in slot 0 first
    s.reset(0)
    for slot, count in ((2, 30), (0, 7)):
        s.decode([(slot, TOKENS[:count].copy())], "none")
    for _ in range(3):
        at = {slot: s.position(slot) for slot in (0, 1, 2)}
        got = s.decode([(slot, TOKENS[p : p + 2].copy()) for slot, p in at.items()], "last")[0]
        assert got is not None
        assert opener.close(got, np.stack([whole[p + 1] for p in at.values()]))


def test_a_checkpoint_brings_a_sequence_back(opener: Opener) -> None:
    s = opener(sequences=2)
    whole = decode(s, TOKENS)
    s.reset()
    decode(s, TOKENS[:40])
    there = s.checkpoint(0)
    assert (there.slot, there.position) == (0, 40)
    assert there.state_bytes > 0
    decode(s, TOKENS[60:90])  # another way to go on
    s.restore(there)
    assert s.position(0) == 40
    assert opener.close(decode(s, TOKENS[40:]), whole[40:])
    s.rewind(40, 0)  # finds the checkpoint by itself
    assert opener.close(decode(s, TOKENS[40:60]), whole[40:60])


def test_elsewhere_a_rewind_says_why_not(opener: Opener) -> None:
    s = opener()
    decode(s, TOKENS[:40])
    there = s.checkpoint(0)
    decode(s, TOKENS[40:50])
    with pytest.raises(
        PlanError, match=r"recurrent state, which can return only to 0 and to checkpoints.* is 40"
    ):
        s.rewind(45)
    assert s.position(0) == 50
    assert [s.rewindable(p) for p in (50, 49, 40, 39, 0)] == [50, 40, 40, 0, 0]
    del there  # nobody holds it any more
    assert s.rewindable(49) == 0
    s.rewind(0)
    assert s.position(0) == 0


def test_a_checkpoint_of_what_is_forgotten_is_refused(opener: Opener) -> None:
    s, other = opener(sequences=2), opener()
    decode(s, TOKENS[:40])
    there = s.checkpoint(0)
    decode(other, TOKENS[:40])
    with pytest.raises(PlanError, match="another session made it"):
        other.restore(there)
    s.reset(0)
    decode(s, TOKENS[50:95])
    with pytest.raises(PlanError, match="position 40 cannot be restored"):
        s.restore(there)
    with pytest.raises(PlanError, match="nearest earlier position is 0"):
        s.rewind(40)


def test_a_copy_goes_on_like_its_source(opener: Opener) -> None:
    s = opener(sequences=2)
    whole = decode(s, TOKENS)
    s.reset()
    decode(s, TOKENS[:33])
    decode(s, TOKENS[80:90], slot=1)
    s.copy(0, 1)
    assert s.position(1) == 33
    decode(s, TOKENS[70:80])
    assert opener.close(decode(s, TOKENS[33:70], slot=1), whole[33:70])


def test_the_plan_counts_the_state(opener: Opener) -> None:
    one, two = opener().plan, opener(sequences=2).plan
    assert 0 < one["state_bytes"] < two["state_bytes"] <= 2 * one["state_bytes"]
    assert two["total_bytes"] - one["total_bytes"] >= one["state_bytes"]
    assert "recurrent state" in opener().describe_plan()


def test_tokens_after_a_checkpoint_come_again_bit_for_bit(opener: Opener) -> None:
    """In the default numerics, token by token, which a GPU replays from a captured graph."""
    s = _core.Session(opener.path, load={"device": opener.device}, context={"ctx": 128, "sequences": 2})
    s.decode([(0, TOKENS[:40].copy())], "none")
    ways = []
    for there in [s.checkpoint(0)] * 2:
        s.restore(there)
        ways.append(np.concatenate([decode(s, token) for token in TOKENS[40:52].reshape(-1, 1)]))
    s.restore(there)
    s.copy(0, 1)
    ways.append(np.concatenate([decode(s, token, slot=1) for token in TOKENS[40:52].reshape(-1, 1)]))
    assert np.isfinite(ways[0]).all()
    np.testing.assert_array_equal(ways[1], ways[0])
    np.testing.assert_array_equal(ways[2], ways[0])


def test_models_without_state_have_checkpoints_too(tmp_path: Path, device: str) -> None:
    opener = Opener(random_model(tmp_path / "m.gguf", SHAPES[0]), device)
    s = opener()
    whole = decode(s, TOKENS)
    s.rewind(40)
    there = s.checkpoint(0)
    assert there.state_bytes == 0
    decode(s, TOKENS[60:80])
    s.restore(there)
    assert opener.close(decode(s, TOKENS[40:]), whole[40:])


def test_the_engine_hands_them_on(tmp_path: Path, device: str) -> None:
    opener = Opener(random_model(tmp_path / "m.gguf", BY_ARCHITECTURE["lfm2"]), device)
    # In the default numerics on the CPU, whose rounding does not depend on what came before.
    numerics: dict[str, Any] = {} if device == "cpu" else {"numerics": "exact"}
    with dyno.Engine(opener.path, device=device, ctx=128, sequences=2, profile=None, **numerics) as engine:
        assert engine.model["recurrent_layers"] == 3
        engine.logits(TOKENS[:20])
        there = engine.checkpoint()
        want = engine.logits(TOKENS[20:25], reset=False)
        engine.copy_sequence(0, 1)
        assert engine.position(1) == 25
        with pytest.raises(PlanError, match="recurrent state"):
            engine.rewind(22)
        engine.restore(there)
        assert opener.close(engine.logits(TOKENS[20:25], reset=False), want)
