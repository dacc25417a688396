"""The tokens that a workload runs: random ones, or the user's own text; and how a router spreads them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from dyno.errors import DynoError

from ...core.errors import TargetUnusable
from ...core.intervals import keyed_rng

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ...core.serve_load import ServedLoad

LEAST_TOKENS = 64  # of a text; less says nothing about how a router uses its experts
_MOST_BYTES = 16 << 20
RANDOM = "random tokens"


class Prompts:
    """The tokens that are measured: passages of a text, or random ones.

    Args:
        model: GGUF file whose tokenizer reads the text.
        vocabulary: number of tokens to draw from where there is no text.
        text: file with the user's own text.

    Raises:
        TargetUnusable: the text cannot be read, is too short, or the model has no vocabulary to read it with.
    """

    def __init__(self, model: str, vocabulary: int, text: str | None) -> None:
        self.vocabulary = vocabulary
        self._tokens: NDArray[np.int32] | None = None
        self.source = RANDOM
        self.digest = ""
        if text is None:
            return
        from dyno.tokenizer import Tokenizer

        try:
            with Path(text).open("rb") as file:
                raw = file.read(_MOST_BYTES)
            self._tokens = np.asarray(
                Tokenizer.from_gguf(model).encode(raw.decode("utf-8", "replace")), dtype=np.int32
            )
        except OSError as error:
            raise TargetUnusable(f"text {text}: {error.strerror}") from error
        except DynoError as error:
            raise TargetUnusable(f"text {text}: the model cannot read it: {error}") from error
        if len(self._tokens) < LEAST_TOKENS:
            raise TargetUnusable(
                f"text {text}: {len(self._tokens)} tokens are too few; give at least {LEAST_TOKENS}"
            )
        self.source = Path(text).name
        self.digest = hashlib.sha256(raw).hexdigest()

    def take(self, count: int, *key: object) -> NDArray[np.int32]:
        """`count` tokens that depend on `key` alone: of a text a passage, which begins anew at its end."""
        rng = keyed_rng("tokens", *key)
        if self._tokens is None:
            return rng.integers(self.vocabulary, size=count, dtype=np.int32)
        start = int(rng.integers(len(self._tokens)))
        return np.resize(np.roll(self._tokens, -start), count).astype(np.int32)


def served_prompts(load: ServedLoad, source: Prompts, number: int) -> list[list[int]]:
    """The prompts of a load of clients.

    Args:
        load: with their number, length, and the share that they begin with alike.
        source: of their tokens.
        number: another one takes other prompts.

    Raises:
        TargetUnusable: the load is cut from a text, and there is none.
    """
    if load.text is not None and not source.digest:
        raise TargetUnusable(
            f"the prompts of the server load come from the text {load.text}; give that file with --text FILE"
        )
    same = round(load.pp * load.shared)
    beginning = source.take(same, "served", number).tolist() if same else []
    ends = (source.take(load.pp - same, "served", number, i) for i in range(load.requests))
    return [beginning + end.tolist() for end in ends]


def use_of_experts(chosen: NDArray[np.int32], experts: int) -> dict[str, float]:
    """How a router spread a batch.

    Args:
        chosen: (layers, tokens, used), the experts of every token.
        experts: of a layer.

    Returns:
        distinct: experts that got any token, mean over the layers; busiest_over_mean: tokens of the busiest
        expert over those of the mean expert, of all there are, averaged over the layers.
    """
    layers = chosen.reshape(chosen.shape[0], -1)
    counts = np.stack([np.bincount(layer, minlength=experts) for layer in layers])
    return {
        "distinct": round(float((counts > 0).sum(axis=1).mean()), 3),
        "busiest_over_mean": round(float((counts.max(axis=1) / counts.mean(axis=1)).mean()), 3),
    }


def measure_routing(session: Any, prompts: Prompts, tokens: int, experts: int) -> dict[str, Any]:
    """How one batch of `tokens` of the workload's prompts is routed. Raises DynoError."""
    session.reset()
    _, chosen = session.decode([(0, prompts.take(tokens, "pp", 0))], rows="last", capture_routing=True)
    found = use_of_experts(np.asarray(chosen, dtype=np.int32), experts)
    return {"source": prompts.source, "tokens": tokens, **found}
