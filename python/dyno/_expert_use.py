"""The use of a model's experts: counted while a text runs, stored, and read again by `Engine`."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from dyno._home import own_folder
from dyno.errors import PlanError

_log = logging.getLogger("dyno")

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from dyno import _core
    from dyno.engine import Engine
    from dyno.tokenizer import Tokenizer

__all__ = ["ExpertUse", "count", "fingerprint", "first_tokens", "for_session", "kept", "read", "remembered"]

_ROUTER = re.compile(r"blk\.(\d+)\.ffn_gate_inp\.weight")
_MOST_BYTES = 16 << 20


@dataclass(frozen=True, eq=False)
class ExpertUse:
    """The counts of how often one text chose each expert of a model."""

    model: str
    """`fingerprint` of the model."""
    tokens: int
    counts: NDArray[np.int64]
    """[layers with experts, experts]: tokens that chose the expert."""

    def share_of(self, part: float) -> float:
        """The share of all choices that falls on the most used `part` of the experts, both from 0 to 1."""
        descending = np.sort(self.counts, axis=None)[::-1]
        chosen = descending[: max(1, round(part * descending.size))].sum()
        return float(chosen / max(1, descending.sum()))

    def write(self, file: Path) -> None:
        """Write the file completely, or leave it unchanged.

        Raises:
            ProfileError: The file can't be written.
        """
        from dyno.profiles.io import write_atomically

        content = {"model": self.model, "tokens": self.tokens, "counts": self.counts.tolist()}
        write_atomically(file, json.dumps(content).encode(), area="experts")

    @classmethod
    def read(cls, file: Path) -> ExpertUse:
        """A file that `write` has written.

        Raises:
            OSError: The file can't be read.
            PlanError: The file has another format.
        """
        if file.stat().st_size > _MOST_BYTES:
            raise PlanError(
                f"[experts] {file} is larger than {_MOST_BYTES >> 20} MiB, so it is not a record of expert "
                "counts"
            )
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            given = np.array(found["counts"])
            if given.dtype.kind != "i":  # this includes numbers beyond int64
                raise ValueError("counts are not whole numbers, 0 or more")
            counts = given.astype(np.int64)
            use = cls(str(found["model"]), int(found["tokens"]), counts)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise PlanError(f"[experts] {file} is not a record of expert counts: {error}") from error
        if counts.ndim != 2 or (counts < 0).any():
            raise PlanError(
                f"[experts] {file} holds counts of shape {counts.shape}; expected a list of counts, "
                "0 or more, for each layer with experts"
            )
        return use


def fingerprint(file: _core.Gguf) -> str:
    """A key of the model that recorded use belongs to, made from its first router. All quantisations with the
    same router share the key. It is empty for a model without experts."""
    routers = sorted(
        (int(found[1]), str(tensor["name"]))
        for tensor in file.tensors()
        if (found := _ROUTER.fullmatch(str(tensor["name"])))
    )
    return hashlib.sha256(file.raw(routers[0][1]).tobytes()).hexdigest()[:16] if routers else ""


def first_tokens(tokenizer: Tokenizer, stream: TextIO, most: int) -> list[int]:
    """The first tokens of a text, of which only the beginning is read and encoded.

    Raises:
        OSError, UnicodeError: The text can't be read.
    """
    text = ""
    while True:
        more = stream.read(max(4096, 8 * most))
        text += more
        tokens = tokenizer.encode(text)
        # If the text goes on, its last tokens can change with the rest of it.
        if not more or len(tokens) >= most + 256:
            return tokens[:most]


def count(
    engine: Engine,
    tokens: Sequence[int] | NDArray[np.int32],
    ctx: int = 512,
    on_piece: Callable[[int], None] = lambda tokens: None,
) -> NDArray[np.int64]:
    """Run a text in pieces of `ctx` tokens and count the experts that its tokens choose.

    Args:
        engine: Open.
        tokens: The tokens of the text.
        ctx: Number of tokens in a piece.
        on_piece: Called after each piece with its number of tokens.

    Returns:
        [layers with experts, experts].

    Raises:
        PlanError: The model has no experts, or there are no tokens.
    """
    experts = int(engine.model["experts"])
    if experts == 0:
        raise PlanError(f"[experts] {engine.path} has no experts")
    text = np.asarray(tokens, dtype=np.int32)
    if text.size == 0:
        raise PlanError("[experts] the text has no tokens")
    total: NDArray[np.int64] | None = None
    for start in range(0, text.size, ctx):
        piece = text[start : start + ctx]
        _, routing = engine.diagnostics.logits_with_routing(piece, rows="none")
        found = np.stack([np.bincount(layer.reshape(-1), minlength=experts) for layer in routing])
        total = found if total is None else total + found
        on_piece(piece.size)
    assert total is not None
    return total.astype(np.int64)


def kept(model: str) -> Path | None:
    """`experts/MODEL.json` in the user's cache folder of dyno; None if no home folder is known, or without a
    model."""
    if not model:
        return None
    try:
        return own_folder("CACHE") / "experts" / f"{model}.json"
    except RuntimeError:
        return None


def remembered(file: _core.Gguf) -> ExpertUse | None:
    """The recorded use of a model; None if nothing was recorded.

    Raises:
        PlanError: The stored file is damaged.
    """
    model = fingerprint(file)
    where = kept(model)
    if where is None or not where.exists():
        return None
    try:
        use = ExpertUse.read(where)
    except OSError as error:
        raise PlanError(f"[experts] {where} cannot be read: {error}") from error
    return use if use.model == model else None


def read(file: str | os.PathLike[str]) -> ExpertUse:
    """Read a file of recorded use that the caller names.

    Raises:
        PlanError: `file` is not a path, can't be read, or has another format.
    """
    if not isinstance(file, (str, os.PathLike)):
        raise PlanError(
            f"[experts] expert_use is {file!r:.60}; expected a file that `dyno experts` has written"
        )
    try:
        return ExpertUse.read(Path(file))
    except OSError as error:
        raise PlanError(f"[experts] {os.fspath(file)} cannot be read: {error}") from error


def for_session(
    file: _core.Gguf, mib: int, given: ExpertUse | None = None, *, may_choose: bool = False
) -> dict[str, Any]:
    """The part of the `placement` of a session that an expert cache of this size needs.

    Args:
        file: The model.
        mib: The setting `expert_cache_mib`.
        given: Use that the caller names; it overrides the stored one.
        may_choose: Whether the plan may choose a size.

    Raises:
        PlanError: The use belongs to another model, or the stored file is damaged.
    """
    if mib <= 0 and not may_choose:
        return {}
    if given is not None and given.model != (model := fingerprint(file)):
        raise PlanError(
            f"[experts] the recorded use is of the model {given.model}, and this one is {model}; record it "
            "with `dyno experts`"
        )
    try:
        use = given or remembered(file)
    except PlanError as error:
        if mib > 0:
            raise
        _log.warning("ignoring the recorded expert counts of this model: %s", error)
        return {}
    return {} if use is None else {"expert_uses": use.counts.tolist()}
