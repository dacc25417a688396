"""The tokens of a workload, which are random or from the user's text, and their routing."""

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

LEAST_TOKENS = 64  # least tokens of a text; fewer say nothing about the use of experts
_MOST_BYTES = 16 << 20
RANDOM = "random tokens"


class Prompts:
    """The source of tokens: passages of a text, or random tokens.

    Args:
        model: GGUF file with the tokenizer for the text.
        vocabulary: Number of tokens to draw from without a text.
        text: File with the user's text.

    Raises:
        TargetUnusable: The text cannot be read, is too short, or the model has no vocabulary.
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
        """`count` tokens that depend only on `key`. With a text, they are a passage that continues at the
        beginning after the end."""
        rng = keyed_rng("tokens", *key)
        if self._tokens is None:
            return rng.integers(self.vocabulary, size=count, dtype=np.int32)
        start = int(rng.integers(len(self._tokens)))
        return np.resize(np.roll(self._tokens, -start), count).astype(np.int32)


def served_prompts(load: ServedLoad, source: Prompts, number: int) -> list[list[int]]:
    """The prompts of a server load.

    Args:
        load: The load, with number and length of prompts and their common share.
        source: Source of their tokens.
        number: Number of the set of prompts.

    Raises:
        TargetUnusable: The load needs a text, and there is none.
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
    """The use of experts in a batch.

    Args:
        chosen: (layers, tokens, used), the experts of each token.
        experts: Number of experts per layer.

    Returns:
        distinct: number of experts with at least one token, averaged over the layers; busiest_over_mean:
        tokens of the busiest expert / mean over all experts, averaged over the layers.
    """
    layers = chosen.reshape(chosen.shape[0], -1)
    counts = np.stack([np.bincount(layer, minlength=experts) for layer in layers])
    return {
        "distinct": round(float((counts > 0).sum(axis=1).mean()), 3),
        "busiest_over_mean": round(float((counts.max(axis=1) / counts.mean(axis=1)).mean()), 3),
    }


def measure_routing(session: Any, prompts: Prompts, tokens: int, experts: int) -> dict[str, Any]:
    """Measure the routing of one batch of `tokens` tokens of the workload's prompts. Raises DynoError."""
    session.reset()
    _, chosen = session.decode([(0, prompts.take(tokens, "pp", 0))], rows="last", capture_routing=True)
    found = use_of_experts(np.asarray(chosen, dtype=np.int32), experts)
    return {"source": prompts.source, "tokens": tokens, **found}
