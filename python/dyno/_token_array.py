"""The check of token ids that a caller gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from dyno.errors import PlanError

if TYPE_CHECKING:
    from numpy.typing import NDArray


def token_array(tokens: Sequence[int] | NDArray[np.integer[Any]]) -> NDArray[np.int32]:
    """Token ids in the form that the engine takes. The engine itself checks that they are in the vocabulary.

    Returns:
        int32 [n], contiguous; `tokens` itself if it has this form.

    Raises:
        PlanError: `tokens` is not a list of whole numbers, is empty, or holds a number beyond int32.
    """
    if (
        isinstance(tokens, np.ndarray)
        and tokens.dtype == np.int32
        and tokens.ndim == 1
        and tokens.size
        and tokens.flags.c_contiguous
    ):
        # This path is used for each generated token. The engine itself checks the ids.
        return cast("NDArray[np.int32]", tokens)
    is_list = isinstance(tokens, Sequence) or hasattr(tokens, "__array__")  # such as a tensor of PyTorch
    if not is_list or isinstance(tokens, (str, bytes)):
        raise PlanError(f"[engine] tokens must be a non-empty list of whole numbers, not {tokens!r:.60}")
    try:
        array = np.asarray(tokens)
    except (TypeError, ValueError, OverflowError) as error:
        raise PlanError(f"[engine] tokens must be one list of whole numbers: {error}") from error
    if array.ndim != 1 or array.size == 0 or not np.issubdtype(array.dtype, np.integer):
        raise PlanError(
            "[engine] tokens must be a non-empty list of whole numbers, "
            f"not {array.dtype} of shape {array.shape}"
        )
    if array.min() < -(2**31) or array.max() >= 2**31:
        raise PlanError(f"[engine] token {int(array.max())} is not a token id")
    return np.ascontiguousarray(array, dtype=np.int32)
