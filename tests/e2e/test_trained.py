"""A really trained model: perplexity against that of llama.cpp, and the fast path against the exact one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import dyno
import numpy as np
import pytest
from dyno import perplexity as measure
from dyno import quality

if TYPE_CHECKING:
    from pathlib import Path

CTX = 512
CHUNKS = 40
# By llama.cpp on the CPU: 40 chunks of 512 tokens, the second half of each scored, no BOS.
PERPLEXITY = {
    "pycode-moe-20m-Q8_0": 11.0996,
    "pycode-moe-20m-Q4_K_M": 11.1578,
    "pycode-moe-20m-Q4_0": 11.1994,
    "pycode-moe-20m-Q2_K": 11.7889,
    "pycode-moe-20m-MXFP4": 11.0088,
    "pycode-moe-44m-32e-Q4_0": 16.7319,
    "pycode-moe-20m-IQ3_S": 11.5924,
    "pycode-moe-20m-IQ3_XXS": 11.5518,
    "pycode-moe-20m-IQ2_S": 12.3215,
    "pycode-moe-20m-IQ2_XS": 12.3215,
    "pycode-moe-20m-IQ2_XXS": 12.5652,
    "pycode-moe-20m-IQ1_M": 13.7389,
    "pycode-moe-20m-IQ1_S": 14.5673,
    "pycode-moe-20m-NVFP4": 11.1597,
    # By ik_llama.cpp, with --no-escape.
    "pycode-moe-20m-IQ2_K": 12.0155,
    "pycode-moe-20m-IQ2_KL": 11.5211,
    "pycode-moe-20m-IQ2_KS": 11.7550,
    "pycode-moe-20m-IQ3_K": 11.3269,
    "pycode-moe-20m-IQ3_KS": 11.3137,
    "pycode-moe-20m-IQ4_K": 11.0907,
    "pycode-moe-20m-IQ4_K_R4": 11.1063,
    "pycode-moe-20m-IQ4_KS": 11.1273,
    "pycode-moe-20m-IQ4_KS_R4": 11.1184,
    "pycode-moe-20m-IQ4_KSS": 11.2875,
    "pycode-moe-20m-IQ5_K": 11.1086,
    "pycode-moe-20m-IQ5_KS": 11.1344,
    "pycode-moe-20m-Q4_K_R4": 11.1888,
    "pycode-moe-20m-Q6_0": 11.1101,
}


def perplexity_of(model: Path, text: Path, chunks: int = CHUNKS) -> measure.Perplexity:
    with dyno.Engine(model, device="cpu", profile=None, ctx=CTX) as engine:
        tokens = engine.tokenizer.encode(text.read_text(encoding="utf-8"))
        return measure.perplexity(engine, measure.chunk_tokens(tokens, CTX, chunks))


def test_the_fast_path_answers_as_the_exact_one(trained_model: Path, eval_text: Path) -> None:
    comparer = quality.Comparer()
    nll: dict[str, list[float]] = {"default": [], "exact": []}
    with (
        dyno.Engine(trained_model, device="cpu", profile=None, ctx=CTX) as fast,
        dyno.Engine(trained_model, device="cpu", profile=None, ctx=CTX, numerics="exact") as exact,
    ):
        assert exact.settings["kv_type_k"] == "f32"
        tokens = fast.tokenizer.encode(eval_text.read_text(encoding="utf-8"))
        for chunk in measure.chunk_tokens(tokens, CTX, 4):
            rows = {"default": fast.logits(chunk), "exact": exact.logits(chunk)}
            comparer.add(rows["exact"], rows["default"])
            for name, logits in rows.items():
                log_probs = quality.log_softmax(logits[:-1])
                nll[name] += (-log_probs[np.arange(CTX - 1), chunk[1:]]).tolist()
    found = comparer.result()
    assert found.rows == 4 * CTX
    assert 0.0 < found.mean_kld < 2e-3  # int8 activations and an f16 cache cost something, and not more
    assert found.top1_agreement > 0.97
    assert np.exp(np.mean(nll["default"]) - np.mean(nll["exact"])) == pytest.approx(1.0, abs=5e-3)


def test_greedy_generation_follows_its_own_logits(trained_model: Path) -> None:
    """Token by token over the cache gives what one pass over the whole text gives."""
    with dyno.Engine(trained_model, device="cpu", profile=None, ctx=128, numerics="exact") as engine:
        prompt = engine.tokenize("def read_file(path):")
        text = "".join(engine.generate(prompt, max_tokens=48, temperature=0))
        whole = [*prompt, *engine.tokenize(text)]
        best = engine.logits(whole).argmax(axis=1)
        assert len(whole) > len(prompt) + 8
        assert best[len(prompt) - 1 : -1].tolist() == whole[len(prompt) :]


@pytest.mark.slow
def test_perplexity_of_the_shipped_model(trained_model: Path, eval_text: Path) -> None:
    found = perplexity_of(trained_model, eval_text)
    assert (found.chunks, found.tokens) == (CHUNKS, CHUNKS * (CTX // 2 - 1))
    assert found.ppl == pytest.approx(PERPLEXITY[trained_model.stem], rel=3e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PERPLEXITY))
def test_perplexity_of_every_type(models_dir: Path, eval_text: Path, name: str) -> None:
    model = models_dir / "trained" / f"{name}.gguf"
    if not model.is_file():
        pytest.skip(f"{model} is not there")
    assert perplexity_of(model, eval_text).ppl == pytest.approx(PERPLEXITY[name], rel=3e-3)


def test_q8_0_is_close_to_the_float_weights(models_dir: Path) -> None:
    """Logits of the unquantised weights by another implementation, in float32."""
    trained = models_dir / "trained"
    golden = np.load(trained / "pycode-moe-20m.golden.npz")
    with dyno.Engine(
        trained / "pycode-moe-20m-Q8_0.gguf", device="cpu", profile=None, numerics="exact"
    ) as engine:
        logits = engine.logits(golden["tokens"])
    assert quality.nmse(golden["logits"], logits[golden["rows"]]) < 2e-4
    assert np.mean(logits.argmax(axis=1) == golden["argmax"]) > 0.97
