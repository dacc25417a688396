"""The load of a server: its clients, the lengths of prompts and answers, and limits for its latencies."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import TuneError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["ServedLoad"]

_MOST = {"concurrency": 1024, "pp": 1 << 20, "tg": 1 << 20, "rounds": 1000}


@dataclass(frozen=True, slots=True)
class ServedLoad:
    """The load of a server.

    Args:
        concurrency: Number of concurrent clients.
        pp: Prompt length in tokens.
        tg: Answer length in tokens.
        shared: Share of the prompt that is the same for all prompts, 0 to 1.
        rounds: Number of requests per client.
        ttft: Limit in seconds for the time to the first token at the 95th percentile; None: no limit.
        itl: Limit in seconds for the time between two tokens at the 95th percentile; None: no limit.
        text: Name or path of a text file whose passages are the prompts; None: random tokens.

    Raises:
        TuneError: A value is impossible.
    """

    concurrency: int = 4
    pp: int = 512
    tg: int = 64
    shared: float = 0.5
    rounds: int = 2
    ttft: float | None = None
    itl: float | None = None
    text: str | None = None

    def __post_init__(self) -> None:
        for name, most in _MOST.items():
            value = getattr(self, name)
            if not 1 <= value <= most:
                raise TuneError(f"workload: serve with {name}={value}; give 1 to {most}")
        if not 0 <= self.shared <= 1:
            raise TuneError(f"workload: serve with shared={self.shared:g}; give a share from 0 to 1")
        for name in ("ttft", "itl"):
            limit = getattr(self, name)
            if limit is not None and not (math.isfinite(limit) and limit > 0):
                raise TuneError(f"workload: serve with {name}={limit:g}; give seconds above 0")
        if self.text is not None and (not self.text or "," in self.text):
            raise TuneError(
                f"workload: serve with text={self.text!r}; give a file without a comma in its path"
            )

    @classmethod
    def parse(cls, text: str) -> ServedLoad:
        """Parse `serve`, or `serve:concurrency=8,pp=1024,tg=256,shared=0.5,ttft=2,itl=0.05,text=FILE`.

        Raises:
            TuneError: The text is neither. The message says what is wrong.
        """
        known: dict[str, type] = {
            field.name: int if field.name in _MOST else float for field in fields(cls)
        } | {"text": str}
        values: dict[str, Any] = {}
        for piece in text.partition(":")[2].split(","):
            if not piece.strip():
                continue
            name, _, given = (each.strip() for each in piece.partition("="))
            if name not in known:
                raise TuneError(f"workload: serve has no parameter {name!r}; known: {', '.join(known)}")
            if name in values:
                raise TuneError(f"workload: {name} is given more than once in {text.strip()!r}")
            try:
                values[name] = known[name](given)
            except ValueError:
                raise TuneError(f"workload: serve with {name}={given!r}, which is not a number") from None
        return cls(**values)

    def __str__(self) -> str:
        """The load in the syntax of `parse`."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        words = {n: v if isinstance(v, str) else f"{v:g}" for n, v in values.items() if v is not None}
        return "serve:" + ",".join(f"{name}={word}" for name, word in words.items())

    def to_dict(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ServedLoad:
        return cls(**data)

    @property
    def requests(self) -> int:
        """Total number of requests."""
        return self.concurrency * self.rounds

    @property
    def metric(self) -> str:
        """The name of its only metric: output tokens per second of all clients together."""
        return f"tg{self.tg}_served{self.concurrency}"

    def prompts(self, vocabulary: Sequence[int] | int, seed: int) -> list[list[int]]:
        """The prompts, from random tokens.

        Args:
            vocabulary: Tokens to draw from, or their number.
            seed: Seed of the prompts.
        """
        rng = np.random.default_rng([seed, self.pp, self.requests])
        known = np.arange(vocabulary) if isinstance(vocabulary, int) else np.asarray(vocabulary)
        same = round(self.pp * self.shared)
        beginning = rng.choice(known, same).tolist()
        return [beginning + rng.choice(known, self.pp - same).tolist() for _ in range(self.requests)]
