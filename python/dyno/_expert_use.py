"""How often each expert of a model is chosen: counted while a text runs, kept, and read again by `Engine`."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dyno._rates import kept as kept_rates
from dyno.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dyno import _core
    from dyno.engine import Engine

__all__ = ["ExpertUse", "count", "fingerprint", "for_session", "kept", "read", "remembered"]

_ROUTER = re.compile(r"blk\.(\d+)\.ffn_gate_inp\.weight")
_MOST_BYTES = 16 << 20


@dataclass(frozen=True)
class ExpertUse:
    """The use of a model's experts by one text."""

    model: str
    """`fingerprint` of the model."""
    tokens: int
    counts: NDArray[np.int64]
    """[layers with experts, experts]: tokens that chose the expert."""

    def share_of(self, part: float) -> float:
        """The share of all choices that the most used `part` of the experts is."""
        descending = np.sort(self.counts, axis=None)[::-1]
        chosen = descending[: max(1, round(part * descending.size))].sum()
        return float(chosen / max(1, descending.sum()))

    def write(self, file: Path) -> None:
        """Write the file whole, or leave it as it was.

        Raises:
            OSError: It can't be written.
        """
        content = {"model": self.model, "tokens": self.tokens, "counts": self.counts.tolist()}
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, partial = tempfile.mkstemp(".new", "experts-", file.parent)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
                json.dump(content, stream)
            os.replace(partial, file)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(partial)
            raise

    @classmethod
    def read(cls, file: Path) -> ExpertUse:
        """A file that `write` has written.

        Raises:
            OSError: It can't be read.
            PlanError: It is of another form.
        """
        if file.stat().st_size > _MOST_BYTES:
            raise PlanError(
                f"[experts] {file} is larger than {_MOST_BYTES >> 20} MiB, which no record of a use is"
            )
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            counts = np.array(found["counts"], dtype=np.int64)
            use = cls(str(found["model"]), int(found["tokens"]), counts)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise PlanError(f"[experts] {file} holds no recorded use of experts: {error}") from error
        if counts.ndim != 2 or (counts < 0).any():
            raise PlanError(
                f"[experts] {file} holds counts of shape {counts.shape}; expected a list of counts, "
                "0 or more, for each layer with experts"
            )
        return use


def fingerprint(file: _core.Gguf) -> str:
    """The model that recorded use belongs to, by its first router: of all its quantisations that keep that
    one; empty for a model without experts."""
    routers = sorted(
        (int(found[1]), str(tensor["name"]))
        for tensor in file.tensors()
        if (found := _ROUTER.fullmatch(str(tensor["name"])))
    )
    return hashlib.sha256(file.raw(routers[0][1]).tobytes()).hexdigest()[:16] if routers else ""


def count(engine: Engine, tokens: Sequence[int] | NDArray[np.int32], ctx: int = 512) -> NDArray[np.int64]:
    """Run a text in pieces of `ctx` tokens and count the experts that its tokens choose.

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
        _, routing = engine.diagnostics.logits_with_routing(text[start : start + ctx], rows="none")
        found = np.stack([np.bincount(layer.reshape(-1), minlength=experts) for layer in routing])
        total = found if total is None else total + found
    assert total is not None
    return total.astype(np.int64)


def kept(model: str) -> Path | None:
    """`experts/MODEL.json` beside the kept rates of devices; None where no home is known."""
    rates = kept_rates()
    return rates.parent / "experts" / f"{model}.json" if rates is not None and model else None


def remembered(file: _core.Gguf) -> ExpertUse | None:
    """The use that was recorded of a model; None if it was not.

    Raises:
        PlanError: The kept file is damaged.
    """
    model = fingerprint(file)
    where = kept(model)
    if where is None or not where.exists():
        return None
    try:
        use = ExpertUse.read(where)
    except OSError as error:
        raise PlanError(f"[experts] {where} can't be read: {error}") from error
    return use if use.model == model else None


def read(file: str | os.PathLike[str]) -> ExpertUse:
    """A file of recorded use that the caller names.

    Raises:
        PlanError: It can't be read, or is of another form.
    """
    try:
        return ExpertUse.read(Path(file))
    except OSError as error:
        raise PlanError(f"[experts] {os.fspath(file)} can't be read: {error}") from error


def for_session(file: _core.Gguf, mib: int, given: ExpertUse | None = None) -> dict[str, Any]:
    """The part of the `placement` of a session that an expert cache of this size needs.

    Args:
        file: The model.
        mib: The setting `expert_cache_mib`.
        given: Use that the caller names; it wins over the kept one.

    Raises:
        PlanError: The use is of another model, or the kept file is damaged.
    """
    if mib <= 0:
        return {}
    if given is not None and given.model != (model := fingerprint(file)):
        raise PlanError(
            f"[experts] the recorded use is of the model {given.model}, and this one is {model}; record it "
            "with `dyno experts`"
        )
    use = given or remembered(file)
    return {} if use is None else {"expert_uses": use.counts.tolist()}
