"""`Engine.embed` against float64 NumPy: pooled rows that follow from the logits, alone and beside texts."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from chat_model import chat_model
from dyno import ContextLengthError, Engine, ModelError, PlanError, Scheduler, _core
from dyno._embedding import Pooler

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

TEXTS = ["a", "def main(argv):", "x" * 90, "one two three", "class Shape:\n    pass", "zz"]


def nmse(out: NDArray[Any], reference: NDArray[Any]) -> float:
    error = out.astype(np.float64) - reference
    return float((error**2).sum() / ((reference - reference.mean()) ** 2).sum())


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, device: str) -> Iterator[Engine]:
    path = chat_model(tmp_path_factory.mktemp("model") / "m.gguf", n_layers=2)
    with Engine(
        path, device=device, profile=None, numerics="exact", sequences=3, ctx=128, ubatch=16, threads=2
    ) as opened:
        yield opened


def reference(engine: Engine, text: str, pooling: str, normalize: bool) -> NDArray[np.float64]:
    head = _core.Gguf(engine.path).dequantize("output.weight").astype(np.float64)
    logits = engine.logits(engine.tokenize(text)).astype(np.float64)
    rows = np.linalg.lstsq(head, logits.T, rcond=None)[0].T  # float32 [288, 64]: the rows follow from logits
    vector = {"mean": rows.mean(axis=0), "last": rows[-1], "cls": rows[0]}[pooling]
    return vector / np.linalg.norm(vector) if normalize else vector


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("pooling", ["mean", "last", "cls"])
def test_embeddings_equal_the_reference(
    engine: Engine, pooling: Any, normalize: bool, scheduled: bool
) -> None:
    wanted = np.stack([reference(engine, text, pooling, normalize) for text in TEXTS])
    if scheduled:
        with Scheduler(engine, step_tokens=10):
            found = engine.embed(TEXTS, pooling, normalize)
    else:
        found = engine.embed(TEXTS, pooling, normalize)
    assert found.shape == wanted.shape
    assert found.dtype == np.float32
    for row, right in zip(found, wanted, strict=True):
        assert nmse(row, right) < 1e-9
    if normalize:
        assert np.allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)
    # Another text's vector would not pass.
    assert min(nmse(found[i], wanted[j]) for i in range(6) for j in range(6) if i != j) > 1e-4


def test_embeddings_beside_texts_leave_both_as_they_are(engine: Engine) -> None:
    alone = ["".join(engine.generate(text, 20)) for text in TEXTS]
    vectors = engine.embed(TEXTS)
    found: dict[str, Any] = {}
    with Scheduler(engine, step_tokens=9) as scheduler:
        work = [
            threading.Thread(target=lambda: found.update(v=engine.embed(TEXTS * 3))),
            *(
                threading.Thread(target=lambda t=t: found.update({t: "".join(engine.generate(t, 20))}))
                for t in TEXTS
            ),
        ]
        for thread in work:
            thread.start()
        for thread in work:
            thread.join()
        assert scheduler.load()["running"] == 0
    assert [found[text] for text in TEXTS] == alone
    assert nmse(found["v"], np.tile(vectors, (3, 1)).astype(np.float64)) < 1e-9


def test_a_file_names_its_pooling(tmp_path: Path) -> None:
    for kind, pooling in ((0, "mean"), (1, "mean"), (2, "cls"), (3, "last"), (4, "mean")):
        path = chat_model(tmp_path / f"{kind}.gguf", pooling_type=kind)
        with Engine(path, device="cpu", profile=None, threads=1, ctx=64) as engine:
            assert np.array_equal(engine.embed("abc"), engine.embed("abc", pooling))  # type: ignore[arg-type]


def test_errors_of_embeddings(engine: Engine) -> None:
    assert engine.embed([]).shape == (0, 64)
    assert engine.embed([[1, 2, 3]]).shape == (1, 64)
    with pytest.raises(PlanError, match="pooling is 'max'; expected mean, last, cls"):
        engine.embed("a", "max")  # type: ignore[arg-type]
    with pytest.raises(ContextLengthError, match="the prompt has 200 tokens, ctx is 128"):
        engine.embed([[1] * 200])
    stop = threading.Event()
    stop.set()
    with pytest.raises(PlanError, match="cancelled"):
        engine.embed("a", cancelled=stop)
    texts = [engine.generate("a", 20, slot=slot) for slot in range(3)]
    for text in texts:
        next(text)
    with pytest.raises(PlanError, match="no slot is free"):
        engine.embed("a")
    texts[1].close()
    assert engine.embed(TEXTS).shape == (6, 64)  # through the one that is free
    for text in texts:
        text.close()
    pooler = Pooler("mean", normalize=True)
    pooler.add(np.full((1, 4), np.nan, np.float32))
    with pytest.raises(ModelError, match="not finite"):
        pooler.vector()
