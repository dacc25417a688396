"""Session.decode_and_draw: a token for each sequence of a step, drawn where the logits are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dyno import _core
from dyno.errors import PlanError

TINY = Path(__file__).resolve().parent.parent / "data" / "tiny"
GPUS = [d for d in _core.devices() if d["kind"] == "cuda"]
DEVICES = [
    "cpu",
    pytest.param(
        "cuda:0",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not GPUS, reason=f"no GPU: {_core.no_cuda_reason()}")],
    ),
]
SETTINGS = [
    (0.0, 0, 1.0, 0.0),
    (0.9, 40, 0.95, 0.05),
    (1.3, 0, 0.8, 0.0),
    (0.7, 0, 1.0, 0.1),
    (1.0, 3, 1.0, 0.0),
]
# Without top-p over a whole row, for which a GPU sorts it.
UNSORTED = [row for row in SETTINGS if row[0] == 0 or row[1] > 0 or row[2] == 1]


def open_session(device: str, sequences: int, ubatch: int = 64) -> _core.Session:
    return _core.Session(
        TINY / "qwen3-tiny.gguf",
        load={"device": device},
        context={"ctx": 128, "sequences": sequences},
        session={"ubatch": ubatch},
    )


def inputs(random: np.random.Generator, lengths: list[int]) -> list[tuple[int, np.ndarray]]:
    return [(slot, random.integers(0, 200, n).astype(np.int32)) for slot, n in enumerate(lengths)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ubatch", [64, 8])
@pytest.mark.parametrize("settings", [SETTINGS, UNSORTED], ids=["sorted", "unsorted"])
def test_each_row_is_drawn_as_if_alone(
    device: str, ubatch: int, settings: list[tuple[float, int, float, float]]
) -> None:
    """Prompts and single tokens of 19 sequences, each with settings of its own.

    A GPU takes two launches if top-p alone chooses for one of them, else one.
    """
    random = np.random.default_rng(1)
    with_logits, drawing = open_session(device, 19, ubatch), open_session(device, 19, ubatch)
    drawn = set()
    for lengths in ([1 + 3 * (i % 4) for i in range(19)], [1] * 19):
        batch = inputs(random, lengths)
        uniforms = random.random(19).astype(np.float32)
        draws = [(*settings[i % len(settings)], float(u)) for i, u in enumerate(uniforms)]
        logits = with_logits.decode(batch, "last")[0]
        assert logits is not None
        want = [_core.sample(row, *draw) for row, draw in zip(logits, draws, strict=True)]
        tokens, rows = drawing.decode_and_draw(batch, draws, logits_of=[2, 18])
        assert tokens.tolist() == want
        np.testing.assert_array_equal(rows, logits[[2, 18]])
        drawn |= set(want)
    assert len(drawn) > 10
    assert [drawing.position(slot) for slot in range(19)] == [
        with_logits.position(slot) for slot in range(19)
    ]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ubatch", [64, 8])
def test_rows_of_a_draft_are_drawn_as_if_alone(device: str, ubatch: int) -> None:
    """The last tokens of some sequences, each row with settings of its own."""
    random = np.random.default_rng(4)
    lengths, first = [6, 1, 9, 12], [3, 0, 8, 2]
    with_logits, drawing = open_session(device, 4, ubatch), open_session(device, 4, ubatch)
    batch = inputs(random, lengths)
    logits = with_logits.decode(batch, "all")[0]
    assert logits is not None
    ends = np.cumsum(lengths)
    kept = np.concatenate([np.arange(e - n + f, e) for e, n, f in zip(ends, lengths, first, strict=True)])
    draws = [(*SETTINGS[i % len(SETTINGS)], float(random.random())) for i in range(len(kept))]
    want = [_core.sample(row, *draw) for row, draw in zip(logits[kept], draws, strict=True)]
    tokens, rows = drawing.decode_and_draw(batch, draws, [0, 5, len(kept) - 1], first)
    assert tokens.tolist() == want
    # A GPU's products of another number of rows may round in another way.
    np.testing.assert_allclose(rows, logits[kept][[0, 5, -1]], rtol=0, atol=0 if device == "cpu" else 1e-4)
    again = [_core.sample(row, *draws[i]) for row, i in zip(rows, (0, 5, len(kept) - 1), strict=True)]
    assert again == [want[0], want[5], want[-1]]
    assert [drawing.position(slot) for slot in range(4)] == lengths


@pytest.mark.parametrize("device", DEVICES)
def test_one_token_is_fed_as_an_int_or_as_an_array(device: str) -> None:
    draws = [(0.8, 40, 0.95, 0.05, 0.25 * i) for i in range(3)]
    drawn = []
    for one in (7, np.array([7], np.int32)):
        session = open_session(device, 3)
        first = session.decode_and_draw([(0, one), (1, np.arange(5, dtype=np.int32)), (2, 9)], draws)[0]
        second = session.decode_and_draw([(2, int(first[2])), (0, one)], draws[1:])[0]
        assert [session.position(slot) for slot in range(3)] == [2, 5, 2]
        drawn.append([*first.tolist(), *second.tolist()])
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        (-1, PlanError, r"token -1 at index 0 of sequence 1 does not exist"),
        (1 << 40, PlanError, r"token 1099511627776 for sequence 1; expected a token id of 32 bits"),
        (-(1 << 80), PlanError, r"token -1208925819614629174706176 for sequence 1"),
        ("x", TypeError, r"tokens for sequence 1 are of type str; expected an int, or an int32 array"),
        (1.5, TypeError, r"tokens for sequence 1 are of type float"),
        (
            np.zeros((2, 1), np.int32),
            TypeError,
            r"tokens for sequence 1 are of type ndarray; expected an int, or an int32 array",
        ),
    ],
)
def test_impossible_tokens_change_nothing(tokens: Any, error: type[Exception], message: str) -> None:
    session = open_session("cpu", 2)
    with pytest.raises(error, match=message):
        session.decode_and_draw([(0, 3), (1, tokens)], [(0.0, 0, 1.0, 0.0, 0.0)] * 2)
    assert [session.position(slot) for slot in range(2)] == [0, 0]


@pytest.mark.parametrize("first", [[0], [2, 5], [-1, 0]])
def test_impossible_first_rows(first: list[int]) -> None:
    session = open_session("cpu", 2)
    with pytest.raises(PlanError, match=r"first row"):
        session.decode_and_draw(
            inputs(np.random.default_rng(2), [3, 5]), [(0.0, 0, 1.0, 0.0, 0.0)] * 5, [], first
        )


@pytest.mark.parametrize("device", DEVICES)
def test_logits_come_to_the_host_only_if_asked_for(device: str) -> None:
    session = open_session(device, 2)
    batch = inputs(np.random.default_rng(2), [3, 5])
    tokens, rows = session.decode_and_draw(batch, [(0.0, 0, 1.0, 0.0, 0.0)] * 2)
    assert rows is None
    assert tokens.dtype == np.int32
    assert tokens.shape == (2,)


@pytest.mark.parametrize("device", DEVICES)
def test_a_generation_goes_on_after_a_step(device: str) -> None:
    """What a step leaves on the device must not be taken for the logits of a generation."""
    session, other = open_session(device, 2), open_session(device, 2)
    prompt = np.arange(7, dtype=np.int32)
    texts = []
    for each in (session, other):
        generation = each.generation(prompt, slot=0)
        generation.queue(np.zeros(6, np.float32))
        text = [generation.next() for _ in range(3)]
        if each is session:
            each.decode_and_draw(inputs(np.random.default_rng(3), [1, 4])[1:], [(0.0, 0, 1.0, 0.0, 0.0)])
        texts.append(text + [generation.next() for _ in range(3)])
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("draws", "logits_of", "message"),
    [
        ([(0.0, 0, 1.0, 0.0, 0.0)], [], "1 draws for 2 rows"),
        ([(0.0, 0, 1.0, 0.0, 1.0)] * 2, [], "uniform 1 is not in"),
        ([(-1.0, 0, 1.0, 0.0, 0.0)] * 2, [], "temperature is -1"),
        ([(0.0, 0, 1.0, 0.0, 0.0)] * 2, [2], "logits_of names row 2; the decode has 2 rows"),
        ([(0.0, 0, 1.0, 0.0, 0.0)] * 2, [-1], "logits_of names row -1"),
    ],
)
def test_refused(
    draws: list[tuple[float, int, float, float, float]], logits_of: list[int], message: str
) -> None:
    session = open_session("cpu", 2)
    with pytest.raises(PlanError, match=message):
        session.decode_and_draw(inputs(np.random.default_rng(2), [3, 5]), draws, logits_of)
    assert session.position(0) == session.position(1) == 0
