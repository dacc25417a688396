"""Embeddings: from a request body to vectors, and from vectors to objects of the API."""

from __future__ import annotations

import base64
import threading
from typing import TYPE_CHECKING, Any

from dyno._writing import prompt_tokens
from dyno.errors import ContextLengthError, PlanError
from dyno.server.errors import ApiError, without_part

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from dyno.engine import Engine
    from dyno.server.bodies import EmbeddingBody

__all__ = ["Embeddings"]


class Embeddings:
    """The vectors of one request.

    Args:
        engine: The engine, whose scheduler is open.
        body: The request.
        model: Model name in the response.
    """

    def __init__(self, engine: Engine, body: EmbeddingBody, model: str) -> None:
        self._engine, self._body, self._model = engine, body, model
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """End the work, from any thread."""
        self._cancelled.set()

    def whole(self) -> dict[str, Any]:
        """The response.

        Raises:
            ApiError: A text is empty or too long, or vectors of the requested length are not possible.
            DynoError: As in `Engine.embed`.
        """
        width = int(self._engine.model["n_embd"])
        if self._body.dimensions not in (None, width):
            raise ApiError(
                400,
                f"dimensions: the model's vectors have {width} numbers and cannot be cut to "
                f"{self._body.dimensions}",
                param="dimensions",
                code="invalid_value",
            )
        vectors = self._engine.embed(
            texts := [self._tokens(index, text) for index, text in enumerate(self._body.inputs)],
            self._body.pooling,
            self._body.normalize,
            cancelled=self._cancelled,
        )
        tokens = sum(map(len, texts))
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": self._written(vector)}
                for index, vector in enumerate(vectors)
            ],
            "model": self._model,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }

    def _tokens(self, index: int, text: str | list[int]) -> list[int]:
        try:
            return prompt_tokens(self._engine, text, parse_special=False)
        except PlanError as error:
            code = "context_length_exceeded" if isinstance(error, ContextLengthError) else "invalid_value"
            place = f"input.{index}" if len(self._body.inputs) > 1 else "input"
            text = f"{place}: {without_part(str(error))}"
            raise ApiError(400, text, param=place, code=code) from error

    def _written(self, vector: NDArray[np.float32]) -> list[float] | str:
        """A vector as numbers, or as base64 of its float32 bytes in little-endian order."""
        if self._body.encoding_format == "float":
            numbers: list[float] = vector.tolist()
            return numbers
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
